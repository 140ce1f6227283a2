"""`bench allreduce`: our all-reduces beside MPI_Allreduce, from 8 bytes to 64 MiB.

Every algorithm takes its turn in each round, in the same run, so that all meet the same machine;
of the rounds the median counts, of the ranks the slowest. `mpi` is the library's own call on the
bare communicator, in place like ours. Bandwidth is 2(p-1)/p of the array over that time.

The limit inside a node is memory: `memcpy_bytes_per_second` is what one rank copies in the same
run, while all copy. An all-reduce through shared memory copies every byte in and out again and
reads it to be added: the bandwidth of a copy is beyond its reach, and a share of a half is good.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpiparallel.backend import on_host, synchronize, xp
from mpiparallel.comm.allreduce import allreduce, choose, library_allreduce
from mpiparallel.comm.group import Group
from mpiparallel.mesh import Mesh

SIZES = (*(8**power for power in range(1, 8)), 2**24, 2**26)  # bytes
ROUNDS = 15
ROUND_SECONDS = 0.01  # of each algorithm, at least one call


def measure_allreduce(mesh: Mesh, dtype: str, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """One row per size (bytes) and algorithm, on the dp axis. Every rank calls, and gets all.

    Of our algorithms the one that `auto` takes has no row of its own. Not counted in the ledger.
    """
    group, rows = mesh.dp, []
    share = 2 * (group.size - 1) / group.size
    with mesh.ledger.aside():
        for size in sizes:
            array = xp.zeros(max(1, size // np.dtype(dtype).itemsize), dtype)
            for algorithm, seconds in _medians(group, _contestants(group, array), array).items():
                row = {"ranks": group.size, "bytes": array.nbytes, "algorithm": algorithm}
                rate = share * array.nbytes / seconds
                rows.append(row | {"seconds": seconds, "bytes_per_second": rate})
        copy = xp.empty_like(array)
        seconds = _medians(group, {"memcpy": partial(_copy_to, copy)}, array)["memcpy"]
    return {"rows": rows, "memcpy_bytes_per_second": array.nbytes / seconds}


def table(result: dict[str, Any]) -> str:
    """A line per size: the bandwidth of `mpi`, and of the others as multiples of it."""
    copy = result["memcpy_bytes_per_second"]
    lines = [f"memcpy {copy / 1e9:.1f} GB/s while every rank copies; all-reduce in GB/s:"]
    rates: dict[int, dict[str, float]] = {}
    for row in result["rows"]:
        rates.setdefault(row["bytes"], {})[row["algorithm"]] = row["bytes_per_second"]
    for size, by_name in rates.items():
        cells = [f"{name} {rate / 1e9:.4f}" for name, rate in by_name.items()]
        auto = by_name["auto"]
        lines.append(
            f"{size:>10}  {'  '.join(cells)}  auto: {auto / by_name['mpi']:.2f} x mpi, "
            f"{auto / copy:.2f} of memcpy"
        )
    return "\n".join(lines)


def _copy_to(copy, array) -> None:
    copy[...] = array


def _contestants(group: Group, array) -> dict[str, Callable]:
    contestants: dict[str, Callable] = {
        "mpi": library_allreduce(group),
        "auto": partial(allreduce, group),
    }
    auto = choose(group, array.nbytes, on_host(array))
    for name in sorted({"ring", "recursive_doubling"} - {auto}):
        contestants[name] = partial(allreduce, group, algorithm=name)
    return contestants


def _medians(group: Group, contestants: dict, array) -> dict[str, float]:
    """Seconds of a call of each: the median over rounds, on the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    calls = dict.fromkeys(contestants, 1)
    for number in range(ROUNDS + 2):
        for name, run in contestants.items():
            group.allreduce(np.zeros(1))  # all start together
            start = time.perf_counter()
            for _ in range(calls[name]):
                run(array)
            synchronize()
            seconds = (time.perf_counter() - start) / calls[name]
            if number < 2:  # to warm up, and to find how many calls make a round
                slowest = float(group.allreduce(np.array([seconds]), "max")[0])
                calls[name] = max(1, min(1000, int(ROUND_SECONDS / slowest)))
            else:
                times[name].append(seconds)
    medians = np.array([statistics.median(times[name]) for name in contestants])
    return dict(zip(contestants, group.allreduce(medians, "max").tolist(), strict=True))
