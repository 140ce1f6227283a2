"""GPipe and 1F1B: one stage per rank, backward in one piece.

GPipe runs all forwards, then all backwards. 1F1B starts backward as soon as it can, and then takes
turns, so that a rank holds the activations of a few micro-batches instead of all of them:

    gpipe   rank 0  F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --
            rank 1  .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. ..
    1f1b    rank 0  F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
            rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. ..

Both take as long: with p ranks, m micro-batches and free messages the bubble is
(p-1) / (m+p-1) of the whole time, (p-1)/m of the ideal time.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B, as PipeDream-flush, which ends every step with no
micro-batch under way: Narayanan et al. 2021, arXiv 2104.04473.
"""

from collections.abc import Iterator

from mpiparallel.pipeline.action import Action


def gpipe(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """All forwards, then all backwards. Holds all micro_batches at its peak."""
    for i in range(micro_batches):
        yield Action("F", rank, i)
    for i in range(micro_batches):
        yield Action("B", rank, i)


def gpipe_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Micro-batches held at the peak: all, on every rank."""
    return micro_batches


def one_f_one_b(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """Just enough forwards that the first backward comes without delay, then in turns."""
    warmup = min(micro_batches, ranks - rank - 1)
    for i in range(warmup):
        yield Action("F", rank, i)
    for i in range(warmup, micro_batches):
        yield Action("F", rank, i)
        yield Action("B", rank, i - warmup)
    for i in range(micro_batches - warmup, micro_batches):
        yield Action("B", rank, i)


def one_f_one_b_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Micro-batches held at the peak: p on rank 0, one fewer on each rank after it."""
    return min(micro_batches, ranks - rank)
