"""Group: collectives and point-to-point messages over one axis of the mesh. The one door to MPI.

Everything that moves data between ranks calls a Group, and nothing else calls mpi4py. So bytes
are counted, time is taken, device arrays are staged through the host and hangs are noticed in
this file alone. An operation is posted non-blocking and completed by `Pending.wait`, which polls
MPI and gives the processor away between polls: with more ranks than cores, a rank that waits
would otherwise keep the rank it waits for from running.

    y = group.allreduce(x)                  x is left alone, y is new on every rank
    group.allreduce(x, out=x)               in place
    pending = group.irecv(buffer, source)   returns at once
    pending.wait()                          buffer is filled, and is what wait returns

Arrays may be non-contiguous, read-only or empty, and in host or in device memory: how each kind
reaches MPI says `comm/transport.py`. `out` must have the right shape and dtype and be writable, as
for a NumPy ufunc; it may overlap the input, and is in the same memory, host or device.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiparallel import backend
from mpiparallel.comm.ledger import Ledger, ring_bytes
from mpiparallel.comm.transport import Transports

yield_processor: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))

# MPI counts elements in a C int: longer messages are cut into pieces of at most this many.
MAX_ELEMENTS = 2**31 - 1

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_BOOL_OPS = {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND}  # what NumPy's add, max, min do


class CommunicationTimeout(TimeoutError):
    """An operation did not complete within --timeout seconds: another rank never took part."""


class Pending:
    """An operation that was posted. `wait` completes it and returns its array."""

    def __init__(self, group: Group, op: str, peer: str, requests: list, finish: Callable):
        self._group, self._op, self._peer = group, op, peer
        self._requests, self._finish = requests, finish

    def test(self) -> bool:
        """Let MPI make progress; True once `wait` would return at once."""
        return _complete(self._requests)

    def wait(self):
        """Complete the operation: the received or combined array, or the array that was sent.

        Raises CommunicationTimeout when the group's timeout (seconds) passes first.
        """
        group, start = self._group, time.perf_counter()
        while not _complete(self._requests):
            yield_processor()
            if time.perf_counter() - start > group.timeout:
                raise CommunicationTimeout(
                    f"{group.where} waited {group.timeout:g} s in {self._op} "
                    f"on axis {group.axis} {self._peer}, in vain"
                )
        result = self._finish()
        group.ledger.add(group.axis, self._op, seconds=time.perf_counter() - start)
        return result


class Group:
    """One communicator, one mesh axis.

    Parameters
    ----------
    communicator : mpi4py communicator; the Group uses it as its own, and `free` frees it.
    axis : name of the mesh axis, for the ledger and for messages ("tp", "pp", "dp", "world").
    ledger : counts every call; Groups of one Mesh share it.
    where : this rank and its mesh coordinates, for messages.
    timeout : seconds after which a wait gives up.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        axis: str,
        *,
        ledger: Ledger | None = None,
        where: str | None = None,
        timeout: float = 300.0,
    ):
        self.communicator, self.axis, self.timeout = communicator, axis, timeout
        self.ledger = Ledger() if ledger is None else ledger
        self.rank, self.size = communicator.rank, communicator.size
        self.where = f"rank {self.rank}" if where is None else where
        self.max_tag = int(communicator.Get_attr(MPI.TAG_UB) or 32767)  # at least, says MPI
        # A test switch: every send becomes an Ssend, which returns once its receive is posted.
        self.synchronous_sends = False
        self._transports = Transports(self)

    def free(self) -> None:
        """Give the communicator back. All ranks of the group call it."""
        self._transports.free()
        self.communicator.Free()

    # ---- collectives: every rank of the group calls, with arrays of one shape and dtype ----

    def allreduce(self, array, op: str = "sum", out=None):
        """Combine `array` elementwise over the ranks; every rank gets the same bits.

        op: "sum", "max" or "min". float16 is reduced in float32. Sends 2(p-1)/p of the array.
        Raises ValueError for an unknown op, TypeError for a dtype that MPI cannot reduce.
        """
        out = _output(out, array.shape, array.dtype, array)
        dtype, mpi_op = _reduction(array.dtype, op)
        via = self._transports.collective(array, dtype)
        buffer = via.window(out) if out.dtype == dtype else None
        if buffer is None:
            buffer = via.space(array.shape, dtype)
        if buffer is not array:
            via.load(buffer, array)
        flat = buffer.reshape(-1)
        via.ready()
        requests = [
            via.communicator.Iallreduce(MPI.IN_PLACE, flat[piece], op=mpi_op)
            for piece in _pieces(flat.size)
        ]
        return self._collective("allreduce", buffer.nbytes, requests, lambda: via.fill(out, buffer))

    def allgather(self, array, dim: int = 0, out=None):
        """Join the arrays of all ranks along `dim`, in rank order. Sends (p-1)/p of the result."""
        dim = _check_dim(array, dim)
        shape = (*array.shape[:dim], array.shape[dim] * self.size, *array.shape[dim + 1 :])
        out = _output(out, shape, array.dtype, array)
        via = self._transports.collective(array)
        mine = _raw(via.reads(array), via.library)
        everyone = via.space((self.size, mine.size), np.uint8)
        copies = [
            (piece, everyone if piece == slice(0, mine.size) else everyone[:, piece].copy())
            for piece in _pieces(mine.size)
        ]
        via.ready()
        requests = [via.communicator.Iallgather(mine[piece], part) for piece, part in copies]

        def finish():
            for piece, part in copies:
                if part is not everyone:
                    everyone[:, piece] = part
            blocks = everyone.reshape(-1).view(array.dtype).reshape(self.size, *array.shape)
            return via.fill(out, via.library.moveaxis(blocks, 0, dim).reshape(shape))

        return self._collective("allgather", everyone.nbytes, requests, finish)

    def reduce_scatter(self, array, op: str = "sum", dim: int = 0, out=None):
        """Combine `array` over the ranks and cut it along `dim`: rank r gets the r-th of p parts.

        Sends (p-1)/p of the array. Raises ValueError where p does not divide the dim.
        """
        dtype, mpi_op = _reduction(array.dtype, op)
        via = self._transports.collective(array, dtype)
        blocks = self._blocks("reduce_scatter", array, _check_dim(array, dim), via)
        shape = blocks.shape[1:]
        out = _output(out, shape, array.dtype, array)
        full = via.library.ascontiguousarray(blocks, dtype).reshape(self.size, -1)
        mine = via.space((full.shape[1],), dtype)
        parts = [
            (piece, via.library.ascontiguousarray(full[:, piece])) for piece in _pieces(mine.size)
        ]
        via.ready()
        requests = [
            via.communicator.Ireduce_scatter_block(part, mine[piece], op=mpi_op)
            for piece, part in parts
        ]
        return self._collective(
            "reduce_scatter", full.nbytes, requests, lambda: via.fill(out, mine.reshape(shape))
        )

    def alltoall(self, array, dim: int = 0, out=None):
        """Cut `array` along `dim` in p parts, send the r-th to rank r, join what arrives by rank.

        Sends (p-1)/p of the array. Raises ValueError where p does not divide the dim.
        """
        dim = _check_dim(array, dim)
        out = _output(out, array.shape, array.dtype, array)
        via = self._transports.collective(array)
        blocks = via.library.ascontiguousarray(self._blocks("alltoall", array, dim, via))
        outgoing = _raw(blocks, via.library).reshape(self.size, -1)
        incoming = via.space(outgoing.shape, np.uint8)
        copies = []
        for piece in _pieces(outgoing.shape[1]):
            sent = via.library.ascontiguousarray(outgoing[:, piece])
            copies.append((piece, sent, via.space(sent.shape, np.uint8)))
        via.ready()
        requests = [via.communicator.Ialltoall(sent, part) for _, sent, part in copies]

        def finish():
            for piece, _, part in copies:
                incoming[:, piece] = part
            received = incoming.reshape(-1).view(array.dtype).reshape(blocks.shape)
            return via.fill(out, via.library.moveaxis(received, 0, dim).reshape(array.shape))

        return self._collective("alltoall", blocks.nbytes, requests, finish)

    def bcast(self, array, root: int = 0, out=None):
        """Every rank gets the array of `root`; elsewhere `array` only says shape and dtype.

        The root sends one copy of the array to each other rank.
        """
        self._check_peer(root)
        out = _output(out, array.shape, array.dtype, array)
        via = self._transports.collective(array)
        buffer = via.window(out)
        if buffer is None:
            buffer = via.space(array.shape, array.dtype)
        if self.rank == root and buffer is not array:
            via.load(buffer, array)
        raw = _raw(buffer, via.library)
        via.ready()
        requests = [via.communicator.Ibcast(raw[piece], root=root) for piece in _pieces(raw.size)]
        sent = raw.size * (self.size - 1) if self.rank == root else 0
        return self._complete("bcast", sent, requests, lambda: via.fill(out, buffer))

    def allgather_json(self, value) -> list:
        """The small JSON-able `value` of every rank, in rank order, on every rank."""
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.allgather(np.array([mine.size]))
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: mine.size] = mine
        rows = self.allgather(padded[None])
        return [
            json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)
        ]

    # ---- point to point: peers are ranks of this group ----

    def isend(self, array, dest: int, tag: int = 0, *, part_of: str | None = None) -> Pending:
        """Post a send. The array must not change before `wait`, which returns it.

        A collective that is written out in messages names itself in `part_of`: the ledger then
        adds the bytes and seconds to its row, and it counts its own calls.
        """
        return self._isend("isend", array, dest, tag, part_of)

    def irecv(self, out, source: int, tag: int = 0, *, part_of: str | None = None) -> Pending:
        """Post a receive into `out`, which `wait` returns; shape and dtype are as sent."""
        return self._irecv("irecv", out, source, tag, part_of)

    def send(self, array, dest: int, tag: int = 0) -> None:
        """Send `array` to `dest` and wait until it may be changed again."""
        self._isend("send", array, dest, tag).wait()

    def recv(self, out, source: int, tag: int = 0):
        """Receive into `out` and return it."""
        return self._irecv("recv", out, source, tag).wait()

    # ---- behind the door ----

    def _isend(self, op: str, array, dest: int, tag: int, part_of: str | None = None) -> Pending:
        self._check_peer(dest)
        via = self._transports.point_to_point(array)
        raw = _raw(via.reads(array), via.library)
        via.ready()
        send = self.communicator.Issend if self.synchronous_sends else self.communicator.Isend
        requests = [send(raw[piece], dest, self._check_tag(tag)) for piece in _pieces(raw.size)]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None, bytes=raw.size)
        # MPI reads from `raw`, so the closure keeps it alive until the send is complete.
        pending = Pending(
            self, part_of or op, f"to {self.axis} {dest}", requests, lambda: (array, raw)[0]
        )
        if self.synchronous_sends:
            pending.wait()
        return pending

    def _irecv(self, op: str, out, source: int, tag: int, part_of: str | None = None) -> Pending:
        self._check_peer(source)
        _output(out, out.shape, out.dtype, out)
        via = self._transports.point_to_point(out)
        buffer = via.window(out)
        if buffer is None:
            buffer = via.space(out.shape, out.dtype)
        raw = _raw(buffer, via.library)
        via.ready()
        requests = [
            self.communicator.Irecv(raw[piece], source, self._check_tag(tag))
            for piece in _pieces(raw.size)
        ]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None)
        peer = f"from {self.axis} {source}"
        return Pending(self, part_of or op, peer, requests, lambda: via.fill(out, buffer))

    def _collective(self, op: str, array_bytes: int, requests: list, finish: Callable):
        return self._complete(op, ring_bytes(op, array_bytes, self.size), requests, finish)

    def _complete(self, op: str, sent: int, requests: list, finish: Callable):
        self.ledger.add(self.axis, op, calls=1, bytes=sent)
        return Pending(self, op, f"with its {self.size} ranks", requests, finish).wait()

    def _blocks(self, op: str, array, dim: int, via):
        """A view (p, ..., dim / p, ...) of the array's p parts along `dim`, as it may be sent."""
        length, rest = divmod(array.shape[dim], self.size)
        if rest:
            raise ValueError(
                f"{op} cuts dim {dim} into {self.size} equal parts, and its length "
                f"{array.shape[dim]} is not a multiple of {self.size}"
            )
        shape = array.shape
        cut = via.reads(array).reshape(*shape[:dim], self.size, length, *shape[dim + 1 :])
        return via.library.moveaxis(cut, dim, 0)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"there is no rank {peer} on axis {self.axis}: it has {self.size}")

    def _check_tag(self, tag: int) -> int:
        if not 0 <= tag <= self.max_tag:
            raise ValueError(f"tag {tag} is outside 0 to {self.max_tag}, what this MPI can carry")
        return tag


def _pieces(count: int) -> Iterator[slice]:
    """Slices of at most MAX_ELEMENTS that together cover `count` elements; none for none."""
    for start in range(0, count, MAX_ELEMENTS):
        yield slice(start, min(start + MAX_ELEMENTS, count))


def _complete(requests: list) -> bool:
    """Whether all are complete; lets MPI make progress."""
    if requests and not isinstance(requests[0], MPI.Request):
        return all(request.Test() for request in requests)
    return MPI.Request.Testall(requests)


def _raw(array, library):
    """The bytes of an array, one-dimensional; of a copy, where it is not contiguous.
    library : NumPy for a host array, CuPy for a device array."""
    if array.dtype.hasobject:
        raise TypeError(f"MPI cannot send Python objects: the array has dtype {array.dtype}")
    return library.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _output(out, shape: tuple[int, ...], dtype, like):
    """`out`, checked, or a new array where the caller gave none, in host or device memory as the
    array `like` is."""
    if out is None:
        return (np if backend.on_host(like) else backend.xp).empty(shape, dtype)
    if backend.on_host(out) != backend.on_host(like):
        raise ValueError("out and the array must both be in host or both in device memory")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}{out.shape}, the result is {dtype}{shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def _check_dim(array, dim: int) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise ValueError(f"dim {dim} is out of range for an array of {array.ndim} dims")
    return dim % array.ndim


def _reduction(dtype: np.dtype, op: str) -> tuple[np.dtype, MPI.Op]:
    """The dtype to reduce in and the MPI operation."""
    if op not in _OPS:
        raise ValueError(f"op={op!r} is not a reduction: use one of {', '.join(_OPS)}")
    if dtype == np.float16:
        return np.dtype(np.float32), _OPS[op]
    dtype = dtype.newbyteorder("=")
    if dtype == np.bool_:
        return dtype, _BOOL_OPS[op]
    if dtype.kind not in "iuf" and not (dtype.kind == "c" and op == "sum"):
        raise TypeError(f"MPI has no {op} of dtype {dtype}")
    return dtype, _OPS[op]
