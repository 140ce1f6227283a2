"""Boxes: rectangular regions of global arrays. What a rank holds, and what a file holds, is boxes.

    a shard          one box, or one per section of a fused q|k|v
    a flat range     what ZeRO leaves of a shard: up to 2 n - 1 boxes of an array of n dims

Saving cuts arrays into boxes, loading copies the common part of every box that is wanted with
every box that is stored; neither knows of meshes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpiparallel.parameter import Parameter


@dataclass(frozen=True)
class Box:
    """start <= index < stop in each dim of a global array."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent in each dim."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """The part that both cover; None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this box in an array that holds `outer`."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.start, self.stop, outer.start, strict=True)
        )


@dataclass
class Piece:
    """A box of a global array that this rank holds.

    name, shape : of the global array. array : the rank's memory, a view of the shape of `box`.
    owned : whether this rank writes it to a checkpoint: one of all that hold it does.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    array: Any
    owned: bool


def pieces_of(parameter: Parameter, name: str, local, owned: bool) -> Iterator[Piece]:
    """The pieces of `local`, which is cut like the parameter: one, or one per section."""
    layout, shape = parameter.layout, parameter.shape
    for here, there in layout.pieces(shape, parameter.tp_rank, parameter.tp_size):
        box = Box(tuple(s.start for s in there), tuple(s.stop for s in there))
        if box.size:
            yield Piece(name, shape, box, local[here], owned)


def flat_boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, Box]]:
    """The elements first .. last-1 of an array in C order as boxes, each with the flat offset of
    its first element. A part of a row, whole rows, a part of a row, and so in every dim."""
    if first >= last:
        return
    if len(shape) == 1:
        yield first, Box((first,), (last,))
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row  # rows top .. bottom-1 are whole
    if top > bottom:  # inside one row
        yield from _in_row(shape, bottom, first, last, row)
        return
    yield from _in_row(shape, top - 1, first, top * row, row)
    if top < bottom:
        rest = tuple(shape[1:])
        yield top * row, Box((top, *(0 for _ in rest)), (bottom, *rest))
    yield from _in_row(shape, bottom, bottom * row, last, row)


def _in_row(
    shape: tuple[int, ...], index: int, first: int, last: int, row: int
) -> Iterator[tuple[int, Box]]:
    for offset, box in flat_boxes(shape[1:], first - index * row, last - index * row):
        yield offset + index * row, Box((index, *box.start), (index + 1, *box.stop))
