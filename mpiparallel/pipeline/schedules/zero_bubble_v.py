"""ZB-V: two stages per rank in a V, no bubble, and no more activations than 1F1B.

The loss is on rank 0, which therefore starts backward after one trip down and up, and every rank
gets forward and backward work of two stages, and weight gradients, to fill its waits with.
Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362; also 2401.10241.

With F = I = W and free messages nothing idles from m = 2p-1 micro-batches on; with fewer a step's
busiest rank idles (2p-1-m) F, where F is the time of a rank's forward, both stages. It sends twice
as many messages as 1F1B: 2p-2 of its 2p-1 boundaries lie between ranks.
"""

from collections.abc import Iterator

from mpiparallel.pipeline.action import Action
from mpiparallel.pipeline.schedules.v_shape import VRank


def zb_v(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """Fewer than 2p-1 micro-batches do what the first ones of 2p-1 do."""
    total = max(micro_batches, 2 * ranks - 1)
    v = VRank(rank, ranks)
    v.run("F", 2 * (ranks - rank) - 1)
    v.run("fF", rank)
    v.run("fiW", ranks - rank)
    v.run("FIWfiW", total - (2 * ranks - 1) + rank)
    v.run("IWfiW", ranks - rank - 1)
    v.run("Ii", rank)
    v.run("IW", ranks - rank)
    v.run("W", 2 * rank)
    return v.first(micro_batches)


def zb_v_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Stages' activations held at the peak: 2p on every rank, as much as p micro-batches.

    With fewer than 2p-1 micro-batches rank r has at most r+1 of them on the way up at a time.
    """
    return min(2 * micro_batches, micro_batches + rank + 1, 2 * ranks)
