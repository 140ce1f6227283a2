"""--backend: which array library, which GPU, and how its arrays reach MPI. Once per process.

    auto     CuPy where it imports and a device answers on every rank, else NumPy
    cupy     CuPy; without a device an error
    numpy    NumPy

Rank r of a node with g GPUs takes GPU r mod g; several ranks may share one.
"""

from __future__ import annotations

import os
import subprocess
import sys

from mpiparallel import backend
from mpiparallel.backend.numpy_backend import NumpyBackend
from mpiparallel.errors import UserError

NAMES = ("auto", "numpy", "cupy")
AWARE = "MPIPARALLEL_GPU_AWARE"
PROBE_SECONDS = 60

# What launchers tell a process of its job: the probe is a job of its own.
_LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE", "HYDI_", "HYDRA_", "MPIR_", "MPI_LOCAL", "SLURM_")


def device_trouble() -> str | None:
    """Why no GPU can be used in this process; None where one answers."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        return "CuPy is not installed" if error.name == "cupy" else _cannot_import(error)
    except Exception as error:  # a broken installation of CUDA raises anything
        return _cannot_import(error)
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "there is no GPU"
        cupy.cuda.runtime.memGetInfo()
    except Exception as error:
        return f"no GPU answers ({_first_line(error)})"
    return None


def choose(name: str, world) -> None:
    """Install the backend that `name` asks for. Every rank of the mpi4py communicator calls.

    The backend's `reason` says in one line which it is and why. Raises UserError on all ranks
    where cupy is asked for and any rank has no device, or where the override is not 0 or 1.
    """
    if name == "numpy":
        backend.install(NumpyBackend("backend numpy, as asked"))
        return
    troubles = [
        f"{text} on rank {rank}"
        for rank, text in enumerate(world.allgather(device_trouble()))
        if text is not None
    ]
    if troubles and name == "cupy":
        raise UserError(
            f"--backend cupy: {troubles[0]}; legal here: numpy, auto (CuPy comes with "
            'pip install -e ".[cuda12]" or ".[cuda13]")'
        )
    if troubles:
        backend.install(NumpyBackend(f"backend numpy: {troubles[0]}"))
        return
    _install_cupy(world)


def _install_cupy(world) -> None:
    import cupy
    from mpi4py import MPI

    from mpiparallel.backend.cupy_backend import CupyBackend

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    gpus = cupy.cuda.runtime.getDeviceCount()
    mine = node.rank % gpus
    sharing = len(range(mine, node.size, gpus))
    ranks = node.size
    node.Free()
    aware, why = world.bcast(mpi_takes_device_arrays() if world.rank == 0 else None)
    if aware is None:
        raise UserError(why)
    model = cupy.cuda.runtime.getDeviceProperties(mine)["name"]
    model = model.decode() if isinstance(model, bytes) else model
    reason = (
        f"backend cupy: {ranks} rank{'s' * (ranks > 1)} on {gpus} {model} a node, device arrays "
        f"{'handed to MPI' if aware else 'through pinned host memory'} ({why})"
    )
    backend.install(CupyBackend(mine, gpu_aware=aware, reason=reason, sharing=sharing))


def mpi_takes_device_arrays() -> tuple[bool | None, str]:
    """(whether MPI takes pointers to device memory, how that is known); None for a wrong override.

    MPIPARALLEL_GPU_AWARE=0/1 decides; else what the library says of itself; else a device array
    is sent in a job of its own, which may crash. What is not proved is
    taken to be false.
    """
    override = os.environ.get(AWARE)
    if override is not None:
        if override not in ("0", "1"):
            return None, f"{AWARE}={override}: legal: 0, 1"
        return override == "1", f"{AWARE}={override}"
    from mpi4py import MPI

    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    if "cuda" in kinds.split(","):
        return True, "MPI says so"
    return probe([sys.executable, "-m", "mpiparallel.comm.gpu_probe"])


def probe(command: list[str]) -> tuple[bool, str]:
    """Run a probe as a job of its own: (whether it proved its case, in words)."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    try:
        done = subprocess.run(command, env=own, capture_output=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"the probe of MPI gave up: {type(error).__name__}"
    if done.returncode == 0 and done.stdout.strip().endswith(b"proved"):
        return True, "a probe of MPI sent one"
    return False, f"a probe of MPI could not send one: status {done.returncode}"


def _cannot_import(error: BaseException) -> str:
    return f"CuPy cannot be imported ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
