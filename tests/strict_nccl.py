"""A stand-in for `cupy.cuda.nccl`: the calls that we make, with CuPy's arguments, over MPI.

A call returns at once; an event that is recorded behind it (`take_posted`) knows when it is done.
"""

import ctypes
import itertools

import numpy as np
from mpi4py import MPI

available = True
NCCL_SUM, NCCL_MAX, NCCL_MIN = range(3)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT32, NCCL_FLOAT64 = 6, 7

_OPS = [MPI.SUM, MPI.MAX, MPI.MIN]
_DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float32", "float64"]
_numbers = itertools.count()
_posted: list = []


def get_unique_id():
    """Who makes it, and how many were made before."""
    return (MPI.COMM_WORLD.rank, next(_numbers) % 1000, *[0] * 126)


def groupStart():
    pass


def groupEnd():
    pass


def take_posted():
    """The MPI requests of the calls since it was last asked."""
    posted = list(_posted)
    _posted.clear()
    return posted


class NcclCommunicator:
    """Ranks that know the id find each other: all tell its maker who they are."""

    def __init__(self, ndev, commId, rank):
        assert isinstance(commId, tuple)
        assert len(commId) == 128
        world, maker, tag = MPI.COMM_WORLD, commId[0], 20000 + commId[1]
        if world.rank == maker:
            others = [world.recv(tag=tag) for _ in range(ndev - 1)]
            members = dict([*others, (rank, world.rank)])
            for member in members.values():
                if member != maker:
                    world.send(members, member, tag + 1000)
        else:
            world.send((rank, world.rank), maker, tag)
            members = world.recv(source=maker, tag=tag + 1000)
        group = world.group.Incl([members[each] for each in range(ndev)])
        self.communicator = world.Create_group(group, tag + 2000)
        group.Free()

    def destroy(self):
        self.communicator.Free()

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        # In place: mpi4py does not keep alive what a non-blocking reduction sends.
        buffer = _at(recvbuf, count, datatype)
        buffer[...] = _at(sendbuf, count, datatype)
        _posted.append(self.communicator.Iallreduce(MPI.IN_PLACE, buffer, _OPS[op]))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        received = _at(recvbuf, count * self.communicator.size, datatype)
        _posted.append(self.communicator.Iallgather(_at(sendbuf, count, datatype), received))

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        sent = _at(sendbuf, recvcount * self.communicator.size, datatype)
        received = _at(recvbuf, recvcount, datatype)
        _posted.append(self.communicator.Ireduce_scatter_block(sent, received, _OPS[op]))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        buffer = _at(recvbuff, count, datatype)
        if self.communicator.rank == root:
            buffer[...] = _at(sendbuff, count, datatype).copy()
        _posted.append(self.communicator.Ibcast(buffer, root))

    def send(self, sendbuf, count, datatype, peer, stream):
        _posted.append(self.communicator.Isend(_at(sendbuf, count, datatype), peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        _posted.append(self.communicator.Irecv(_at(recvbuf, count, datatype), peer))


def _at(pointer, count, datatype):
    """The elements at an address."""
    dtype = np.dtype(_DTYPES[datatype])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)
