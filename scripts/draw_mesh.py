"""The README's picture of the mesh: eight ranks, 2 x 2 x 2, and the three kinds of traffic.

    python scripts/draw_mesh.py docs/mesh.png

Ranks and groups are those of `mpiparallel.mesh`, on four nodes of two ranks: tensor groups fill a
node, pipelines and replicas go across.
"""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from mpiparallel.coordinates import Coordinates
from mpiparallel.report.look import AXES as COLORS

PP = TP = DP = 2
TEXT = {
    "tp": "tensor: all-reduces of activations inside every layer,\n"
    "forward and backward. Stays inside the node",
    "pp": "pipeline: activations down, gradients up,\npoint to point, for every micro-batch",
    "dp": "data: one all-reduce of gradients per step,\nof this rank's share of the parameters",
}


def place(at: Coordinates) -> tuple[float, float]:
    """Where a rank is drawn: replicas side by side, a node each; stages below each other."""
    return 4.2 * at.dp + 1.7 * at.tp, -2.2 * at.pp


def arrow(axes, axis: str, start, end, bend: float = 0.0) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<->",
            mutation_scale=14,
            linewidth=2.4,
            color=COLORS[axis],
            connectionstyle=f"arc3,rad={bend}",
            zorder=1,
        )
    )


def main() -> None:
    figure, axes = plt.subplots(figsize=(9.5, 6.2))
    ranks = [Coordinates.of(rank, PP, TP) for rank in range(DP * PP * TP)]
    for node, at in enumerate(at for at in ranks if at.tp == 0):
        x, y = place(at)
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.7, y - 0.62),
                3.1,
                1.24,
                boxstyle="round,pad=0.06",
                fc="#F4F4F4",
                ec="#BBBBBB",
            )
        )
        axes.text(x + 0.85, y - 0.56, f"node {node}", ha="center", fontsize=8, color="#555555")
    for replica in range(DP):
        x, _ = place(Coordinates(replica, 0, 0))
        axes.text(x + 0.85, 1.45, f"replica dp={replica}", ha="center")
    for rank, at in enumerate(ranks):
        x, y = place(at)
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.5, y - 0.36),
                1.0,
                0.72,
                boxstyle="round,pad=0.05",
                fc="white",
                ec="#333333",
                zorder=2,
            )
        )
        axes.text(x, y + 0.1, f"rank {rank}", ha="center", va="center", weight="bold", zorder=3)
        axes.text(
            x, y - 0.2, f"pp={at.pp} tp={at.tp}", ha="center", va="center", fontsize=7.5, zorder=3
        )
        if at.tp + 1 < TP:
            arrow(axes, "tp", (x + 0.55, y), (x + 1.15, y))
        if at.pp + 1 < PP:
            arrow(axes, "pp", (x, y - 0.41), (x, y - 1.79))
        if at.dp + 1 < DP:
            above = at.pp == 0
            edge = 0.41 if above else -0.41
            arrow(axes, "dp", (x, y + edge), (x + 4.2, y + edge), -0.17 if above else 0.17)
    for row, (axis, text) in enumerate(TEXT.items()):
        y = -4.2 - 0.62 * row
        axes.plot([-0.7, 0.0], [y, y], color=COLORS[axis], linewidth=3)
        axes.text(0.25, y, text, va="center", fontsize=9)
    axes.set_xlim(-1.0, 7.0)
    axes.set_ylim(-5.9, 1.8)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(sys.argv[1], dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
