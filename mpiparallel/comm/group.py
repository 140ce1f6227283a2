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
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpiparallel.comm.buffers import check_dim, complete, output, parts, pieces, raw, reduction
from mpiparallel.comm.ledger import Ledger, ring_bytes
from mpiparallel.comm.pending import CommunicationTimeout, Pending
from mpiparallel.comm.transport import Host, Transports
from mpiparallel.comm.watch import LOOK_SECONDS, Watch

if TYPE_CHECKING:
    from mpiparallel.comm.node import NodeLayout


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
        self._transports = Transports(self)

    def free(self) -> None:
        """Give the communicator back. All ranks of the group call it."""
        self._transports.free()
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
        out = output(out, array.shape, array.dtype, array)
        dtype, mpi_op = reduction(array.dtype, op)
        via = self._transports.collective(array, dtype)
        buffer = via.window(out) if out.dtype == dtype else None
        if buffer is None:
            buffer = via.space(array.shape, dtype)
        if buffer is not array:
            via.load(buffer, array)
        flat, start = buffer.reshape(-1), via.communicator.Iallreduce
        via.ready()
        requests = [start(MPI.IN_PLACE, part, mpi_op) for part in parts(flat)]
        sent = ring_bytes("allreduce", buffer.nbytes, self.size, self.rank)
        return self._post("allreduce", sent, requests, lambda: via.fill(out, buffer))

    def allgather(self, array, dim: int = 0, out=None):
        """Join the arrays of all ranks along `dim`, in rank order. Sends (p-1)/p of the result."""
        dim = check_dim(array, dim)
        shape = (*array.shape[:dim], array.shape[dim] * self.size, *array.shape[dim + 1 :])
        out = output(out, shape, array.dtype, array)
        via = self._transports.collective(array)
        mine = raw(via.reads(array), via.library)
        everyone = via.space((self.size, mine.size), np.uint8)
        copies = [
            (piece, everyone if piece == slice(0, mine.size) else everyone[:, piece].copy())
            for piece in pieces(mine.size)
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
        dtype, mpi_op = reduction(array.dtype, op)
        via = self._transports.collective(array, dtype)
        blocks = self._blocks("reduce_scatter", array, check_dim(array, dim), via)
        shape = blocks.shape[1:]
        out = output(out, shape, array.dtype, array)
        full = via.library.ascontiguousarray(blocks, dtype).reshape(self.size, -1)
        mine = via.space((full.shape[1],), dtype)
        cut = [
            (piece, via.library.ascontiguousarray(full[:, piece])) for piece in pieces(mine.size)
        ]
        via.ready()
        # mpi4py does not keep alive what a non-blocking reduction sends: `cut` has to, to the end.
        requests = [
            via.communicator.Ireduce_scatter_block(part, mine[piece], op=mpi_op)
            for piece, part in cut
        ]
        return self._collective(
            "reduce_scatter", full.nbytes, requests, lambda: via.fill(out, mine.reshape(shape))
        )

    def alltoall(self, array, dim: int = 0, out=None):
        """Cut `array` along `dim` in p parts, send the r-th to rank r, join what arrives by rank.

        Sends (p-1)/p of the array. Raises ValueError where p does not divide the dim.
        """
        dim = check_dim(array, dim)
        out = output(out, array.shape, array.dtype, array)
        via = self._transports.collective(array)
        blocks = via.library.ascontiguousarray(self._blocks("alltoall", array, dim, via))
        outgoing = raw(blocks, via.library).reshape(self.size, -1)
        incoming = via.space(outgoing.shape, np.uint8)
        self._count_copies(outgoing.shape[1])
        copies = []
        for piece in pieces(outgoing.shape[1]):
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
        out = output(out, array.shape, array.dtype, array)
        via = self._transports.collective(array)
        buffer = via.window(out)
        if buffer is None:
            buffer = via.space(array.shape, array.dtype)
        if self.rank == root and buffer is not array:
            via.load(buffer, array)
        flat = raw(buffer, via.library)
        via.ready()
        requests = [via.communicator.Ibcast(part, root) for part in parts(flat)]
        sent = self._count_copies(flat.size) if self.rank == root else 0
        return self._post("bcast", sent, requests, lambda: via.fill(out, buffer)).wait()

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
        self._check_tag(tag)
        posted = time.perf_counter()
        via = self._transports.point_to_point(array)
        flat = raw(via.reads(array), via.library)
        via.ready()
        send = self.communicator.Issend if self.synchronous_sends else self.communicator.Isend
        requests = [send(part, dest, tag) for part in parts(flat)]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None, bytes=flat.size)
        self.ledger.add_to(self.axis, dest, flat.size)
        # MPI reads from `flat`, so the closure keeps it alive until the send is complete.
        pending = Pending(
            self,
            part_of or op,
            f"to {self.axis} {dest}",
            complete(requests),
            lambda: (array, flat)[0],
            bytes=flat.size,
            rank=dest,
            posted=posted,
        )
        if self.synchronous_sends:
            pending.wait()
        return pending

    def _irecv(self, op: str, out, source: int, tag: int, part_of: str | None = None) -> Pending:
        self._check_peer(source)
        self._check_tag(tag)
        output(out, out.shape, out.dtype, out)
        via = self._transports.point_to_point(out)
        buffer = via.window(out)
        if buffer is None:
            buffer = via.space(out.shape, out.dtype)
        flat = raw(buffer, via.library)
        via.ready()
        requests = [self.communicator.Irecv(part, source, tag) for part in parts(flat)]
        self.ledger.add(self.axis, part_of or op, calls=part_of is None)
        return Pending(
            self,
            part_of or op,
            f"from {self.axis} {source}",
            complete(requests),
            lambda: via.fill(out, buffer),
            bytes=flat.size,
            rank=source,
        )

    def _collective(self, op: str, array_bytes: int, requests: list, finish: Callable):
        return self._post(
            op, ring_bytes(op, array_bytes, self.size, self.rank), requests, finish
        ).wait()

    def _post(self, op: str, sent: int, requests: list, finish: Callable) -> Pending:
        self.ledger.add(self.axis, op, calls=1, bytes=sent)
        peers = f"with its {self.size} ranks"
        return Pending(self, op, peers, complete(requests), finish, bytes=sent)

    def _count_copies(self, bytes: int) -> int:
        """Note that each other rank is sent so many bytes; how many that are together."""
        for peer in range(self.size):
            if peer != self.rank:
                self.ledger.add_to(self.axis, peer, bytes)
        return bytes * (self.size - 1)

    def _blocks(self, op: str, array, dim: int, via: Host):
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

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self.max_tag:
            raise ValueError(f"tag {tag} is outside 0 to {self.max_tag}, what this MPI can carry")
