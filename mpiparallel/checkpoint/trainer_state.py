"""The pieces of a training run: weights and both Adam moments by global name.

A rank's shard of a parameter is a flat range of its piece of the global array. It is cut into
boxes, first of the piece, then by the layout of the global array.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiparallel.checkpoint.boxes import Box, Piece, flat_boxes, pieces_of
from mpiparallel.data_parallel.zero import DataParallel, Shard
from mpiparallel.mesh import Mesh
from mpiparallel.model import GPT
from mpiparallel.optimizer import AdamW


def model_pieces(model: GPT) -> Iterator[Piece]:
    """The weights that a rank holds whole pieces of; for reading alone."""
    for parameter in model.parameters:
        yield from pieces_of(parameter, parameter.name, parameter.data, owned=False)


def weight_pieces(state: DataParallel, mesh: Mesh) -> Iterator[Piece]:
    """This rank's shards of the weights, and the frozen ones."""
    for number, shard in enumerate(state.shards()):
        owned = _owns(state, mesh, shard, number)
        yield from shard_pieces(shard, shard.parameter.name, shard.data, owned)
    for parameter in state.model.parameters:
        if parameter.frozen:
            owned = mesh.dp.rank == 0 and parameter.counts_on(mesh.pp.rank)
            yield from pieces_of(parameter, parameter.name, parameter.data, owned)


def moment_pieces(state: DataParallel, optimizer: AdamW, mesh: Mesh) -> Iterator[Piece]:
    """This rank's shards of Adam's moments, named NAME/first and NAME/second."""
    moments = zip(state.shards(), optimizer.first, optimizer.second, strict=True)
    for number, (shard, first, second) in enumerate(moments):
        owned = _owns(state, mesh, shard, number)
        yield from shard_pieces(shard, f"{shard.parameter.name}/first", first, owned)
        yield from shard_pieces(shard, f"{shard.parameter.name}/second", second, owned)


def shard_pieces(shard: Shard, name: str, flat, owned: bool) -> Iterator[Piece]:
    """The boxes of a flat array (n,) that is laid out like the shard."""
    parameter, first, last = shard.parameter, shard.segment.start, shard.segment.stop
    local_shape = parameter.local_shape
    for offset, local in flat_boxes(local_shape, first, last):
        values = flat[offset - first : offset - first + local.size].reshape(local.shape)
        for here, there in parameter.layout.pieces(
            parameter.shape, parameter.tp_rank, parameter.tp_size
        ):
            common = local.common(_box(here))
            if common is None:
                continue
            moved = [b.start - a.start for a, b in zip(here, there, strict=True)]
            box = Box(
                tuple(start + move for start, move in zip(common.start, moved, strict=True)),
                tuple(stop + move for stop, move in zip(common.stop, moved, strict=True)),
            )
            yield Piece(name, parameter.shape, box, values[common.within(local)], owned)


def _box(index: tuple[slice, ...]) -> Box:
    return Box(tuple(s.start for s in index), tuple(s.stop for s in index))


def _owns(state: DataParallel, mesh: Mesh, shard: Shard, number: int) -> bool:
    """One rank writes each element. Without ZeRO the replicas take turns in owning parameters, so
    that all of them write at the same time."""
    turn = state.stage > 0 or number % mesh.dp.size == mesh.dp.rank
    return turn and shard.parameter.counts_on(mesh.pp.rank)
