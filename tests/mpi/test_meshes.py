"""The project's promise: every mesh gives the serial answer, gradients first.

The serial answer is tests/reference.py: one process, float64, gradients from autograd. Labels are
ignored unevenly over the batch, so that a mean taken locally somewhere would show.
"""

import dataclasses
import zlib

import numpy as np
import pytest
import reference
from conftest import WORLD, factorings
from memory import close, equal
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

from mpiparallel import settings as settings_module
from mpiparallel.data import Corpus
from mpiparallel.mesh import Mesh
from mpiparallel.optimizer import learning_rate
from mpiparallel.train import Trainer

pytestmark = pytest.mark.mpi(min_size=1)


def layers_for(pp):
    """More layers than stages, and not a multiple of them."""
    return max(3, pp + 1)


def micro_batch_counts(dp):
    """One micro-batch, and three uneven ones where there are rows for them."""
    return sorted({1, min(3, SMALL.global_batch // dp)})


CASES = [
    (mesh, count, allreduce)
    for mesh in factorings()
    for count in micro_batch_counts(mesh[0])
    for allreduce in ("ring", "mpi")
    if allreduce == "ring" or (mesh[0] > 1 and count == 1)
]


@pytest.mark.parametrize(("mesh", "micro_batches", "allreduce"), CASES)
def test_gradients_equal_the_serial_ones(mesh, micro_batches, allreduce):
    changes = dict(layers=layers_for(mesh[1]), micro_batches=micro_batches, allreduce=allreduce)
    with trainer(*mesh, **changes) as made:
        first = batch(0)
        result = made.gradients(first)
        gradients = gather(made, "gradients")
        losses = made.mesh.world.communicator.allgather((result.loss, result.grad_norm))
    assert len(set(losses)) == 1, "every rank knows the loss and the norm, bit for bit"
    if gradients is not None:
        weights = serial_weights(made.model.config)
        loss, expected = reference.loss_and_gradients(
            weights, first.tokens, first.labels, SMALL.heads
        )
        assert result.loss == pytest.approx(loss, rel=1e-10)
        assert_same(gradients, expected, 1e-10)
        assert result.grad_norm == pytest.approx(reference.gradient_norm(expected), rel=1e-10)


@pytest.mark.parametrize("mesh", factorings())
def test_three_adamw_steps_equal_the_serial_ones(mesh):
    micro_batches = micro_batch_counts(mesh[0])[-1]
    rates = [learning_rate(k, lr=1e-2, min_lr=1e-3, warmup=2, steps=3) for k in range(3)]
    with trainer(*mesh, layers=layers_for(mesh[1]), micro_batches=micro_batches) as made:
        results = [made.step(batch(k), rates[k]) for k in range(3)]
        weights = gather(made)
    if weights is not None:
        expected = serial_weights(made.model.config)
        history = serial_training(
            expected,
            3,
            lambda k: reference.learning_rate(k, lr=1e-2, min_lr=1e-3, warmup=2, steps=3),
        )
        assert all(norm > SMALL.clip for _, norm in history), "clipping is part of the case"
        close([(result.loss, result.grad_norm) for result in results], history, rtol=1e-10)
        assert_same(weights, expected, 1e-10)


@pytest.mark.parametrize("mesh", factorings())
def test_initial_weights_are_the_same_bits_on_every_mesh(mesh):
    changes = dict(layers=layers_for(mesh[1]), dtype="float32")
    settings = dataclasses.replace(SMALL, dp=mesh[0], pp=mesh[1], tp=mesh[2], **changes)
    settings = settings_module.check(settings, WORLD.size)
    with Mesh(*mesh) as made_mesh:
        made = Trainer(settings, settings.model_config(VOCABULARY), made_mesh)
        whole = gather(made)
    if whole is not None:
        residual_std = 0.02 / np.sqrt(2 * made.model.config.layers)
        for parameter in whole:  # float32 in float64 arrays
            generator = np.random.default_rng([SMALL.seed, zlib.crc32(parameter.encode())])
            drawn = generator.standard_normal(whole[parameter].shape)
            if parameter.endswith("norm.weight"):
                right = np.ones(whole[parameter].shape)
            elif parameter.endswith("bias"):
                right = np.zeros(whole[parameter].shape)
            elif parameter.endswith(("projection.weight", "down.weight")):
                right = drawn * residual_std
            else:
                right = drawn * 0.02
            equal(whole[parameter], right.astype("float32"), parameter)


@pytest.mark.parametrize("mesh", factorings())
def test_evaluation_covers_the_whole_split_and_equals_the_serial_loss(mesh):
    tokens = np.random.default_rng(1).integers(0, 13, 1003).astype(np.int32)
    corpus = Corpus(tokens, SMALL.seq_len)
    with trainer(*mesh, layers=layers_for(mesh[1])) as made:
        value = made.evaluate(corpus)
        assert made.mesh.ledger.rows() == []
        everywhere = made.mesh.world.communicator.allgather(value)
    assert len(set(everywhere)) == 1
    if made.mesh.rank == 0:
        rows = list(corpus.validation_batches(1))
        losses = [
            reference.loss(serial_weights(made.model.config), row.tokens, row.labels, SMALL.heads)
            * row.valid
            for row in rows
        ]
        assert sum(row.valid for row in rows) == len(corpus.validation) - 1
        assert value == pytest.approx(sum(losses) / (len(corpus.validation) - 1), rel=1e-10)


@pytest.mark.parametrize("mesh", factorings())
def test_float32_follows_float64_to_rounding(mesh):
    losses = {}
    for dtype in ("float32", "float64"):
        with trainer(*mesh, layers=layers_for(mesh[1]), dtype=dtype) as made:
            losses[dtype] = [made.step(batch(k), 1e-2).loss for k in range(3)]
    close(losses["float32"], losses["float64"], rtol=2e-5)


def test_the_same_run_twice_gives_the_same_bits():
    runs = []
    for _ in range(2):
        with trainer(1, 1, factorings()[0][2], dtype="float32") as made:
            for k in range(2):
                made.step(batch(k), 1e-2)
            runs.append([parameter.data.tobytes() for parameter in made.model.parameters])
    assert runs[0] == runs[1]
