"""How tests behave under mpirun: one voice, no rank left waiting, and on which arrays.

MPIPARALLEL_TEST_BACKEND=strict runs them all on the stand-in for device arrays of strict_array.py,
=cupy on a GPU; the package itself does not know the variable.

Ranks other than 0 are silent. The first rank on which a test fails says so, with its number, and
ends the job: the others may be waiting for it. A rank that hangs is ended by pytest-timeout.
"""

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpiparallel import backend
from mpiparallel.backend import choice
from mpiparallel.comm.group import Group
from mpiparallel.comm.ledger import Ledger
from mpiparallel.job import FirstFailure

WORLD = MPI.COMM_WORLD
FIRST_FAILURE = FirstFailure(WORLD)
BACKEND = os.environ.get("MPIPARALLEL_TEST_BACKEND", "numpy")
# How device arrays reach MPI in tests that take `world`; for a rank alone there is one way.
WAYS = ["staged", "direct", "nccl"] if BACKEND == "strict" and WORLD.size > 1 else ["as chosen"]

if BACKEND == "strict":
    import strict_array

    sys.modules.update(strict_array.modules())
    os.environ[choice.AWARE] = "0"
if BACKEND != "numpy":
    choice.choose("cupy", WORLD)
if BACKEND == "strict":
    backend.current().kernels = strict_array.kernels


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if WORLD.rank != 0:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw._file = io.StringIO()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed and WORLD.size > 1:
        FIRST_FAILURE.end_all_ranks(
            f"\nrank {WORLD.rank} of {WORLD.size}: {item.nodeid} failed\n{report.longreprtext}"
        )


def pytest_unconfigure(config):
    FIRST_FAILURE.forget()


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How device arrays reach MPI in this test."""
    if request.param == "direct":
        monkeypatch.setattr(backend.current(), "gpu_aware", True)
        monkeypatch.setattr(strict_array.STREAM, "pointers", True)
    if request.param == "nccl":
        monkeypatch.setattr(backend.current(), "device", WORLD.rank)
    return request.param


@pytest.fixture
def world(way):
    """All ranks as a Group with a ledger of its own."""
    group = Group(WORLD.Dup(), "world", ledger=Ledger(), timeout=20)
    yield group
    group.free()


@pytest.fixture
def shared_path():
    """One empty folder for all ranks, made and removed by rank 0."""
    made = tempfile.mkdtemp(prefix="mpiparallel-test-") if WORLD.rank == 0 else None
    path = Path(WORLD.bcast(made))
    yield path
    WORLD.Barrier()  # nobody is still reading
    if WORLD.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def rng():
    """The same random numbers on every rank."""
    return np.random.default_rng(7)


def factorings(ranks=WORLD.size):
    """All (dp, pp, tp) whose product is the number of ranks."""
    return [
        (dp, pp, ranks // dp // pp)
        for dp in range(1, ranks + 1)
        for pp in range(1, ranks + 1)
        if ranks % dp == 0 and ranks // dp % pp == 0
    ]
