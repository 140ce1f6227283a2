"""The pictures of a whole run as Altair charts: loss, bytes, memory.

One chart is the interactive picture of the page and the PNG. Needs altair, which the extra
`report` installs; only the command `report` imports this file.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from mpiparallel.report import look
from mpiparallel.report.picture import AXES, Picture, legend, rank_names, scale

MOST_POINTS = 2000  # of a curve; from there on every second, third, .. step is drawn
SILENT = "No rank sent anything."


def loss(metrics: list[dict], tokens_per_step: int) -> Picture:
    """The loss against the step. metrics : rows of metrics.jsonl."""
    stride = -(-len(metrics) // MOST_POINTS)
    rows: list[dict] = []
    for index, row in enumerate(metrics):
        point = {
            "step": row["step"],
            "tokens": f"{row['step'] * tokens_per_step:,}",
            "rate": row["lr"],
            "speed": row["tokens_per_second"],
        }
        if index % stride == 0 or index == len(metrics) - 1:
            rows.append({**point, "loss": row["loss"], "curve": "training"})
        if "val_loss" in row:
            rows.append({**point, "loss": row["val_loss"], "curve": "validation"})
    colour = alt.Color(
        "curve:N",
        title=None,
        scale=alt.Scale(
            domain=["training", "validation"], range=[look.COMPUTE["forward"], look.INK]
        ),
        legend=alt.Legend(orient="top"),
    )
    nearest = alt.selection_point(
        name="nearest", nearest=True, on="pointermove", fields=["step"], empty=False
    )
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d")),
        y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
    )
    lines = base.mark_line(strokeWidth=1.8).encode(color=colour)
    evaluated = base.mark_point(filled=True, size=60, opacity=1).encode(color=colour)
    dots = base.mark_point(filled=True, size=70).encode(
        color=colour,
        opacity=alt.condition(nearest, alt.value(1), alt.value(0)),
        tooltip=[
            alt.Tooltip("curve:N", title="loss of"),
            alt.Tooltip("step:Q", title="step"),
            alt.Tooltip("loss:Q", title="loss", format=".4f"),
            alt.Tooltip("tokens:N", title="tokens seen"),
            alt.Tooltip("rate:Q", title="learning rate", format=".2e"),
            alt.Tooltip("speed:Q", title="tokens/s", format=",.0f"),
        ],
    )
    chart = alt.layer(
        lines, evaluated.transform_filter("datum.curve == 'validation'"), dots.add_params(nearest)
    ).properties(height=280)
    thinned = "" if stride == 1 else f" One step in {stride} is drawn."
    return Picture(
        "loss",
        "Loss",
        f"Mean cross-entropy of a token; a step is {tokens_per_step:,} tokens.{thinned}",
        chart,
    )


def traffic(laws: list[dict], steps: int) -> Picture:
    """Bytes of the run by axis and operation, counted beside the formula.

    laws : rows of axis, op, counted, formula (None where there is none). steps : of this run.
    """
    title = "Bytes by mesh axis and operation"
    laws = [row for row in laws if row["counted"] or row["formula"]]
    if not laws:
        return Picture("traffic", title, SILENT)
    size, unit = look.unit_of_bytes(row["counted"] for row in laws)
    rows = [
        {
            **row,
            "what": f"{row['axis']} {row['op']}",
            "counted": row["counted"] / size,
            "formula": None if row["formula"] is None else row["formula"] / size,
            "exact": f"{row['counted']:,}",
            "expected": "none" if row["formula"] is None else f"{row['formula']:,}",
            "short": look.bytes_text(row["counted"]),
        }
        for row in laws
    ]
    most = max(max(row["counted"], row["formula"] or 0) for row in rows)
    tooltip = [
        alt.Tooltip("what:N", title="axis and operation"),
        alt.Tooltip("exact:N", title="bytes counted"),
        alt.Tooltip("expected:N", title="bytes by formula"),
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("what:N", title=None, sort=None))
    bars = base.mark_bar(height={"band": 0.62}).encode(
        x=alt.X(
            "counted:Q",
            title=f"{unit} in the whole run; black: by formula",
            scale=alt.Scale(domain=[0, most], nice=False),
        ),
        color=alt.Color("axis:N", scale=scale(look.AXES), legend=None),
        tooltip=tooltip,
    )
    marks = base.mark_tick(thickness=3, opacity=1, color=look.INK, height={"band": 0.9}).encode(
        x="formula:Q", tooltip=tooltip
    )
    labels = base.mark_text(align="left", dx=7, color=look.INK).encode(
        x="counted:Q", text="short:N"
    )
    chart = alt.layer(bars, marks.transform_filter("datum.formula != null"), labels).properties(
        height=40 * len(rows)
    )
    table = [("bytes of the run", "counted", "formula", "a step")]
    for row in laws:
        formula = "none" if row["formula"] is None else f"{row['formula']:,}"
        formula = formula if row["formula"] in (None, row["counted"]) else f"≠ {formula}"
        per_step = f"{row['counted'] / steps:,.0f}"
        table.append((f"{row['axis']} {row['op']}", f"{row['counted']:,}", formula, per_step))
    return Picture(
        "traffic",
        title,
        "A bar is what the ranks counted while they sent it; the black mark is what the formula of "
        "that axis says.",
        chart,
        table=table,
    )


def matrix(between: dict[str, list[list[int]]]) -> Picture:
    """Who sent how much to whom. between : for every axis [from][to] in bytes."""
    title = "Bytes from rank to rank"
    order = list(range(len(next(iter(between.values())))))
    rows = _pairs(between)
    if not rows:
        return Picture("matrix", title, SILENT)
    most = max(row["bytes"] for row in rows)
    size, unit = look.unit_of_bytes([most])
    for row in rows:
        row["strength"] = (row["bytes"] / most) ** 0.5  # so that what is small can be seen
        short = look.digits(row["bytes"] / size)
        row["short"] = "<0.01" if short == "0.00" else short
    colours = {look.NAMES_OF_AXES[axis]: colour for axis, colour in look.AXES.items()}
    numbers = len(order) <= 8  # more of them would not fit into their cells
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "to:O",
            title=f"to rank · {unit} in the whole run" if numbers else "to rank",
            scale=alt.Scale(domain=order, padding=0),
            axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False),
        ),
        y=alt.Y(
            "from:O",
            title="from rank",
            scale=alt.Scale(domain=order),
            axis=alt.Axis(domain=False, ticks=False),
        ),
    )
    used = [name for name in colours if any(row["axis"] == name for row in rows)]
    marks = base.mark_rect(stroke=look.PAPER, strokeWidth=2).encode(
        color=alt.Color(
            "axis:N",
            title=None,
            scale=scale({name: colours[name] for name in used}),
            legend=legend(),
        ),
        opacity=alt.Opacity(
            "strength:Q", scale=alt.Scale(domain=[0, 1], range=[0.12, 1]), legend=None
        ),
        tooltip=[
            alt.Tooltip("from:O", title="from rank"),
            alt.Tooltip("to:O", title="to rank"),
            *[alt.Tooltip(f"{axis}:N", title=look.NAMES_OF_AXES[axis]) for axis in AXES],
        ],
    )
    layers: list[Any] = [marks]
    side = max(260, 56 * len(order)) if numbers else 480
    if numbers:
        layers.append(base.mark_text(color=look.INK, fontSize=11).encode(text="short:N"))
    return Picture(
        "matrix",
        title,
        "What the whole run sent. The colour is the axis that the pair talked most on, the "
        "stronger the more bytes; blank pairs never talked.",
        alt.layer(*layers).properties(height=side),
        most_width=side + 80,
    )


def _pairs(between: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """A row for every two ranks of which the first sent the second anything, on any axis."""
    ranks = range(len(next(iter(between.values()))))
    rows = []
    for source in ranks:
        for target in ranks:
            sent = {axis: rows_of[source][target] for axis, rows_of in between.items()}
            if any(sent.values()):
                rows.append(
                    {
                        "from": source,
                        "to": target,
                        "bytes": sum(sent.values()),
                        "axis": look.NAMES_OF_AXES[max(sent, key=lambda axis: sent[axis])],
                        **{axis: look.bytes_text(sent.get(axis, 0)) for axis in AXES},
                    }
                )
    return rows


def memory(by_kind: dict[str, list[int]], mesh: dict[str, int]) -> Picture:
    """Bytes that every rank holds, by kind. by_kind : for every kind one number per rank."""
    totals = [sum(column) for column in zip(*by_kind.values(), strict=True)]
    size, unit = look.unit_of_bytes(totals)
    names = rank_names(mesh)
    rows = [
        {
            "rank": names[rank],
            "kind": kind,
            "order": order,
            "held": held / size,
            "bytes": f"{held:,}",
            "share": held / max(1, totals[rank]),
        }
        for order, (kind, values) in enumerate(by_kind.items())
        for rank, held in enumerate(values)
    ]
    colours = {kind: look.MEMORY.get(kind, look.COMPUTE["other compute"]) for kind in by_kind}
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(height={"band": 0.7})
        .encode(
            y=alt.Y("rank:N", title=None, sort=None),
            x=alt.X(
                "held:Q",
                title=f"{unit} held",
                scale=alt.Scale(domain=[0, max(totals) / size], nice=False),
            ),
            color=alt.Color("kind:N", title=None, scale=scale(colours), legend=legend()),
            order="order:Q",
            tooltip=[
                alt.Tooltip("rank:N", title="rank"),
                alt.Tooltip("kind:N", title="kind"),
                alt.Tooltip("bytes:N", title="bytes"),
                alt.Tooltip("share:Q", title="of this rank's", format=".0%"),
            ],
        )
    )
    sums = [
        {"rank": names[rank], "held": total / size, "text": look.bytes_text(total)}
        for rank, total in enumerate(totals)
    ]
    labels = (
        alt.Chart(alt.Data(values=sums))
        .mark_text(align="left", dx=6, color=look.INK)
        .encode(y=alt.Y("rank:N", sort=None), x="held:Q", text="text:N")
    )
    return Picture(
        "memory",
        "Memory of every rank",
        "What a rank keeps from step to step, in arrays of its own.",
        alt.layer(bars, labels).properties(height=30 * len(names)),
    )
