"""Pending: an operation that was posted, and the one wait.

It polls MPI and gives the processor away between polls: with more ranks than cores, a rank that
waits would otherwise keep the rank it waits for from running. What it waited for is timed,
recorded, and given up after the group's timeout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpiparallel.comm.trace import Entry

if TYPE_CHECKING:
    from mpiparallel.comm.group import Group

yield_processor: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))

# Polls between two gifts of the processor: asking MPI takes a tenth of what a switch takes.
POLLS = 16

# Who yields again and again goes to the end of the system's queue, who has slept goes to its head:
# where ranks share cores, a wait sleeps for NAP seconds at a time once it was long in vain.
NAP, NAP_AFTER, NAP_AFTER_IF_CROWDED = 20e-6, 10e-3, 100e-6


class CommunicationTimeout(TimeoutError):
    """An operation did not complete within --timeout seconds: another rank never took part."""


class Pending:
    """An operation that was posted. `wait` completes it and returns its array.

    peer : whom it waits for, in words; rank : the same as a rank of the group, where it is one.
    ready : lets MPI make progress, and says whether the operation is complete.
    finish : called once it is; gives what `wait` returns. bytes : of the message, or sent.
    posted : when its posting began, by time.perf_counter; now, where that is not said.
    """

    def __init__(
        self,
        group: Group,
        op: str,
        peer: str,
        ready: Callable[[], bool],
        finish: Callable[[], Any],
        *,
        bytes: int = 0,
        rank: int | None = None,
        posted: float | None = None,
    ):
        self._group, self._op, self._peer = group, op, peer
        self.test, self._finish = ready, finish  # test: True once `wait` would return at once
        self._bytes, self._rank = bytes, rank
        watch = group.watch
        self._posted = watch.trace and (posted or time.perf_counter(), watch.step, watch.action)

    def wait(self):
        """Complete the operation: the received or combined array, or the array that was sent.

        Raises CommunicationTimeout when the group's timeout (seconds) passes first.
        """
        group, start, polls = self._group, time.perf_counter(), 0
        nap_after = NAP_AFTER_IF_CROWDED if group.crowded else NAP_AFTER
        while not self.test():
            polls += 1
            if polls % POLLS == 0:
                waited = time.perf_counter() - start
                if waited < nap_after:
                    yield_processor()
                else:
                    time.sleep(NAP)
                group.look_up(self._op, self._peer, start)
        group.watch.waiting = None
        result = self._finish()
        end, trace = time.perf_counter(), group.watch.trace
        group.ledger.add(group.axis, self._op, seconds=end - start)
        if trace is not None and self._posted:
            posted, step, action = self._posted
            where = (posted, self._bytes, self._rank)
            trace.add(Entry(self._op, group.axis, start, end, step, action, *where))
        return result
