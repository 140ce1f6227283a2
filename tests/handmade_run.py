"""A run's folder written by hand: 2 replicas x 2 pipeline ranks, one step of two micro-batches.

Replica 0, in milliseconds; isend posted at the end of each F of rank 0 and each B of rank 1:

    rank 0   F0 0-10   F1 10-20   wait 20-45   B0 45-65   wait 65-75   B1 75-95   dp 95-99   ...
    rank 1   wait 0-12 F0 12-22   B0 22-42   wait 42-43   F1 43-53   B1 53-73   dp 73-79   ...

then both: world to 100, optimizer 100-103. Replica 1 does the same 1 ms later. What the waits for
messages are made of:

    rank 1 waits 12 ms for F0's message, which rank 0 posts at 10: 10 bubble, 2 exposed
    rank 1 waits 1 ms for F1's, posted at 20 already:               0 bubble, 1 exposed
    rank 0 waits 25 ms for B0's, posted at 42:                     22 bubble, 3 exposed
    rank 0 waits 10 ms for B1's, posted at 73:                      8 bubble, 2 exposed

The last to post what all ranks do together is rank 2, at 100: all that ranks 0 and 1 wait there is
bubble, and of what rank 3 waits from 80 to 101 all but 1 ms. Replica 0 is idle for the last
millisecond, replica 1 for the first.
"""

import json

MS = 1000.0  # of the trace's microseconds
STEP = 7

# Milliseconds of every rank in the step of 104.
SPLIT = [
    {"compute": 63, "tp": 0, "pp": 5, "dp": 4, "world": 0, "bubble": 32, "other": 0},
    {"compute": 63, "tp": 0, "pp": 3, "dp": 6, "world": 0, "bubble": 32, "other": 0},
    {"compute": 63, "tp": 0, "pp": 5, "dp": 4, "world": 1, "bubble": 31, "other": 0},
    {"compute": 63, "tp": 0, "pp": 3, "dp": 6, "world": 1, "bubble": 31, "other": 0},
]
MESH = {"dp": 2, "pp": 2, "tp": 1}
BETWEEN = {
    "dp": [[0, 0, 4000, 0], [0, 0, 0, 4000], [4000, 0, 0, 0], [0, 4000, 0, 0]],
    "pp": [[0, 1600, 0, 0], [1600, 0, 0, 0], [0, 0, 0, 1600], [0, 0, 1600, 0]],
    "world": [[0, 36, 0, 0], [0, 0, 36, 0], [0, 0, 0, 36], [36, 0, 0, 0]],
}
LAWS = [
    {"axis": "dp", "op": "allreduce", "counted": 16000, "formula": 16000},
    {"axis": "pp", "op": "isend", "counted": 6400, "formula": 6400},
    {"axis": "world", "op": "allreduce", "counted": 144, "formula": 144},
]
MEMORY = {
    "parameters": [2000, 2400, 2000, 2400],
    "gradients": [2000, 2400, 2000, 2400],
    "optimizer": [4000, 4800, 4000, 4800],
}


def write(folder, traced=True):
    """Write the files of the run into `folder`, which is made."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        'schedule = "gpipe"\nglobal_batch = 4\nmicro_batches = 2\nseq_len = 8\n'
    )
    rows = [
        {
            "step": step,
            "loss": 4.5 - 0.3 * step**0.5,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens_per_second": 320.0,
            "step_seconds": 0.1,
            **({"val_loss": 4.55 - 0.3 * step**0.5} if step % 4 == 0 else {}),
        }
        for step in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(summary()))
    if traced:
        (folder / "trace.json").write_text(json.dumps(trace()))


def summary():
    """What stands in summary.json, as far as the report reads it."""
    return {
        "mesh": MESH,
        "ranks": 4,
        "nodes": 2,
        "node_of_rank": [0, 0, 1, 1],
        "parameters": 1100,
        "steps": 8,
        "resumed_from": 0,
        "loss": 3.65,
        "val_loss": 3.7,
        "tokens_per_second": 320.0,
        "memory": MEMORY,
        "bubble": {"measured": 0.25, "predicted": 1 / 3},
        "laws": LAWS,
        "bytes_between": BETWEEN,
    }


def trace():
    """The trace of the step above, and of a shorter and a longer one around it."""
    events = []
    for rank in range(4):
        events += [
            {"ph": "M", "name": "process_name", "pid": rank % 2, "args": {"name": "pipeline rank"}},
            {"ph": "M", "name": "thread_name", "pid": rank % 2, "tid": rank, "args": {"name": ""}},
        ]
        for step, begin, length in ((STEP - 1, 0, 50), (STEP, 1000, 103), (STEP + 1, 2000, 300)):
            start = begin + rank // 2
            span = {"ph": "X", "name": f"step {step}", "cat": "step", "pid": rank % 2, "tid": rank}
            events.append({**span, "ts": start * MS, "dur": length * MS, "args": {"step": step}})
        events += _rank(rank, 1000 + rank // 2)
    return {
        "traceEvents": events,
        "otherData": {"ranks": 4, "mesh": MESH, "steps": [STEP - 1, STEP + 1]},
    }


def _rank(rank, begin):
    replica, pp = rank // 2, rank % 2
    peer = 2 * replica + 1 - pp
    events = []

    def add(name, cat, start, end, **details):
        where = {"ph": "X", "pid": pp, "tid": rank, "name": name, "cat": cat}
        times = {"ts": (begin + start) * MS, "dur": (end - start) * MS}
        events.append({**where, **times, "args": {"step": STEP, **details}})

    def compute(kind, start, end, micro_batch=None):
        details = {"kind": kind, "stage": pp, "micro_batch": micro_batch}
        add(f"{kind} stage {pp} mb {micro_batch}", "compute", start, end, **details)

    def operation(op, axis, start, end, posted, moved, **details):
        details |= {"op": op, "axis": axis, "posted": (begin + posted) * MS, "bytes": moved}
        add(f"{op} {axis}", axis, start, end, **details)

    if pp == 0:
        compute("F", 0, 10, 0)
        compute("F", 10, 20, 1)
        operation("isend", "pp", 20, 20, 10, 800, peer=peer, micro_batch=0)
        operation("isend", "pp", 20, 20, 20, 800, peer=peer, micro_batch=1)
        operation("irecv", "pp", 20, 45, 0, 0, peer=peer, micro_batch=0)
        compute("B", 45, 65, 0)
        operation("irecv", "pp", 65, 75, 1, 0, peer=peer, micro_batch=1)
        compute("B", 75, 95, 1)
        operation("allreduce", "dp", 95, 99, 90, 4000)
        operation("allreduce", "world", 99, 100, 99, 36)
    else:
        operation("irecv", "pp", 0, 12, 0, 0, peer=peer, micro_batch=0)
        compute("F", 12, 22, 0)
        compute("B", 22, 42, 0)
        operation("irecv", "pp", 42, 43, 1, 0, peer=peer, micro_batch=1)
        compute("F", 43, 53, 1)
        compute("B", 53, 73, 1)
        operation("isend", "pp", 73, 73, 42, 800, peer=peer, micro_batch=0)
        operation("isend", "pp", 73, 73, 73, 800, peer=peer, micro_batch=1)
        operation("allreduce", "dp", 73, 79, 70, 4000)
        operation("allreduce", "world", 79, 100, 79, 36)
    compute("optimizer", 100, 103)
    return events
