"""`bench matmul`: the rate of plain matrix products, which everything else is measured against."""

from __future__ import annotations

import time

import numpy as np

from mpiparallel import backend
from mpiparallel.backend import xp
from mpiparallel.mesh import Mesh


def matmul_rate(dtype: str, *, seconds: float, size: int | None = None) -> float:
    """FLOP/s of products of two (size, size) matrices on this rank: the mean over repetitions for
    `seconds`, at least three. No message. size : what fills the backend's processor, if None."""
    size = size or backend.current().matmul_size
    generator = np.random.default_rng(0)
    a, b = (
        backend.from_host(generator.standard_normal((size, size)).astype(dtype)) for _ in range(2)
    )
    out = xp.empty_like(a)
    xp.matmul(a, b, out=out)
    backend.synchronize()
    spent, count = 0.0, 0
    while spent < seconds or count < 3:
        start = time.perf_counter()
        xp.matmul(a, b, out=out)
        backend.synchronize()
        spent += time.perf_counter() - start
        count += 1
    return 2 * size**3 * count / spent


def matmul_peak(mesh: Mesh, dtype: str, *, seconds: float = 0.2) -> float:
    """FLOP/s of all ranks together, multiplying at the same time on the cores that they share.

    Every rank calls and gets the sum. Not counted in the ledger.
    """
    with mesh.ledger.aside():
        mesh.world.allreduce(np.zeros(1))  # so that all start together
        rate = matmul_rate(dtype, seconds=seconds)
        return float(mesh.world.allreduce(np.array([rate]))[0])
