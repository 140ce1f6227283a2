"""Ledger: what was sent, by mesh axis and operation.

    axis   op         calls     bytes   seconds
    tp     allreduce     16   1048576     0.021
    pp     isend          8    262144     0.002

`bytes` is what this rank sends. Of a collective that MPI carries out itself nobody outside the
library can see the messages, so it is counted as what a ring would send (Thakur et al. 2005):

    all-reduce                    2 (p-1)/p of the array
    reduce-scatter, all-gather      (p-1)/p of the full array
    all-to-all                      (p-1)/p of the array (what leaves the rank)
    broadcast                     (p-1) copies of the array, on the root
"""

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

    def rows(self) -> list[dict]:
        """One dict per row, sorted: axis, op, calls, bytes, seconds."""
        return [
            {"axis": axis, "op": op, **vars(row)} for (axis, op), row in sorted(self._rows.items())
        ]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is counted inside is forgotten: evaluation and sampling are not training traffic."""
        kept, self._rows = self._rows, {}
        try:
            yield
        finally:
            self._rows = kept

    @staticmethod
    def merge(ledgers: list[list[dict]]) -> list[dict]:
        """Add up the `rows()` of several ranks."""
        total = Ledger()
        for row in (row for rows in ledgers for row in rows):
            counts = {key: row[key] for key in ("calls", "bytes", "seconds")}
            total.add(row["axis"], row["op"], **counts)
        return total.rows()


def ring_bytes(op: str, array_bytes: int, size: int) -> int:
    """Bytes that one rank of `size` sends for a collective, as a ring carries it out.

    `array_bytes` is the array that `op` reduces, or the full one that it gathers, scatters or
    exchanges. Exact where `size` divides it; rounded to the nearest byte where it does not.
    """
    factor = 2 if op == "allreduce" else 1
    return round(factor * (size - 1) * array_bytes / size)
