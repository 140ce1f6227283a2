"""The mesh drawn on its nodes: a box per rank, lines between ranks that talk, nodes around them.

      pp 0        pp 1
dp 0  rank 0 ---- rank 2   tp 0
        |           |
      rank 1 ---- rank 3   tp 1
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import altair as alt

from mpiparallel.coordinates import Coordinates
from mpiparallel.report import look
from mpiparallel.report.picture import AXES, Picture, legend, scale

WIDTH, HEIGHT = 130, 74  # of a rank's cell, in pixels
GAP = 0.35  # between replicas, in cells


def mesh(
    sizes: dict[str, int],
    node_of_rank: list[int],
    between: dict[str, list[list[int]]],
    memory: dict[str, list[int]],
) -> Picture:
    """sizes : of dp, pp, tp. between : for every axis [from][to] in bytes, or {} where unknown."""
    ranks = range(len(node_of_rank))
    places = {rank: Coordinates.of(rank, sizes["pp"], sizes["tp"]) for rank in ranks}
    rows = sizes["dp"] * sizes["tp"] + GAP * (sizes["dp"] - 1)
    x = {rank: place.pp + 0.5 for rank, place in places.items()}
    y = {rank: place.dp * (sizes["tp"] + GAP) + place.tp + 0.5 for rank, place in places.items()}
    cells = [
        {
            "x": x[rank],
            "y": y[rank],
            "left": x[rank] - 0.34,
            "right": x[rank] + 0.34,
            "top": y[rank] - 0.26,
            "bottom": y[rank] + 0.26,
            "name": f"rank {rank}",
            "where": f"dp {place.dp}  pp {place.pp}  tp {place.tp}",
            "node": str(node_of_rank[rank]),
            "memory": look.bytes_text(sum(held[rank] for held in memory.values())),
            **{axis: _sent(between, axis, rank) for axis in AXES},
        }
        for rank, place in places.items()
    ]
    links = [
        {
            "x": x_of_point,
            "y": y_of_point,
            "order": order,
            "axis": look.NAMES_OF_AXES[axis],
            "pair": f"rank {one} and rank {other}",
            "there": look.bytes_text(between[axis][one][other]),
            "back": look.bytes_text(between[axis][other][one]),
        }
        for axis in ("tp", "pp", "dp")
        if axis in between
        for one in ranks
        for other in ranks
        if one < other and between[axis][one][other] + between[axis][other][one]
        for order, (x_of_point, y_of_point) in enumerate(
            _line(axis, (x[one], y[one]), (x[other], y[other]), places[one].tp / sizes["tp"])
        )
    ]
    frame: dict[str, Any] = dict(
        x=alt.X("left:Q", axis=None, scale=alt.Scale(domain=[0, sizes["pp"]], nice=False)),
        y=alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[rows, 0], nice=False)),
    )
    boxes = (
        alt.Chart(alt.Data(values=_boxes(node_of_rank, x, y)))
        .mark_rect(fill="#eef1f4", stroke="#b8c1cb", cornerRadius=8)
        .encode(**frame, x2="right:Q", y2="bottom:Q")
    )
    names = (
        alt.Chart(alt.Data(values=_boxes(node_of_rank, x, y)))
        .mark_text(align="left", baseline="top", dx=7, dy=5, fontSize=10, color=look.FAINT)
        .encode(**frame, text="name:N")
    )
    colours = {look.NAMES_OF_AXES[axis]: colour for axis, colour in look.AXES.items()}
    used = [name for name in colours if any(link["axis"] == name for link in links)]
    lines = (
        alt.Chart(alt.Data(values=links))
        .mark_line(strokeWidth=4, strokeJoin="round")
        .encode(
            x=alt.X("x:Q", axis=None),
            y=alt.Y("y:Q", axis=None),
            detail="pair:N",
            order="order:Q",
            color=alt.Color(
                "axis:N",
                title=None,
                scale=scale({name: colours[name] for name in used}),
                legend=legend(symbolType="stroke"),
            ),
            tooltip=[
                alt.Tooltip("pair:N", title="between"),
                alt.Tooltip("axis:N", title="axis"),
                alt.Tooltip("there:N", title="to the higher rank"),
                alt.Tooltip("back:N", title="to the lower rank"),
            ],
        )
    )
    ranks_drawn = alt.Chart(alt.Data(values=cells))
    squares = ranks_drawn.mark_rect(fill=look.PAPER, stroke=look.INK, cornerRadius=6).encode(
        **frame,
        x2="right:Q",
        y2="bottom:Q",
        tooltip=[
            alt.Tooltip("name:N", title="who"),
            alt.Tooltip("where:N", title="on the mesh"),
            alt.Tooltip("node:N", title="node"),
            alt.Tooltip("memory:N", title="holds"),
            *[alt.Tooltip(f"{a}:N", title=f"sent, {look.NAMES_OF_AXES[a]}") for a in AXES],
        ],
    )
    titles = ranks_drawn.mark_text(dy=-8, fontSize=13, fontWeight="bold", color=look.INK).encode(
        x=alt.X("x:Q", axis=None), y=alt.Y("y:Q", axis=None), text="name:N"
    )
    coordinates = ranks_drawn.mark_text(dy=9, fontSize=11, color=look.FAINT).encode(
        x=alt.X("x:Q", axis=None), y=alt.Y("y:Q", axis=None), text="where:N"
    )
    layers = [boxes, *([lines] if links else []), squares, names, titles, coordinates]
    count = len(set(node_of_rank))
    return Picture(
        "mesh",
        "The mesh on its nodes",
        f"{len(node_of_rank)} ranks on {count} node{'s' if count > 1 else ''}. A line joins "
        "two ranks that sent each other anything on the axis of its colour; what all ranks sum "
        "together (world) is not drawn.",
        alt.layer(*layers).properties(height=int(HEIGHT * rows)),
        least_width=max(280, WIDTH * sizes["pp"]),
        most_width=max(480, 220 * sizes["pp"]),
    )


def _sent(between: dict[str, list[list[int]]], axis: str, rank: int) -> str:
    return look.bytes_text(sum(between[axis][rank])) if axis in between else "unknown"


def _line(
    axis: str, one: tuple[float, float], other: tuple[float, float], aside: float
) -> list[tuple[float, float]]:
    """Points of a line between two ranks' cells. tp and pp go straight; a cell covers the middle
    of one that only passes it. dp goes round the cells between two replicas, on their right;
    aside : 0 to 1, so that such lines lie side by side."""
    (x1, y1), (x2, y2) = one, other
    if axis == "tp":
        return [(x1 - 0.22, y1), (x2 - 0.22, y2)]
    if axis == "pp":
        return [(x1, y1 + 0.12), (x2, y2 + 0.12)]
    outside = x1 + 0.37 + 0.08 * aside
    return [(x1, y1 - 0.1), (outside, y1 - 0.1), (outside, y2 - 0.1), (x2, y2 - 0.1)]


def _boxes(
    node_of_rank: list[int], x: dict[int, float], y: dict[int, float]
) -> list[dict[str, Any]]:
    """A box around every node; around each rank of it where a box would hold others' ranks."""
    of_node: dict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(node_of_rank):
        of_node[node].append(rank)
    boxes = []
    for node, mine in of_node.items():
        box = _around(mine, x, y)
        held = [r for r in x if box[0] < x[r] < box[1] and box[2] < y[r] < box[3]]
        groups = [mine] if len(held) == len(mine) else [[rank] for rank in mine]
        for group in groups:
            left, right, top, bottom = _around(group, x, y)
            boxes.append(
                {"left": left, "right": right, "top": top, "bottom": bottom, "name": f"node {node}"}
            )
    return boxes


def _around(
    ranks: list[int], x: dict[int, float], y: dict[int, float]
) -> tuple[float, float, float, float]:
    xs, ys = [x[rank] for rank in ranks], [y[rank] for rank in ranks]
    return min(xs) - 0.46, max(xs) + 0.46, min(ys) - 0.48, max(ys) + 0.46
