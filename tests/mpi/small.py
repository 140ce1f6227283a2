"""Small models and batches for the tests, and the serial reference's view of them."""

import contextlib
import dataclasses

import numpy as np

from mpiparallel import settings as settings_module
from mpiparallel.data import Batch
from mpiparallel.layers.loss import IGNORE
from mpiparallel.mesh import Coordinates, Mesh
from mpiparallel.model import every_parameter
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
def trainer(dp, pp, tp, **changes):
    """A Trainer on a mesh of all ranks, with weights that are nowhere zero or one."""
    settings = dataclasses.replace(SMALL, dp=dp, pp=pp, tp=tp, **changes)
    settings = settings_module.check(settings, dp * pp * tp)
    with Mesh(dp, pp, tp, timeout=settings.timeout) as mesh:
        made = Trainer(settings, settings.model_config(VOCABULARY), mesh)
        for parameter in made.model.parameters:
            parameter.load(weight(parameter.name, parameter.shape).astype(settings.dtype))
        yield made


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


def gather(model, mesh, placement, what="data"):
    """The global arrays by name on rank 0; an empty dict elsewhere. Every rank calls.

    what : "data" for weights, "grad" for gradients. The pieces of the first replica are sent to
    rank 0 one parameter at a time, over the world.
    """
    whole = {}
    mine = {parameter.name: parameter for parameter in model.parameters}
    for parameter in every_parameter(model.config, mesh.tp, placement):
        holder = min(parameter.holders)
        sends = mesh.coordinates.dp == 0 and mesh.coordinates.pp == holder and mesh.rank != 0
        if sends:
            mesh.world.send(getattr(mine[parameter.name], what), 0)
        if mesh.rank != 0:
            continue
        pieces = []
        for tp_rank in range(mesh.tp.size):
            source = Coordinates(0, holder, tp_rank).rank(mesh.pp.size, mesh.tp.size)
            if source == 0:
                pieces.append(getattr(mine[parameter.name], what))
            else:
                piece = np.empty(parameter.local_shape, model.gradients.dtype)
                pieces.append(mesh.world.recv(piece, source))
        whole[parameter.name] = parameter.layout.join(pieces, parameter.shape)
    return whole


def gathered(made, what="data"):
    """The global arrays by name on rank 0, None elsewhere."""
    whole = gather(made.model, made.mesh, made.placement, what)
    return whole if made.mesh.rank == 0 else None


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


def assert_same(actual, expected, tolerance):
    """Equal names, and every array within `tolerance` of its largest entry."""
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        scale = np.abs(right).max()
        worst = np.abs(actual[name] - right).max()
        assert worst <= tolerance * scale, f"{name} is off by {worst / scale:.1e} of {scale:.1e}"
