"""The bubble of a pipeline: what its ranks wait for each other, and how micro-batches shrink it.

    mpirun -n 4 python scripts/pipeline_bubble.py

The real executor runs three schedules with real messages, sleeping in place of computing, so that
two cores carry four stages. Then a real training step is taken: between stages there are sends and
receives, and not one collective.
"""

from lesson import WORLD, change, claim, figure, save, train

from mpiparallel import settings as settings_module
from mpiparallel.bench.pipeline import measure_pipeline
from mpiparallel.mesh import Mesh
from mpiparallel.settings import Settings

SCHEDULES = ("1f1b", "interleaved", "zb-h1")
COLORS = ("#0072b2", "#e69f00", "#009e73")
MICRO_BATCHES = (4, 8, 16)
FORWARD_MS, BACKWARD_MS = 16.0, 32.0
BASE = Settings(steps=3)
TOLERANCE = 0.08  # of the whole time: a crowded laptop wakes sleepers late


def main() -> None:
    p = WORLD.size
    found = {}
    with Mesh(1, p, 1) as mesh:
        for name in SCHEDULES:
            for count in MICRO_BATCHES:
                settings = change(BASE, pp=p, layers=2 * p, schedule=name)
                settings = change(settings, micro_batches=count, global_batch=count)
                settings = settings_module.check(settings, p)
                found[name, count] = measure_pipeline(mesh, settings, FORWARD_MS, BACKWARD_MS)
    model = Settings(dp=1, pp=p, tp=1, layers=p, hidden=64, heads=4, seq_len=16, global_batch=8)
    run = train(model, 2)
    if WORLD.rank:
        return

    print(f"\nbubble on {p} stages, share of the whole time: measured (predicted)")
    print("  schedule    " + "".join(f"{f'm={count}':>18}" for count in MICRO_BATCHES))
    for name in SCHEDULES:
        cells = (found[name, count] for count in MICRO_BATCHES)
        text = "".join(
            f"{c['measured_bubble']:>10.3f} ({c['predicted_bubble']:.3f})" for c in cells
        )
        print(f"  {name:<12}{text}")
    print("\nmessages of a training step on the pp axis, all ranks, by operation")
    operations = {op: calls for (axis, op), calls in run.calls.items() if axis == "pp"}
    for op, calls in operations.items():
        print(f"  {op:<8}{calls:>6.0f} calls {run.sent.get(('pp', op), 0):>12,} bytes")

    drawn, axes = figure(1, 1, (6, 3.6))
    for name, color in zip(SCHEDULES, COLORS, strict=True):
        rows = [found[name, count] for count in MICRO_BATCHES]
        axes.plot(MICRO_BATCHES, [r["predicted_bubble"] for r in rows], color=color, label=name)
        axes.plot(MICRO_BATCHES, [r["measured_bubble"] for r in rows], "o", color=color)
    axes.set(xlabel="micro-batches", ylabel="bubble, share of the whole time", ylim=(0, None))
    axes.set_xticks(MICRO_BATCHES)
    axes.set_title(f"{p} stages; lines predicted, dots measured")
    axes.legend(frameon=False)
    save(drawn, "pipeline_bubble")

    off = max(abs(c["measured_bubble"] - c["predicted_bubble"]) for c in found.values())
    claim(off < TOLERANCE, f"measured is predicted, {off:.3f} off at most")
    for name in SCHEDULES:
        first, *_, last = (found[name, count]["measured_bubble"] for count in MICRO_BATCHES)
        claim(last < first, f"{name}: more micro-batches, less bubble: {first:.3f} to {last:.3f}")
    best = MICRO_BATCHES[0]
    mine, theirs = (found[name, best]["measured_bubble"] for name in ("zb-h1", "1f1b"))
    claim(mine < theirs, f"weight gradients that wait fill it: {mine:.3f} instead of {theirs:.3f}")
    claim(set(operations) == {"isend", "irecv"}, "between stages nothing but sends and receives")
    claim(run.sent == run.law, "their bytes are those of the law")


if __name__ == "__main__":
    main()
