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

Arrays may be non-contiguous, read-only or empty. `out` must have the right shape and dtype and
be writable, as for a NumPy ufunc; it may overlap the input.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpiparallel import backend
from mpiparallel.comm.ledger import Ledger, ring_bytes
from mpiparallel.comm.trace import Entry
from mpiparallel.comm.watch import LOOK_SECONDS, Watch

if TYPE_CHECKING:
    from mpiparallel.comm.node import NodeLayout

yield_processor: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))

# MPI counts elements in a C int: longer messages are cut into pieces of at most this many.
MAX_ELEMENTS = 2**31 - 1

# Polls between two gifts of the processor: asking MPI takes a tenth of what a switch takes.
POLLS = 16

# Who yields again and again goes to the end of the system's queue, who has slept goes to its head:
# where ranks share cores, a wait sleeps for NAP seconds at a time once it was long in vain.
NAP, NAP_AFTER, NAP_AFTER_IF_CROWDED = 20e-6, 10e-3, 100e-6

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_BOOL_OPS = {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND}  # what NumPy's add, max, min do


class CommunicationTimeout(TimeoutError):
    """An operation did not complete within --timeout seconds: another rank never took part."""


class Pending:
    """An operation that was posted. `wait` completes it and returns its array.

    peer : whom it waits for, in words; rank : the same as a rank of the group, where it is one.
    ready : lets MPI make progress, and says whether the operation is complete.
    finish : called once it is; gives what `wait` returns. bytes : of the message, or sent.
    posted : when its posting began, by time.perf_counter; now, where that is not said.
    """

    def __init__(
        self,
        group: Group,
        op: str,
        peer: str,
        ready: Callable[[], bool],
        finish: Callable[[], Any],
        *,
        bytes: int = 0,
        rank: int | None = None,
        posted: float | None = None,
    ):
        self._group, self._op, self._peer = group, op, peer
        self.test, self._finish = ready, finish  # test: True once `wait` would return at once
        self._bytes, self._rank = bytes, rank
        watch = group.watch
        self._posted = watch.trace and (posted or time.perf_counter(), watch.step, watch.action)

    def wait(self):
        """Complete the operation: the received or combined array, or the array that was sent.

        Raises CommunicationTimeout when the group's timeout (seconds) passes first.
        """
        group, start, polls = self._group, time.perf_counter(), 0
        nap_after = NAP_AFTER_IF_CROWDED if group.crowded else NAP_AFTER
        while not self.test():
            polls += 1
            if polls % POLLS == 0:
                waited = time.perf_counter() - start
                if waited < nap_after:
                    yield_processor()
                else:
                    time.sleep(NAP)
                group.look_up(self._op, self._peer, start)
        group.watch.waiting = None
        result = self._finish()
        end, trace = time.perf_counter(), group.watch.trace
        group.ledger.add(group.axis, self._op, seconds=end - start)
        if trace is not None and self._posted:
            posted, step, action = self._posted
            where = (posted, self._bytes, self._rank)
            trace.add(Entry(self._op, group.axis, start, end, step, action, *where))
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
    watch : tells the other ranks what this one waits for; Groups of one Mesh share it.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        axis: str,
        *,
        ledger: Ledger | None = None,
        where: str | None = None,
        timeout: float = 300.0,
        watch: Watch | None = None,
    ):
        self.communicator, self.axis, self.timeout = communicator, axis, timeout
        self.ledger = Ledger() if ledger is None else ledger
        self.watch = Watch() if watch is None else watch
        self._next_look = 0.0
        self.rank, self.size = communicator.rank, communicator.size
        self.where = f"rank {self.rank}" if where is None else where
        self.max_tag = int(communicator.Get_attr(MPI.TAG_UB) or 32767)  # at least, says MPI
        # A test switch: every send becomes an Ssend, which returns once its receive is posted.
        self.synchronous_sends = False
        self.crowded = False  # whether this node has more ranks than cores, where the Mesh says so
        self.layout: NodeLayout | None = None  # which ranks share a node, where the Mesh says so
        self._last_tag = 0

    def free(self) -> None:
        """Give the communicator back. All ranks of the group call it."""
        if self.layout is not None:
            self.layout.free()
        self.communicator.Free()

    def next_tag(self) -> int:
        """A tag that keeps the messages of one algorithm from those of others under way.

        Every rank takes one for each algorithm, in the same order. They come round again after
        the 32,767 that every MPI can carry.
        """
        self._last_tag = self._last_tag % 32767 + 1
        return self._last_tag

    def look_up(self, op: str, peer: str, since: float) -> None:
        """What a rank does now and then while it waits: answer others, and give up in the end.

        Raises CommunicationTimeout, with the table of what all ranks do, after `timeout` seconds.
        """
        now = time.perf_counter()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        self.watch.waiting = (f"{op} on axis {self.axis} {peer}", since)
        self.watch.answer()
        if now - since > self.timeout:
            raise CommunicationTimeout(
                f"{self.where} waited {self.timeout:g} s in {op} on axis {self.axis} {peer}, "
                f"in vain\n{self.watch.table()}".rstrip()
            )

    # ---- collectives: every rank of the group calls, with arrays of one shape and dtype ----

    def allreduce(self, array, op: str = "sum", out=None):
        """Combine `array` elementwise over the ranks; every rank gets the same bits.

        op: "sum", "max" or "min". float16 is reduced in float32. Sends 2(p-1)/p of the array.
        Raises ValueError for an unknown op, TypeError for a dtype that MPI cannot reduce.
        """
        return self.iallreduce(array, op, out).wait()

    def iallreduce(self, array, op: str = "sum", out=None) -> Pending:
        """Post the same; neither `array` nor `out` may be touched before `wait`."""
        out = _output(out, array.shape, array.dtype)
        dtype, mpi_op = _reduction(array.dtype, op)
        buffer = _host(out) if out.dtype == dtype else None
        if buffer is None or not _direct(buffer):
            buffer = np.empty(array.shape, dtype)
        if buffer is not array:
            buffer[...] = _host(array)
        flat, start = buffer.reshape(-1), self.communicator.Iallreduce
        requests = [start(MPI.IN_PLACE, part, mpi_op) for part in _parts(flat)]
        sent = ring_bytes("allreduce", buffer.nbytes, self.size, self.rank)
        return self._post("allreduce", sent, requests, lambda: _fill(out, buffer))

    def allgather(self, array, dim: int = 0, out=None):
        """Join the arrays of all ranks along `dim`, in rank order. Sends (p-1)/p of the result."""
        dim = _check_dim(array, dim)
        shape = list(array.shape)
        shape[dim] *= self.size
        out = _output(out, tuple(shape), array.dtype)
        mine = _raw(_host(array))
        everyone = np.empty((self.size, mine.size), np.uint8)
        requests, copies = [], []
        for piece in _pieces(mine.size):
            part = everyone if piece == slice(0, mine.size) else everyone[:, piece].copy()
            requests.append(self.communicator.Iallgather(mine[piece], part))
            copies.append((piece, part))

        def finish():
            for piece, part in copies:
                if part is not everyone:
                    everyone[:, piece] = part
            blocks = everyone.reshape(-1).view(array.dtype).reshape(self.size, *array.shape)
            return _fill(out, np.moveaxis(blocks, 0, dim).reshape(shape))

        return self._collective("allgather", everyone.nbytes, requests, finish)

    def reduce_scatter(self, array, op: str = "sum", dim: int = 0, out=None):
        """Combine `array` over the ranks and cut it along `dim`: rank r gets the r-th of p parts.

        Sends (p-1)/p of the array. Raises ValueError where p does not divide the dim.
        """
        blocks = self._blocks("reduce_scatter", array, _check_dim(array, dim))
        out = _output(out, blocks.shape[1:], array.dtype)
        dtype, mpi_op = _reduction(array.dtype, op)
        full = np.ascontiguousarray(blocks, dtype).reshape(self.size, -1)
        mine = np.empty(full.shape[1], dtype)
        parts = [(piece, np.ascontiguousarray(full[:, piece])) for piece in _pieces(mine.size)]
        requests = [
            self.communicator.Ireduce_scatter_block(part, mine[piece], op=mpi_op)
            for piece, part in parts
        ]
        shape = blocks.shape[1:]
        return self._collective(
            "reduce_scatter", full.nbytes, requests, lambda: _fill(out, mine.reshape(shape))
        )

    def alltoall(self, array, dim: int = 0, out=None):
        """Cut `array` along `dim` in p parts, send the r-th to rank r, join what arrives by rank.

        Sends (p-1)/p of the array. Raises ValueError where p does not divide the dim.
        """
        dim = _check_dim(array, dim)
        out = _output(out, array.shape, array.dtype)
        blocks = np.ascontiguousarray(self._blocks("alltoall", array, dim))
        outgoing = _raw(blocks).reshape(self.size, -1)
        incoming = np.empty_like(outgoing)
        for peer in range(self.size):
            if peer != self.rank:
                self.ledger.add_to(self.axis, peer, outgoing.shape[1])
        requests, copies = [], []
        for piece in _pieces(outgoing.shape[1]):
            part = np.empty_like(outgoing[:, piece], order="C")
            sent = np.ascontiguousarray(outgoing[:, piece])
            requests.append(self.communicator.Ialltoall(sent, part))
            copies.append((piece, sent, part))

        def finish():
            for piece, _, part in copies:
                incoming[:, piece] = part
            received = incoming.reshape(-1).view(array.dtype).reshape(blocks.shape)
            return _fill(out, np.moveaxis(received, 0, dim).reshape(array.shape))

        return self._collective("alltoall", blocks.nbytes, requests, finish)

    def bcast(self, array, root: int = 0, out=None):
        """Every rank gets the array of `root`; elsewhere `array` only says shape and dtype.

        The root sends one copy of the array to each other rank.
        """
        self._check_peer(root)
        out = _output(out, array.shape, array.dtype)
        buffer = _host(out)
        if not _direct(buffer):
            buffer = np.empty(array.shape, array.dtype)
        if self.rank == root and buffer is not array:
            buffer[...] = _host(array)
        raw = _raw(buffer)
        requests = [self.communicator.Ibcast(part, root) for part in _parts(raw)]
        receivers = [peer for peer in range(self.size) if peer != root] if self.rank == root else []
        for peer in receivers:
            self.ledger.add_to(self.axis, peer, raw.size)
        sent = raw.size * len(receivers)
        return self._post("bcast", sent, requests, lambda: _fill(out, buffer)).wait()

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
        posted = time.perf_counter()
        raw = _raw(_host(array))
        send = self.communicator.Issend if self.synchronous_sends else self.communicator.Isend
        self._check_tag(tag)
        requests = [send(part, dest, tag) for part in _parts(raw)]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None, bytes=raw.size)
        self.ledger.add_to(self.axis, dest, raw.size)
        # MPI reads from `raw`, so the closure keeps it alive until the send is complete.
        pending = Pending(
            self,
            part_of or op,
            f"to {self.axis} {dest}",
            _complete(requests),
            lambda: (array, raw)[0],
            bytes=raw.size,
            rank=dest,
            posted=posted,
        )
        if self.synchronous_sends:
            pending.wait()
        return pending

    def _irecv(self, op: str, out, source: int, tag: int, part_of: str | None = None) -> Pending:
        self._check_peer(source)
        _output(out, out.shape, out.dtype)
        buffer = _host(out)
        if not _direct(buffer):
            buffer = np.empty(out.shape, out.dtype)
        raw = _raw(buffer)
        self._check_tag(tag)
        requests = [self.communicator.Irecv(part, source, tag) for part in _parts(raw)]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None)
        peer = f"from {self.axis} {source}"
        return Pending(
            self,
            part_of or op,
            peer,
            _complete(requests),
            lambda: _fill(out, buffer),
            bytes=raw.size,
            rank=source,
        )

    def _collective(self, op: str, array_bytes: int, requests: list, finish: Callable):
        return self._post(
            op, ring_bytes(op, array_bytes, self.size, self.rank), requests, finish
        ).wait()

    def _post(self, op: str, sent: int, requests: list, finish: Callable) -> Pending:
        self.ledger.add(self.axis, op, calls=1, bytes=sent)
        peers = f"with its {self.size} ranks"
        return Pending(self, op, peers, _complete(requests), finish, bytes=sent)

    def _blocks(self, op: str, array, dim: int) -> np.ndarray:
        """A view (p, ..., dim / p, ...) of the array's p parts along `dim`."""
        length, rest = divmod(array.shape[dim], self.size)
        if rest:
            raise ValueError(
                f"{op} cuts dim {dim} into {self.size} equal parts, and its length "
                f"{array.shape[dim]} is not a multiple of {self.size}"
            )
        host, shape = _host(array), array.shape
        cut = host.reshape(*shape[:dim], self.size, length, *shape[dim + 1 :])
        return np.moveaxis(cut, dim, 0)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"there is no rank {peer} on axis {self.axis}: it has {self.size}")

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self.max_tag:
            raise ValueError(f"tag {tag} is outside 0 to {self.max_tag}, what this MPI can carry")


def _complete(requests: list) -> Callable[[], bool]:
    """Asks whether all of the MPI requests are complete."""
    return requests[0].Test if len(requests) == 1 else partial(MPI.Request.Testall, requests)


def _pieces(count: int) -> Iterator[slice]:
    """Slices of at most MAX_ELEMENTS that together cover `count` elements; none for none."""
    for start in range(0, count, MAX_ELEMENTS):
        yield slice(start, min(start + MAX_ELEMENTS, count))


def _parts(flat: np.ndarray) -> list[np.ndarray]:
    """The same pieces of a one-dimensional array; itself where one piece is enough."""
    if 0 < flat.size <= MAX_ELEMENTS:
        return [flat]
    return [flat[piece] for piece in _pieces(flat.size)]


def _host(array) -> np.ndarray:
    return backend.to_host(array)


def _direct(buffer: np.ndarray) -> bool:
    """Whether MPI can write into the buffer as it lies in memory."""
    return buffer.flags.c_contiguous and buffer.flags.writeable


def _raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, one-dimensional; of a copy, where it is not contiguous."""
    if array.dtype.hasobject:
        raise TypeError(f"MPI cannot send Python objects: the array has dtype {array.dtype}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fill(out, result: np.ndarray):
    """Put the host array `result` where the caller wants it."""
    if backend.to_host(out) is not result:
        out[...] = backend.from_host(result.astype(out.dtype, copy=False))
    return out


def _output(out, shape: tuple[int, ...], dtype):
    """`out`, checked, or a new array where the caller gave none."""
    if out is None:
        return backend.xp.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}{out.shape}, the result is {dtype}{shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def _check_dim(array, dim: int) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise ValueError(f"dim {dim} is out of range for an array of {array.ndim} dims")
    return dim % array.ndim


@cache
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
