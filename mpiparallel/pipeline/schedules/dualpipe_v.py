"""DualPipe-V: the V of ZB-V, with forwards and backwards in pairs that can hide messages.

DualPipe (DeepSeek-V3 technical report, arXiv 2412.19437) feeds the pipeline from both ends and
keeps two copies of the weights. Cut in half, as Qi et al. proposed, it is a V of two stages a rank
with one copy. In its long middle every rank pairs a forward of one stage with a whole backward of
the other. In the original the two are one fused block, F&B, so that the messages of one (those of
expert parallelism above all) travel while the other computes. Weight gradients are split off only
near both ends.

With fused blocks, free messages and m >= 2p a step's busiest rank idles (p-1) (F&B + B - 3W), in
the times of one stage, as published. Here a pair is two actions, forward first, each of which
starts and sends when it can by itself: that idles less, with F = I = W (p-1) F, half of it.
"""

from collections.abc import Iterator

from mpiparallel.pipeline.action import Action
from mpiparallel.pipeline.schedules.v_shape import VRank


def dualpipe_v(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """Fewer than 2p micro-batches do what the first ones of 2p do."""
    total = max(micro_batches, 2 * ranks)
    hops = ranks - rank - 1
    v = VRank(rank, ranks)
    v.run("F", 2 * hops)
    v.run("Ff", rank + 1)
    v.run("iWf", hops)
    v.run("FbfB", total - 2 * ranks + rank + 1)
    v.run("bfB", hops)
    # From the middle of these backwards on, weight gradients wait.
    backwards = "bB" * (rank + 1)
    v.run(backwards[: rank + 1])
    v.run(backwards[rank + 1 :].replace("b", "i").replace("B", "I"))
    v.run("WI", hops)
    v.run("W", rank + 1)
    return v.first(micro_batches)


def dualpipe_v_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Stages' activations held at the peak: 2p+1 on every rank, half a micro-batch above 1F1B.

    With fewer than 2p micro-batches rank r has at most r+1 of them on the way up at a time.
    """
    return min(2 * micro_batches, micro_batches + rank + 1, 2 * ranks + 1)
