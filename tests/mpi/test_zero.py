"""ZeRO 1, 2 and 3, buckets and overlap: the serial answer, to the byte what the formulas say."""

import dataclasses
import json

import numpy as np
import pytest
import reference
from conftest import WORLD, factorings
from mpi4py import MPI
from small import (
    SMALL,
    VOCABULARY,
    assert_same,
    batch,
    gather,
    serial_training,
    serial_weights,
    trainer,
)

from mpiparallel.checkpoint.manifest import read_manifest
from mpiparallel.comm.ledger import Ledger
from mpiparallel.data import IdTokenizer
from mpiparallel.pipeline import schedules

pytestmark = pytest.mark.mpi(min_size=1)

STAGES = (1, 2, 3)
TINY_BUCKET = 1e-4  # MiB: a bucket per layer


def layers_for(pp):
    return max(3, pp + 1)


CASES = [(mesh, stage) for mesh in factorings() for stage in STAGES]


@pytest.mark.parametrize(("mesh", "stage"), CASES)
def test_every_stage_on_every_mesh_equals_the_serial_training(mesh, stage):
    count = min(3, SMALL.global_batch // mesh[0])
    with trainer(*mesh, layers=layers_for(mesh[1]), zero=stage, micro_batches=count) as made:
        results = []
        for step in range(3):
            results.append(made.step(batch(step), 1e-2))
            if step == 0:
                gradients = gather(made, "gradients")
        weights = gather(made)
    if weights is not None:
        expected = serial_weights(made.model.config)
        first = batch(0)
        _, right = reference.loss_and_gradients(expected, first.tokens, first.labels, SMALL.heads)
        assert_same(gradients, right, 1e-10)
        history = serial_training(expected, 3, lambda k: 1e-2)
        np.testing.assert_allclose(
            [(result.loss, result.grad_norm) for result in results], history, rtol=1e-10
        )
        assert_same(weights, expected, 1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_schedule_with_every_stage(name, stage):
    pp = min(2, WORLD.size)
    mesh = (WORLD.size // pp, pp, 1)
    with trainer(*mesh, layers=5, schedule=name, zero=stage, bucket_mb=TINY_BUCKET) as made:
        results = [made.step(batch(step), 1e-2) for step in range(2)]
    if WORLD.rank == 0:
        expected = serial_weights(made.model.config)
        history = serial_training(expected, 2, lambda k: 1e-2)
        np.testing.assert_allclose(
            [(result.loss, result.grad_norm) for result in results], history, rtol=1e-10
        )


@pytest.mark.parametrize("mesh", factorings())
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_overlap_changes_no_bit(mesh, stage):
    bits = []
    for overlap in ("on", "off"):
        changes = dict(layers=layers_for(mesh[1]), zero=stage, dtype="float32", overlap=overlap)
        with trainer(*mesh, bucket_mb=TINY_BUCKET, allreduce="ring", **changes) as made:
            for step in range(2):
                made.step(batch(step), 1e-2)
            bits.append([shard.data.tobytes() for shard in made.data_parallel.shards()])
            blocks = sum(len(own.blocks) for own in made.model.stages.values())
            assert len(made.data_parallel.buckets) >= blocks
    assert bits[0] == bits[1]


@pytest.mark.mpi(min_size=2)
def test_a_sum_starts_before_backward_ends(monkeypatch):
    with trainer(WORLD.size, 1, 1, bucket_mb=TINY_BUCKET) as made:
        state, started = made.data_parallel, []
        made.gradients(batch(0))  # once before, so that nothing is measured that happens once
        original = state._sum
        monkeypatch.setattr(state, "_sum", lambda b: started.append(due(state)) or original(b))
        made.gradients(batch(1))
    assert started[0] > 0, "gradients are still to come when the first bucket goes"
    assert started == sorted(started, reverse=True)
    assert started[-1] == 0


def due(state):
    return sum(state._due.values())


@pytest.mark.mpi(min_size=4)
def test_copies_of_the_tied_table_stay_equal_to_the_bit():
    # dp >= 3 sums each chunk in another order: both stages must cut the table alike.
    dp = WORLD.size // 2
    for stage in (0, *STAGES):
        with trainer(dp, 2, 1, zero=stage, dtype="float32", allreduce="ring") as made:
            for step in range(3):
                made.step(batch(step, size=SMALL.global_batch), 1e-2)
            mine = {
                shard.segment.start: shard.data.tobytes()
                for shard in made.data_parallel.shards()
                if shard.parameter.name == "token_embedding.weight"
            }
            copies = made.mesh.pp.communicator.allgather(mine)
        assert copies[0] == copies[1]
        assert copies[0]


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_frozen_parameters_do_not_move_and_cost_no_state(stage):
    dp = WORLD.size
    with trainer(dp, 1, 1, zero=stage, freeze="blocks.0.,token_embedding") as made:
        before = gather(made)
        made.step(batch(0), 1e-2)
        after = gather(made)
        trained = {shard.parameter.name for shard in made.data_parallel.shards()}
    assert not any(name.startswith(("blocks.0.", "token_embedding")) for name in trained)
    if before is not None:
        for name, array in before.items():
            frozen = name.startswith(("blocks.0.", "token_embedding"))
            assert np.array_equal(array, after[name]) == frozen, name


# ---- bytes: what is held and what is sent ----


def held_and_sent(made, step=0):
    """Bytes that this rank holds by kind, and sends on dp in one step by operation."""
    made.step(batch(step), 1e-2)
    made.mesh.ledger = made.mesh.dp.ledger = Ledger()
    made.step(batch(step + 1), 1e-2)
    sent = {row["op"]: row["bytes"] for row in made.mesh.dp.ledger.rows() if row["axis"] == "dp"}
    optimizer = made.optimizer
    moments = sum(array.nbytes for array in optimizer.first + optimizer.second)
    return {**made.data_parallel.bytes_held(), "optimizer": moments}, sent


@pytest.mark.parametrize("mesh", factorings())
@pytest.mark.parametrize("stage", [0, *STAGES])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_bytes_are_those_of_the_formulas(mesh, stage, micro_batches):
    dp = mesh[0]
    if SMALL.global_batch // dp < micro_batches:
        return
    changes = dict(layers=layers_for(mesh[1]), zero=stage, micro_batches=micro_batches)
    with trainer(*mesh, dtype="float32", allreduce="ring", **changes) as made:
        held, sent = held_and_sent(made)
        # The rank's own share of the model, cut over dp with at most an element's difference.
        p = sum(int(np.prod(q.local_shape)) for q in made.model.parameters)
        uneven = 4 * len(made.data_parallel.buckets)
    for kind, copies, sharded in (("parameters", 4, 3), ("gradients", 4, 2), ("optimizer", 8, 1)):
        if stage < sharded:
            assert held[kind] == copies * p
        else:
            assert abs(held[kind] - copies * p / dp) < copies // 4 * uneven
    once = (dp - 1) * 4 * p / dp
    times = {"allreduce": 2} if stage == 0 else {"reduce_scatter": 1, "allgather": 1 + (stage == 3)}
    assert sent.keys() == times.keys()
    for op, count in times.items():
        assert abs(sent[op] - count * once) < count * uneven
        # Added up over the replicas it is exact.
        assert WORLD.allreduce(sent[op]) == WORLD.allreduce(round(count * once * dp)) / dp


@pytest.mark.mpi(min_size=2)
def test_stage_3_holds_one_layer_at_a_time_unless_there_are_more_micro_batches():
    peaks = {}
    for count in (1, 2):
        with trainer(WORLD.size, 1, 1, zero=3, micro_batches=count, global_batch=16) as made:
            made.step(batch(0, size=16), 1e-2)
            sizes = [8 * bucket.length for bucket in made.data_parallel.buckets]
            shards = made.data_parallel.bytes_held()["parameters"]
            peaks[count] = made.data_parallel.peak_parameters - shards
    # The tied table is used by the first layer and the last: with one block it is the most.
    table = 8 * VOCABULARY * SMALL.hidden
    assert peaks[1] == max(sizes) + table
    assert peaks[2] == sum(sizes)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("stage", [0, *STAGES])
def test_three_replicas_equal_the_serial_training(stage):
    part = WORLD.Split(0 if WORLD.rank < 3 else MPI.UNDEFINED)
    if part == MPI.COMM_NULL:
        return
    with trainer(3, 1, 1, communicator=part, zero=stage, global_batch=6) as made:
        results = [made.step(batch(step, size=6), 1e-2) for step in range(2)]
    expected = serial_weights(made.model.config)
    history = reference.train_steps(
        expected,
        [(batch(step, size=6).tokens, batch(step, size=6).labels) for step in range(2)],
        heads=SMALL.heads,
        lr_of_step=lambda k: 1e-2,
        beta1=SMALL.beta1,
        beta2=SMALL.beta2,
        weight_decay=SMALL.weight_decay,
        clip=SMALL.clip,
    )
    np.testing.assert_allclose(
        [(result.loss, result.grad_norm) for result in results], history, rtol=1e-10
    )
    part.Free()


@pytest.mark.mpi(min_size=8)
def test_a_hybrid_rank_sends_only_its_share_of_the_gradients():
    """The claim of hybrid parallelism: the same model on 8 x 1 x 1 and on 2 x 2 x 2."""
    sent = {}
    for mesh in ((8, 1, 1), (2, 2, 2)):
        with trainer(*mesh, layers=4, vocab_size=16, allreduce="ring") as made:
            _, by_op = held_and_sent(made)
            sent[mesh] = WORLD.allreduce(by_op["allreduce"])
            share = WORLD.allreduce(sum(b.length for b in made.data_parallel.buckets))
            dp = mesh[0]
            assert sent[mesh] == 2 * (dp - 1) * 8 * share // dp
    assert sent[8, 1, 1] > 5 * sent[2, 2, 2]


# ---- checkpoints of any stage, onto any other ----


def test_any_stage_loads_what_any_other_saved(shared_path):
    meshes = factorings()
    chain = [(meshes[n % len(meshes)], stage) for n, stage in enumerate((0, 3, 1, 2, 3, 0))]
    first = None
    folder = None
    for number, (mesh, stage) in enumerate(chain):
        with trainer(*mesh, layers=9, zero=stage, bucket_mb=TINY_BUCKET) as made:
            if folder is None:
                for step in range(2):
                    made.step(batch(step), 1e-2)
            else:
                made.resume(folder, read_manifest(folder))
            now = json.dumps(bits(made))
            first = first or now
            assert now == first
            made.settings = dataclasses.replace(made.settings, out=str(shared_path / str(number)))
            folder = made.save(IdTokenizer(13), made.optimizer.steps)
            manifest = read_manifest(folder)
            assert manifest.mesh["zero"] == stage


def bits(made):
    """Weights and moments as text, on rank 0."""
    whole = [gather(made, what) or {} for what in ("weights", "moments")]
    return [{n: a.tobytes().hex() for n, a in sorted(arrays.items())} for arrays in whole]


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_run_under_every_stage(shared_path, stage):
    with trainer(WORLD.size, 1, 1, zero=stage, dtype="float32") as made:
        straight = [made.step(batch(step), 1e-2).loss for step in range(4)]
    with trainer(WORLD.size, 1, 1, zero=stage, dtype="float32") as made:
        losses = [made.step(batch(step), 1e-2).loss for step in range(2)]
        made.settings = dataclasses.replace(made.settings, out=str(shared_path))
        folder = made.save(IdTokenizer(13), 2)
    with trainer(WORLD.size, 1, 1, zero=stage, dtype="float32") as made:
        made.resume(folder, read_manifest(folder))
        losses += [made.step(batch(step), 1e-2).loss for step in range(2, 4)]
    assert losses == straight
