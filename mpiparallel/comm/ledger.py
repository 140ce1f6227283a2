"""Ledger: what was sent, by mesh axis and operation.

    axis   op         calls     bytes   seconds
    tp     allreduce     16   1048576     0.021
    pp     isend          8    262144     0.002

`bytes` is what this rank sends. Of a collective that MPI carries out itself nobody outside the
library can see the messages, and in shared memory there are none, so both are counted as what a
ring would send (Thakur et al. 2005):

    all-reduce                    2 (p-1)/p of the array
    reduce-scatter, all-gather      (p-1)/p of the full array
    all-to-all                      (p-1)/p of the array (what leaves the rank)
    broadcast                     (p-1) copies of the array, on the root

Added up over the ranks these are exact; of one rank they are those of its chunks, which differ by
a byte where p does not divide the array.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Row:
    """Totals of one operation on one axis: calls, bytes sent by this rank, seconds in the door."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts the operations of one rank. All Groups of a Mesh share one Ledger."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        self._to: Counter[tuple[str, int]] = Counter()

    def row(self, axis: str, op: str) -> Row:
        """The totals of `op` on `axis`, to read or to add to."""
        row = self._rows.get((axis, op))
        if row is None:
            row = self._rows[axis, op] = Row()
        return row

    def add(
        self, axis: str, op: str, *, calls: int = 0, bytes: int = 0, seconds: float = 0
    ) -> None:
        """Count `calls` that sent `bytes` and kept this rank in the door for `seconds`."""
        row = self.row(axis, op)
        row.calls += calls
        row.bytes += bytes
        row.seconds += seconds

    def add_to(self, axis: str, peer: int, bytes: int) -> None:
        """Note that of the bytes on `axis` so many went to its rank `peer`."""
        self._to[axis, peer] += bytes

    def bytes_to(self, axis: str, rank: int, size: int) -> list[int]:
        """Bytes that this rank, the `rank`-th of `size` on `axis`, has sent to each of them: those
        of messages to whom they went, those that are counted as a ring's to its right neighbour."""
        sent = [self._to[axis, peer] for peer in range(size)]
        total = sum(row.bytes for (where, _), row in self._rows.items() if where == axis)
        sent[(rank + 1) % size] += total - sum(sent)
        return sent

    def rows(self) -> list[dict]:
        """One dict per row, sorted: axis, op, calls, bytes, seconds."""
        return [
            {"axis": axis, "op": op, **vars(row)} for (axis, op), row in sorted(self._rows.items())
        ]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is counted inside is forgotten: evaluation and sampling are not training traffic."""
        kept, self._rows, self._to = (self._rows, self._to), {}, Counter()
        try:
            yield
        finally:
            self._rows, self._to = kept

    @staticmethod
    def merge(ledgers: list[list[dict]]) -> list[dict]:
        """Add up the `rows()` of several ranks."""
        total = Ledger()
        for row in (row for rows in ledgers for row in rows):
            counts = {key: row[key] for key in ("calls", "bytes", "seconds")}
            total.add(row["axis"], row["op"], **counts)
        return total.rows()


def ring_bytes(op: str, array_bytes: int, size: int, rank: int) -> int:
    """Bytes that the `rank`-th of `size` ranks sends for a collective, as a ring carries it out.

    `array_bytes` is the array that `op` reduces, or the full one that it gathers, scatters or
    exchanges. It is cut into `size` chunks as even as can be. Over all ranks the sum is exactly
    (size-1) times the array, twice that for an all-reduce.
    """

    def all_but(chunk: int) -> int:
        chunk %= size
        return array_bytes - (array_bytes * (chunk + 1) // size - array_bytes * chunk // size)

    # Reduce-scatter ends with the rank's own chunk, which it never sends; all-gather with its
    # right neighbour's.
    if op == "allreduce":
        return all_but(rank) + all_but(rank + 1)
    return all_but(rank + 1 if op == "allgather" else rank)
