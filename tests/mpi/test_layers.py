"""Each layer cut over tp equals its serial self, and central differences, in float64.

All ranks of the run are one tensor group. The loss of a layer is sum(y * r) for a fixed r.
"""

import numpy as np
import pytest
from memory import close, device, equal, host
from mpi4py import MPI

from mpiparallel.comm.group import Group
from mpiparallel.layers.attention import Attention
from mpiparallel.layers.block import Block
from mpiparallel.layers.embedding import VocabParallelEmbedding, token_table
from mpiparallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpiparallel.layers.loss import IGNORE, VocabParallelCrossEntropy, VocabParallelLogits
from mpiparallel.layers.mlp import MLP
from mpiparallel.layers.norm import LayerNorm

pytestmark = pytest.mark.mpi(min_size=1)

H, N, F, V, S, B = 16, 8, 24, 13, 5, 2


@pytest.fixture
def alone():
    """A group of one rank: the serial layer is the same code."""
    group = Group(MPI.COMM_SELF.Dup(), "tp")
    yield group
    group.free()


def fill(parameters, seed=3):
    """Give parameters the same global values however they are cut; allocate gradients."""
    for parameter in parameters:
        generator = np.random.default_rng([seed, *parameter.name.encode()])
        parameter.load(generator.standard_normal(parameter.shape) * 0.5)
        parameter.grad = device(np.zeros(parameter.local_shape))


def whole(parameter, tp, what):
    """The global array of a parameter's data or grad, on every rank."""
    shards = tp.communicator.allgather(host(getattr(parameter, what)))
    return parameter.layout.join(shards, parameter.shape)


class EmbeddingOf:
    """The embedding as a function of its tables: x only chooses the tokens."""

    def __init__(self, tp):
        self.layer = VocabParallelEmbedding(token_table(V, H, tp, 0.1), S + 1, tp, 0.1)
        self.parameters = self.layer.parameters

    def forward(self, x):
        tokens = np.abs(100 * np.sin(np.arange(B * S))).astype(int).reshape(B, S) % V
        return self.layer.forward(device(tokens))

    def backward(self, dy, saved):
        self.layer.backward(dy, saved)
        return device(np.zeros(dy.shape))


class LossOf:
    """Output layer and cross-entropy: x (B, S, H) -> losses (B, S), one label ignored."""

    def __init__(self, tp):
        table = token_table(V, H, tp, 0.1)
        self.output, self.loss = VocabParallelLogits(table, tp), VocabParallelCrossEntropy(V, tp)
        self.parameters = [table]

    def forward(self, x):
        labels = np.arange(B * S).reshape(B, S) % V
        labels[0, 2] = IGNORE
        logits, output = self.output.forward(x)
        losses, loss = self.loss.forward(logits, device(labels))
        return losses[..., None] * device(np.ones(H)), (output, loss)

    def backward(self, dy, saved):
        output, loss = saved
        assert np.ptp(host(dy)) == 0, "the loss is scaled by one number"
        return self.output.backward(self.loss.backward(H * float(dy[0, 0, 0]), loss), output)


class ColumnsThenRows:
    """The pair with a single all-reduce each way, nothing between them."""

    def __init__(self, tp):
        self.columns = ColumnParallelLinear("columns", H, F, tp, 0.1)
        self.rows = RowParallelLinear("rows", F, H, tp, 0.1)
        self.parameters = self.columns.parameters + self.rows.parameters

    def forward(self, x):
        inner, columns = self.columns.forward(x)
        y, rows = self.rows.forward(inner)
        return y, (columns, rows)

    def backward(self, dy, saved):
        columns, rows = saved
        return self.columns.backward(self.rows.backward(dy, rows), columns)


LAYERS = {
    "linear": ColumnsThenRows,
    "embedding": EmbeddingOf,
    "loss": LossOf,
    "norm": lambda tp: LayerNorm("layer", H, tp),
    "mlp": lambda tp: MLP("layer", H, F, tp, 0.1, 0.1),
    "attention": lambda tp: Attention("layer", H, N, tp, 0.1, 0.1),
    "block": lambda tp: Block("layer", H, N, F, tp, 0.1, 0.1),
}


def layer_input(kind, rng):
    """x, and the weights r of the loss sum(y * r); one number for the cross-entropy."""
    x, r = rng.standard_normal((2, B, S, H))
    return x, np.full_like(r, 0.3) if kind == "loss" else r


def run(layer, x, r):
    """y and dx as NumPy arrays, with the gradients of sum(y * r) left in the parameters."""
    given = device(x.copy())
    y, saved = layer.forward(given)
    dx = layer.backward(device(r), saved)
    equal(given, x, "the input is the caller's")
    return host(y), host(dx)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_cut_layer_equals_the_serial_one(world, alone, rng, kind):
    x, r = layer_input(kind, rng)
    results = []
    for tp in (alone, world):
        layer = LAYERS[kind](tp)
        fill(layer.parameters)
        y, dx = run(layer, x, r)
        results.append([y, dx, *(whole(p, tp, "grad") for p in layer.parameters)])
    for serial, cut in zip(*results, strict=True):
        close(cut, serial, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_equals_central_differences(world, rng, kind):
    x, r = layer_input(kind, rng)
    layer = LAYERS[kind](world)
    fill(layer.parameters)
    _, dx = run(layer, x, r)
    gradients = {p.name: whole(p, world, "grad") for p in layer.parameters}
    values = {p.name: whole(p, world, "data") for p in layer.parameters}

    def loss(direction, scale):
        """The loss with everything moved by scale * direction."""
        for parameter in layer.parameters:
            parameter.load(values[parameter.name] + scale * direction[parameter.name])
        y, _ = layer.forward(device(x + scale * direction["x"]))
        return float((host(y) * r).sum())

    # Along random directions, of x and of each parameter alone, then of all together.
    for name in ["x", *values]:
        direction = {key: np.zeros_like(value) for key, value in values.items()}
        direction["x"] = np.zeros_like(x)
        direction[name] = rng.standard_normal(direction[name].shape)
        step = 1e-5
        slope = (loss(direction, step) - loss(direction, -step)) / (2 * step)
        expected = float((direction[name] * (dx if name == "x" else gradients[name])).sum())
        assert slope == pytest.approx(expected, rel=1e-6, abs=1e-7), name


def test_column_parallel_sums_the_input_gradient_once_and_weights_not_at_all(world, rng):
    x, w = rng.standard_normal((3, 4)), rng.standard_normal((4, 16))
    r = rng.standard_normal((3, 16))
    layer = ColumnParallelLinear("layer", 4, 16, world, 0.1)
    fill(layer.parameters)
    layer.weight.load(w)
    y, saved = layer.forward(device(x))
    columns = slice(world.rank * 16 // world.size, (world.rank + 1) * 16 // world.size)
    close(y - layer.bias.data, (x @ w)[:, columns], rtol=1e-12, atol=1e-12)
    dx = layer.backward(device(r[:, columns].copy()), saved)
    close(dx, r @ w.T, rtol=1e-11, atol=1e-12)
    close(layer.weight.grad, (x.T @ r)[:, columns], rtol=1e-12, atol=1e-12)
    counted = {row["op"]: row["calls"] for row in world.ledger.rows()}
    assert counted == {"allreduce": 1}


def test_row_parallel_adds_its_bias_once(world):
    layer = RowParallelLinear("layer", 8, 3, world, 0.1)
    fill(layer.parameters)
    layer.weight.load(np.zeros((8, 3)))
    layer.bias.load(np.array([100.0, 200.0, 300.0]))
    y, saved = layer.forward(device(np.ones((2, 8 // world.size))))
    equal(y, [[100, 200, 300]] * 2)
    layer.backward(device(np.ones((2, 3))), saved)
    equal(layer.bias.grad, [2, 2, 2])


def test_a_split_backward_gives_the_gradients_of_a_whole_one(world, rng):
    x, r = rng.standard_normal((2, B, S, H))
    gradients = []
    for split in (False, True):
        layer = LAYERS["block"](world)
        fill(layer.parameters)
        _, saved = layer.forward(device(x))
        if split:
            work = []
            dx = layer.backward(device(r), saved, lambda *call, work=work: work.append(call))
            for function, *arrays in work:
                function(*arrays)
            assert len(work) == 4, "one piece of work per linear layer"
        else:
            dx = layer.backward(device(r), saved)
        gradients.append([dx] + [p.grad for p in layer.parameters])
    for one, other in zip(*gradients, strict=True):
        equal(one, other)


def test_a_shared_weight_is_counted_once_by_each_use_in_a_split_backward(alone):
    # loss = sum(x W W): the same linear layer used twice; the values are worked out by hand.
    layer = ColumnParallelLinear("layer", 2, 2, alone, 0.1)
    fill(layer.parameters)
    layer.weight.load(np.array([[0.4, -0.2], [0.7, 0.3]]))
    layer.bias.load(np.zeros(2))
    work = []

    def later(function, *arrays):
        work.append((function, arrays))

    inner, saved1 = layer.forward(device(np.array([[1.1, -0.7]])))
    _, saved2 = layer.forward(inner)
    dx = layer.backward(layer.backward(device(np.ones((1, 2))), saved2, later), saved1, later)
    close(dx, [[-0.12, 0.44]], atol=1e-14)
    for function, arrays in work:
        function(*arrays)
    close(layer.weight.grad, [[0.17, 1.05], [-0.57, -1.13]], atol=1e-14)


def test_fused_qkv_is_cut_by_heads(world):
    layer = Attention("layer", 16, 8, world, 0.1, 0.1)
    columns = np.arange(48.0)
    layer.qkv.bias.load(columns)
    own = slice(world.rank * 16 // world.size, (world.rank + 1) * 16 // world.size)
    expected = np.concatenate([part[own] for part in columns.reshape(3, 16)])
    equal(layer.qkv.bias.data, expected)
    equal(whole(layer.qkv.bias, world, "data"), columns)


def test_attention_sees_no_later_position(world, rng):
    layer = LAYERS["attention"](world)
    fill(layer.parameters)
    x = rng.standard_normal((1, S, H))
    y = host(layer.forward(device(x))[0])
    x[0, 3] += 10
    changed = host(layer.forward(device(x))[0])
    equal(changed[0, :3], y[0, :3])
    assert (changed[0, 3:] != y[0, 3:]).all()


# ---- vocabulary: any size, padded to tp inside and invisible outside ----


@pytest.mark.parametrize("vocabulary", [1, 3, 13, 16])
def test_embedding_equals_a_table_lookup_with_any_vocabulary(world, rng, vocabulary):
    table = token_table(vocabulary, H, world, 0.1)
    layer = VocabParallelEmbedding(table, S + 1, world, 0.1)
    fill(layer.parameters)
    tokens = rng.integers(0, vocabulary, (B, S))
    x, saved = layer.forward(device(tokens))
    tokens_table, positions = (whole(p, world, "data") for p in layer.parameters)
    close(x, tokens_table[tokens] + positions[:S], rtol=1e-15)
    dx = rng.standard_normal(x.shape)
    layer.backward(device(dx), saved)
    dtable, dpositions = np.zeros((vocabulary, H)), np.zeros((S + 1, H))
    np.add.at(dtable, tokens, dx)
    dpositions[:S] = dx.sum(0)
    close(whole(table, world, "grad"), dtable, rtol=1e-12, atol=1e-12)
    close(whole(layer.positions, world, "grad"), dpositions, atol=1e-12)


def test_a_token_outside_the_vocabulary_is_an_error(world):
    layer = VocabParallelEmbedding(token_table(V, H, world, 0.1), S, world, 0.1)
    fill(layer.parameters)
    for token in (-1, V):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            layer.forward(device(np.array([[0, token]])))


def output_and_loss(world, x, labels, vocabulary, scale=1.0):
    """losses (B, S), dx and the table's gradient, from our cut layers."""
    table = token_table(vocabulary, x.shape[-1], world, 0.1)
    fill([table])
    output, loss = VocabParallelLogits(table, world), VocabParallelCrossEntropy(vocabulary, world)
    logits, saved_output = output.forward(device(x))
    losses, saved_loss = loss.forward(logits, device(labels))
    dx = output.backward(loss.backward(scale, saved_loss), saved_output)
    return host(losses), host(dx), table


def serial_cross_entropy(x, table, labels, scale):
    """The same by the book: gathered logits, one softmax."""
    logits = x @ table.T
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    valid = labels != IGNORE
    known = np.where(valid, labels, 0)
    losses = -np.take_along_axis(log_probabilities, known[..., None], -1)[..., 0] * valid
    dlogits = np.exp(log_probabilities)
    np.put_along_axis(
        dlogits, known[..., None], np.take_along_axis(dlogits, known[..., None], -1) - 1, -1
    )
    dlogits *= scale * valid[..., None]
    return losses, dlogits @ table, np.einsum("bsv,bsh->vh", dlogits, x)


@pytest.mark.parametrize("vocabulary", [1, 3, 13, 16])
def test_cross_entropy_equals_the_serial_one_with_any_vocabulary(world, rng, vocabulary):
    x = rng.standard_normal((B, S, H))
    labels = rng.integers(0, vocabulary, (B, S))
    labels[0, 1] = labels[1, 4] = IGNORE
    losses, dx, table = output_and_loss(world, x, labels, vocabulary, scale=0.25)
    expected = serial_cross_entropy(x, whole(table, world, "data"), labels, 0.25)
    for ours, right in zip((losses, dx, whole(table, world, "grad")), expected, strict=True):
        close(ours, right, rtol=1e-11, atol=1e-12)


def test_ignored_labels_give_no_loss_and_exactly_zero_gradient(world, rng):
    x = rng.standard_normal((B, S, H))
    losses, dx, table = output_and_loss(world, x, np.full((B, S), IGNORE), V)
    equal(losses, 0)
    equal(dx, 0)
    equal(table.grad, 0)


@pytest.mark.parametrize("label", [V, V + 1, -1, -99, 2**31 - 1])
def test_a_label_outside_the_vocabulary_is_an_error(world, label):
    # V = 13 is padded to 14 or 16 inside: the padding is no label either.
    with pytest.raises(ValueError, match="in the vocabulary"):
        output_and_loss(world, np.zeros((1, 1, H)), np.array([[label]]), V)


def test_cross_entropy_is_stable_for_huge_logits(world):
    x = np.zeros((1, 1, H), "float32")
    x[..., 0] = 1e4
    table_std = token_table(V, H, world, 0.1)
    fill([table_std])
    losses, dx, _ = output_and_loss(world, x, np.array([[2]]), V)
    assert np.isfinite(losses).all()
    assert np.isfinite(dx).all()


def test_the_loss_never_sends_the_logits(world, rng):
    vocabulary = 4096
    before = sum(row["bytes"] for row in world.ledger.rows())
    table = token_table(vocabulary, H, world, 0.1)
    fill([table])
    logits, _ = VocabParallelLogits(table, world).forward(device(rng.standard_normal((B, S, H))))
    loss = VocabParallelCrossEntropy(vocabulary, world)
    _, saved = loss.forward(logits, device(np.zeros((B, S), int)))
    loss.backward(1.0, saved)
    sent = sum(row["bytes"] for row in world.ledger.rows()) - before
    p = world.size
    assert sent == 3 * 2 * (p - 1) * B * S * 8 // p  # three numbers per position
