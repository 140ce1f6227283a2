"""A simulated schedule in the terminal: one row per pipeline rank, time from left to right.

    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1     F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Dots are the bubble as the papers count it: waits between a rank's first action and its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from mpiparallel.pipeline.action import Action, Schedule
from mpiparallel.pipeline.messages import outgoing
from mpiparallel.pipeline.simulate import Number, Timeline

NAMES_OF_KINDS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward, input gradient",
    "W": "backward, weight gradient",
}
# 256-colour backgrounds, for a rank's first, third, .. stage and for its second, fourth, ..
COLOURS = {"F": (25, 75), "B": (30, 79), "I": (37, 123), "W": (28, 114)}
TEXT_COLOURS = (231, 16)
BUBBLE = "bubble = (cost - m(F+I+W)) / cost, the idle share of the whole time"
COST = "cost = the longest time over ranks from a rank's first action to the end of its last"
PEAKS = "activations are counted in micro-batches of a rank's whole share of the model"


def summary_row(timeline: Timeline) -> dict[str, Any]:
    """The numbers of a schedule under the keys that --json prints."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "stages_per_rank": schedule.stages_per_rank,
        "micro_batches": schedule.micro_batches,
        "bubble": float(timeline.bubble),
        "makespan": float(timeline.makespan),
        "messages": count_messages(schedule),
        "peak_activations": [float(peak) for peak in timeline.peak_activations],
    }


def count_messages(schedule: Schedule) -> int:
    """Messages between ranks in one step, both directions, over all ranks."""
    return sum(
        outgoing(action, schedule.placement) is not None
        for actions in schedule.actions
        for action in actions
    )


def show_schedule(timeline: Timeline, width: int, colour: bool) -> str:
    """The picture of one schedule with its legend and its numbers, at most `width` columns."""
    schedule = timeline.schedule
    ranks = range(schedule.ranks)
    busy = [sum(end - start for _, start, end in spans) for spans in timeline.spans]
    spans = [spans[-1][2] - spans[0][1] for spans in timeline.spans]
    idle = [span - work for span, work in zip(spans, busy, strict=True)]
    table = [
        ["rank", *map(str, ranks)],
        ["busy", *map(number, busy)],
        ["idle in between", *map(number, idle)],
        ["peak activations", *map(number, timeline.peak_activations)],
    ]
    return "\n".join(
        [
            f"{schedule.name}: {_count(schedule.ranks, 'pipeline rank')} of "
            f"{_count(schedule.stages_per_rank, 'stage')}, "
            f"{_count(schedule.micro_batches, 'micro-batch')}",
            "",
            *_picture(timeline, width, colour),
            *_legend(schedule, colour),
            "",
            f"bubble    {percent(timeline.bubble)} of the whole time, "
            f"{percent(timeline.bubble_of_ideal)} of the ideal time m(F+I+W)",
            f"cost      {number(timeline.cost)}, makespan {number(timeline.makespan)}",
            f"messages  {count_messages(schedule)}",
            "",
            *_columns(table),
            "",
            f"{BUBBLE};",
            f"{COST};",
            f"{PEAKS}.",
        ]
    )


def show_comparison(timelines: Sequence[Timeline]) -> str:
    """A table of several schedules for the same ranks and micro-batches."""
    head = "schedule,stages/rank,bubble,of ideal,makespan,messages,peak activations by rank"
    rows = [
        [
            timeline.schedule.name,
            str(timeline.schedule.stages_per_rank),
            percent(timeline.bubble),
            percent(timeline.bubble_of_ideal),
            number(timeline.makespan),
            str(count_messages(timeline.schedule)),
            " ".join(f"{number(peak):>4}" for peak in timeline.peak_activations),
        ]
        for timeline in timelines
    ]
    schedule = timelines[0].schedule
    return "\n".join(
        [
            f"{_count(schedule.ranks, 'pipeline rank')}, "
            f"{_count(schedule.micro_batches, 'micro-batch')}",
            "",
            *_columns([head.split(","), *rows]),
            "",
            f"{BUBBLE};",
            f"{COST};",
            "of ideal = the other convention, (cost - m(F+I+W)) / m(F+I+W);",
            f"{PEAKS}.",
        ]
    )


def turns(schedule: Schedule) -> list[int]:
    """For each stage, how many stages before it are on the same rank."""
    return [schedule.placement[:stage].count(rank) for stage, rank in enumerate(schedule.placement)]


def label(action: Action, turn: int) -> str:
    """The kind, in lower case for a rank's second, fourth, .. stage, and the micro-batch."""
    kind = action.kind if turn % 2 == 0 else action.kind.lower()
    return f"{kind}{action.micro_batch}"


def number(value: Number) -> str:
    """Short: 27, 13.5, 0.333."""
    return f"{float(value):.6g}" if float(value) >= 100 else f"{float(value):.3g}"


def percent(value: Number) -> str:
    """A share in percent."""
    return f"{float(value):.1%}"


# A cell is one character of a row and the kind and turn that colour it, or None.
_Cell = tuple[str, tuple[str, int] | None]


def _picture(timeline: Timeline, width: int, colour: bool) -> list[str]:
    """The rows, in bands of time where one line per rank is too short."""
    schedule, turn = timeline.schedule, turns(timeline.schedule)
    margin = len(f"rank {schedule.ranks - 1}  ")
    room = width - margin
    lengths = [end - start for spans in timeline.spans for _, start, end in spans]
    # The labels of actions that are far shorter than others are cut off.
    longest = max(lengths)
    shortest = min(length for length in lengths if 3 * length >= longest)
    columns = 1 + len(str(schedule.micro_batches - 1))  # of the longest label
    if (columns + 1) * timeline.makespan <= room * shortest:
        columns += 1
    scale = columns / shortest

    rows: list[list[_Cell]] = []
    for spans in timeline.spans:
        row: list[_Cell] = []
        for action, start, end in spans:
            gap = round(start * scale) - len(row)
            row += [("." if row else " ", None)] * gap
            look = (action.kind, turn[action.stage])
            text = label(action, turn[action.stage])
            length = round(end * scale) - len(row)
            if length > len(text):
                text = text.ljust(length - 1, "-") + " "
            row += [(letter, look) for letter in text[:length]]
        rows.append(row)

    total = max(map(len, rows))
    bands = -(-total // room)
    cell = max(1, round(shortest * scale))
    band = min(room, -(-total // bands // cell) * cell)  # cut between cells, where they are equal
    lines = []
    for begin in range(0, total, band):
        lines.append((" " * margin + _ruler(begin, band, scale, timeline.makespan)).rstrip())
        for rank, row in enumerate(rows):
            name = f"rank {rank}".ljust(margin)
            lines.append((name + _paint(row[begin : begin + band], colour)).rstrip())
        lines.append("")
    return lines


def _ruler(begin: int, band: int, scale: float, makespan: Number) -> str:
    """Times above the columns, at round numbers about ten columns apart."""
    step = _round_up(10 / float(scale))
    line = ""
    tick = 0
    while (column := round(tick * step * scale)) < begin + band and tick * step <= makespan:
        if column >= begin:
            line = line.ljust(column - begin) + number(tick * step)
        tick += 1
    return line[:band]


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, .. and their like below 1."""
    power = 10.0 ** (len(f"{int(value)}") - 1 if value >= 1 else -len(f"{int(1 / value)}"))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value)


def _paint(cells: Sequence[_Cell], colour: bool) -> str:
    if not colour:
        return "".join(letter for letter, _ in cells)
    return "".join(
        _coloured("".join(letter for letter, _ in group), look)
        for look, group in groupby(cells, key=lambda cell: cell[1])
    )


def _coloured(text: str, look: tuple[str, int] | None) -> str:
    if look is None:
        return f"\033[2m{text}\033[0m"
    kind, turn = look
    shade = turn % 2
    return f"\033[48;5;{COLOURS[kind][shade]};38;5;{TEXT_COLOURS[shade]}m{text}\033[0m"


def _legend(schedule: Schedule, colour: bool) -> list[str]:
    kinds = [
        kind
        for kind in NAMES_OF_KINDS
        if any(action.kind == kind for actions in schedule.actions for action in actions)
    ]
    names = [
        f"{_coloured(f' {kind} ', (kind, 0)) if colour else kind} {NAMES_OF_KINDS[kind]}"
        for kind in kinds
    ]
    numbers = "the number is the micro-batch"
    if schedule.stages_per_rank > 1:
        second = "the second" if schedule.stages_per_rank < 4 else "every second"
        numbers += f"; lower case is {second} of a rank's {schedule.stages_per_rank} stages"
    return ["   ".join([*names, ". idle"]), numbers]


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows of text under each other: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if position == 0 else text.rjust(width)
            for position, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
