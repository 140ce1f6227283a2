"""How the ranks of a group lie on the nodes of a cluster, and what follows from it.

one node:   all ranks share memory, and get a Window

several:    node 0  [ rank 0   rank 1 ]   inside: a row of the grid
            node 1  [ rank 2   rank 3 ]   across: a column
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mpiparallel.comm.group import Group
from mpiparallel.comm.window import Window


class NodeLayout:
    """The nodes of a group's ranks. All ranks of the group make it together.

    Parameters
    ----------
    group : the Group that this is set as the `layout` of; `group.free` then frees it.
    node_of : the node of each of its ranks, as any number.

    Attributes
    ----------
    window : shared memory of all ranks, where they are on one node and more than one.
    grid : Groups of the ranks inside this rank's node and of those across nodes, where there are
        several nodes with the same number of ranks, two or more. They count as the group does.
    """

    def __init__(self, group: Group, node_of: Sequence[int]):
        self.window: Window | None = None
        self.grid: tuple[Group, Group] | None = None
        nodes, per_node = len(set(node_of)), set(Counter(node_of).values())
        if nodes == 1 and group.size > 1:
            self.window = Window(group)
        elif nodes > 1 and len(per_node) == 1 and per_node != {1}:
            inside = _split(group, node_of[group.rank])
            self.grid = inside, _split(group, inside.rank)

    def free(self) -> None:
        """Give memory and communicators back; not those of the group. All its ranks call it."""
        if self.window is not None:
            self.window.free()
        for part in self.grid or ():
            part.free()


def _split(group: Group, color: int) -> Group:
    part = Group(
        group.communicator.Split(color, group.rank),
        group.axis,
        ledger=group.ledger,
        where=group.where,
        timeout=group.timeout,
    )
    part.crowded = group.crowded
    return part
