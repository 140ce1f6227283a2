"""Parameter: an array that says how it is cut. Everything else is derived from that statement.

A parameter has a global name, a global shape and a Layout. Initialisation, the reduction of its
gradient, its share of the global norm, weight decay and checkpoints follow from them:

    Layout()                       whole on every tp rank (norms, row-parallel biases, positions)
    Layout(cut=1)                  columns over tp (column-parallel weights)
    Layout(cut=0)                  rows over tp (row-parallel weights), entries of a cut bias
    Layout(cut=1, sections=3)      a fused q|k|v: each third is cut by itself, so heads stay whole
    Layout(cut=0, padding=True)    rows over tp, with zero rows at the end where tp does not divide

A rank's piece of a cut dim of n = 6 in 3 sections at tp=2: rank 0 holds 0,2,4 and rank 1 1,3,5.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpiparallel.backend import from_host, kernels, xp


@dataclass(frozen=True)
class Layout:
    """How a global array is cut over the tp axis.

    cut : the dim that is cut, None where every tp rank holds the whole.
    sections : equal parts of that dim, each of which is cut by itself.
    padding : whether zeros fill the dim up to a multiple of tp; without it tp must divide it.
    """

    cut: int | None = None
    sections: int = 1
    padding: bool = False

    def local_shape(self, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
        """The shape of one of `parts` pieces. Raises ValueError where they would not be equal."""
        if self.cut is None:
            return shape
        section, rest = divmod(shape[self.cut], self.sections)
        if rest or (section % parts and not self.padding):
            raise ValueError(
                f"dim {self.cut} of {shape} in {self.sections} sections is not cut by {parts}"
            )
        local = list(shape)
        local[self.cut] = self.sections * -(-section // parts)
        return tuple(local)

    def pieces(
        self, shape: tuple[int, ...], part: int, parts: int
    ) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Pairs of (local index, global index) that say where piece `part` lies in the whole."""
        everything = [slice(0, length) for length in shape]
        if self.cut is None:
            yield tuple(everything), tuple(everything)
            return
        width = self.local_shape(shape, parts)[self.cut] // self.sections
        section = shape[self.cut] // self.sections
        for number in range(self.sections):
            start = min(part * width, section)
            count = min(width, section - start)
            local, whole = list(everything), list(everything)
            local[self.cut] = slice(number * width, number * width + count)
            whole[self.cut] = slice(number * section + start, number * section + start + count)
            yield tuple(local), tuple(whole)

    def shard(self, whole: np.ndarray, part: int, parts: int) -> np.ndarray:
        """Piece `part` of a global array, C-contiguous, padded with zeros."""
        local = np.zeros(self.local_shape(whole.shape, parts), whole.dtype)
        for here, there in self.pieces(whole.shape, part, parts):
            local[here] = whole[there]
        return local

    def join(self, shards: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The global array from the pieces of all tp ranks, in their order."""
        whole = np.empty(shape, shards[0].dtype)
        for part, shard in enumerate(shards):
            for here, there in self.pieces(shape, part, len(shards)):
                whole[there] = shard[here]
        return whole


@dataclass(eq=False)
class Parameter:
    """One rank's piece of a parameter.

    name : its global name, the same on every mesh: "blocks.3.mlp.up.weight".
    shape : its global shape.
    layout : how it is cut over tp.
    init : "zeros", "ones", or the standard deviation of a normal distribution.
    data : this rank's piece.
    grad : its gradient, the shape and dtype of data. `add_grad` adds to it.
    holders : the pipeline ranks that hold it: more than one for tied embeddings, whose gradients
        are summed between the holders.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    init: str | float
    tp_rank: int
    tp_size: int
    holders: tuple[int, ...] = ()
    data: Any = field(default=None, repr=False)
    grad: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._grad_is_zero = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        return self.layout.local_shape(self.shape, self.tp_size)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to biases and norms."""
        return len(self.shape) > 1

    def initialize(self, seed: int, dtype) -> None:
        """Set `data` from (seed, global name) alone: the same weights on every mesh.

        The whole array is drawn in float64 and this rank's piece kept.
        """
        if isinstance(self.init, str):
            whole = {"zeros": np.zeros, "ones": np.ones}[self.init](self.shape)
        else:
            generator = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
            whole = generator.standard_normal(self.shape) * self.init
        self.load(whole.astype(dtype))

    def load(self, whole: np.ndarray) -> None:
        """Set `data` to this rank's piece of a global array."""
        self.data = from_host(self.layout.shard(whole, self.tp_rank, self.tp_size))

    def counts_on(self, pp_rank: int) -> bool:
        """Whether this rank counts it in a sum over all parameters: one of its copies does."""
        first_holder = not self.holders or pp_rank == min(self.holders)
        return first_holder and (self.layout.cut is not None or self.tp_rank == 0)

    def zero_grad(self) -> None:
        """Forget the gradient: the next `add_grad` writes instead of adding."""
        self._grad_is_zero = True

    def add_grad(self, gradient) -> None:
        """grad += gradient."""
        if self._grad_is_zero:
            self.grad[...] = gradient
        else:
            self.grad += gradient
        self._grad_is_zero = False

    def add_grad_matmul(self, a, b) -> None:
        """grad += a @ b, without a temporary for the first micro-batch."""
        if self._grad_is_zero:
            xp.matmul(a, b, out=self.grad)
        else:
            self.grad += xp.matmul(a, b)
        self._grad_is_zero = False

    def add_grad_rows(self, rows, values) -> None:
        """grad[rows[i]] += values[i] for every i."""
        if self._grad_is_zero:
            self.grad[...] = 0
        kernels.add_rows(self.grad, rows, values)
        self._grad_is_zero = False
