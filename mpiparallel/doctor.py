"""`doctor`: what is here, and what of it will hurt.

    $ mpirun -n 8 python -m mpiparallel doctor --tp 2
    MPI            MPICH 5.0.2 ...
    ranks          8 on 1 node (8), dp=4 x pp=1 x tp=2
    cores          2
    ...
    ! 8 ranks on the 2 cores of node 0
      start at most 2 ranks on it; ...

Ranks gather the facts; `judge` looks at them alone, so that it can be tested with the facts of
clusters that one does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiparallel import settings as settings_module
from mpiparallel.settings import Settings

# What launchers tell a process: how many they started, and which of them it is.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The mesh to be judged, and --json."""
    settings_module.add_arguments(parser, ["dp", "pp", "tp", "timeout"])
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")


def launched(environment: Mapping[str, str]) -> tuple[int, int]:
    """(how many processes the launcher started, which one this is), by its own word; (1, 0) where
    no launcher says anything, and of several the one that started the most."""
    said = [(environment.get(size, ""), environment.get(rank, "0")) for size, rank in _LAUNCHERS]
    return max(
        (int(size), int(rank))
        for size, rank in [*said, ("1", "0")]
        if (size + rank).isdecimal() and size
    )


def prepare(arguments: argparse.Namespace, rank: int, ranks: int) -> tuple[Settings]:
    """The checked sizes of the mesh. Raises UserError."""
    wanted = settings_module.from_arguments(arguments)
    if launched(os.environ)[0] > ranks == 1:
        wanted = Settings(timeout=wanted.timeout)  # the mesh cannot be had, and the reason is told
    # A model that any mesh can carry: the mesh is judged, and not the model.
    tp, pp = wanted.tp, wanted.pp
    model = dict(heads=tp, hidden=tp, feed_forward=tp, layers=pp, global_batch=ranks)
    return (settings_module.check(Settings(**{**dataclasses.asdict(wanted), **model}), ranks),)


def run(arguments: argparse.Namespace, mesh, settings: Settings) -> None:
    """Gather, judge and print; the first process prints. Every rank calls."""
    facts = gather(mesh)
    if mesh.rank or (mesh.size == 1 and launched(os.environ)[1] > 0):
        return
    findings = judge(facts)
    if arguments.json:
        print(json.dumps({**facts, "findings": findings}))
        return
    print(describe(facts))
    for finding in findings:
        print(f"! {finding['finding']}\n  {finding['advice']}")
    if not findings:
        print("nothing to complain of")


def gather(mesh) -> dict[str, Any]:
    """The facts of all ranks, on every rank. Every rank calls."""
    import mpi4py
    from mpi4py import MPI
    from threadpoolctl import threadpool_info

    from mpiparallel import backend
    from mpiparallel.backend.choice import device_trouble

    mesh.limit_blas_threads()
    libraries = [info for info in threadpool_info() if info["user_api"] == "blas"]
    mine = {
        "cores": mesh.node_cores,
        "blas_threads": max((info["num_threads"] for info in libraries), default=1),
        "gpu_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
    }
    every = mesh.world.allgather_json(mine)
    first = [mesh.node_of.index(node) for node in range(mesh.nodes)]
    current = backend.current()
    return {
        "mpi": " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()),
        "mpi4py": mpi4py.__version__,
        "launched": launched(os.environ)[0],
        "ranks": mesh.size,
        "mesh": dict(zip(("dp", "pp", "tp"), mesh.shape, strict=True)),
        "node_of_rank": mesh.node_of,
        "ranks_per_node": [mesh.node_of.count(node) for node in range(mesh.nodes)],
        "cores_per_node": [every[rank]["cores"] for rank in first],
        "blas": sorted({f"{info['internal_api']} {info['version']}" for info in libraries}),
        "blas_threads": [rank["blas_threads"] for rank in every],
        "gpus_per_node": [every[rank]["gpu_files"] for rank in first],
        "cupy": device_trouble() or "a GPU answers",
        "backend": current.name,
        "gpu_aware": bool(getattr(current, "gpu_aware", False)),
        "python": sys.version.split()[0],
    }


def describe(facts: dict[str, Any]) -> str:
    """The facts as lines."""
    nodes = facts["ranks_per_node"]
    mesh = " x ".join(f"{axis}={size}" for axis, size in facts["mesh"].items())
    plural = "s" if len(nodes) > 1 else ""
    rows = {
        "MPI": f"{facts['mpi']}, mpi4py {facts['mpi4py']}, Python {facts['python']}",
        "ranks": f"{facts['ranks']} on {len(nodes)} node{plural} ({_listed(nodes)}), {mesh}",
        "cores": f"{_listed(facts['cores_per_node'])} that the ranks of a node may use",
        "BLAS": f"{_listed(facts['blas']) or 'none found'}, "
        f"{_listed(sorted(set(facts['blas_threads'])))} threads a rank",
        "GPU": f"{_listed(facts['gpus_per_node'])} on a node; CuPy: {facts['cupy']}",
        "backend": facts["backend"]
        + (", device arrays handed to MPI as they are" if facts["gpu_aware"] else ""),
    }
    return "\n".join(f"{name:<10}{text}" for name, text in rows.items())


def judge(facts: dict[str, Any]) -> list[dict[str, str]]:
    """What will hurt, each with what to do: {"finding", "advice"}. No message, no clock."""
    found: list[dict[str, str]] = []

    def say(finding: str, advice: str) -> None:
        found.append({"finding": finding, "advice": advice})

    if facts["launched"] > facts["ranks"] == 1:
        say(
            f"the launcher started {facts['launched']} processes, and each is rank 0 of 1",
            f"mpirun is of another MPI than mpi4py's ({facts['mpi']}): start with that MPI's own, "
            "or build mpi4py anew with yours: pip install --force-reinstall --no-binary mpi4py "
            "mpi4py",
        )
    node_of, threads = facts["node_of_rank"], facts["blas_threads"]
    for node, (ranks, cores) in enumerate(
        zip(facts["ranks_per_node"], facts["cores_per_node"], strict=True)
    ):
        if ranks > cores:
            say(
                f"{ranks} ranks on the {cores} cores of node {node}",
                f"it works, ranks that wait give their core away; for speed start at most {cores}",
            )
        used = sum(threads[rank] for rank, where in enumerate(node_of) if where == node)
        if used > max(ranks, cores):
            say(
                f"{used} BLAS threads on the {cores} cores of node {node}",
                "unset OMP_NUM_THREADS and its like, so that ranks share the cores out, or set it "
                f"to {max(1, cores // ranks)}",
            )
    tp = facts["mesh"]["tp"]
    spread = [
        rank for rank in range(0, facts["ranks"], tp) if len(set(node_of[rank : rank + tp])) > 1
    ]
    if spread:
        fewest = min(facts["ranks_per_node"])
        legal = [size for size in range(1, fewest + 1) if fewest % size == 0]
        say(
            f"{len(spread)} of {facts['ranks'] // tp} tensor groups span nodes, the one of rank "
            f"{spread[0]} first",
            "every layer then all-reduces over the network: choose --tp among "
            f"{_listed(legal)}, and number ranks node by node (mpirun's default; srun "
            "--distribution=block)",
        )
    if max(facts["gpus_per_node"]) and facts["backend"] != "cupy":
        say(
            f"there is a GPU, and it will not be used: {facts['cupy']}",
            'pip install -e ".[cuda12]" or ".[cuda13]", and see that every rank may use a GPU',
        )
    if facts["backend"] == "cupy" and not facts["gpu_aware"]:
        say(
            "MPI cannot see the GPU: arrays go through pinned host memory",
            "an MPI that was built with CUDA takes them as they are; if yours is one and the probe "
            "failed, MPIPARALLEL_GPU_AWARE=1 says so",
        )
    return found


def _listed(values) -> str:
    return ", ".join(map(str, values))
