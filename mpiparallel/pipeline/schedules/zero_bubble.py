"""ZB-H1 and ZB-H2: backward in two halves, so that weight gradients fill the bubble.

Only the input gradient (I) is waited for by the stage before; the weight gradient (W) can be put
off. Qi et al. 2023, arXiv 2401.10241, whose implementation calls the two ZB1P and ZB2P:

    zb-h1   rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
            rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
            rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    zb-h2   rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
            rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
            rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

A rank may hold the activations of at most `limit` micro-batches, and puts off weight gradients for
as long as that allows. ZB-H1 has limit p, what 1F1B holds on rank 0. ZB-H2 has limit 2p-1, not
quite twice as much, and fills the wait for the first backward with more forwards; its ranks end one
after the other, as they began, so it needs an optimizer step that does not wait for all ranks.

With p ranks, m micro-batches, W <= F, W <= I and free messages, a step's busiest rank idles
(p-1)(F+I) - (min(m, limit) - 1) W. With m >= limit that is, as the paper has it, (p-1)(F+I-W) for
ZB-H1, a third of 1F1B's when F = I = W, and (p-1)(F+I-2W) for ZB-H2, nothing when F = I = W.
"""

from collections.abc import Iterator

from mpiparallel.pipeline.action import Action


def zb_h1(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """The forwards of 1F1B; rank r leaves r weight gradients for later."""
    return _in_turns(rank, micro_batches, warmup=ranks - rank - 1, waiting=rank)


def zb_h1_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Micro-batches held at the peak: p on every rank."""
    return min(micro_batches, ranks)


def zb_h2(rank: int, ranks: int, micro_batches: int, stages: int) -> Iterator[Action]:
    """Two more forwards per hop to the last rank; rank r leaves 2r weight gradients for later."""
    return _in_turns(rank, micro_batches, warmup=2 * (ranks - rank - 1), waiting=2 * rank)


def zb_h2_peak(rank: int, ranks: int, micro_batches: int, stages: int) -> int:
    """Micro-batches held at the peak: 2p-1 on every rank."""
    return min(micro_batches, 2 * ranks - 1)


def _in_turns(stage: int, micro_batches: int, warmup: int, waiting: int) -> Iterator[Action]:
    """Warm-up forwards, then F, I and W in turns, with up to `waiting` Ws put off."""
    warmup = min(warmup, micro_batches)
    for i in range(warmup):
        yield Action("F", stage, i)
    for i in range(micro_batches):
        if warmup + i < micro_batches:
            yield Action("F", stage, warmup + i)
        yield Action("I", stage, i)
        if i >= waiting:
            yield Action("W", stage, i - waiting)
    for i in range(max(0, micro_batches - waiting), micro_batches):
        yield Action("W", stage, i)
