"""The laws of traffic and memory hold, to the byte, on every mesh, schedule and stage of ZeRO."""

import pytest
from conftest import WORLD, factorings
from small import SMALL, batch, trainer

from mpiparallel.comm.ledger import Ledger
from mpiparallel.pipeline import schedules
from mpiparallel.plan import laws

pytestmark = pytest.mark.mpi(min_size=1)


def assert_lawful(made):
    """One step of a Trainer sends, and leaves it holding, what the laws say."""
    made.step(batch(0), 1e-2)
    step = laws.Step.of(made.settings, made.model.config, made.placement)
    counted = Ledger.merge(made.mesh.world.allgather_json(made.mesh.ledger.rows()))
    sent = {(row["axis"], row["op"]): row["bytes"] for row in counted if row["bytes"]}
    assert sent == laws.traffic(step)
    moments = sum(a.nbytes for a in made.optimizer.first + made.optimizer.second)
    held = {**made.data_parallel.bytes_held(), "optimizer": moments}
    every = made.mesh.world.allgather_json(held)
    assert {kind: sum(rank[kind] for rank in every) for kind in held} == laws.memory(step)


@pytest.mark.parametrize("mesh", factorings())
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("allreduce", ["auto", "ring", "mpi"])
def test_every_mesh_and_stage(mesh, zero, allreduce):
    if zero and allreduce != "auto":
        return
    count = min(3, SMALL.global_batch // mesh[0])
    changes = dict(layers=max(3, mesh[1] + 1), zero=zero, micro_batches=count)
    with trainer(*mesh, allreduce=allreduce, bucket_mb=1e-3, **changes) as made:
        assert_lawful(made)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("zero", [0, 3])
def test_every_schedule(name, zero):
    for pp in {2, min(4, WORLD.size)}:
        mesh = (WORLD.size // pp, pp, 1)
        with trainer(*mesh, layers=9, schedule=name, dtype="float32", zero=zero) as made:
            assert_lawful(made)


def test_frozen_parameters_send_nothing_and_hold_weights_alone():
    freeze = "token_embedding,blocks.0.mlp"
    for mesh in factorings():
        with trainer(*mesh, layers=9, freeze=freeze) as made:
            assert_lawful(made)
