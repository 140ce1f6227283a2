"""Every schedule gives the serial gradients over real messages, also if every send is an Ssend."""

import functools
import gc
import weakref

import numpy as np
import pytest
import reference
from conftest import WORLD, factorings
from small import SMALL, assert_same, batch, gather, serial_weights, trainer

from mpiparallel.backend import xp
from mpiparallel.mesh import Mesh
from mpiparallel.model import GPT
from mpiparallel.model_config import ModelConfig
from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.action import Action
from mpiparallel.pipeline.executor import Executor, MicroBatch

pytestmark = pytest.mark.mpi(min_size=1)


@functools.cache
def serial(layers):
    """The reference's loss and gradients, computed on rank 0 alone."""
    config = ModelConfig(layers, SMALL.hidden, SMALL.heads, SMALL.feed_forward, 13, SMALL.seq_len)
    first = batch(0)
    return reference.loss_and_gradients(
        serial_weights(config), first.tokens, first.labels, SMALL.heads
    )


def micro_batch_counts(dp, pp):
    """Fewer than the stages, and no multiple of them with a smaller last one, as rows allow."""
    rows = SMALL.global_batch // dp
    return [1, min(5, rows)] if pp == WORLD.size else [min(3, rows)]


CASES = [
    (name, mesh, count)
    for mesh in factorings()
    if mesh[1] > 1 or WORLD.size == 1
    for count in micro_batch_counts(*mesh[:2])
    for name in schedules.NAMES
]


@pytest.mark.parametrize(("name", "mesh", "micro_batches"), CASES)
def test_every_schedule_gives_the_serial_gradients(name, mesh, micro_batches):
    layers = 2 * mesh[1] + 1  # two stages per rank, and one of them larger
    with trainer(*mesh, schedule=name, layers=layers, micro_batches=micro_batches) as made:
        losses, gradients = [], []
        for synchronous in (False, True):
            made.mesh.pp.synchronous_sends = synchronous
            losses.append(made.gradients(batch(0)).loss)
            gradients.append(gather(made, "gradients"))
    assert losses[0] == losses[1], "how messages are sent does not change a bit"
    if gradients[0] is not None:
        loss, expected = serial(layers)
        assert losses[0] == pytest.approx(loss, rel=1e-10)
        for found in gradients:
            assert_same(found, expected, 1e-10)


@pytest.mark.mpi(min_size=2)
def test_the_pipeline_sends_one_activation_and_one_gradient_per_boundary_and_micro_batch():
    pp = WORLD.size
    with trainer(1, pp, 1, layers=pp, micro_batches=4) as made:
        made.mesh.ledger._rows.clear()
        made.data_parallel.start_step(4)
        made.executor.run(made.operations, made._micro_batches(batch(0)))
        sent = WORLD.allreduce(made.mesh.ledger.row("pp", "isend").bytes)
        ops = {op for axis, op in made.mesh.ledger._rows if axis == "pp"}
    rows, boundaries, directions = SMALL.global_batch, pp - 1, 2
    assert sent == directions * boundaries * rows * SMALL.seq_len * SMALL.hidden * 8
    assert ops == {"isend", "irecv"}, "the pp axis never sees a collective"


def test_layer_names_are_global_under_interleaving():
    config = ModelConfig(8, 16, 8, 24, 13, 6)
    with Mesh(1, 1, WORLD.size) as mesh:
        placement = schedules.placement("interleaved", 2, 2)
        model = GPT(config, mesh.tp, placement, 0)
        owned = {int(p.name.split(".")[1]) for p in model.parameters if p.name.startswith("blocks")}
    assert owned == {0, 1, 4, 5}


def test_a_first_and_last_stage_on_one_rank_share_one_table():
    # A V-shaped placement: the embedding and the output are on pipeline rank 0.
    config = ModelConfig(4, 16, 8, 24, 13, 6)
    with Mesh(1, 1, WORLD.size) as mesh:
        model = GPT(config, mesh.tp, (0, 1, 1, 0), 0)
    tables = [p for p in model.parameters if p.name == "token_embedding.weight"]
    assert len(tables) == 1
    assert tables[0].holders == (0,)
    assert model.stages[0].embedding.table is model.stages[3].logits.table


def test_weight_gradients_that_wait_hold_inputs_and_output_gradients_only():
    config = ModelConfig(1, 16, 8, 24, 13, 6)
    with Mesh(1, WORLD.size, 1) as mesh:
        model = GPT(config, mesh.tp, (0,), 0)
        model.initialize(0, "float64")
        for parameter in model.parameters:
            parameter.grad = xp.zeros_like(parameter.data)
        executor = Executor(model, mesh.pp, "float64")
        tokens = np.zeros((2, 6), np.int32)
        executor.run([Action("F", 0, 0)], [MicroBatch(tokens, tokens)])
        executor.keeps = True
        executor._act(Action("F", 0, 0))
        # blocks[0].attention keeps the probabilities, which only the input gradient needs.
        probabilities = weakref.ref(executor.saved[0, 0][1][1][1])
        executor._act(Action("I", 0, 0))
        gc.collect()
        assert probabilities() is None
        assert not executor.saved
        held = {
            id(array): array
            for work in executor.waiting[0, 0]
            for array in work.args
            if hasattr(array, "dtype")
        }
        h, f, v, rows = 16, 24, 13, 12
        linear = [(h, 3 * h), (h, h), (h, f), (f, h)]
        right = sum(rows * (inputs + outputs) for inputs, outputs in linear)
        right += rows * (v + h)  # the output layer
        right += rows * h  # the gradient of the embedding
        floats = [array.size for array in held.values() if array.dtype == np.float64]
        # The embedding's gradient, like the projection's, is one array that two layers hold.
        assert sum(floats) <= right
        executor._act(Action("W", 0, 0))
        assert not executor.waiting


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_gathering_knows_every_stage_of_a_rank(name):
    pp = WORLD.size
    with trainer(1, pp, 1, schedule=name, layers=2 * pp) as made:
        whole = gather(made)
    if made.mesh.rank == 0:
        assert_same(whole, serial_weights(made.model.config), 0)
