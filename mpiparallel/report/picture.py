"""What all pictures of a report are made of: a Picture, its scales, its legend, names of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from mpiparallel.coordinates import Coordinates
from mpiparallel.report import look

AXES = tuple(look.AXES)


@dataclass
class Picture:
    """A section of the report.

    name : of the PNG and of the section. chart : None where the run cannot give it. text : one or
    two sentences under the title. least_width, most_width : pixels of the chart; on a page that is
    narrower it scrolls in a box of its own. table : rows of text under the
    chart, the head first.
    """

    name: str
    title: str
    text: str
    chart: Any = None
    least_width: int = 280
    most_width: int = 1100
    table: Sequence[Sequence[str]] = field(default_factory=list)


def rank_names(mesh: dict[str, int], axes: Sequence[str] = ("dp", "pp", "tp")) -> list[str]:
    """ "rank 3 · dp1 tp1": the coordinates on those of `axes` that have more than one rank."""
    names = []
    for rank in range(mesh["dp"] * mesh["pp"] * mesh["tp"]):
        where = Coordinates.of(rank, mesh["pp"], mesh["tp"])._asdict()
        parts = [f"{axis}{where[axis]}" for axis in axes if mesh[axis] > 1]
        names.append(f"rank {rank}" + (f" · {' '.join(parts)}" if parts else ""))
    return names


def scale(colours: dict[str, str]) -> alt.Scale:
    """The colour scale of a dict from names to colours."""
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def legend(**more: Any) -> alt.Legend:
    """Above the chart, in as many columns as its width has room for."""
    columns = alt.ExprRef("width < 420 ? 2 : width < 700 ? 4 : 0")
    return alt.Legend(orient="top", columns=columns, **more)
