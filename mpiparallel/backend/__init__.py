"""The array library behind one seam: layer code says `xp` and `kernels`, and never `numpy`.

    from mpiparallel.backend import kernels, xp

    y = xp.matmul(x, w)          the functions that NumPy and CuPy share
    y, saved = kernels.gelu(y)   the fused elementwise kernels: one name, an implementation each

MPI reads host memory: `to_host` and `from_host` are where a device array would be staged, and
`comm.Group` is their only user.
"""

import numpy as np

from mpiparallel.backend import numpy_kernels as kernels

xp = np


def to_host(array) -> np.ndarray:
    """The array in host memory; the array itself where it is there already."""
    return np.asarray(array)


def from_host(array: np.ndarray):
    """A host array as an array of the backend; the array itself where that is NumPy."""
    return array


__all__ = ["from_host", "kernels", "to_host", "xp"]
