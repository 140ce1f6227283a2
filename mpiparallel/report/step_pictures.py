"""The two pictures of one traced step: its timeline, and what every rank's time went to."""

from __future__ import annotations

from typing import Any

import altair as alt

from mpiparallel.coordinates import Coordinates
from mpiparallel.report import look
from mpiparallel.report.picture import AXES, Picture, legend, rank_names, scale
from mpiparallel.report.timeline import Span, Step, innermost

LEAST_WIDTH = 900  # of the timeline, in pixels
BUBBLE, OTHER = "bubble", "other"
COLOURS = {
    **look.COMPUTE,
    **{look.NAMES_OF_AXES[a]: look.AXES[a] for a in AXES},
    BUBBLE: look.BUBBLE,
    OTHER: look.OTHER,
}


def timeline(step: Step, mesh: dict[str, int]) -> Picture:
    """All ranks of a step under each other, grouped by pipeline rank, time from left to right."""
    tops, labels, last = _places(mesh)
    rows, sends = [], []
    for rank, spans in enumerate(step.spans):
        who = {"rank": f"rank {rank}"}
        compute = [span for span in spans if span.what == "compute"]
        for span in spans:
            inside = span.what in AXES and any(
                outer.start <= span.start and span.end <= outer.end for outer in compute
            )
            rows.append(_row(span, step.seconds, tops[rank], inside) | who)
        for piece in innermost(spans, step.seconds):
            if piece.what == OTHER and piece.seconds >= step.seconds / 500:  # can be seen
                rows.append(_row(piece, step.seconds, tops[rank], False) | who)
        sends += [_row(send, step.seconds, tops[rank], False) | who for send in step.sends[rank]]
    used = {row["kind"] for row in rows}
    x = alt.X(
        "start:Q",
        title="milliseconds from the start of the step",
        scale=alt.Scale(domain=[0, step.seconds * 1e3], nice=False),
    )
    y = alt.Y(
        "top:Q",
        title=None,
        scale=alt.Scale(domain=[last + 0.2, 0], nice=False),
        axis=_row_labels(labels),
    )
    colour = alt.Color(
        "kind:N",
        title=None,
        scale=scale({kind: colour for kind, colour in COLOURS.items() if kind in used}),
        legend=alt.Legend(orient="top", columns=0),
    )
    base = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y)
    layers: list[Any] = [
        base.mark_bar(clip=True, stroke=look.PAPER).encode(
            strokeWidth=alt.condition("datum.inside", alt.value(0), alt.value(0.5)),
            x2="end:Q",
            y2="bottom:Q",
            color=colour,
            tooltip=_tooltip(),
        )
    ]
    layers += [
        base.transform_filter(f"datum.label != '' && datum.ink == '{ink}'")
        .mark_text(clip=True, fontSize=10, color=ink)
        .encode(x="middle:Q", y="text_at:Q", text="label:N")
        for ink in look.INKS
    ]
    if sends:
        triangle: dict[str, Any] = dict(
            shape="triangle-up", size=34, fill=look.AXES["pp"], stroke=look.PAPER
        )
        layers.append(
            alt.Chart(alt.Data(values=sends))
            .mark_point(clip=True, opacity=1, strokeWidth=0.8, **triangle)
            .encode(x=x, y=alt.Y("bottom:Q", title=None), tooltip=_tooltip())
        )
    zoom = alt.selection_interval(
        name="zoom",
        bind="scales",
        encodings=["x"],
        zoom="wheel![event.shiftKey]",
        translate="[mousedown[event.shiftKey], window:mouseup] > window:mousemove!",
    )
    return Picture(
        "timeline",
        f"Timeline of step {step.number}",
        f"The step of the median length among those that were traced ({_traced(step)}). The number "
        "in a box is its micro-batch. A low bar inside a box is communication that its compute "
        "waited for; a triangle is a message posted to another pipeline rank; other is Python "
        "between the recorded actions. With a mouse: hold shift and turn the wheel to zoom, hold "
        "it and drag to move, double-click to go back.",
        alt.layer(*layers).add_params(zoom).properties(height=26 * (last + 0.2)),
        least_width=LEAST_WIDTH,
    )


def split(step: Step, mesh: dict[str, int]) -> Picture:
    """Stacked bars: compute, exposed communication by axis, bubble; seconds of every rank."""
    colours = {
        "compute": look.COMPUTE["forward"],
        **{look.NAMES_OF_AXES[axis]: look.AXES[axis] for axis in AXES},
        BUBBLE: look.BUBBLE,
        OTHER: look.OTHER,
    }
    names = rank_names(mesh)
    rows: list[dict[str, Any]] = []
    for rank, parts in enumerate(step.split()):
        for order, (part, seconds) in enumerate(parts.items()):
            rows.append(
                {
                    "rank": names[rank],
                    "part": look.NAMES_OF_AXES.get(part, part),
                    "order": order,
                    "time": seconds * 1e3,
                    "text": look.seconds_text(seconds),
                    "share": seconds / step.seconds,
                }
            )
    used = {row["part"] for row in rows if row["time"] > 0}
    rows = [row for row in rows if row["part"] in used]
    chart = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.72}, stroke=look.PAPER, strokeWidth=0.5)
        .encode(
            y=alt.Y("rank:N", title=None, sort=None),
            x=alt.X(
                "time:Q",
                title="milliseconds of the step",
                scale=alt.Scale(domain=[0, step.seconds * 1e3], nice=False),
            ),
            color=alt.Color(
                "part:N",
                title=None,
                scale=scale({part: colour for part, colour in colours.items() if part in used}),
                legend=legend(),
            ),
            order="order:Q",
            tooltip=[
                alt.Tooltip("rank:N", title="rank"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("text:N", title="takes"),
                alt.Tooltip("share:Q", title="of the step", format=".1%"),
            ],
        )
        .properties(height=30 * len(names))
    )
    return Picture(
        "step_time",
        f"Where the time of step {step.number} went",
        "An axis means waits that compute did not hide. Bubble is the part of a wait for a "
        "pipeline message that lies before its sender posted it, the part of a wait in an "
        "operation of all ranks before the last of them came, and what is idle at both ends of "
        "the step. A wait for a late rank in a tp or dp operation counts for that axis. Other is "
        "Python between the recorded actions.",
        chart,
    )


def _places(mesh: dict[str, int]) -> tuple[list[float], list[tuple[float, str]], float]:
    """Where the timeline's rows are: the top of every rank's, (middle, text) of every label, and
    the bottom of the last. A row has height 1; where a pipeline rank has more than one row, its
    label stands above them."""
    tops = [0.0] * (mesh["dp"] * mesh["pp"] * mesh["tp"])
    labels, top = [], 0.0
    grouped = mesh["pp"] > 1 and mesh["dp"] * mesh["tp"] > 1
    names = rank_names(mesh, ("dp", "tp")) if grouped else rank_names(mesh)
    for pp in range(mesh["pp"]):
        if grouped:
            labels.append((top + 0.55, f"pipeline rank {pp}"))
            top += 1
        for dp in range(mesh["dp"]):
            for tp in range(mesh["tp"]):
                rank = Coordinates(dp, pp, tp).rank(mesh["pp"], mesh["tp"])
                labels.append((top + 0.5, names[rank]))
                tops[rank] = top
                top += 1
    return tops, labels, top


def _row_labels(labels: list[tuple[float, str]]) -> alt.Axis:
    """The axis that has a text at each place, in bold where it is a pipeline rank's."""
    places, texts = [place for place, _ in labels], [text for _, text in labels]
    heads = [place for place, text in labels if text.startswith("pipeline")]
    return alt.Axis(
        values=places,
        labelExpr=f"{texts}[indexof({places}, datum.value)]",
        labelFontWeight={
            "condition": {"test": f"indexof({heads}, datum.value) >= 0", "value": "bold"},
            "value": "normal",
        },
        labelOverlap=False,
        tickCount=10 * len(labels),  # where there are more values than this, Vega drops some
        grid=False,
        domain=False,
        ticks=False,
    )


def _tooltip() -> list[alt.Tooltip]:
    """What hovering over a mark shows of its `_row`."""
    titles = {
        "rank": "who",
        "name": "what",
        "kind": "colour",
        "step": "step",
        "stage": "stage",
        "micro_batch": "micro-batch",
        "bytes": "bytes",
        "from": "starts at",
        "length": "takes",
    }
    return [alt.Tooltip(f"{key}:N", title=title) for key, title in titles.items()]


def _row(span: Span, length: float, top: float, inside: bool) -> dict[str, Any]:
    """What the chart knows of a span. inside : it lies in a compute span."""
    details = span.details
    if span.what in (BUBBLE, OTHER):
        kind = span.what
    elif span.what == "compute":
        kind = look.KINDS.get(details["kind"], "other compute")
    else:
        kind = look.NAMES_OF_AXES[span.what]
    micro_batch = details.get("micro_batch")
    label = ""
    if span.what == "compute" and micro_batch is not None:
        room = span.seconds / length * (LEAST_WIDTH - 130)  # pixels, at least
        label = str(micro_batch) if room >= 6 * len(str(micro_batch)) + 4 else ""
    moved = details.get("bytes")
    return {
        "start": span.start * 1e3,
        "end": span.end * 1e3,
        "middle": (span.start + span.end) * 5e2,
        "inside": inside,
        "top": top + (0.62 if inside else 0.08),
        "bottom": top + 0.92,
        "text_at": top + 0.36,
        "kind": kind,
        "ink": look.text_on(COLOURS[kind]),
        "label": label,
        "name": span.name,
        "step": _shown(details.get("step")),
        "stage": _shown(details.get("stage")),
        "micro_batch": _shown(micro_batch),
        "bytes": "-" if moved is None or span.what == BUBBLE else f"{moved:,}",
        "from": look.seconds_text(span.start),
        "length": look.seconds_text(span.seconds),
    }


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _traced(step: Step) -> str:
    return f"{step.first} to {step.last}" if step.last > step.first else f"only {step.first}"
