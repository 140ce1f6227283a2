"""Ring reduce-scatter, all-gather and all-reduce, written out from Isend and Irecv.

Each of p ranks cuts its array into the same p chunks. Every step, each rank sends one chunk to
its right neighbour and receives another from its left, so all links are busy all the time:

    reduce-scatter, p = 3          chunk 0   chunk 1   chunk 2
    step 0:  rank 0 sends                              a2 -> 1
             rank 1 sends           b0 -> 2
             rank 2 sends                     c1 -> 0
    step 1:  rank 0 sends                   a1+c1 -> 1
             rank 1 sends                            b2+a2 -> 2
             rank 2 sends         c0+b0 -> 0
    now rank r holds the sum of chunk r, and the all-gather passes the sums on round the ring.

Each half takes p-1 steps and sends (p-1)/p of the array: 2(p-1)/p in all, however many ranks
there are (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). Each chunk is
summed along one path and then copied, so all ranks end with the same bits.

An algorithm here is a generator. It posts messages, yields those that it needs next, and goes on
when it is resumed, waiting for them if they are not there yet. To run it through is to call it
blocking; to resume it only when its messages have arrived is to overlap it with something else.
"""

from collections.abc import Iterator

from mpiparallel.backend import library_of
from mpiparallel.comm.group import Group
from mpiparallel.comm.pending import Pending

Steps = Iterator[tuple[Pending, ...]]


def chunk_bounds(length: int, parts: int) -> list[int]:
    """parts + 1 offsets that cut `length` elements as evenly as can be; chunks may be empty."""
    return [length * part // parts for part in range(parts + 1)]


def reduce_scatter_steps(
    group: Group, flat, part_of: str = "reduce_scatter", tag: int = 0
) -> Steps:
    """Sum `flat` over the ranks, in place: chunk r of rank r ends as the sum, the rest is spent.

    flat : contiguous 1-D array, the same length and dtype on every rank, at least float32 wide
        where it is floating. part_of : the ledger's row for the messages. tag : of the messages,
        a `group.next_tag()` where several algorithms are under way at once.
    """
    rank, size = group.rank, group.size
    bounds = chunk_bounds(flat.size, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    scratch = library_of(flat).empty(-(-flat.size // size), flat.dtype)
    for step in range(size - 1):
        leaving = _chunk(flat, bounds, rank - step - 1)
        arriving = _chunk(flat, bounds, rank - step - 2)
        received = group.irecv(scratch[: arriving.size], left, tag, part_of=part_of)
        sent = group.isend(leaving, right, tag, part_of=part_of)
        yield received, sent
        arriving += received.wait()
        sent.wait()


def allgather_steps(group: Group, flat, part_of: str = "allgather", tag: int = 0) -> Steps:
    """Fill `flat` on every rank, in place, from chunk r of rank r."""
    rank, size = group.rank, group.size
    bounds = chunk_bounds(flat.size, size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        arriving = _chunk(flat, bounds, rank - step - 1)
        received = group.irecv(arriving, left, tag, part_of=part_of)
        sent = group.isend(_chunk(flat, bounds, rank - step), right, tag, part_of=part_of)
        yield received, sent
        received.wait()
        sent.wait()


def allreduce_steps(group: Group, flat, tag: int = 0) -> Steps:
    """Sum `flat` over the ranks, in place. All ranks of the group run it."""
    yield from reduce_scatter_steps(group, flat, "allreduce", tag)
    yield from allgather_steps(group, flat, "allreduce", tag)


def run(steps: Steps) -> None:
    """Run an algorithm through, waiting for its messages as they are needed."""
    for _ in steps:
        pass


def _chunk(flat, bounds: list[int], index: int):
    index %= len(bounds) - 1
    return flat[bounds[index] : bounds[index + 1]]
