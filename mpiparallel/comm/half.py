"""16-bit numbers as float32 and back: sums are made in float32 and rounded once.

A bfloat16 is the upper half of a float32. NumPy has no such type, so it comes as the dtype of
that name which other packages register, or as its bits in uint16, and then the caller says so.
"""

from __future__ import annotations

import numpy as np

from mpiparallel.backend import library_of


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether this is the dtype that ml_dtypes and its users register; none of them is needed."""
    return dtype.name == "bfloat16"


def widen(bits):
    """bfloat16, as uint16 bits, to float32: exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """float32 to bfloat16, as uint16 bits: to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    library = library_of(values)
    return library.where(library.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
