"""What the lessons share: some steps of a real run on any mesh, claims, and pictures.

A lesson measures, prints a table on rank 0, draws, and ends with its claims. Each is checked; one
that does not hold ends the program with status 1.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpiparallel import settings as settings_module
from mpiparallel.comm.ledger import Ledger
from mpiparallel.data import Batch, CharTokenizer, Corpus, read_text
from mpiparallel.mesh import Mesh
from mpiparallel.plan import laws
from mpiparallel.report.look import AXES, COMPUTE
from mpiparallel.settings import Settings
from mpiparallel.train import Trainer

WORLD = MPI.COMM_WORLD
COLORS = {**AXES, **COMPUTE}


@dataclass
class Run:
    """What a few steps left, of all ranks together.

    losses, norms : of every step. seconds, exposed, hidden : medians of a step, of the slowest
    rank: in all, and of gradients' communication. sent : (axis, operation) -> bytes of one step,
    calls likewise; law : the bytes by formula. held : kind -> bytes of every rank.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: dict[tuple[str, str], float] = field(default_factory=dict)
    law: dict[tuple[str, str], int] = field(default_factory=dict)
    held: dict[str, list[int]] = field(default_factory=dict)
    parameters: int = 0

    def on(self, axis: str) -> int:
        """Bytes of a step on one axis, of all ranks."""
        return sum(sent for (where, _), sent in self.sent.items() if where == axis)


def train(
    settings: Settings,
    steps: int,
    *,
    communicator: Any = WORLD,
    batch_of: Callable[[int], Batch] | None = None,
    lr: float = 1e-2,
    blas_threads: int | None = None,
) -> Run | None:
    """Train for some steps on the first dp x pp x tp ranks of `communicator`; None on the others.

    All ranks call. batch_of(step) : the global batch, of real text where nothing is given.
    blas_threads : of a rank; where nothing is given, what `train` takes.
    """
    ranks = (settings.dp or 1) * settings.pp * settings.tp
    part = communicator.Split(0 if communicator.rank < ranks else MPI.UNDEFINED, communicator.rank)
    if part == MPI.COMM_NULL:
        wait_for_all(communicator)
        return None
    settings = settings_module.check(settings, ranks)
    text = read_text(settings.data)
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    corpus = Corpus(tokenizer.encode(text), settings.seq_len)
    config = settings.model_config(tokenizer.vocabulary)
    run, rows = Run(parameters=config.parameters), []
    with Mesh(settings.dp or 1, settings.pp, settings.tp, part) as mesh:
        if blas_threads:
            threadpool_limits(blas_threads, user_api="blas")
        else:
            mesh.limit_blas_threads()
        trainer = Trainer(settings, config, mesh)
        state = trainer.data_parallel
        for step in range(steps):
            given = batch_of(step) if batch_of else None
            batch = given or corpus.batch(settings.seed, step, settings.global_batch)
            part.Barrier()
            exposed, hidden, start = state.exposed, state.hidden, time.perf_counter()
            result = trainer.step(batch, lr)
            seconds = time.perf_counter() - start
            rows.append((seconds, state.exposed - exposed, state.hidden - hidden))
            run.losses.append(result.loss)
            run.norms.append(result.grad_norm)
        medians = [statistics.median(column) for column in zip(*rows[1:] or rows, strict=True)]
        moments = sum(a.nbytes for a in trainer.optimizer.first + trainer.optimizer.second)
        mine = {
            "times": medians,
            "ledger": mesh.ledger.rows(),
            "held": {**state.bytes_held(), "optimizer": moments},
        }
        every = part.allgather(mine)
        times = zip(*(rank["times"] for rank in every), strict=True)
        run.seconds, run.exposed, run.hidden = map(max, times)
        for row in Ledger.merge([rank["ledger"] for rank in every]):
            where = row["axis"], row["op"]
            run.calls[where] = row["calls"] / steps
            if row["bytes"]:
                run.sent[where] = row["bytes"] // steps
        run.law = laws.traffic(laws.Step.of(settings, config, trainer.placement))
        run.held = {kind: [rank["held"][kind] for rank in every] for kind in mine["held"]}
    part.Free()
    wait_for_all(communicator)
    return run


def wait_for_all(communicator: Any = WORLD) -> None:
    """A barrier at which ranks that have nothing to do take no processor from those that have."""
    barrier = communicator.Ibarrier()
    while not barrier.Test():
        time.sleep(0.005)


def change(settings: Settings, **changes: Any) -> Settings:
    """The settings with some of them changed."""
    return dataclasses.replace(settings, **changes)


def claim(holds: bool, text: str) -> None:
    """Print a claim that holds; end with status 1 at one that does not. Rank 0 calls."""
    if not holds:
        sys.exit(f"DOES NOT HOLD: {text}")
    print(f"holds: {text}", flush=True)


def figure(rows: int, columns: int, size: tuple[float, float]):
    """A matplotlib figure and its axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    return plt.subplots(rows, columns, figsize=size, layout="constrained")


def save(drawn, name: str) -> None:
    """Write a figure to runs/lessons/NAME.png, and say so."""
    path = Path("runs/lessons") / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    print(f"\npicture: {path}\n")
