"""Pipeline schedules by name: pure functions from sizes to a list of actions per pipeline rank.

    gpipe 1f1b                  one stage per rank, whole backward            one_stage.py
    interleaved breadth-first   any number of stages per rank, looped         looped.py
    zb-h1 zb-h2                 one stage per rank, backward in two halves    zero_bubble.py
    zb-v                        two stages per rank in a V, likewise          zero_bubble_v.py
    dualpipe-v                  the same V, forward and backward in pairs     dualpipe_v.py

Every schedule takes any number of ranks and micro-batches of at least 1.

Activations are counted in micro-batches of a rank's whole share of the model: a stage of a rank
with v stages counts 1/v. They are held from the start of F to the end of B, or of W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpiparallel.errors import UserError
from mpiparallel.pipeline.action import Action, Schedule
from mpiparallel.pipeline.schedules import (
    dualpipe_v,
    looped,
    one_stage,
    zero_bubble,
    zero_bubble_v,
)


@dataclass(frozen=True)
class Family:
    """How a schedule is made.

    actions(rank, ranks, micro_batches, stages_per_rank) : the list of one rank.
    peak(the same) : stages' activations that the rank holds at its peak, in closed form.
    stages_per_rank : the only number that it has, or None for any.
    """

    actions: Callable[[int, int, int, int], Iterable[Action]]
    peak: Callable[[int, int, int, int], int]
    stages_per_rank: int | None
    v_shaped: bool = False


FAMILIES = {
    "gpipe": Family(one_stage.gpipe, one_stage.gpipe_peak, 1),
    "1f1b": Family(one_stage.one_f_one_b, one_stage.one_f_one_b_peak, 1),
    "interleaved": Family(looped.interleaved, looped.interleaved_peak, None),
    "breadth-first": Family(looped.breadth_first, looped.breadth_first_peak, None),
    "zb-h1": Family(zero_bubble.zb_h1, zero_bubble.zb_h1_peak, 1),
    "zb-h2": Family(zero_bubble.zb_h2, zero_bubble.zb_h2_peak, 1),
    "zb-v": Family(zero_bubble_v.zb_v, zero_bubble_v.zb_v_peak, 2, v_shaped=True),
    "dualpipe-v": Family(dualpipe_v.dualpipe_v, dualpipe_v.dualpipe_v_peak, 2, v_shaped=True),
}
NAMES = tuple(FAMILIES)
ALIASES = {"zb1p": "zb-h1", "zb2p": "zb-h2"}


def build(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The schedule of that name or alias for so many pipeline ranks and micro-batches.

    stages_per_rank : None for the schedule's own number, or 2 where it takes any. Raises UserError
    for a name that is not known and a number of stages that the schedule does not have.
    """
    family, stages = _look_up(name, stages_per_rank)
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"{ranks} ranks, {micro_batches} micro-batches: both are at least 1")
    return Schedule(
        name=ALIASES.get(name, name),
        ranks=ranks,
        micro_batches=micro_batches,
        placement=placement(name, ranks, stages_per_rank),
        actions=tuple(
            tuple(family.actions(rank, ranks, micro_batches, stages)) for rank in range(ranks)
        ),
    )


def placement(name: str, ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """placement[stage] is the pipeline rank that owns the stage. Raises UserError like `build`."""
    family, stages = _look_up(name, stages_per_rank)
    if family.v_shaped:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * stages


def stated_peaks(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> tuple[int, ...]:
    """What each rank holds at its peak by the schedule's closed form, in stages' activations:
    stages_per_rank of them are one micro-batch's activations of the rank's whole share."""
    family, stages = _look_up(name, stages_per_rank)
    return tuple(family.peak(rank, ranks, micro_batches, stages) for rank in range(ranks))


def forward_only(micro_batches: int, placement: tuple[int, ...]) -> Schedule:
    """No backward, for evaluation: every rank takes its stages one after the other."""
    ranks = max(placement) + 1
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement):
        actions[rank] += [Action("F", stage, i) for i in range(micro_batches)]
    return Schedule("forward-only", ranks, micro_batches, placement, tuple(map(tuple, actions)))


def _look_up(name: str, stages_per_rank: int | None) -> tuple[Family, int]:
    family = FAMILIES.get(ALIASES.get(name, name))
    if family is None:
        raise UserError(f"--schedule {name}: legal: {', '.join((*NAMES, *ALIASES))}")
    stages = stages_per_rank if stages_per_rank is not None else family.stages_per_rank or 2
    if stages < 1 or family.stages_per_rank not in (None, stages):
        raise UserError(
            f"--stages-per-rank {stages_per_rank}: not with --schedule {name}; "
            f"legal: {family.stages_per_rank or '1 or more'}"
        )
    return family, stages
