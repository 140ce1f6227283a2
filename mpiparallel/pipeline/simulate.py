"""The simulator: durations in, timeline out. Every action starts as early as it can.

    start of an action = the later of   the end of the rank's action before it
                                        the end of what it needs, plus the message if that is
                                        on another rank

Messages take time but no rank's time, and any number of them travel at once. Numbers stay what
they are: whole numbers and Fractions give exact results, so that a paper's closed form can be
compared with ==.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from mpiparallel.pipeline.action import Action, Schedule, ScheduleError

Number: TypeAlias = int | float | Fraction


@dataclass(frozen=True)
class Timeline:
    """When every action runs.

    schedule : what was simulated. spans[rank] : (action, start, end) in the order of the rank.
    work : time of a rank's actions on all micro-batches, the same for all ranks.
    peak_activations[rank] : the most that a rank holds, see `peak_activations`.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[Action, Number, Number], ...], ...]
    work: Number
    peak_activations: tuple[Fraction, ...]

    @property
    def makespan(self) -> Number:
        """From the start of the first action of any rank to the end of the last."""
        return max(rank[-1][2] for rank in self.spans)

    @property
    def cost(self) -> Number:
        """The longest time over ranks from a rank's own first action to the end of its last."""
        return max(rank[-1][2] - rank[0][1] for rank in self.spans)

    @property
    def bubble(self) -> Number:
        """The idle share of the whole time: (cost - work) / cost."""
        return _divide(self.cost - self.work, self.cost)

    @property
    def bubble_of_ideal(self) -> Number:
        """The other convention, idle time as a share of the ideal time: (cost - work) / work."""
        return _divide(self.cost - self.work, self.work)


def simulate(
    schedule: Schedule,
    *,
    forward: Number = 1,
    input_gradient: Number = 1,
    weight_gradient: Number = 1,
    message: Number = 0,
) -> Timeline:
    """Run the schedule on paper.

    forward, input_gradient, weight_gradient : time of a rank's whole share of the model on one
    micro-batch, in any unit; a stage of a rank with v stages takes a v-th of it, and a whole
    backward both halves. message : time of one message between ranks, in the same unit.
    Raises ScheduleError where the ranks come to wait for each other.
    """
    stages = schedule.stages_per_rank
    share = {"F": forward, "I": input_gradient, "W": weight_gradient}
    share["B"] = input_gradient + weight_gradient
    duration = {kind: _divide(time, stages) for kind, time in share.items()}
    last = len(schedule.placement) - 1

    ends: dict[tuple[str, int, int], Number] = {}
    spans: list[list[tuple[Action, Number, Number]]] = [[] for _ in schedule.actions]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            for action in actions[len(spans[rank]) :]:
                needs = action.needs(last)
                if not all(need in ends for need in needs):
                    break
                start = spans[rank][-1][2] if spans[rank] else 0
                for need in needs:
                    far = schedule.placement[need[1]] != rank
                    start = max(start, ends[need] + message if far else ends[need])
                end = ends[action.result] = start + duration[action.kind]
                spans[rank].append((action, start, end))
                progress = True
    for rank, actions in enumerate(schedule.actions):
        if len(spans[rank]) < len(actions):
            raise ScheduleError(f"rank {rank} cannot run {actions[len(spans[rank])]}")

    work = schedule.micro_batches * (share["F"] + share["B"])
    return Timeline(schedule, tuple(map(tuple, spans)), work, peak_activations(schedule))


def peak_activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """The most activations that each rank holds at a time.

    In micro-batches of the rank's whole share of the model: a stage of a rank with v stages counts
    1/v. Held from the start of a stage's forward to the end of its whole backward, or of its weight
    gradient where backward is split: what that still needs is taken to be everything.
    """
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(Fraction(peak, schedule.stages_per_rank))
    return tuple(peaks)


def _divide(number: Number, by: Number) -> Number:
    """The quotient, exact for exact numbers; whole where it can be, because that is faster."""
    if isinstance(number, float) or isinstance(by, float):
        return number / by
    quotient = Fraction(number) / by
    return quotient.numerator if quotient.denominator == 1 else quotient
