"""All-reduce through shared memory: ranks of one node read each other's arrays, and send nothing.

An MPI window (`MPI_Win_allocate_shared`) is memory that all ranks of a node see. Each rank owns a
part of it, in which it alone writes:

    count | two short slots | one block, cut in p chunks | sums

Long arrays go through the block, piece by piece, each in three moves with a barrier between:

    copy in    each rank writes its array into its block, but for its own chunk
    reduce     rank r adds up chunk r of all ranks, straight from their memory, into its sums
    copy out   each rank reads the sums of the other ranks

so that every element is added once, in rank order, wherever it is added: all ranks get the same
bits, and get them again. A rank reads and writes about twice the array: the limit is the bandwidth
of memory, or of the caches where the blocks stay in them.

Short arrays take one barrier: each rank writes into a slot and adds up all slots itself. The next
call uses the other slot, and only after a call has every rank read the slot before the last.

A barrier is a count that each rank raises in its part, and waits for in the others'.
`MPI_Win_sync` orders it with what was written before and is read after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpiparallel.comm.group import POLLS, Group, Pending, yield_processor
from mpiparallel.comm.ledger import ring_bytes
from mpiparallel.comm.ring import Steps, chunk_bounds, run

SMALL = 64 * 1024  # bytes that one barrier moves faster than two
BLOCK = 4 << 20  # bytes of a rank: smaller stays in caches, larger takes fewer barriers
STRIP = 128 * 1024  # bytes that are added at a time: the sums are copied while a cache has them
_TRIES = range(1, 1000)  # of a short all-reduce to see the others come, before it waits as others

_SUMMED = "?bhilqBHILQfdgFDG"  # dtypes that are summed as they are: not float16
_LINE = 128  # bytes: counts of two ranks never share a cache line


class Window:
    """Shared memory of the ranks of `group`, all on one node. They make and free it together.

    Takes BLOCK bytes and a little per rank.
    """

    def __init__(self, group: Group):
        self.group, self._rank, self._axis = group, group.rank, group.axis
        rank, size = group.rank, group.size
        self._chunk_bytes = BLOCK // size // _LINE * _LINE
        block = self._chunk_bytes * size
        length = _LINE + 2 * SMALL + block + self._chunk_bytes
        assert isinstance(group.communicator, MPI.Intracomm)
        self._window = MPI.Win.Allocate_shared(length, 1, comm=group.communicator)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory = [self._window.Shared_query(owner)[0] for owner in range(size)]
        cuts = np.cumsum([_LINE, SMALL, SMALL, block])
        counts, first, second, self._blocks, self._sums = zip(
            *(np.split(np.asarray(part), cuts) for part in memory),
            strict=True,
        )
        self._slots = first, second
        self._others = [memoryview(count[:8]).cast("B").cast("q") for count in counts]
        self._count = self._others.pop(rank)
        self._polls = 1 if group.crowded else POLLS
        self._barriers = self._turn = 0
        self._taken = self._served = 0  # all-reduces begun, and ended
        self._slots_as = lru_cache(maxsize=256)(self._view_slots)
        self._count[0] = 0
        self._window.Sync()
        group.communicator.Barrier()

    def free(self) -> None:
        """Give the memory back. All ranks of the group call it."""
        self._slots_as.cache_clear()
        del self._count, self._others, self._slots, self._blocks, self._sums
        self._window.Unlock_all()
        self._window.Free()

    def allreduce_steps(self, flat: np.ndarray) -> Steps:
        """Sum `flat` over the ranks, in place. All ranks of the group run it.

        flat : contiguous 1-D array, the same length and dtype on every rank, at least float32 wide
            where it is floating. Nothing is sent; the ledger counts what a ring would send.
        All-reduces on one window are carried out one after the other, in the order of these calls.
        """
        self._taken += 1
        return self._in_turn(flat, self._taken - 1)

    def allreduce_at_once(self, array: np.ndarray) -> bool:
        """The same as `allreduce_steps` run through and counted, at the least cost per call.

        False, and nothing done, for what it does not take: more than SMALL bytes, memory or a dtype
        that cannot be summed in place, or any array while another all-reduce is under way.
        """
        if (
            array.nbytes > SMALL
            or self._taken != self._served
            or not array.flags.carray  # contiguous, aligned and writable
            or array.dtype.char not in _SUMMED
        ):
            return False
        self._taken += 1
        flat = array if array.ndim == 1 else array.reshape(-1)
        slots, sent = self._fill_slot(flat)
        for polls in _TRIES:
            if self._all_came():
                break
            if polls % self._polls == 0:
                yield_processor()
        else:
            run(self._wait_for("with its ranks", self._all_came))
        self._sum_slots(slots, flat, sent, calls=1)
        return True

    def _in_turn(self, flat: np.ndarray, ticket: int) -> Steps:
        if self._served != ticket:
            yield from self._wait_for("behind an earlier one", lambda: self._served == ticket)
        if flat.nbytes <= SMALL:
            slots, sent = self._fill_slot(flat)
            yield from self._wait_for("with its ranks", self._all_came)
            self._sum_slots(slots, flat, sent)
        else:
            yield from self._through_blocks(flat)

    def _through_blocks(self, flat: np.ndarray) -> Steps:
        rank, size = self.group.rank, self.group.size
        bounds = chunk_bounds(flat.size, size)
        length = self._chunk_bytes // flat.itemsize  # of a piece of a chunk, in elements
        strip = STRIP // flat.itemsize
        blocks = [block.view(flat.dtype).reshape(size, -1) for block in self._blocks]
        sums = [part.view(flat.dtype) for part in self._sums]
        others = [(rank + step) % size for step in range(1, size)]
        for offset in range(0, -(-flat.size // size), length):
            pieces = [
                flat[start + offset : min(start + offset + length, end)]
                for start, end in pairwise(bounds)
            ]
            for other in others:
                blocks[rank][other, : pieces[other].size] = pieces[other]
            self._come()
            yield from self._wait_for("with its ranks", self._all_came)

            mine = pieces[rank]
            total = sums[rank][: mine.size]
            terms = [block[rank, : mine.size] for block in blocks]
            terms[rank] = mine
            for start in range(0, mine.size, strip):
                part = slice(start, start + strip)
                np.add(terms[0][part], terms[1][part], out=total[part])
                for term in terms[2:]:
                    total[part] += term[part]
                mine[part] = total[part]
            self._come()
            yield from self._wait_for("with its ranks", self._all_came)

            for other in others:
                pieces[other][...] = sums[other][: pieces[other].size]
        self._served += 1
        sent = ring_bytes("allreduce", flat.nbytes, size, rank)
        self.group.ledger.add(self._axis, "allreduce", bytes=sent)

    def _fill_slot(self, flat: np.ndarray) -> tuple[list[np.ndarray], int]:
        """Show the array to the others; the slots of all, to be read when all have come, and the
        bytes to be counted."""
        self._turn = turn = 1 - self._turn
        slots, sent = self._slots_as(turn, flat.dtype, flat.size)
        slots[self._rank][...] = flat
        self._come()
        return slots, sent

    def _sum_slots(
        self, slots: list[np.ndarray], flat: np.ndarray, sent: int, calls: int = 0
    ) -> None:
        np.add(slots[0], slots[1], flat)  # by position: a tenth of what a short one takes here
        if len(slots) > 2:
            for slot in slots[2:]:
                np.add(flat, slot, flat)
        self._served += 1
        row = self.group.ledger.row(self._axis, "allreduce")
        row.calls += calls
        row.bytes += sent

    def _view_slots(self, turn: int, dtype: np.dtype, length: int) -> tuple[list[np.ndarray], int]:
        slots = [slot.view(dtype)[:length] for slot in self._slots[turn]]
        return slots, ring_bytes("allreduce", slots[0].nbytes, len(slots), self._rank)

    # ---- the barrier ----

    def _come(self) -> None:
        self._barriers += 1
        self._window.Sync()
        self._count[0] = self._barriers

    def _all_came(self) -> bool:
        barriers = self._barriers
        for count in self._others:
            if count[0] < barriers:
                return False
        self._window.Sync()
        return True

    def _wait_for(self, whom: str, ready: Callable[[], bool]) -> Steps:
        pending = Pending(self.group, "allreduce", whom, ready, lambda: None)
        yield (pending,)
        pending.wait()
