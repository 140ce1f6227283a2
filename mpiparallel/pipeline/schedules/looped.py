"""Interleaved 1F1B and looped breadth-first: several stages per rank, dealt out in turns.

With p ranks and v stages per rank, stage s lives on rank s mod p, so that a micro-batch passes
every rank v times and fills the pipeline in steps of a v-th of a rank's work:

    p = 2, v = 2    rank 0 has stages 0 and 2, rank 1 has stages 1 and 3

Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473) moves on to its next stage after a group
of p micro-batches, and takes turns between forward and backward. Breadth-first (Lamy-Poirier 2022,
arXiv 2211.05953) runs all micro-batches through a stage before it goes on to the next one, forward
and then backward: it holds all activations, and in return touches a stage's weights in one go, so
that sharded weights are gathered once per step and reduced while other stages compute.

The published interleaved schedule wants m, the micro-batches, to be a multiple of p. Here they fall
into max(1, m // p) groups of equal size, or nearly so, the larger ones first. With a multiple of p
that is the published schedule, and the bubble is the same closed form for every m of p or more;
other numbers hold up to twice the activations, because their groups are larger.

Both take ((v-1) max(m, p) + m+p-1) / v times a rank's work on one micro-batch. With m >= p and
free messages the bubble is therefore (p-1) / (v m + p-1) of the whole time, (p-1) / (v m) of the
ideal time.
"""

from collections.abc import Iterator
from itertools import pairwise

from mpiparallel.pipeline.action import Action


def interleaved(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """Warm up through the first group, then forward and backward in turns."""
    groups = _groups(ranks, micro_batches)
    forwards = [
        Action("F", turn * ranks + rank, i)
        for group in groups
        for turn in range(stages)
        for i in group
    ]
    backwards = [
        Action("B", turn * ranks + rank, i)
        for group in groups
        for turn in reversed(range(stages))
        for i in group
    ]
    warmup = min(len(forwards), _warmup(rank, ranks, len(groups[0]), stages))
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


def interleaved_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Stages' activations held at the peak: the warm-up and one more.

    With m a multiple of p and v > 1 rank 0 holds (v p + p-1) / v micro-batches, which is
    1 + (p-1) / (v p) times what it holds under 1F1B.
    """
    group = len(_groups(ranks, micro_batches)[0])
    return min(micro_batches * stages, _warmup(rank, ranks, group, stages) + 1)


def breadth_first(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """All micro-batches through one stage, then through the next; backward likewise."""
    for turn in range(stages):
        for i in range(micro_batches):
            yield Action("F", turn * ranks + rank, i)
    for turn in reversed(range(stages)):
        for i in range(micro_batches):
            yield Action("B", turn * ranks + rank, i)


def breadth_first_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Stages' activations held at the peak: all, on every rank."""
    return micro_batches * stages


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """The micro-batches that go through a rank's first stage before its second sees any."""
    count = max(1, micro_batches // ranks)
    size, over = divmod(micro_batches, count)
    starts = [number * size + min(number, over) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _warmup(rank: int, ranks: int, group: int, stages: int) -> int:
    """Forwards before the first turn of one forward, one backward.

    Of all stages but the last, those of the first group. Of the last stage, as many as fill the
    time that a micro-batch takes to the last rank and back: two a hop. With one stage this is
    1F1B, which waits for its first backward instead: one a hop is enough for the same bubble.
    """
    hops = ranks - rank - 1
    return (stages - 1) * group + (2 * hops if stages > 1 else hops)
