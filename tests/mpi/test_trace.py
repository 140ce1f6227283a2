"""The trace: every action and every operation once, nested, on one clock, in bounded memory."""

import json
import time
from collections import Counter
from itertools import combinations

import pytest
from conftest import WORLD
from small import batch, trainer

from mpiparallel.comm.clock import clock_offset
from mpiparallel.comm.trace import Trace
from mpiparallel.pipeline.action import Action
from mpiparallel.report import chrome

pytestmark = pytest.mark.mpi(min_size=1)

MESHES = {1: (1, 1, 1), 2: (1, 2, 1), 4: (1, 2, 2), 8: (2, 2, 2)}


@pytest.fixture
def traced():
    """A Trainer, and the Trace of its second and third steps; the ledger counts those alone."""
    with trainer(*MESHES[WORLD.size], micro_batches=2, schedule="zb-h1") as made:
        made.step(batch(0), 1e-2)
        for axis in ("dp", "pp", "tp", "world"):
            made.mesh.group(axis).ledger = made.mesh.ledger
        made.mesh.ledger._rows.clear()
        made.mesh.watch.trace = trace = Trace()
        for step in (1, 2):
            made.step(batch(step), 1e-2)
        made.mesh.watch.trace = None
        yield made, trace


def test_every_action_is_recorded_once_a_step(traced):
    made, trace = traced
    mine = [entry for entry in made.operations if isinstance(entry, Action)]
    for step in (2, 3):
        work = [entry for entry in trace.entries if not entry.axis and entry.step == step]
        assert [entry.action for entry in work if entry.action] == mine
        assert [entry.what for entry in work if not entry.action] == ["optimizer", "step"]


def test_every_operation_is_recorded_once_with_its_bytes(traced):
    made, trace = traced
    operations = [entry for entry in trace.entries if entry.axis]
    calls, sent = Counter(), Counter()
    for entry in operations:
        calls[entry.axis, entry.what] += 1
        sent[entry.axis, entry.what] += entry.bytes
        assert entry.posted <= entry.start <= entry.end
    for row in made.mesh.ledger.rows():
        where = row["axis"], row["op"]
        if row["axis"] != "dp":  # sums on dp are made of several messages each
            assert calls[where] == row["calls"]
            assert where == ("pp", "irecv") or sent[where] == row["bytes"]
    if made.mesh.pp.size > 1:
        neighbour = 1 - made.mesh.pp.rank
        assert {e.peer for e in operations if e.axis == "pp"} == {neighbour}


def test_entries_nest(traced):
    _, trace = traced
    for a, b in combinations(trace.entries, 2):
        first, second = sorted((a, b), key=lambda entry: (entry.start, -entry.end))
        assert second.start >= first.end or second.end <= first.end


def test_ranks_are_merged_into_one_file_on_one_clock(traced, shared_path):
    made, trace = traced
    mesh, file = made.mesh, shared_path / "trace.json"
    before = json.dumps(mesh.ledger.rows())
    assert chrome.write(file, trace, mesh) == 0
    assert json.dumps(mesh.ledger.rows()) == before, "merging is no traffic of training"
    WORLD.Barrier()
    merged = json.loads(file.read_text())
    assert merged["otherData"]["steps"] == [2, 3]
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == WORLD.rank for event in spans) == len(trace.entries)
    assert min(event["ts"] for event in spans) == 0
    names = {e["tid"]: e["args"]["name"] for e in merged["traceEvents"] if "thread_name" in str(e)}
    assert names[WORLD.rank] == f"rank {WORLD.rank} ({mesh.coordinates})"
    # A message arrives after it was sent: the n-th receive from a peer is its n-th send to here.
    for event in spans:
        assert event["pid"] == mesh.coordinates.of(event["tid"], *mesh.shape[1:]).pp
    pairs = {}
    for event in spans:
        about = event["args"]
        if about.get("axis") == "pp":
            route = event["tid"], about["peer"]
            way = route if about["op"] == "isend" else route[::-1]
            pairs.setdefault(way, {"isend": [], "irecv": []})[about["op"]].append(event)
    assert bool(pairs) == (mesh.pp.size > 1)
    for both in pairs.values():
        sends, receives = (sorted(both[op], key=posted) for op in ("isend", "irecv"))
        assert len(sends) == len(receives) > 0
        for sent, received in zip(sends, receives, strict=True):
            assert received["ts"] + received["dur"] >= posted(sent)
            assert received["args"]["bytes"] == sent["args"]["bytes"]


def posted(event):
    return event["args"]["posted"]


def test_a_full_trace_counts_what_it_drops():
    with trainer(1, 1, WORLD.size) as made:  # as many entries in every step
        made.mesh.watch.trace = full = Trace(limit=5)
        made.step(batch(0), 1e-2)
        made.mesh.watch.trace = whole = Trace()
        made.step(batch(1), 1e-2)
    assert len(full.entries) == 5
    assert full.dropped == len(whole.entries) - 5 > 0


def test_clocks_that_differ_are_aligned(world):
    nodes = [rank // 2 for rank in range(world.size)]

    def clock():
        return time.perf_counter() + 100 * nodes[world.rank]

    offset = clock_offset(world, nodes, clock)
    assert offset == pytest.approx(-100 * nodes[world.rank], abs=0.05)
    assert len(set(world.communicator.allgather(offset))) == max(nodes) + 1
