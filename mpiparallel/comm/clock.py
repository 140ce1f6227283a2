"""Clocks: what the clock of each rank says when rank 0's says something.

A question to rank 0 and its answer take a moment; the answer was given half way, give or take half
of that moment. Of several tries the quickest says most (Cristian 1989; the same in NTP):

    here     sent ----------------------- received        offset = there - (sent + received) / 2
    rank 0              there

Processes of one node read one clock; those of two nodes do not, so one rank of each node asks.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from mpiparallel.comm.group import Group

TRIES = 20


def clock_offset(
    world: Group, node_of: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds to add to this rank's `clock` to get rank 0's. All ranks call together.

    node_of : the node of every rank. Rank 0 answers the first rank of every other node, one after
    the other: 2 TRIES messages of 8 bytes each; one all-gather tells the other ranks.
    """
    firsts = [node_of.index(node) for node in dict.fromkeys(node_of)]
    number, offset = np.zeros(1), 0.0
    if world.rank == 0:
        for first in firsts[1:]:
            for _ in range(TRIES):
                world.recv(number, first)
                world.send(np.array([clock()]), first)
    elif world.rank in firsts[1:]:
        best = np.inf
        for _ in range(TRIES):
            sent = clock()
            world.send(number, 0)
            there = float(world.recv(number, 0)[0])
            received = clock()
            if received - sent < best:
                best, offset = received - sent, there - (sent + received) / 2
    offsets = world.allgather(np.array([offset]))
    return float(offsets[node_of.index(node_of[world.rank])])
