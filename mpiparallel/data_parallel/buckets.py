"""Buckets: parameters side by side in flat arrays, so that a few long messages do for all of them.

    weights   [ p9 | p8 | p7 ... ]        flat, a view for every parameter
    gradients [ g9 | g8 | g7 ... ]        likewise; made when the step begins

Parameters stand in the order in which backward finishes them, the last layer's first, so the first
bucket is complete while most of backward is still to come (Li et al. 2020, arXiv 2006.15704). A
tied table, which another pipeline rank holds as well, is a bucket of its own: so both cut and sum
it alike, and their copies stay equal to the bit.

A bucket is cut into dp parts as even as can be, as the ring cuts it; the part of this rank is its
shard. Without ZeRO the shard is the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mpiparallel.backend import xp
from mpiparallel.comm.ring import chunk_bounds
from mpiparallel.parameter import Parameter


@dataclass(frozen=True)
class Segment:
    """The elements start .. stop-1 of a parameter's piece, C order, at `offset` of the shard."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    def of(self, shard):
        """Its part of a flat array that is as long as the shard."""
        return shard[self.offset : self.offset + self.stop - self.start]


class Bucket:
    """Some parameters of a rank, their flat weights and gradients, and the shard of this rank.

    parts, part : into how many shards it is cut, and which is this rank's.
    arrivals : gradients that arrive in it per micro-batch: one for every use of a parameter.
    """

    def __init__(self, parameters: list[Parameter], parts: int, part: int, arrivals: int):
        self.parameters, self.arrivals = parameters, arrivals
        self.length = sum(parameter.data.size for parameter in parameters)
        bounds = chunk_bounds(self.length, parts)
        self.shard = slice(bounds[part], bounds[part + 1])
        self.dtype = parameters[0].data.dtype
        self.weights: Any = xp.zeros(self.length, self.dtype)
        self.gradients: Any = None
        self.places: list[slice] = []
        start = 0
        for parameter in parameters:
            place = slice(start, start + parameter.data.size)
            self.weights[place] = parameter.data.reshape(-1)
            self.places.append(place)
            start = place.stop
        self.segments = list(self._segments())
        self.show_weights()

    def show_weights(self) -> None:
        """Point every parameter's `data` into the flat weights, or at nothing."""
        for parameter, place in zip(self.parameters, self.places, strict=True):
            flat = self.weights
            parameter.data = None if flat is None else flat[place].reshape(parameter.local_shape)

    def make_gradients(self) -> None:
        """Allocate the flat gradients, if they are not there, and point `grad` into them."""
        if self.gradients is not None:
            return
        self.gradients = xp.zeros(self.length, self.dtype)
        for parameter, place in zip(self.parameters, self.places, strict=True):
            parameter.grad = self.gradients[place].reshape(parameter.local_shape)

    def drop_gradients(self) -> None:
        """Give the memory of the flat gradients back."""
        self.gradients = None
        for parameter in self.parameters:
            parameter.grad = None

    def _segments(self) -> Iterator[Segment]:
        for parameter, place in zip(self.parameters, self.places, strict=True):
            start, stop = max(place.start, self.shard.start), min(place.stop, self.shard.stop)
            if start < stop:
                yield Segment(
                    parameter, start - place.start, stop - place.start, start - self.shard.start
                )


def group_by_size(
    layers: Iterable[list[Parameter]], bucket_bytes: float
) -> Iterator[list[Parameter]]:
    """Join the parameters of layers, which come in the order of backward, into lists that are
    closed when they reach `bucket_bytes`. A parameter with several holders stands alone."""
    joined: list[Parameter] = []
    seen: set[str] = set()
    for layer in layers:
        for parameter in layer:
            if parameter.frozen or parameter.name in seen:
                continue
            seen.add(parameter.name)
            if parameter.holders:
                yield [parameter]
            else:
                joined.append(parameter)
        if joined and sum(parameter.data.nbytes for parameter in joined) >= bucket_bytes:
            yield joined
            joined = []
    if joined:
        yield joined
