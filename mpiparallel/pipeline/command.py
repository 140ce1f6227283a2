"""The command `schedule`: print, draw and compare pipeline schedules. Needs no MPI.

python -m mpiparallel schedule --schedule zb-v --stages 4 --micro-batches 8
python -m mpiparallel schedule --compare --stages 4 --micro-batches 8 --plot schedules.png
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from fractions import Fraction

from mpiparallel.errors import UserError
from mpiparallel.pipeline import schedules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--schedule",
        choices=(*schedules.NAMES, *schedules.ALIASES),
        default="1f1b",
        help="which one (default 1f1b); zb1p and zb2p are zb-h1 and zb-h2",
    )
    which.add_argument("--compare", action="store_true", help="all schedules in one table")
    parser.add_argument(
        "--stages", type=int, default=4, help="pipeline ranks (default 4)", metavar="P"
    )
    parser.add_argument(
        "--stages-per-rank",
        type=int,
        default=None,
        metavar="V",
        help="stages that each of them owns, for interleaved and breadth-first (default 2)",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="per step (default 8)", metavar="M"
    )
    for flag, what in (
        ("--forward", "forward (F)"),
        ("--input-gradient", "input gradient (I)"),
        ("--weight-gradient", "weight gradient (W)"),
    ):
        parser.add_argument(
            flag,
            type=_duration,
            default=Fraction(1),
            metavar="TIME",
            help=f"time of a rank's whole share in {what} of a micro-batch (default 1)",
        )
    parser.add_argument(
        "--message",
        type=_waiting_time,
        default=Fraction(0),
        metavar="TIME",
        help="time of a message between ranks (default 0)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw it as well: .png, .svg, .pdf")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0. Raises UserError for settings that cannot be."""
    # Printing and drawing is imported when it is wanted: every command builds this one's flags.
    from mpiparallel.pipeline.simulate import simulate
    from mpiparallel.report import schedule_view

    for flag, value in (("--stages", args.stages), ("--micro-batches", args.micro_batches)):
        if value < 1:
            raise UserError(f"{flag} {value}: legal: 1 or more")
    timelines = [
        simulate(
            schedules.build(name, args.stages, args.micro_batches, stages_per_rank),
            forward=args.forward,
            input_gradient=args.input_gradient,
            weight_gradient=args.weight_gradient,
            message=args.message,
        )
        for name, stages_per_rank in _wanted(args)
    ]
    if args.plot:
        _plot(timelines, args.plot)
    if args.json:
        rows = [schedule_view.summary_row(timeline) for timeline in timelines]
        print(json.dumps({"bubble_is": schedule_view.BUBBLE, "rows": rows}))
    elif args.compare:
        print(schedule_view.show_comparison(timelines))
    else:
        terminal = sys.stdout.isatty()
        width = max(60, shutil.get_terminal_size().columns) if terminal else 110
        colour = terminal and "NO_COLOR" not in os.environ
        print(schedule_view.show_schedule(timelines[0], width, colour))
    return 0


def _wanted(args: argparse.Namespace) -> list[tuple[str, int | None]]:
    """(schedule, stages per rank); in a comparison the number goes to those that take any."""
    if not args.compare:
        return [(args.schedule, args.stages_per_rank)]
    return [
        (name, args.stages_per_rank if family.stages_per_rank is None else None)
        for name, family in schedules.FAMILIES.items()
    ]


def _plot(timelines: list, path: str) -> None:
    try:
        from mpiparallel.report.schedule_plot import draw_schedules
    except ImportError as error:
        raise UserError(
            f"--plot {path}: needs matplotlib ({error}); install it with "
            f"pip install 'mpiparallel[plot]'"
        ) from None
    try:
        draw_schedules(timelines).savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written ({error})") from None


def _duration(text: str) -> Fraction:
    value = _number(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: legal: a number above 0")
    return value


def _waiting_time(text: str) -> Fraction:
    value = _number(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text}: legal: a number of 0 or more")
    return value


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
