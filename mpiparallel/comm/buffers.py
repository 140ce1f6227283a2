"""Buffers: what MPI is handed, and what may be asked of it.

MPI takes contiguous memory of the dtypes that it knows, counts its elements in a C int, and says
little when it is given anything else. Here arrays are checked, flattened and cut to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import numpy as np
from mpi4py import MPI

from mpiparallel import backend

# MPI counts elements in a C int: longer messages are cut into pieces of at most this many.
MAX_ELEMENTS = 2**31 - 1

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_BOOL_OPS = {"sum": MPI.LOR, "max": MPI.LOR, "min": MPI.LAND}  # what NumPy's add, max, min do


def complete(requests: list) -> Callable[[], bool]:
    """Asks whether all of the requests are complete; MPI's, or others that have a Test."""
    if len(requests) == 1:
        return requests[0].Test
    if requests and not isinstance(requests[0], MPI.Request):
        return lambda: all(request.Test() for request in requests)
    return partial(MPI.Request.Testall, requests)


def pieces(count: int) -> Iterator[slice]:
    """Slices of at most MAX_ELEMENTS that together cover `count` elements; none for none."""
    for start in range(0, count, MAX_ELEMENTS):
        yield slice(start, min(start + MAX_ELEMENTS, count))


def parts(flat) -> list:
    """The same pieces of a one-dimensional array; itself where one piece is enough."""
    if 0 < flat.size <= MAX_ELEMENTS:
        return [flat]
    return [flat[piece] for piece in pieces(flat.size)]


def raw(array, library):
    """The bytes of an array, one-dimensional; of a copy, where it is not contiguous.
    library : NumPy for a host array, CuPy for a device array."""
    if array.dtype.hasobject:
        raise TypeError(f"MPI cannot send Python objects: the array has dtype {array.dtype}")
    return library.ascontiguousarray(array).reshape(-1).view(np.uint8)


def output(out, shape: tuple[int, ...], dtype, like):
    """`out`, checked, or a new array where the caller gave none, in host or device memory as the
    array `like` is."""
    if out is None:
        return backend.library_of(like).empty(shape, dtype)
    if backend.on_host(out) != backend.on_host(like):
        raise ValueError("out and the array must both be in host or both in device memory")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype}{out.shape}, the result is {dtype}{shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def check_dim(array, dim: int) -> int:
    if not -array.ndim <= dim < array.ndim:
        raise ValueError(f"dim {dim} is out of range for an array of {array.ndim} dims")
    return dim % array.ndim


@cache
def reduction(dtype: np.dtype, op: str) -> tuple[np.dtype, MPI.Op]:
    """The dtype to reduce in and the MPI operation."""
    if op not in _OPS:
        raise ValueError(f"op={op!r} is not a reduction: use one of {', '.join(_OPS)}")
    if dtype == np.float16:
        return np.dtype(np.float32), _OPS[op]
    dtype = dtype.newbyteorder("=")
    if dtype == np.bool_:
        return dtype, _BOOL_OPS[op]
    if dtype.kind not in "iuf" and not (dtype.kind == "c" and op == "sum"):
        raise TypeError(f"MPI has no {op} of dtype {dtype}")
    return dtype, _OPS[op]
