"""The array library behind one seam: layer code says `xp` and `kernels`, and never `numpy`.

    from mpiparallel.backend import kernels, xp

    y = xp.matmul(x, w)          the functions that NumPy and CuPy share
    y, saved = kernels.gelu(y)   the fused elementwise kernels: one name, an implementation each

A process starts with NumPy. `choice.choose` installs what --backend asks for, once, before any
array is made; `xp` and `kernels` are then the chosen ones in every module that imported them.
Tokens, labels, text and scalars that ranks agree on stay NumPy arrays: `from_host` and `to_host`
are the two ways across, and `comm.Group` takes arrays of either side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiparallel.backend.numpy_backend import NumpyBackend

_backend: Any = NumpyBackend()


class _Chosen:
    """The names of one module of the installed backend.

    A name is looked up when it is first used and is an attribute from then on: later uses cost
    what an attribute of a module costs.
    """

    def __init__(self, module: str):
        self._module = module

    def __getattr__(self, name: str):
        value = getattr(getattr(_backend, self._module), name)
        self.__dict__[name] = value
        return value

    def forget(self) -> None:
        """Look every name up anew."""
        module = self._module
        self.__dict__.clear()
        self._module = module


xp: Any = _Chosen("xp")
kernels: Any = _Chosen("kernels")


def install(backend) -> None:
    """Make `backend` the one that all arrays from now on belong to."""
    global _backend
    _backend = backend
    for chosen in (xp, kernels):
        chosen.forget()


def current():
    """The installed backend: a NumpyBackend or a CupyBackend."""
    return _backend


def on_host(array) -> bool:
    """Whether an array is in host memory, where MPI can always reach it."""
    return isinstance(array, np.ndarray | np.generic)


def library_of(array):
    """The library whose functions take this array: NumPy in host memory, else the backend's."""
    return np if on_host(array) else _backend.xp


def to_host(array) -> np.ndarray:
    """The array in host memory; the array itself where it is there already. Waits for the device
    to have computed it."""
    return np.asarray(array) if on_host(array) else _backend.download(array)


def from_host(array: np.ndarray):
    """A host array as an array of the backend; the array itself where that is NumPy."""
    return _backend.from_host(array)


def synchronize() -> None:
    """Wait until the device has done all that it was told; nothing to wait for with NumPy."""
    _backend.synchronize()


__all__ = [
    "current",
    "from_host",
    "install",
    "kernels",
    "library_of",
    "on_host",
    "synchronize",
    "to_host",
    "xp",
]
