"""Coordinates: where a rank is on the mesh. Needs no MPI, so that pictures can be drawn without."""

from __future__ import annotations

from typing import NamedTuple


class Coordinates(NamedTuple):
    """Where a rank is on the mesh."""

    dp: int
    pp: int
    tp: int

    @classmethod
    def of(cls, rank: int, pp: int, tp: int) -> Coordinates:
        """The coordinates of `rank` on a mesh with `pp` stages and `tp` tensor ranks."""
        return cls(rank // (pp * tp), rank // tp % pp, rank % tp)

    def rank(self, pp: int, tp: int) -> int:
        """The rank at these coordinates, on a mesh with `pp` stages and `tp` tensor ranks."""
        return (self.dp * pp + self.pp) * tp + self.tp

    def __str__(self) -> str:
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}"
