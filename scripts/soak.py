"""Kill a training run again and again, and see that nothing is lost but time.

    python scripts/soak.py --kills 100

A run of a tiny model saves after every step. At a random moment one of its ranks, chosen at
random, gets SIGKILL, which no process can catch; some of the moments are inside a save. Each time

    mpirun must end within 10 seconds and with a status other than 0,
    --resume must go on from the newest complete checkpoint,

and in the end the loss and the gradient norm of every step must be, bit for bit, those of a run
that nobody killed. Exits with 1 where any of it does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS, LIMIT = 4, 10.0
STEPS_PER_KILL = 60  # more than a life has time for
TRAIN = (
    "train --dp 2 --tp 2 --layers 2 --hidden 16 --heads 2 --seq-len 8 --global-batch 4 --sample 0 "
    "--eval-every 0 --keep 2 --data text.txt"
)


def start(folder: Path, *flags: str) -> subprocess.Popen:
    """Start the run; its output goes to log.txt."""
    default = str(Path(sys.executable).parent / "mpirun")
    launcher = shlex.split(os.environ.get("MPIRUN", default))
    launcher[0] = str(Path(launcher[0]).resolve()) if "/" in launcher[0] else launcher[0]
    python = [sys.executable, "-m", "mpiparallel", *shlex.split(TRAIN), *flags]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*launcher, "-n", str(RANKS), *python],
            cwd=folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the run's ranks: those that work in its folder and are Python."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            here = entry.name.isdigit() and (entry / "cwd").resolve() == folder
            if here and b"-m\0mpiparallel" in (entry / "cmdline").read_bytes().split(b"mpirun")[-1]:
                executable = (entry / "exe").resolve().name
                found += [int(entry.name)] if executable.startswith("python") else []
        except OSError:
            continue  # it has ended, or is not ours
    return found


def rows(folder: Path, out: str) -> list[tuple[float, float]]:
    """(loss, norm) of every step that was written whole."""
    file = folder / out / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [(row["loss"], row["grad_norm"]) for row in lines]


def written_after(part: Path, moment: float) -> bool:
    """Whether a folder that is still there was made in this life, not left by an earlier one."""
    try:
        return part.stat().st_mtime > moment
    except OSError:
        return False


def soak(folder: Path, kills: int, seed: int) -> str:
    """Kill `kills` times; a line of figures. Raises AssertionError where something is lost."""
    dice = random.Random(seed)
    (folder / "text.txt").write_text("it was the best of times, it was the worst of times;\n" * 30)
    steps = ("--steps", str(STEPS_PER_KILL * kills))
    born = time.monotonic()
    undisturbed = start(folder, *steps, "--out", "whole", "--save-every", "0")
    while not rows(folder, "whole") and undisturbed.poll() is None:
        time.sleep(0.05)
    start_up = time.monotonic() - born
    assert undisturbed.wait(timeout=900) == 0, (folder / "log.txt").read_text()
    right = rows(folder, "whole")

    seconds, in_save, killed = [], 0, 0
    while killed < kills:
        known = list((folder / "run" / "checkpoints").glob("step-*/manifest.json"))
        resume = ["--resume", "run"] if known else []
        run = start(folder, *steps, "--out", "run", "--save-every", "1", *resume)
        born = time.time()
        time.sleep(dice.uniform(0.3 * start_up, start_up + 1))  # starting, training or saving
        assert run.poll() is None, f"the run ended by itself: {(folder / 'log.txt').read_text()}"
        ranks = ranks_of(folder)
        if not ranks:
            run.send_signal(signal.SIGKILL)
            run.wait()
            continue
        parts = list((folder / "run" / "checkpoints").glob(".step-*.part"))
        in_save += any(written_after(part, born) for part in parts)
        began = time.monotonic()
        os.kill(dice.choice(ranks), signal.SIGKILL)
        status = run.wait(timeout=60)
        seconds.append(time.monotonic() - began)
        killed += 1
        assert status != 0, "a killed run ended with status 0"
        assert seconds[-1] < LIMIT, f"it took {seconds[-1]:.1f} s to end"
        left = ranks_of(folder)
        assert not left, f"{len(left)} ranks live on"

    last = start(folder, *steps, "--out", "run", "--save-every", "0", "--resume", "run")
    reached, until = len(rows(folder, "run")), time.monotonic() + 60
    while len(rows(folder, "run")) <= reached:  # a rank that has just begun knows no signal yet
        assert time.monotonic() < until, "the last run does not get on"
        time.sleep(0.1)
    last.send_signal(signal.SIGUSR1)
    assert last.wait(timeout=60) == 0, "a run that was asked to stop did not end well"
    found = rows(folder, "run")
    assert len(found) > kills, f"only {len(found)} steps were reached"
    wrong = [step for step, row in enumerate(found) if row != right[step]]
    assert not wrong, f"step {wrong[0] + 1} differs from the run that nobody killed"
    return (
        f"{killed} kills, {in_save} of them inside a save; over after "
        f"{statistics.median(seconds):.2f} s in the median and {max(seconds):.2f} s at most; "
        f"{len(found)} steps, all bit-equal to those of a run that nobody killed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a training run again and again.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(soak(Path(folder).resolve(), arguments.kills, arguments.seed))
        except AssertionError as error:
            sys.exit(f"soak: {error}")


if __name__ == "__main__":
    main()
