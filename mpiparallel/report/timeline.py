"""One traced step: what every rank did at every moment of it, from a run's trace.json.

    rank 0   F0   F1   .........   B0   ....   B1   dp  optimizer
    rank 1   .... F0   B0     pp   F1   B1     dp       optimizer

Dots are the bubble, what a rank waits for other ranks' compute: the part of a wait for a pipeline
message that lies before its sender posted it; the part of a wait in an operation of all ranks that
lies before the last of them posted it; and what is idle before a rank's first action and after its
last, up to the end of the last rank. The rest of these waits, and every other wait in a
communication call, is exposed communication. Of two things that lie in each other, as an all-reduce
inside a forward, the inner one counts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from mpiparallel.errors import UserError

AXES = ("tp", "pp", "dp", "world")


@dataclass(frozen=True)
class Span:
    """Something that a rank did. Times in seconds from the start of the step.

    what : "compute", an axis, "bubble", or "other" for what the trace says nothing of.
    name : as in the trace. details : its args there.
    """

    what: str
    name: str
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """A step of all ranks.

    number : as the run counts it, from 1. first, last : the steps that were traced.
    seconds : from the first rank's start to the last rank's end.
    spans : of every rank, by start; waits are cut into bubble and rest.
    sends : of every rank, its messages to other pipeline ranks, start and end when it posted them.
    """

    number: int
    first: int
    last: int
    seconds: float
    spans: list[list[Span]]
    sends: list[list[Span]]

    def split(self) -> list[dict[str, float]]:
        """Seconds of every rank by what they went to; each rank's add up to `seconds`."""
        table = []
        for spans in self.spans:
            row = dict.fromkeys(("compute", *AXES, "bubble", "other"), 0.0)
            for span in innermost(spans, self.seconds):
                row[span.what] += span.seconds
            table.append(row)
        return table


def read_trace(path: Path) -> dict:
    """The object in a trace.json. Raises UserError where it is none of ours."""
    try:
        trace = json.loads(path.read_text())
        about = trace["otherData"]
        trace["traceEvents"], about["ranks"], about["steps"], about["mesh"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a trace of a training run ({error})") from None
    return trace


def typical_step(trace: dict) -> Step:
    """The step of the median length. Raises UserError for a trace that has no whole step."""
    ranks = trace["otherData"]["ranks"]
    bounds: dict[int, list[dict]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "step":
            bounds[int(event["name"].split()[-1])].append(event)
    lengths = {
        step: max(_end(event) for event in events) - min(event["ts"] for event in events)
        for step, events in bounds.items()
        if len(events) == ranks
    }
    if not lengths:
        raise UserError(f"trace.json: no step was traced on all {ranks} ranks")
    middle = median_low(lengths.values())
    number = next(step for step, length in lengths.items() if length == middle)
    begin = min(event["ts"] for event in bounds[number])

    events: list[list[dict]] = [[] for _ in range(ranks)]
    # Operations on an axis of one rank do nothing.
    alone = {axis for axis, size in trace["otherData"]["mesh"].items() if size == 1}
    for event in trace["traceEvents"]:
        left_out = event["ph"] != "X" or event["cat"] in {"step", *alone}
        if not left_out and event["args"]["step"] == number:
            events[event["tid"]].append(event)
    for row in events:
        row.sort(key=lambda event: event["ts"])
    arrivals = _messages(events) | _meetings(events)
    seconds = middle / 1e6
    spans = [_spans(row, begin, seconds, arrivals) for row in events]
    first, last = trace["otherData"]["steps"]
    sends = [
        [_send(event, begin) for event in row if _is_message(event, "isend")] for row in events
    ]
    return Step(number, first, last, seconds, spans, sends)


def innermost(spans: Sequence[Span], seconds: float) -> list[Span]:
    """The pieces of [0, seconds] in order, each of the span that started last; "other" between.

    Not every piece is a whole span: a forward with an all-reduce inside gives three.
    """
    times = sorted({0.0, seconds, *(s.start for s in spans), *(s.end for s in spans)})
    waiting = sorted(spans, key=lambda span: (span.start, -span.end), reverse=True)
    open_spans: list[Span] = []
    pieces = []
    for start, end in pairwise(times):
        while waiting and waiting[-1].start <= start:
            open_spans.append(waiting.pop())
        open_spans = [span for span in open_spans if span.end > start]
        span = open_spans[-1] if open_spans else Span("other", "between actions", start, end)
        pieces.append(replace(span, start=start, end=end))
    return pieces


# By the id() of an event that waits: what for, and when that was posted, in µs.
_Arrivals = dict[int, tuple[str, float]]


def _messages(events: list[list[dict]]) -> _Arrivals:
    """For the receives of all ranks: their sends. events : a step's, by rank.

    Raises UserError where a pair of ranks sent and received different numbers of messages.
    """
    pairs: dict[tuple[int, int], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for rank, row in enumerate(events):
        for event in sorted(row, key=lambda event: event["args"].get("posted", event["ts"])):
            if _is_message(event, "isend"):
                pairs[rank, event["args"]["peer"]]["sends"].append(event)
            elif _is_message(event, "irecv"):
                pairs[event["args"]["peer"], rank]["receives"].append(event)
    found = {}
    for (source, target), ends in pairs.items():
        sends, receives = ends["sends"], ends["receives"]
        if len(sends) != len(receives):
            raise UserError(
                f"trace.json: rank {source} sent {len(sends)} messages to rank {target} in a step, "
                f"which received {len(receives)}: the trace is not whole"
            )
        for send, receive in zip(sends, receives, strict=True):
            found[id(receive)] = (f"wait for rank {source}", send["args"]["posted"])
    return found


def _meetings(events: list[list[dict]]) -> _Arrivals:
    """For the operations of all ranks together: when the last rank posted them. events : a step's,
    by rank. Raises UserError where ranks had different numbers of them."""
    rows = [[event for event in row if event["cat"] == "world"] for row in events]
    if len({len(row) for row in rows}) > 1:
        raise UserError(
            "trace.json: ranks took part in different numbers of operations of all ranks in a "
            "step: the trace is not whole"
        )
    found = {}
    for together in zip(*rows, strict=True):
        last = max(event["args"]["posted"] for event in together)
        found.update({id(event): ("wait for the last rank", last) for event in together})
    return found


def _spans(events: list[dict], begin: float, seconds: float, arrivals: _Arrivals) -> list[Span]:
    """A rank's spans, of its events in a step that began at `begin` µs."""
    spans = []
    for event in events:
        start, end = (event["ts"] - begin) / 1e6, (_end(event) - begin) / 1e6
        if id(event) in arrivals:
            name, posted = arrivals[id(event)]
            cut = min(max(start, (posted - begin) / 1e6), end)
            spans.append(Span("bubble", name, start, cut, event["args"]))
            start = cut
        spans.append(Span(event["cat"], event["name"], start, end, event["args"]))
    spans = [span for span in spans if span.end > span.start]
    first = min((span.start for span in spans), default=seconds)
    last = max((span.end for span in spans), default=seconds)
    if first > 0:
        spans.insert(0, Span("bubble", "before the first action", 0.0, first))
    if last < seconds:
        spans.append(Span("bubble", "after the last action", last, seconds))
    return spans


def _is_message(event: dict, op: str) -> bool:
    return event["cat"] == "pp" and event["args"]["op"] == op


def _send(event: dict, begin: float) -> Span:
    posted = (event["args"]["posted"] - begin) / 1e6
    name = f"send to rank {event['args']['peer']}"
    return Span("pp", name, posted, posted, event["args"])


def _end(event: dict) -> float:
    return event["ts"] + event["dur"]
