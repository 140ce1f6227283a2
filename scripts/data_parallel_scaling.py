"""Why adding replicas alone stops helping: step time against dp, split into what it is spent on.

    mpirun -n 4 python scripts/data_parallel_scaling.py

For dp = 1, 2, 4, .. up to the ranks there are, the same model is trained for some steps, once with
the same batch on every replica (the work grows with dp) and once with the same global batch (the
work of a replica shrinks). Every replica sends the same gradients whatever its batch, so what the
replicas gain in compute they give back in communication, the sooner the smaller their batch.

Prints a table and draws it.
"""

import dataclasses
import statistics
import time

import numpy as np
from lesson import WORLD, claim, figure, save, wait_for_all
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpiparallel import settings as settings_module
from mpiparallel.data import Batch
from mpiparallel.mesh import Mesh
from mpiparallel.settings import Settings
from mpiparallel.train import Trainer

BATCH, STEPS, VOCABULARY = 8, 8, 65
MODEL = Settings(layers=4, heads=4, hidden=256, seq_len=32, pp=1, tp=1)


def measure(dp: int, global_batch: int) -> dict[str, float] | None:
    """Median seconds of a step on the first dp ranks; None on the others."""
    part = WORLD.Split(0 if WORLD.rank < dp else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return None
    settings = dataclasses.replace(MODEL, dp=dp, global_batch=global_batch)
    with Mesh(dp, 1, 1, part) as mesh:
        trainer = Trainer(settings_module.check(settings, dp), settings.model_config(65), mesh)
        state = trainer.data_parallel
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (global_batch, MODEL.seq_len))
        batch = Batch(tokens, np.roll(tokens, -1, 1), tokens.size)
        rows = []
        for _ in range(STEPS):
            exposed, hidden, start = state.exposed, state.hidden, time.perf_counter()
            trainer.step(batch, 1e-4)
            step = time.perf_counter() - start
            rows.append((step, state.exposed - exposed, state.hidden - hidden))
        columns = zip(*rows[1:], strict=True)
        step, exposed, hidden = (statistics.median(column) for column in columns)
        sent = sum(row["bytes"] for row in mesh.ledger.rows() if row["axis"] == "dp") / STEPS
    part.Free()
    return {
        "dp": dp,
        "sequences": global_batch,
        "step": step,
        "compute": step - exposed,
        "exposed": exposed,
        "hidden": hidden,
        "sent": sent,
        "rate": global_batch / step,
    }


def draw(tables: dict[str, list[dict]]) -> None:
    """Stacked bars of a step's seconds, for both ways of adding replicas."""
    drawn, axes = figure(1, len(tables), (9, 3.6))
    axes[1].sharey(axes[0])
    for axis, (title, rows) in zip(axes, tables.items(), strict=True):
        names = [f"dp={row['dp']}\n{row['rate']:.0f} seq/s" for row in rows]
        compute = np.array([row["compute"] for row in rows]) * 1e3
        exposed = np.array([row["exposed"] for row in rows]) * 1e3
        axis.bar(names, compute, label="compute", color="#4c72b0")
        hidden = np.minimum([row["hidden"] * 1e3 for row in rows], compute)
        axis.bar(
            names,
            hidden,
            bottom=compute - hidden,
            label="of it with communication hidden behind it",
            color="none",
            edgecolor="white",
            hatch="///",
            linewidth=0,
        )
        axis.bar(names, exposed, bottom=compute, label="exposed communication", color="#c44e52")
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.3)
    axes[0].set_ylabel("milliseconds per step")
    axes[0].legend(fontsize=8, frameon=True, facecolor="#9fb4d6", loc="upper left")
    save(drawn, "data_parallel_scaling")


def main() -> None:
    threadpool_limits(1, user_api="blas")  # a replica is a core: more of them add compute
    sizes = [2**n for n in range(10) if 2**n <= WORLD.size]
    plans = {
        f"{BATCH} sequences on every replica": [(dp, BATCH * dp) for dp in sizes],
        f"{BATCH} sequences in all": [(dp, BATCH) for dp in sizes],
    }
    tables: dict[str, list[dict]] = {}
    for title, plan in plans.items():
        rows = []
        for dp, global_batch in plan:
            rows.append(measure(dp, global_batch))
            wait_for_all()
        if WORLD.rank == 0:
            tables[title] = rows
            print(f"\n{title}")
            print("  dp  sequences/s  speed-up   step ms  compute  exposed   hidden  sent MB")
            for row in rows:
                milliseconds = "".join(
                    f"{row[kind] * 1e3:>9.1f}" for kind in ("step", "compute", "exposed", "hidden")
                )
                print(
                    f"{row['dp']:>4}{row['rate']:>13.1f}{row['rate'] / rows[0]['rate']:>10.2f} "
                    f"{milliseconds}{row['sent'] / 1e6:>9.2f}"
                )
    if WORLD.rank == 0:
        draw(tables)
        sent = [{row["dp"]: row["sent"] for row in rows} for rows in tables.values()]
        claim(sent[0] == sent[1], "a smaller batch on every replica sends not a byte less")


if __name__ == "__main__":
    main()
