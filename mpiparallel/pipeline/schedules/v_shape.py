"""The V: each rank owns two stages, and the last rank turns the model around.

    rank         0  1  2  3
    way down     0  1  2  3
    way up       7  6  5  4

A micro-batch starts and ends on rank 0, and the two stages of the last rank hand over without a
message.
"""

from collections import Counter
from collections.abc import Iterator

from mpiparallel.pipeline.action import Action


class VRank:
    """The list of one rank, written step by step; micro-batches count up by themselves.

    A step is a letter: F, B, I for the stage on the way down, f, b, i for the one on the way up,
    and W for the weight gradient that has waited longest, of either.
    """

    def __init__(self, rank: int, ranks: int):
        self.stages = {"down": rank, "up": 2 * ranks - 1 - rank}
        self.counts: Counter[tuple[str, int]] = Counter()
        self.waiting: list[Action] = []
        self.actions: list[Action] = []

    def run(self, steps: str, times: int = 1) -> None:
        """Append the steps, so many times over."""
        for step in steps * times:
            if step == "W":
                self.actions.append(self.waiting.pop(0))
                continue
            stage = self.stages["down" if step.isupper() else "up"]
            direction = "forward" if step in "Ff" else "backward"
            action = Action(step.upper(), stage, self.counts[direction, stage])
            self.counts[direction, stage] += 1
            self.actions.append(action)
            if action.kind == "I":
                self.waiting.append(Action("W", stage, action.micro_batch))

    def first(self, micro_batches: int) -> Iterator[Action]:
        """The actions on the first micro-batches; those on later ones are left out.

        No action needs another micro-batch, so what is left is in a possible order still.
        """
        return (action for action in self.actions if action.micro_batch < micro_batches)
