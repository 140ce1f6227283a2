"""A museum of mistakes: what each classic fault does to a run, and the test that catches it.

    mpirun -n 4 python scripts/mistakes.py

Each fault of `faults.py` is put into a real run from outside and trained beside the right one, on
text whose sequences have different lengths. Most show nothing but a loss that is a little worse.
Then the test that is said to catch it is run with the fault in it, and must fail. The first three
stand, or stood, in public teaching codes whose own tests pass.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from faults import FAULTS
from lesson import WORLD, Run, change, claim, figure, save, train, wait_for_all

from mpiparallel.data import Batch
from mpiparallel.layers.loss import IGNORE
from mpiparallel.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
STEPS = 40
MODEL = Settings(
    layers=2, heads=4, hidden=32, seq_len=16, global_batch=8, micro_batches=4, lr=3e-3, clip=0.5
)


def batch(step: int) -> Batch:
    """Periodic text in sequences of different lengths: the rest of a row counts for nothing."""
    generator = np.random.default_rng([1, step])
    starts, lengths = generator.integers(0, 12, (8, 1)), generator.integers(2, 16, (8, 1))
    lengths[:4] = np.minimum(lengths[:4], 5)  # the first replica has the short ones
    positions = np.arange(17)
    tokens = (starts + positions) * (starts + positions) % 53
    labels = np.where(positions[None, 1:] <= lengths, tokens[:, 1:], IGNORE)
    valid = int((labels != IGNORE).sum())
    return Batch(tokens[:, :-1].astype(np.int32), labels.astype(np.int32), valid)


def caught(name: str) -> bool:
    """Whether the fault's test fails with the fault in it; on 4 ranks of a job of its own."""
    fault = FAULTS[name]
    default = str(Path(sys.executable).parent / "mpirun")
    launcher = shlex.split(os.environ.get("MPIRUN", default))
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PMI", "HYD", "MPIR_", "OMPI_", "PRTE_"))
        or key.endswith(("AS_ROOT", "AS_ROOT_CONFIRM", "_osc"))
    }
    paths = [str(ROOT / "scripts"), str(ROOT), own.get("PYTHONPATH", "")]
    test = [f"tests/mpi/{fault.test}", "--with-mpi", "--only-mpi", "-x", "-p", "faults"]
    done = subprocess.run(
        [*launcher, "-n", "4", sys.executable, "-m", "pytest", *test],
        cwd=ROOT,
        env={**own, "MPIPARALLEL_FAULT": name, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode != 0 and "Error" in done.stdout + done.stderr


def main() -> None:
    right = train(change(MODEL, dp=1, pp=2, tp=2), STEPS, batch_of=batch)
    wrong = {}
    for name, fault in FAULTS.items():
        dp, pp, tp = fault.mesh
        with fault.patch():
            settings = change(MODEL, dp=dp, pp=pp, tp=tp, schedule=fault.schedule)
            wrong[name] = train(settings, STEPS, batch_of=batch)
    try:
        if WORLD.rank == 0:
            show(right, wrong)
    finally:
        wait_for_all()


def show(right: Run, wrong: dict[str, Run]) -> None:
    """The table, the picture, and the tests. Rank 0 calls."""
    print(f"\nright: loss of step 1 {right.losses[0]:.5f}, of step {STEPS} {right.losses[-1]:.4f}")
    print(
        "fault                                                loss 1   norm 1    x right   loss 40"
    )
    for name, run in wrong.items():
        print(
            f"{FAULTS[name].title:<50}{run.losses[0]:>9.5f}{run.norms[0]:>9.4f}"
            f"{run.norms[0] / right.norms[0]:>11.4f}{run.losses[-1]:>10.4f}"
        )

    drawn, grid = figure(3, 3, (10, 7.5))
    for axes, (name, run) in zip(grid.flat, wrong.items(), strict=True):
        axes.plot(right.losses, color="#999999", label="right")
        axes.plot(run.losses, color="#d55e00", label="with the fault")
        axes.set_title(FAULTS[name].title, fontsize=8)
    grid[0, 0].legend(frameon=False)
    grid[2, 1].set_xlabel("step")
    grid[1, 0].set_ylabel("loss")
    save(drawn, "mistakes")

    for name, run in wrong.items():
        fault = FAULTS[name]
        differs = max(
            abs(a / b - 1)
            for a, b in zip(run.losses + run.norms, right.losses + right.norms, strict=True)
        )
        claim(differs > 1e-4, f"{fault.title}: {fault.seen}; off by up to {differs:.1%}")
        claim(caught(name), f"    caught by {fault.test}")


if __name__ == "__main__":
    main()
