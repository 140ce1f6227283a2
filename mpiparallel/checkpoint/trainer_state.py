"""The pieces of a training run: weights and both Adam moments by global name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpiparallel.checkpoint.boxes import Piece, pieces_of

if TYPE_CHECKING:
    from mpiparallel.mesh import Mesh
    from mpiparallel.model import GPT
    from mpiparallel.optimizer import AdamW


def weight_pieces(model: GPT, mesh: Mesh) -> Iterator[Piece]:
    """What this rank holds of the weights. Replicas take turns in owning parameters, so that all
    of them write at the same time."""
    for number, parameter in enumerate(model.parameters):
        owned = parameter.counts_on(mesh.pp.rank) and number % mesh.dp.size == mesh.dp.rank
        yield from pieces_of(parameter, parameter.name, parameter.data, owned)


def moment_pieces(model: GPT, optimizer: AdamW, mesh: Mesh) -> Iterator[Piece]:
    """What this rank holds of Adam's moments, named NAME/first and NAME/second."""
    moments = zip(model.parameters, optimizer.first, optimizer.second, strict=True)
    for number, (parameter, first, second) in enumerate(moments):
        owned = parameter.counts_on(mesh.pp.rank) and number % mesh.dp.size == mesh.dp.rank
        yield from pieces_of(parameter, f"{parameter.name}/first", first, owned)
        yield from pieces_of(parameter, f"{parameter.name}/second", second, owned)
