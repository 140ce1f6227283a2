"""Hybrid parallelism: the same model and batch on every mesh of the ranks there are.

    mpirun -n 8 python scripts/hybrid_mesh.py

The loss is the same everywhere. What differs is who sends what: a rank all-reduces the gradients of
the parameters that it holds, and tensor and pipeline parallelism leave it 1/(pp tp) of them.
"""

import numpy as np
from lesson import COLORS, WORLD, change, claim, figure, save, train

from mpiparallel.settings import Settings

RANKS = WORLD.size
MODEL = Settings(
    layers=8, heads=8, hidden=64, seq_len=16, global_batch=16, micro_batches=2, dtype="float64"
)
MESHES = [
    (dp, pp, RANKS // dp // pp)
    for dp in range(RANKS, 0, -1)
    for pp in range(1, RANKS + 1)
    if RANKS % (dp * pp) == 0 and RANKS % dp == 0
]
AXES = ("tp", "pp", "dp")


def main() -> None:
    runs = {(dp, pp, tp): train(change(MODEL, dp=dp, pp=pp, tp=tp), 3) for dp, pp, tp in MESHES}
    if WORLD.rank:
        return
    # A rank of dp replicas sends 2(dp-1)/dp of its own gradients: what it sent says what it has.
    share = {
        (dp, pp, tp): run.on("dp") / (2 * (dp - 1) * pp * tp * 8)
        for (dp, pp, tp), run in runs.items()
        if dp > 1
    }
    parameters = runs[MESHES[0]].parameters
    print(f"\n{parameters:,} parameters, 16 sequences of 16 tokens, 3 steps, float64")
    print("bytes per rank and step on each axis; the share of the model that a rank all-reduces")
    print("  dp pp tp   loss of step 3          tp          pp          dp      share   x pp tp")
    for (dp, pp, tp), run in runs.items():
        bytes_ = "".join(f"{run.on(axis) / RANKS:>12,.0f}" for axis in AXES)
        mine = share.get((dp, pp, tp))
        part = f"{mine / parameters:>10.3f}{mine / parameters * pp * tp:>9.3f}" if mine else ""
        print(f"  {dp:>2} {pp:>2} {tp:>2}   {run.losses[-1]:.12f}{bytes_}{part}")

    drawn, axes = figure(1, 1, (8, 3.8))
    names = [f"{dp} x {pp} x {tp}" for dp, pp, tp in runs]
    bottom = np.zeros(len(runs))
    for axis, label in zip(AXES, ("tensor", "pipeline", "data"), strict=True):
        heights = np.array([run.on(axis) / RANKS / 1e6 for run in runs.values()])
        axes.bar(names, heights, bottom=bottom, color=COLORS[axis], label=f"{label} ({axis})")
        bottom += heights
    axes.set(xlabel="dp x pp x tp", ylabel="MB sent per rank and step")
    axes.margins(y=0.1)
    axes.legend(frameon=False)
    save(drawn, "hybrid_mesh")

    serial = np.array(runs[MESHES[-1]].losses)
    worst = max(float(np.abs(np.array(run.losses) / serial - 1).max()) for run in runs.values())
    claim(worst < 1e-10, f"every mesh gives the same losses, to {worst:.0e} relative")
    claim(all(run.sent == run.law for run in runs.values()), "all bytes are those of the laws")
    if share:
        least = min(mine * pp * tp / parameters for (dp, pp, tp), mine in share.items())
        most = max(mine * pp * tp / parameters for (dp, pp, tp), mine in share.items())
        claim(
            least >= 1 and most < 1.25,
            f"a rank all-reduces 1/(pp tp) of the model: times {least:.3f} to {most:.3f}, for what "
            "is whole on every tensor rank and the table that two stages have",
        )


if __name__ == "__main__":
    main()
