"""A simulated schedule as a picture in the papers' style: a row per rank, a box per action.

Needs matplotlib, which the extra `plot` installs. Nothing else of the project imports this file
before a picture is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from mpiparallel.pipeline.simulate import Timeline
from mpiparallel.report.schedule_view import BUBBLE, NAMES_OF_KINDS, number, percent, turns

# For a rank's first, third, .. stage and for its second, fourth, ..
COLOURS = {
    "F": ("#3b6fb6", "#a9c8ec"),
    "B": ("#1f8a80", "#a3ded6"),
    "I": ("#2ba6cb", "#b5e4f1"),
    "W": ("#4d9a3a", "#c0e2b0"),
}
TEXT_COLOURS = ("white", "black")
IDLE = "#e4e4e4"


def draw_schedules(timelines: Sequence[Timeline]) -> Figure:
    """The schedules under each other on one time axis; `savefig` writes the picture."""
    longest = max(float(timeline.makespan) for timeline in timelines)
    rows = sum(timeline.schedule.ranks for timeline in timelines)
    shortest = min(
        float(end - start)
        for timeline in timelines
        for spans in timeline.spans
        for _, start, end in spans
    )
    width = min(40.0, max(8.0, 1.5 + 0.19 * longest / shortest))  # inches
    height = 0.34 * rows + 0.72 * len(timelines) + 0.9
    figure = Figure(figsize=(width, height), layout="constrained")
    heights = [timeline.schedule.ranks + 0.6 for timeline in timelines]
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for timeline, axes in zip(timelines, panels, strict=True):
        _draw(timeline, axes, longest, inches_per_time=(width - 1.5) / longest)
    panels[-1].set_xlabel(f"time          {BUBBLE}")
    used = {
        action.kind
        for timeline in timelines
        for actions in timeline.schedule.actions
        for action in actions
    }
    patches = [
        Patch(facecolor=COLOURS[kind][0], label=name)
        for kind, name in NAMES_OF_KINDS.items()
        if kind in used
    ]
    patches.append(Patch(facecolor=IDLE, label="idle"))
    if any(timeline.schedule.stages_per_rank > 1 for timeline in timelines):
        patches.append(
            Patch(facecolor="white", edgecolor="black", label="light: a rank's 2nd, 4th stage")
        )
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    return figure


def _draw(timeline: Timeline, axes: Axes, longest: float, inches_per_time: float) -> None:
    schedule, turn = timeline.schedule, turns(timeline.schedule)
    for rank, spans in enumerate(timeline.spans):
        begin, finish = float(spans[0][1]), float(spans[-1][2])
        axes.add_patch(Rectangle((begin, rank - 0.5), finish - begin, 1, color=IDLE, linewidth=0))
        for action, start, end in spans:
            shade = turn[action.stage] % 2
            length = float(end - start)
            axes.add_patch(
                Rectangle(
                    (float(start), rank - 0.5),
                    length,
                    1,
                    facecolor=COLOURS[action.kind][shade],
                    edgecolor="white",
                    linewidth=0.6,
                )
            )
            digits = len(str(action.micro_batch))
            size = min(8.0, 72 * length * inches_per_time / (0.75 * digits + 0.5))  # points
            if size >= 3:
                axes.text(
                    float(start) + length / 2,
                    rank,
                    str(action.micro_batch),
                    ha="center",
                    va="center_baseline",
                    fontsize=size,
                    color=TEXT_COLOURS[shade],
                )
    axes.set_xlim(0, longest)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    peak = number(max(timeline.peak_activations))
    axes.set_title(
        f"{schedule.name}     bubble {percent(timeline.bubble)}     makespan "
        f"{number(timeline.makespan)}     peak activations {peak}",
        loc="left",
        fontsize=10,
    )
