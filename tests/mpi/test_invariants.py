"""Known ways such systems go wrong, each as a small case with its right value.

The serial equality of test_meshes.py would catch most of them; these say which one it was.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import WORLD, factorings
from memory import close, device, equal, host
from small import batch, gather, trainer

from mpiparallel.comm.group import Group
from mpiparallel.data import Corpus
from mpiparallel.data_parallel.zero import DataParallel
from mpiparallel.mesh import Mesh
from mpiparallel.model import GPT
from mpiparallel.model_config import ModelConfig
from mpiparallel.optimizer import AdamW, clip_scale
from mpiparallel.parameter import Layout, Parameter
from mpiparallel.pipeline.executor import Executor
from mpiparallel.pipeline.messages import Message
from mpiparallel.pipeline.tied import sum_tied_gradients

pytestmark = pytest.mark.mpi(min_size=1)


def parameter(name, gradient, layout=None, holders=(), tp=None):
    """A parameter with a given gradient on this rank."""
    gradient = np.atleast_1d(np.array(gradient, float))
    layout = layout or Layout()
    size = tp.size if tp else 1
    shape = (gradient.size * (size if layout.cut == 0 else 1),)
    made = Parameter(name, shape, layout, "zeros", tp.rank if tp else 0, size, holders)
    made.data, made.grad = device(np.zeros_like(gradient)), device(gradient)
    return made


def state_of(parameters, dp, stage=0, **more):
    """A DataParallel over bare parameters, with the gradients they have as the averaged ones."""
    layer = SimpleNamespace(parameters=parameters)
    model = SimpleNamespace(layers=[layer], parameters=parameters, stages={})
    more = dict(algorithm="ring", bucket_bytes=0, overlap=True) | more
    gradients = [made.grad.copy() for made in parameters]
    state = DataParallel(model, dp, stage=stage, **more)
    state.start_step(1)
    for made, gradient in zip(reversed(parameters), reversed(gradients), strict=True):
        made.add_grad(gradient)
    state.finish_gradients()
    return state


def global_norm(mesh, state):
    """The norm as the Trainer puts it together."""
    return math.sqrt(mesh.world.allreduce(np.array([state.square_sum(mesh.pp.rank)]))[0])


@pytest.mark.mpi(min_size=2)
def test_a_parameter_replicated_over_tp_is_counted_once_in_the_norm():
    with Mesh(WORLD.size // 2, 1, 2) as mesh:
        shard = parameter("cut", [3.0, 4.0][mesh.tp.rank], Layout(0), tp=mesh.tp)
        replicated = parameter("whole", 12.0, tp=mesh.tp)
        state = state_of([shard, replicated], mesh.dp)
        assert global_norm(mesh, state) == pytest.approx(13.0)


@pytest.mark.mpi(min_size=2)
def test_the_norm_is_global_over_stages_and_clips_all_alike():
    with Mesh(WORLD.size // 2, 2, 1) as mesh:
        gradient = [3.0, 4.0][mesh.pp.rank]
        norm = global_norm(mesh, state_of([parameter(f"stage{mesh.pp.rank}", gradient)], mesh.dp))
        assert norm == pytest.approx(5.0)
        assert gradient * clip_scale(norm, 1.0) == pytest.approx([0.6, 0.8][mesh.pp.rank])


@pytest.mark.parametrize("pp", [size for size in (1, 2, 4, 8) if WORLD.size % size == 0])
def test_tied_gradients_are_summed_over_first_and_last_stage_and_counted_once(pp):
    with Mesh(WORLD.size // pp, pp, 1) as mesh:
        holders = tuple(sorted({0, pp - 1}))
        here = mesh.pp.rank in holders
        value = 3.0 if mesh.pp.rank == 0 else 4.0
        mine = [parameter("tied", value, holders=holders)] if here else []
        state = state_of(mine, mesh.dp)
        sum_tied_gradients(state.tied_gradients(), mesh.pp)
        right = 3.0 if pp == 1 else 7.0
        assert all(shard.grad[0] == right for shard in state.shards())
        assert global_norm(mesh, state) == pytest.approx(right)
        ops = {row["op"] for row in mesh.ledger.rows() if row["axis"] == "pp"}
        assert ops <= {"isend", "irecv"}, "point to point only"


@pytest.mark.mpi(min_size=3)
def test_three_holders_of_a_tied_parameter_get_the_same_bits():
    with Mesh(1, WORLD.size, 1) as mesh:
        generator = np.random.default_rng(mesh.pp.rank)
        mine = [parameter("tied", generator.standard_normal(9), holders=(0, 1, 2))]
        mine = mine if mesh.pp.rank < 3 else []
        sum_tied_gradients([(tied, tied.grad) for tied in mine], mesh.pp)
        right = sum(np.random.default_rng(rank).standard_normal(9) for rank in range(3))
        results = WORLD.allgather(mine[0].grad.tobytes() if mine else None)
        assert len(set(results[:3])) == 1
        for tied in mine:
            close(tied.grad, right, rtol=1e-14)


@pytest.mark.parametrize("algorithm", ["auto", "ring", "mpi"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_accumulated_gradients_are_averaged_once_two_steps_in_a_row(
    world, algorithm, stage, overlap
):
    weight = parameter("weight", [0.0] * world.size)
    state = state_of([weight], world, stage, algorithm=algorithm, overlap=overlap)
    for _ in range(2):
        state.start_step(micro_batches=3)
        for micro_batch in (1.0, 2.0, 3.0):
            weight.add_grad(device(np.full(world.size, micro_batch)))
        state.finish_gradients()
        [shard] = state.shards()
        equal(shard.grad, np.full(shard.grad.shape, 6.0))


@pytest.mark.mpi(min_size=2)
def test_the_norm_of_a_sharded_gradient_counts_what_a_rank_owns():
    # Ranks 0 and 1 own [3] and [4] of a gradient whose other part is garbage on each.
    with Mesh(2, WORLD.size // 2, 1) as mesh:
        weight = parameter("weight", [0.0, 0.0])
        state = state_of([weight], mesh.dp, stage=1)
        state.gradient_shards[state.buckets[0]][...] = device([3.0, 4.0])[mesh.dp.rank]
        state.buckets[0].gradients[1 - mesh.dp.rank] = 1e9
        squares = mesh.dp.allreduce(np.array([state.square_sum(0)]))
        assert squares[0] == 25.0


def test_accumulation_divides_by_nothing_of_its_own():
    # Four micro-batches whose scaled gradients are 1/4 each: the gradient of a mean is 1.
    weight = parameter("weight", 0.0)
    weight.zero_grad()
    for _ in range(4):
        weight.add_grad_matmul(device(np.array([[0.25]])), device(np.array([1.0])))
    assert weight.grad[0] == 1.0


@pytest.mark.parametrize("mesh", [mesh for mesh in factorings() if mesh[0] <= 2])
def test_the_loss_is_the_sum_over_valid_tokens_by_their_global_count(mesh):
    # Row 0 has one label, row 1 three, on different replicas where dp = 2.
    tokens_and_labels = batch(0, size=2)
    labels = np.full_like(tokens_and_labels.labels, -100)
    labels[0, 2], labels[1, 1:4] = 5, [1, 2, 3]
    tokens_and_labels.labels, tokens_and_labels.valid = labels, 4
    changes = dict(layers=max(3, mesh[1]), global_batch=2, micro_batches=1)
    with trainer(*mesh, **changes) as made:
        whole = made.gradients(tokens_and_labels)
        gradients = gather(made, "gradients")
        parts = []
        for row in range(2):
            alone = batch(0, size=2)
            alone.labels = np.where(np.arange(2)[:, None] == row, labels, -100)
            alone.valid = 4
            parts.append((made.gradients(alone).loss, gather(made, "gradients")))
    assert whole.loss == pytest.approx(parts[0][0] + parts[1][0], rel=1e-12)
    if gradients is not None:
        for name, gradient in gradients.items():
            total = parts[0][1][name] + parts[1][1][name]
            close(gradient, total, atol=1e-12 * np.abs(total).max() + 1e-15)


def test_adam_steps_are_one_count_and_each_update_is_lr():
    weights = [parameter("a", 1.0), parameter("b", [1.0, 1.0])]
    optimizer = AdamW(weights, beta1=0.9, beta2=0.99, weight_decay=0.0)
    for step in range(1, 6):
        optimizer.step(0.1)
        for weight in weights:
            close(weight.data, -0.1 * step, rtol=1e-6)


def test_the_optimizer_follows_a_loaded_weight():
    weight = parameter("weight", 1.0)
    optimizer = AdamW([weight], beta1=0.9, beta2=0.99, weight_decay=0.1)
    weight.load(np.array([5.0]))
    optimizer.step(0.0)
    assert weight.data[0] == 5.0


def test_ranks_that_differ_in_tp_or_pp_only_see_the_same_data_and_replicas_disjoint_data():
    corpus = Corpus(np.arange(5000, dtype=np.int32), 4)
    for shape in factorings():
        with Mesh(*shape) as mesh:
            if 16 % mesh.dp.size:
                continue
            rows = corpus.batch(0, 3, 16).shard(mesh.dp.rank, mesh.dp.size).tokens
            seen = WORLD.allgather((mesh.coordinates.dp, rows.tolist()))
            by_replica = {}
            for dp, tokens in seen:
                assert by_replica.setdefault(dp, tokens) == tokens
            together = [row for dp in sorted(by_replica) for row in by_replica[dp]]
            assert together == corpus.batch(0, 3, 16).tokens.tolist()


def test_tags_stay_in_range_and_do_not_grow_with_steps(world):
    # MPI promises tags up to 32767; a 64-stage pipeline with 128 micro-batches fits.
    config = ModelConfig(64, 8, 1, 8, 5, 4)
    alone = Group(WORLD.Split(WORLD.rank), "tp")
    executor = Executor(GPT(config, alone, tuple(range(64)), 0), world, "float32")
    tags = {
        executor._tag(Message(kind, stage, micro_batch, 0, 1))
        for kind in ("activation", "gradient")
        for stage in range(64)
        for micro_batch in range(128)
    }
    assert len(tags) == 2 * 64 * 128
    assert max(tags) <= 32767
    alone.free()


@pytest.mark.mpi(min_size=3)
def test_a_receive_buffer_keeps_dtype_and_values_through_three_stages(world):
    if world.rank >= 3:
        return
    for dtype in ("float32", "float64"):
        sent = np.arange(4).astype(dtype) + np.dtype(dtype).type(0.1)
        buffer = device(sent)
        if world.rank > 0:
            buffer = world.recv(device(np.empty(4, dtype)), world.rank - 1)
        if world.rank < 2:
            world.send(buffer, world.rank + 1)
        equal(buffer, sent)
        assert buffer.dtype == dtype


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_pipeline_completes_when_every_send_is_an_ssend(micro_batches):
    pp = min(4, WORLD.size)
    losses = []
    for synchronous in (False, True):
        with trainer(WORLD.size // pp, pp, 1, layers=5, micro_batches=micro_batches) as made:
            made.mesh.pp.synchronous_sends = synchronous
            losses.append(made.gradients(batch(0)).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("tp", [size for size in (1, 2, 4, 8) if WORLD.size % size == 0])
def test_cutting_and_joining_is_the_identity_for_every_parameter(tp):
    config = ModelConfig(layers=2, hidden=16, heads=8, feed_forward=24, vocabulary=13, sequence=6)
    with Mesh(WORLD.size // tp, 1, tp) as mesh:
        model = GPT(config, mesh.tp, (0,), 0)
        for number, made in enumerate(model.parameters):
            values = np.random.default_rng(number).standard_normal(made.shape)
            made.load(values)
            shards = mesh.tp.communicator.allgather(host(made.data))
            equal(made.layout.join(shards, made.shape), values)
