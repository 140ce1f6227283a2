"""NumPy as the backend: arrays are in host memory, and every function returns when it is done."""

from __future__ import annotations

import numpy as np

from mpiparallel.backend import numpy_kernels


class NumpyBackend:
    """Host memory and this process's cores. `reason` says why it was chosen."""

    name = "numpy"
    xp = np
    kernels = numpy_kernels
    matmul_size = 1024  # of the products that `bench matmul` times

    def __init__(self, reason: str = "backend numpy"):
        self.reason = reason

    def from_host(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def synchronize(self) -> None:
        """Nothing is under way."""

    def out_of_memory(self, error: BaseException) -> str | None:
        """None: NumPy's own message says how much was asked."""
        return None
