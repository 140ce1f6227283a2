"""CuPy as the backend: one GPU per process, its memory, its stream, pinned host memory.

    device array  --download-->  pinned host memory  --MPI-->  pinned host memory  --upload-->

Work is queued on the current stream and functions return before it is done. `download` waits for
it, so what MPI gets is what was computed. Pinned memory is page-locked: the GPU copies from and to
it at full speed. It is slow to allocate, so CuPy keeps what was freed in a pool for the next one.
"""

from __future__ import annotations

import re

import cupy
import cupyx
import numpy as np

from mpiparallel.backend import cupy_kernels


class CupyBackend:
    """One GPU of this node.

    device : its number. gpu_aware : whether MPI takes pointers to its memory. reason : why this
    backend was chosen. sharing : ranks that use the same GPU.
    """

    name = "cupy"
    xp = cupy
    kernels = cupy_kernels
    matmul_size = 4096  # of the products that `bench matmul` times

    def __init__(self, device: int, *, gpu_aware: bool = False, reason: str = "", sharing: int = 1):
        cupy.cuda.Device(device).use()
        self.device, self.gpu_aware, self.sharing = device, gpu_aware, sharing
        self.reason = reason

    def from_host(self, array: np.ndarray):
        """A copy of a host array in device memory."""
        return cupy.asarray(array)

    def synchronize(self) -> None:
        """Wait until the current stream is empty."""
        cupy.cuda.get_current_stream().synchronize()

    def host_empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Pinned host memory; it returns to CuPy's pool with the last reference to the array."""
        return cupyx.empty_pinned(shape, dtype)

    def download(self, array, out: np.ndarray | None = None) -> np.ndarray:
        """A device array in host memory, in `out` if given: contiguous, of its shape and dtype.

        Waits for the stream. Without `out` into pinned memory that no one else holds.
        """
        out = self.host_empty(array.shape, array.dtype) if out is None else out
        array.get(out=out)
        return out

    def upload(self, array: np.ndarray, out) -> None:
        """Copy a host array of the same shape into device memory. Returns when it is there: the
        host memory may be used again."""
        array = np.ascontiguousarray(array, out.dtype).reshape(out.shape)
        if out.flags.c_contiguous:
            out.set(array)
        else:
            out[...] = cupy.asarray(array)
        self.synchronize()

    def bus_id(self) -> str:
        """The address of this GPU on its node: two ranks with one address share it."""
        return str(cupy.cuda.runtime.deviceGetPCIBusId(self.device))

    def out_of_memory(self, error: BaseException) -> str | None:
        """What to say of an error that means that the GPU is full; None for any other.

        Bytes asked, bytes free (on the device, and kept for reuse by this rank), what to change.
        """
        full = isinstance(error, cupy.cuda.memory.OutOfMemoryError)
        if not full and "cudaErrorMemoryAllocation" not in str(error):
            return None
        asked = re.search(r"allocating ([\d,]+) bytes", str(error))
        free, total = cupy.cuda.runtime.memGetInfo()
        kept = cupy.get_default_memory_pool().free_bytes()
        others = f", shared by {self.sharing} ranks" if self.sharing > 1 else ""
        return (
            f"GPU {self.device} is out of memory: {asked[1] if asked else 'unknown'} bytes asked, "
            f"{free:,} of {total:,} free and {kept:,} kept by this rank{others}; use more "
            "--micro-batches, a smaller --global-batch or --seq-len, more --pp or --tp, or fewer "
            "ranks per GPU"
        )
