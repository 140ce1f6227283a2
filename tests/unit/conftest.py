"""Tests that need no ranks of their own; those of the command line start mpirun themselves."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

# What Open MPI's launcher says of its own when a rank exits with a status: between two rules, and
# now and then that it cannot reach the rank any more.
BANNER = re.compile(
    r"^-{60,}\n.*?^-{60,}\n\0?|^\[[^\n]*\] PMIX ERROR: [^\n]*\n", re.MULTILINE | re.DOTALL
)


class Finished(NamedTuple):
    """What a command left: exit status, what it printed, seconds."""

    status: int
    out: str
    err: str
    seconds: float


@pytest.fixture
def mpiparallel(tmp_path):
    """run(ranks, *arguments) runs `mpiparallel` under mpirun in an empty folder."""
    default = str(Path(sys.executable).parent / "mpirun")
    launcher = shlex.split(os.environ.get("MPIRUN", default))
    launcher[0] = str(Path(launcher[0]).resolve()) if "/" in launcher[0] else launcher[0]

    def run(ranks, *arguments, env=None):
        command = [*launcher, "-n", str(ranks), sys.executable, "-m", "mpiparallel", *arguments]
        start = time.monotonic()
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=45,
        )
        said = BANNER.sub("", done.stderr)
        return Finished(done.returncode, done.stdout, said, time.monotonic() - start)

    return run
