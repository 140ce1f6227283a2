"""How an array reaches MPI: as it lies, or through pinned host memory.

    Host      a NumPy array: MPI reads and writes it
    Staged    a device array: downloaded to pinned host memory, and what arrives is uploaded
    Device    a device array, handed over as it is, once the stream has computed it:
                  to MPI, where MPI proved that it takes device pointers
                  to NCCL, for collectives of ranks that have a GPU each (`comm/nccl.py`)
                  to nobody (`Alone`), where the group has one rank

A Group asks `Transports` for one of them per call and then works with its three verbs: `reads`
gives memory that may be sent, `space` and `window` memory that may be received into, `fill` puts
what came where the caller wants it. Both sides of a message may use different ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiparallel import backend
from mpiparallel.comm.nccl import NcclCommunicator, own_gpus, takes


class Host:
    """NumPy arrays, and the mpi4py communicator that takes them."""

    library: Any = np

    def __init__(self, communicator):
        self.communicator = communicator

    def reads(self, array):
        """The array in memory that may be sent from."""
        return self.library.asarray(array)

    def space(self, shape: tuple[int, ...], dtype):
        """New memory that may be received into."""
        return self.library.empty(shape, dtype)

    def window(self, out):
        """The memory of `out` itself, if it may be received into as it lies; else None."""
        return out if out.flags.c_contiguous and out.flags.writeable else None

    def load(self, buffer, array) -> None:
        """Copy an array into memory of `space` or `window`, as its dtype."""
        buffer[...] = array

    def fill(self, out, result):
        """Put what was received where the caller wants it."""
        if out is not result:
            out[...] = result.astype(out.dtype, copy=False)
        return out

    def ready(self) -> None:
        """Called when all memory is about to be handed over."""


class Staged(Host):
    """Device arrays through pinned host memory; a download waits for the stream."""

    def reads(self, array):
        return backend.to_host(array)

    def space(self, shape, dtype):
        return backend.current().host_empty(shape, dtype)

    def window(self, out):
        return None

    def load(self, buffer, array) -> None:
        backend.current().download(array.astype(buffer.dtype, copy=False), buffer)

    def fill(self, out, result):
        backend.current().upload(result, out)
        return out


class Device(Host):
    """Device arrays as they are, for a communicator that takes their pointers."""

    @property
    def library(self):
        """The functions that make and copy such arrays."""
        return backend.xp

    def window(self, out):
        return out if out.flags.c_contiguous else None

    def ready(self) -> None:
        """Memory may be new from the pool and still in use by kernels that are queued, so what is
        to be received into waits for the stream as well."""
        backend.synchronize()


class Stream(Device):
    """Device arrays for what queues its work on the same stream: nothing needs to wait."""

    def ready(self) -> None:
        pass


class Done:
    """The request of an operation that is complete when it is posted."""

    def Test(self) -> bool:
        return True


class Alone:
    """The collectives of one rank, with the signatures of mpi4py's: copies."""

    def Iallreduce(self, _in_place, buffer, op=None):
        return Done()

    def Ibcast(self, buffer, root=0):
        return Done()

    def Iallgather(self, mine, everyone):
        everyone[...] = mine.reshape(everyone.shape)
        return Done()

    Ialltoall = Iallgather

    def Ireduce_scatter_block(self, full, mine, op=None):
        mine[...] = full.reshape(mine.shape)
        return Done()


class Transports:
    """The transports of one Group. `group` makes the messages by which NCCL is set up."""

    def __init__(self, group):
        self.group, self.host = group, Host(group.communicator)
        self.nccl: NcclCommunicator | None = None
        self.nccl_was_tried = False

    def point_to_point(self, array) -> Host:
        """For a message of this rank."""
        if backend.on_host(array):
            return self.host
        kind = Device if backend.current().gpu_aware else Staged
        return kind(self.group.communicator)

    def collective(self, array, dtype=np.uint8) -> Host:
        """For a collective that all ranks of the group call with such an array.

        dtype : in which elements are combined; bytes, where they are only moved.
        """
        if backend.on_host(array):
            return self.host
        if self.group.size == 1:
            return Stream(Alone())
        if not self.nccl_was_tried:
            self.nccl_was_tried = True
            if own_gpus(self.group):
                self.nccl = NcclCommunicator(self.group)
        if self.nccl and takes(np.dtype(dtype)):
            return Stream(self.nccl)
        return self.point_to_point(array)

    def free(self) -> None:
        """Give the NCCL communicator back."""
        if self.nccl:
            self.nccl.free()
