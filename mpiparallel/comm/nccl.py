"""NCCL as the transport of collectives, where every rank of a group has a GPU of its own.

`NcclCommunicator` has the collectives of an mpi4py communicator that Group uses, with the same
arguments, for contiguous device arrays. NCCL queues a collective on the current stream, behind the
kernels that compute its input; the request that is returned is an event in that stream, so that
Group's clock and its timeout work as they do for MPI.

The ranks find each other over MPI: rank 0 makes an id and the others get it.
"""

from __future__ import annotations

import socket

import numpy as np
from mpi4py import MPI

from mpiparallel import backend

_TYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}


def takes(dtype: np.dtype) -> bool:
    """Whether NCCL combines elements of this dtype."""
    return dtype.name in _TYPES


def own_gpus(group) -> bool:
    """Whether NCCL is there and every rank of the group has its own GPU. All ranks call."""
    nccl = _nccl()
    mine = [socket.gethostname(), backend.current().bus_id()] if nccl else None
    with group.ledger.aside():
        every = group.allgather_json(mine)
    return None not in every and len(set(map(tuple, every))) == len(every)


class NcclCommunicator:
    """A communicator of the ranks of a Group. All of them make it together."""

    def __init__(self, group):
        self.nccl, self.size = _nccl(), group.size
        identity = list(self.nccl.get_unique_id()) if group.rank == 0 else None
        with group.ledger.aside():
            identity = group.allgather_json(identity)[0]
        self.communicator = self.nccl.NcclCommunicator(group.size, tuple(identity), group.rank)

    def free(self) -> None:
        """Give it back."""
        self.communicator.destroy()

    def Iallreduce(self, _in_place, buffer, op):
        """In place, as Group does it."""
        pointer = buffer.data.ptr
        self.communicator.allReduce(
            pointer, pointer, buffer.size, self._type(buffer), self._op(op), _stream()
        )
        return Event()

    def Iallgather(self, mine, everyone):
        self.communicator.allGather(
            mine.data.ptr, everyone.data.ptr, mine.size, self._type(mine), _stream()
        )
        return Event()

    def Ireduce_scatter_block(self, full, mine, op):
        self.communicator.reduceScatter(
            full.data.ptr, mine.data.ptr, mine.size, self._type(mine), self._op(op), _stream()
        )
        return Event()

    def Ibcast(self, buffer, root):
        self.communicator.broadcast(
            buffer.data.ptr, buffer.data.ptr, buffer.size, self._type(buffer), root, _stream()
        )
        return Event()

    def Ialltoall(self, sent, received):
        """sent, received : (p, n). NCCL has no such call: p sends and receives as one operation."""
        count, kind, stream = sent.size // self.size, self._type(sent), _stream()
        step = count * sent.dtype.itemsize
        self.nccl.groupStart()
        for peer in range(self.size):
            self.communicator.send(sent.data.ptr + peer * step, count, kind, peer, stream)
            self.communicator.recv(received.data.ptr + peer * step, count, kind, peer, stream)
        self.nccl.groupEnd()
        return Event()

    def _type(self, array) -> int:
        return getattr(self.nccl, _TYPES[array.dtype.name])

    def _op(self, op: MPI.Op) -> int:
        names = [(MPI.SUM, "NCCL_SUM"), (MPI.MAX, "NCCL_MAX"), (MPI.MIN, "NCCL_MIN")]
        return getattr(self.nccl, next(name for known, name in names if known == op))


class Event:
    """The request of an operation on the current stream."""

    def __init__(self):
        self.event = backend.xp.cuda.Event(disable_timing=True)
        self.event.record()

    def Test(self) -> bool:
        return self.event.done


def _stream() -> int:
    return backend.xp.cuda.get_current_stream().ptr


def _nccl():
    """CuPy's NCCL module, None where the library is not installed."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it is missing; staging does then
        from cupy.cuda import nccl
    return nccl if nccl.available else None
