"""Trace: what one rank did and when, for the timeline of a run.

    F of stage 0, micro-batch 2      12.0 .. 14.5 ms
      allreduce on tp, 32 KiB        12.8 .. 13.1 ms, posted at 12.8
    irecv on pp from rank 1          14.5 .. 16.0 ms, posted at 3.2

Times are the rank's own `time.perf_counter`, in seconds; report/chrome.py aligns the clocks of all
ranks and merges them. Of an operation the trace keeps when it was posted and how long the rank then
had to wait for it: that much of it was not hidden behind other work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LIMIT = 100_000  # entries that a rank keeps, about 30 MiB: what comes after is counted only


class Entry(NamedTuple):
    """One thing that a rank did from `start` to `end`.

    what : the kind of work ("F", "B", "I", "W", "optimizer", "step") or the operation of a Group.
    axis : of an operation, "" for work. posted, bytes, peer : of an operation; the peer, a rank of
    the axis, of point-to-point messages only. step : counted from 1. action : the pipeline action
    or message that was under way, if any; it has `stage` and `micro_batch`.
    """

    what: str
    axis: str
    start: float
    end: float
    step: int | None
    action: Any
    posted: float = 0.0
    bytes: int = 0
    peer: int | None = None


class Trace:
    """The entries of one rank, in the order in which they ended."""

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self.entries: list[Entry] = []
        self.dropped = 0

    def add(self, entry: Entry) -> None:
        """Keep an entry, or count it where the trace is full."""
        if len(self.entries) < self.limit:
            self.entries.append(entry)
        else:
            self.dropped += 1
