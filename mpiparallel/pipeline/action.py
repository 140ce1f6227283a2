"""A pipeline schedule is data: for each pipeline rank the list of actions that it runs, in order.

    0F1   stage 0 runs forward of micro-batch 1
    0B1   stage 0 runs backward of micro-batch 1, whole
    0I1   its first half only: the gradient of the stage's input, which the stage before waits for
    0W1   the second half: the gradients of the stage's weights, which nobody waits for

A whole backward is I and W in one. Nothing here says when an action starts: it starts when the
rank has finished the action before it and its inputs are there.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = "FBIW"


class ScheduleError(ValueError):
    """A schedule that cannot run or is not what it claims to be; says which rank, which action."""


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch.

    kind : "F", "B", "I" or "W". stage : 0 .. stages-1 in the order of the model, over all ranks.
    micro_batch : 0 .. micro_batches-1.
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`. Raises ValueError where there is none."""
        for kind in KINDS:
            stage, found, micro_batch = text.partition(kind)
            if found and stage.isdecimal() and micro_batch.isdecimal():
                return cls(kind, int(stage), int(micro_batch))
        raise ValueError(f"{text!r} is not an action: wanted stage, one of {KINDS}, micro-batch")

    @property
    def result(self) -> tuple[str, int, int]:
        """What it makes. The input gradient is one result, whether a B or an I made it."""
        return "I" if self.kind == "B" else self.kind, self.stage, self.micro_batch

    def needs(self, last_stage: int) -> tuple[tuple[str, int, int], ...]:
        """The results that must be there before it starts; the other stage's comes first."""
        stage, micro_batch = self.stage, self.micro_batch
        if self.kind == "F":
            return (("F", stage - 1, micro_batch),) if stage > 0 else ()
        if self.kind == "W":
            return (("I", stage, micro_batch),)
        own = ("F", stage, micro_batch)
        return (("I", stage + 1, micro_batch), own) if stage < last_stage else (own,)


@dataclass(frozen=True)
class Schedule:
    """What every pipeline rank does in one step.

    ranks : pipeline ranks. placement[stage] : the pipeline rank that owns the stage.
    actions[rank] : what the rank runs, in this order.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages_per_rank(self) -> int:
        """Stages that each pipeline rank owns."""
        return len(self.placement) // self.ranks
