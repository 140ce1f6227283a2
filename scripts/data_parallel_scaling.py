"""Why adding replicas alone stops helping: step time against dp, split into what it is spent on.

    mpirun -n 4 python scripts/data_parallel_scaling.py

For dp = 1, 2, 4, .. up to the ranks there are, the same model is trained for some steps, once with
the same batch on every replica (the work grows with dp) and once with the same global batch (the
work of a replica shrinks). Every replica sends the same gradients whatever its batch, so what the
replicas gain in compute they give back in communication, the sooner the smaller their batch.

Prints a table and draws it.
"""

import numpy as np
from lesson import COLORS, WORLD, change, claim, figure, save, train

from mpiparallel.settings import Settings

BATCH, STEPS = 8, 8
MODEL = Settings(layers=4, heads=4, hidden=256, seq_len=32, pp=1, tp=1)


def measure(dp: int, global_batch: int) -> dict[str, float] | None:
    """Median seconds of a step on the first dp ranks, and its bytes per rank; None on the others.

    A replica has one BLAS thread, so that more of them have more cores, as far as there are any.
    """
    settings = change(MODEL, dp=dp, global_batch=global_batch)
    run = train(settings, STEPS, blas_threads=1)
    return run and {
        "dp": dp,
        "step": run.seconds,
        "compute": run.seconds - run.exposed,
        "exposed": run.exposed,
        "hidden": run.hidden,
        "sent": run.on("dp") / dp,
        "rate": global_batch / run.seconds,
    }


def draw(tables: dict[str, list[dict]]) -> None:
    """Stacked bars of a step's seconds, for both ways of adding replicas."""
    drawn, axes = figure(1, len(tables), (9, 3.6))
    axes[1].sharey(axes[0])
    for axis, (title, rows) in zip(axes, tables.items(), strict=True):
        names = [f"dp={row['dp']}\n{row['rate']:.0f} seq/s" for row in rows]
        compute = np.array([row["compute"] for row in rows]) * 1e3
        exposed = np.array([row["exposed"] for row in rows]) * 1e3
        axis.bar(names, compute, label="compute", color=COLORS["forward"])
        hidden = np.minimum([row["hidden"] * 1e3 for row in rows], compute)
        axis.bar(
            names,
            hidden,
            bottom=compute - hidden,
            label="of it with communication hidden behind it",
            color=COLORS["forward"],
            edgecolor="white",
            hatch="///",
            linewidth=0,
        )
        axis.bar(names, exposed, bottom=compute, label="exposed communication", color=COLORS["dp"])
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.3)
    axes[0].set_ylabel("milliseconds per step")
    axes[0].legend(fontsize=8, frameon=True, loc="upper left")
    save(drawn, "data_parallel_scaling")


def main() -> None:
    sizes = [2**n for n in range(10) if 2**n <= WORLD.size]
    plans = {
        f"{BATCH} sequences on every replica": [(dp, BATCH * dp) for dp in sizes],
        f"{BATCH} sequences in all": [(dp, BATCH) for dp in sizes],
    }
    tables: dict[str, list[dict]] = {}
    for title, plan in plans.items():
        rows = [measure(dp, global_batch) for dp, global_batch in plan]
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
