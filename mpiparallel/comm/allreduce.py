"""All-reduce: which algorithm for how many bytes on which nodes.

Each of these sums n bytes over p ranks in place, and leaves the same bits on all of them:

    algorithm            bytes that a rank sends                        what `auto` takes it for
    window               none: memory, counted as a ring's              ranks of a node up to 8 MiB
                                                                        (device arrays: as below)
    mpi                  what MPI_Allreduce does, counted as a ring     up to 256 KiB elsewhere
    hierarchical         2(m-1)/m n inside, 2(k-1)/k n/m across         k nodes of m ranks
    ring                 2(p-1)/p n                                     others
    recursive_doubling   n log2 p                                       nothing alone: the sums
                                                                        between nodes up to 64 KiB

float16 and bfloat16 are summed as float32, and sent as such: n is then twice the array.

    allreduce(group, array)                         runs it through
    for needed in allreduce_steps(group, array):    runs it while other work goes on: resume it
        ...                                         when the messages in `needed` are there
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller

import numpy as np
from mpi4py import MPI

from mpiparallel.backend import on_host
from mpiparallel.comm import half, hierarchical, recursive_doubling, ring
from mpiparallel.comm.group import Group
from mpiparallel.comm.pending import Pending
from mpiparallel.comm.ring import Steps, run

# Bytes. Where two cores share no cache, a store to memory that the other has read is slow:
# 2.6 GB/s, and 44 where it had not. At 16 MiB the window was then 0.4 to 0.7 times MPI_Allreduce,
# the ring 0.8 to 1.4 times. Where they share one, the window was 1.4 to 1.8 times, the ring 1.1.
WINDOW_UP_TO = 8 << 20
LIBRARY_UP_TO = 256 * 1024  # bytes: over a network C starts its messages sooner than Python

ALGORITHMS = ("window", "hierarchical", "recursive_doubling", "ring", "mpi")


def allreduce_steps(
    group: Group, array, algorithm: str = "auto", *, bfloat16: bool = False
) -> Steps:
    """Sum `array` over the ranks, in place. All ranks of the group call it and run the steps.

    array : C-contiguous and writable, of integers, bool, floats or complex numbers; the same shape
        and dtype on every rank. algorithm : "auto" or one of ALGORITHMS. bfloat16 : the uint16
        array holds the bits of bfloat16 numbers.
    Several may be under way on a group if all ranks call in the same order. The ledger counts one
    call of "allreduce" on the group's axis, and the bytes of the table above.
    Raises ValueError for an array that is not contiguous or not writable, for an unknown algorithm,
    and for one that the group's nodes do not have; TypeError for a dtype without a sum.
    """
    if not (array.flags.c_contiguous and (not on_host(array) or array.flags.writeable)):
        raise ValueError("allreduce works in place: the array must be contiguous and writable")
    flat = array.reshape(-1)
    if algorithm not in ("auto", *ALGORITHMS):
        raise ValueError(f"algorithm={algorithm!r}: use auto or one of {', '.join(ALGORITHMS)}")
    if bfloat16 or half.is_bfloat16(flat.dtype):
        bits = flat.view(np.uint16)
        return _as_float32(group, bits, half.widen, half.narrow, algorithm)
    if flat.dtype == np.float16:
        wide, back = methodcaller("astype", np.float32), methodcaller("astype", np.float16)
        return _as_float32(group, flat, wide, back, algorithm)
    if flat.dtype.kind not in "biufc":
        raise TypeError(f"there is no sum of dtype {flat.dtype}")
    if algorithm == "auto":
        algorithm = choose(group, flat.nbytes, on_host(flat))
    if algorithm == "mpi":
        return _wait_for(group.iallreduce(flat, out=flat))
    group.ledger.add(group.axis, "allreduce", calls=1)
    if group.size == 1:
        return iter(())
    tag, layout = group.next_tag(), group.layout
    if algorithm == "window":
        if layout is None or layout.window is None or not on_host(flat):
            raise ValueError(
                f"the ranks of axis {group.axis} are not known to share a node, or the array is "
                "not in its memory"
            )
        return layout.window.allreduce_steps(flat)
    if algorithm == "hierarchical":
        if layout is None or layout.grid is None:
            raise ValueError(
                f"axis {group.axis} is not known to be several nodes with as many ranks on each, "
                "two or more"
            )
        return hierarchical.allreduce_steps(*layout.grid, flat, tag)
    if algorithm == "recursive_doubling":
        return recursive_doubling.allreduce_steps(group, flat, tag)
    return ring.allreduce_steps(group, flat, tag)


def allreduce(group: Group, array, algorithm: str = "auto", *, bfloat16: bool = False) -> None:
    """The same, run through: when it returns, `array` is the sum."""
    layout = group.layout
    if algorithm == "auto" and layout is not None and not bfloat16 and on_host(array):
        window = layout.window
        if window is not None and window.allreduce_at_once(array):
            return
    run(allreduce_steps(group, array, algorithm, bfloat16=bfloat16))


def library_allreduce(group: Group) -> Callable:
    """f(array): MPI_Allreduce in place on the bare communicator, to be measured against; of a
    device array by its transport."""
    bare = partial(group.communicator.Allreduce, MPI.IN_PLACE)
    return lambda array: bare(array) if on_host(array) else group.allreduce(array, out=array)


def choose(group: Group, nbytes: int, in_host_memory: bool = True) -> str:
    """The algorithm that `auto` is for `nbytes` bytes. The same on every rank; no message."""
    layout = group.layout
    if layout is not None and layout.window is not None and in_host_memory:
        return "window" if nbytes <= WINDOW_UP_TO else "ring"
    if nbytes <= LIBRARY_UP_TO:
        return "mpi"
    if layout is not None and layout.grid is not None:
        return "hierarchical"
    return "ring"


# What must happen in the same order on every rank happens in the call, not when the steps begin.


def _wait_for(pending: Pending) -> Steps:
    yield (pending,)
    pending.wait()


def _as_float32(
    group: Group, narrow, to_float32: Callable, from_float32: Callable, algorithm: str
) -> Steps:
    wide = to_float32(narrow)
    return _then_round(allreduce_steps(group, wide, algorithm), narrow, wide, from_float32)


def _then_round(steps: Steps, narrow, wide, from_float32: Callable) -> Steps:
    yield from steps
    narrow[...] = from_float32(wide)
