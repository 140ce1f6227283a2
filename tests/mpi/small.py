"""Small models and batches for the tests, and the serial reference's view of them."""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import reference
from conftest import WORLD

from mpiparallel import settings as settings_module
from mpiparallel.checkpoint.boxes import Box
from mpiparallel.checkpoint.trainer_state import moment_pieces, weight_pieces
from mpiparallel.data import Batch
from mpiparallel.layers.loss import IGNORE
from mpiparallel.mesh import Mesh
from mpiparallel.parameter import Parameter
from mpiparallel.settings import Settings
from mpiparallel.train import Trainer

VOCABULARY = 13  # odd: every tp > 1 pads it
SMALL = Settings(
    layers=3,
    heads=8,
    hidden=16,
    feed_forward=24,
    seq_len=6,
    global_batch=8,
    dtype="float64",
    clip=0.5,
    lr=1e-2,
    seed=11,
    timeout=20,
)


@contextlib.contextmanager
def trainer(dp, pp, tp, *, communicator=WORLD, **changes):
    """A Trainer on a mesh of all ranks, with weights that are nowhere zero or one."""
    settings = dataclasses.replace(SMALL, dp=dp, pp=pp, tp=tp, **changes)
    settings = settings_module.check(settings, dp * pp * tp)
    with Mesh(dp, pp, tp, communicator, timeout=settings.timeout) as mesh:
        with mock.patch.object(Parameter, "initialize", load_weight):
            made = Trainer(settings, settings.model_config(VOCABULARY), mesh)
        yield made


def load_weight(parameter, _seed, dtype):
    """In the place of drawing small weights from the seed."""
    parameter.load(weight(parameter.name, parameter.shape).astype(dtype))


def weight(name, shape):
    """Any weights, but large: small ones would hide what a bias or a norm gets wrong."""
    generator = np.random.default_rng([5, *name.encode()])
    around = 1.0 if name.endswith("norm.weight") else 0.0
    return around + 0.3 * generator.standard_normal(shape)


def batch(step, size=SMALL.global_batch, sequence=SMALL.seq_len):
    """A batch in which some labels are ignored, more of them in its first rows."""
    generator = np.random.default_rng([3, step])
    tokens = generator.integers(0, VOCABULARY, (size, sequence)).astype(np.int32)
    labels = generator.integers(0, VOCABULARY, (size, sequence)).astype(np.int32)
    ignored = generator.random((size, sequence)) < np.linspace(0.7, 0.0, size)[:, None]
    labels[ignored] = IGNORE
    return Batch(tokens, labels, int((labels != IGNORE).sum()))


def gather(made, what="weights"):
    """The global arrays by name on rank 0, None elsewhere: of what every rank owns.

    what : "weights", "gradients" (averaged, as the optimizer sees them), or "moments".
    """
    state, mesh = made.data_parallel, made.mesh
    if what == "weights":
        pieces = weight_pieces(state, mesh)
    elif what == "moments":
        pieces = moment_pieces(state, made.optimizer, mesh)
    else:
        # The same shards, with their gradients in the place of Adam's moments.
        first = [shard.grad for shard in state.shards()]
        stand_in = SimpleNamespace(first=first, second=first)
        pieces = (p for p in moment_pieces(state, stand_in, mesh) if p.name.endswith("/first"))
    mine = [(p.name.removesuffix("/first" * (what == "gradients")), p) for p in pieces if p.owned]
    packed = [(name, p.shape, p.box, np.array(p.array)) for name, p in mine]
    every = mesh.world.communicator.gather(packed)
    if every is None:
        return None
    whole, filled = {}, {}
    for name, shape, box, array in (piece for rank in every for piece in rank):
        target = whole.setdefault(name, np.full(shape, np.nan))
        target[box.within(Box((0,) * len(shape), shape))] = array
        filled[name] = filled.get(name, 0) + box.size
    assert all(filled[name] == whole[name].size for name in whole), "each element owned once"
    return whole


def serial_weights(config):
    """The reference's parameters, equal to what `trainer` loads."""
    h, f = config.hidden, config.feed_forward
    shapes = {
        "token_embedding.weight": (config.vocabulary, h),
        "position_embedding.weight": (config.sequence, h),
        "final_norm.weight": (h,),
        "final_norm.bias": (h,),
    }
    for layer in range(config.layers):
        shapes |= {
            f"blocks.{layer}.{name}": shape
            for name, shape in {
                "attention_norm.weight": (h,),
                "attention_norm.bias": (h,),
                "attention.qkv.weight": (h, 3 * h),
                "attention.qkv.bias": (3 * h,),
                "attention.projection.weight": (h, h),
                "attention.projection.bias": (h,),
                "mlp_norm.weight": (h,),
                "mlp_norm.bias": (h,),
                "mlp.up.weight": (h, f),
                "mlp.up.bias": (f,),
                "mlp.down.weight": (f, h),
                "mlp.down.bias": (h,),
            }.items()
        }
    return {name: weight(name, shape) for name, shape in shapes.items()}


def serial_training(weights, steps, lr_of_step):
    """Train the reference's weights in place on the first batches; a list of (loss, norm)."""
    return reference.train_steps(
        weights,
        [(batch(step).tokens, batch(step).labels) for step in range(steps)],
        heads=SMALL.heads,
        lr_of_step=lr_of_step,
        beta1=SMALL.beta1,
        beta2=SMALL.beta2,
        weight_decay=SMALL.weight_decay,
        clip=SMALL.clip,
    )


def assert_same(actual, expected, tolerance):
    """Equal names, and every array within `tolerance` of its largest entry."""
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        scale = np.abs(right).max()
        worst = np.abs(actual[name] - right).max()
        assert worst <= tolerance * scale, f"{name} is off by {worst / scale:.1e} of {scale:.1e}"
