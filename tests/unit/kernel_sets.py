"""The two implementations of the kernels, to be called with NumPy arrays in tests.

"cupy" is `cupy_kernels` and `kernels.cu`, on a GPU where there is one, and else on the stand-in
for CuPy with the CUDA source compiled for the CPU.
"""

import importlib
import sys
import types

import numpy as np
import pytest
import strict_array
from cuda_on_cpu import COMPILER, RawModule

from mpiparallel.backend import choice, numpy_kernels

NAMES = [
    name
    for name, value in vars(numpy_kernels).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
]


def kernel_set(which, monkeypatch):
    """The functions of numpy_kernels by name."""
    if which == "numpy":
        return numpy_kernels
    if choice.device_trouble() is None:
        return _on_gpu()
    if COMPILER is None:
        pytest.skip("no GPU, and no g++ to run CUDA's source on the CPU")
    return _on_cpu(monkeypatch)


def _on_cpu(monkeypatch):
    modules = strict_array.modules()
    modules["cupy"].RawModule = RawModule
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mpiparallel.backend.cupy_kernels", raising=False)
    ours = importlib.import_module("mpiparallel.backend.cupy_kernels")
    monkeypatch.setattr(ours, "THREADS", 4)
    monkeypatch.setattr(ours, "_module", _compiled(ours))
    # The arrays that tests make are the device's memory: what is in place changes them.
    return _adapted(ours, strict_array.StrictArray, lambda *_: None)


_libraries: dict = {}


def _compiled(ours):
    """`_module`, compiling each dtype once for all tests."""
    plain = ours._module.__wrapped__

    def module(dtype):
        if dtype not in _libraries:
            _libraries[dtype] = plain(dtype)
        return _libraries[dtype]

    return module


def _on_gpu():
    import cupy

    from mpiparallel.backend import cupy_kernels

    def back(given, device):
        given[...] = device.get()

    return _adapted(cupy_kernels, cupy.asarray, back)


def _adapted(kernels, to_device, write_back):
    """The kernels for NumPy arrays; what is in place is written back to them."""

    def up(value):
        if isinstance(value, tuple):
            return tuple(map(up, value))
        return to_device(value) if isinstance(value, np.ndarray) else value

    def down(value):
        if isinstance(value, tuple):
            return tuple(map(down, value))
        return value.get() if hasattr(value, "get") else value

    def adapt(function):
        def call(*arguments, **keywords):
            device = [up(each) for each in arguments]
            result = function(*device, **keywords)
            for given, changed in zip(arguments, device, strict=True):
                if isinstance(given, np.ndarray):
                    write_back(given, changed)
            return down(result)

        return call

    return types.SimpleNamespace(**{name: adapt(getattr(kernels, name)) for name in NAMES})
