"""trace.json: the traces of all ranks in one file, for Perfetto (ui.perfetto.dev) or the report.

Chrome's trace event format: a process per pipeline rank, in it a thread per rank, on it a span for
every action and, inside, for every operation that the rank waited for:

    pipeline rank 0
        rank 0 (dp=0, pp=0, tp=0)   | step 3                                         |
                                    | F stage 0 mb 0 | F stage 0 mb 1 | irecv pp |...
                                    |      allreduce tp

Spans of one kind have one name but for the numbers in it, so that viewers give them one colour.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mpiparallel.comm.clock import clock_offset
from mpiparallel.comm.trace import Entry, Trace
from mpiparallel.mesh import Coordinates, Mesh

# Chrome's own names of colours: for work and for the axes.
_COLORS = {
    "F": "good",
    "B": "thread_state_running",
    "I": "thread_state_running",
    "W": "rail_load",
    "optimizer": "rail_animation",
    "step": "grey",
    "tp": "yellow",
    "pp": "bad",
    "dp": "terrible",
    "world": "generic_work",
}


def write(file: Path, trace: Trace, mesh: Mesh) -> int:
    """Merge the traces of all ranks into `file`, on rank 0. All ranks of the mesh call.

    Every other rank sends its part to rank 0, which holds one part at a time. Times are
    microseconds since the first traced step began anywhere, by rank 0's clock. Returns the number
    of entries that found no room in the trace of some rank.
    """
    world = mesh.world
    with mesh.ledger.aside():
        offset = clock_offset(world, mesh.node_of)
        begin = min((entry.start for entry in trace.entries), default=np.inf) + offset
        zero = float(world.allreduce(np.array([begin]), "min")[0])
        dropped = int(world.allreduce(np.array([trace.dropped]))[0])
        part = json.dumps(
            [_event(entry, mesh, offset - zero) for entry in trace.entries], separators=(",", ":")
        ).encode()
        if mesh.rank:
            world.send(np.array([len(part)]), 0)
            world.send(np.frombuffer(part, np.uint8), 0)
            return dropped
        steps = [entry.step for entry in trace.entries if entry.step is not None]
        about = {
            "ranks": mesh.size,
            "mesh": dict(zip(("dp", "pp", "tp"), mesh.shape, strict=True)),
            "steps": [min(steps), max(steps)] if steps else [],
        }
        with file.open("wb") as out:
            out.write(b'{"displayTimeUnit":"ms","otherData":' + json.dumps(about).encode())
            out.write(b',"traceEvents":' + json.dumps(_names(mesh)).encode()[:-1])
            for rank in range(mesh.size):
                if rank:
                    length = int(world.recv(np.zeros(1, int), rank)[0])
                    part = world.recv(np.empty(length, np.uint8), rank).tobytes()
                if len(part) > 2:
                    out.write(b",\n" + part[1:-1])
            out.write(b"]}\n")
        return dropped


def _names(mesh: Mesh) -> list[dict[str, Any]]:
    """What processes and threads are called, and their order."""
    _, pp, tp = mesh.shape
    found: list[dict[str, Any]] = []
    for stage in range(pp):
        about = {"ph": "M", "pid": stage, "tid": 0}
        found.append({**about, "name": "process_name", "args": {"name": f"pipeline rank {stage}"}})
        found.append({**about, "name": "process_sort_index", "args": {"sort_index": stage}})
    for rank in range(mesh.size):
        where = Coordinates.of(rank, pp, tp)
        about = {"ph": "M", "pid": where.pp, "tid": rank}
        found.append({**about, "name": "thread_name", "args": {"name": f"rank {rank} ({where})"}})
        found.append({**about, "name": "thread_sort_index", "args": {"sort_index": rank}})
    return found


def _event(entry: Entry, mesh: Mesh, shift: float) -> dict[str, Any]:
    """One complete event; `shift` seconds take this rank's clock to the trace's."""
    about: dict[str, Any] = {"step": entry.step}
    if entry.action is not None:
        about |= {"stage": entry.action.stage, "micro_batch": entry.action.micro_batch}
    if entry.axis:
        name, kind = f"{entry.what} {entry.axis}", entry.axis
        about |= {
            "op": entry.what,
            "axis": entry.axis,
            "bytes": entry.bytes,
            "posted": _micro(entry.posted + shift),
        }
        if entry.peer is not None:
            about["peer"] = mesh.world_rank(entry.axis, entry.peer)
    else:
        kind = "step" if entry.what == "step" else "compute"
        name = f"step {entry.step}" if kind == "step" else entry.what
        if entry.action is not None:
            name = f"{entry.what} stage {entry.action.stage} mb {entry.action.micro_batch}"
        about["kind"] = entry.what
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": mesh.coordinates.pp,
        "tid": mesh.rank,
        "ts": _micro(entry.start + shift),
        "dur": round((entry.end - entry.start) * 1e6, 3),
        "cname": _COLORS[entry.axis or entry.what],
        "args": about,
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
