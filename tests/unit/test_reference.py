"""The oracle is checked against hand computations, written-out loops and central differences."""

import math

import numpy as np
import pytest
import reference

VOCAB, HIDDEN, HEADS, FEED_FORWARD, LAYERS, LONGEST = 7, 4, 2, 6, 2, 5


def shapes():
    """name -> shape of every parameter of the tiny model."""
    block = {
        "attention_norm.weight": (HIDDEN,),
        "attention_norm.bias": (HIDDEN,),
        "attention.qkv.weight": (HIDDEN, 3 * HIDDEN),
        "attention.qkv.bias": (3 * HIDDEN,),
        "attention.projection.weight": (HIDDEN, HIDDEN),
        "attention.projection.bias": (HIDDEN,),
        "mlp_norm.weight": (HIDDEN,),
        "mlp_norm.bias": (HIDDEN,),
        "mlp.up.weight": (HIDDEN, FEED_FORWARD),
        "mlp.up.bias": (FEED_FORWARD,),
        "mlp.down.weight": (FEED_FORWARD, HIDDEN),
        "mlp.down.bias": (HIDDEN,),
    }
    return {
        "token_embedding.weight": (VOCAB, HIDDEN),
        "position_embedding.weight": (LONGEST, HIDDEN),
        **{f"blocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()},
        "final_norm.weight": (HIDDEN,),
        "final_norm.bias": (HIDDEN,),
    }


@pytest.fixture
def parameters():
    rng = np.random.default_rng(0)
    return {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes().items()}


@pytest.fixture
def tokens():
    return np.array([[3, 1, 4, 1], [5, 2, 6, 5]])  # shorter than LONGEST; 0 never occurs


@pytest.fixture
def labels():
    return np.array([[1, 4, 1, -100], [2, 6, -100, 3]])


# The model


def test_layer_norm_divides_by_the_biased_deviation():
    parameters = {"norm.weight": np.array([2.0, 2.0]), "norm.bias": np.array([10.0, 20.0])}
    normal = 1 / math.sqrt(1 + 1e-5)  # [1, 3]: mean 2, variance 1
    y = reference.layer_norm(parameters, "norm", np.array([1.0, 3.0]))
    np.testing.assert_allclose(y, [10 - 2 * normal, 20 + 2 * normal], rtol=1e-14)


def test_gelu_is_the_tanh_form():
    # The exact form gives 0.84134 and -0.15866.
    y = reference.gelu(np.array([-1.0, 0.0, 1.0]))
    np.testing.assert_allclose(y, [-0.158808, 0.0, 0.841192], atol=1e-6)


def test_attention_equals_a_loop_over_heads_and_positions(parameters):
    name, head_dim = "blocks.0.attention", HIDDEN // HEADS
    x = np.random.default_rng(1).standard_normal((1, 4, HIDDEN))
    qkv = x[0] @ parameters[f"{name}.qkv.weight"] + parameters[f"{name}.qkv.bias"]
    context = np.zeros((4, HIDDEN))
    for head in range(HEADS):
        columns = np.arange(head * head_dim, (head + 1) * head_dim)
        for i in range(4):
            q = qkv[i, columns]
            odds = [math.exp(q @ qkv[j, HIDDEN + columns] / head_dim**0.5) for j in range(i + 1)]
            for j in range(i + 1):
                context[i, columns] += odds[j] / sum(odds) * qkv[j, 2 * HIDDEN + columns]
    expected = context @ parameters[f"{name}.projection.weight"]
    expected += parameters[f"{name}.projection.bias"]
    y = reference.attention(parameters, name, x, HEADS)
    np.testing.assert_allclose(y[0], expected, rtol=1e-12)


def test_a_later_token_leaves_earlier_logits_unchanged(parameters, tokens):
    before = reference.logits(parameters, tokens, HEADS)
    tokens[:, 2] = 0
    after = reference.logits(parameters, tokens, HEADS)
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.all(np.any(before[:, 2:] != after[:, 2:], axis=-1))


def test_blocks_add_to_a_residual_stream_that_the_tied_head_reads(parameters, tokens):
    for name in parameters:
        if name.startswith("blocks."):
            parameters[name][:] = 0
    table = parameters["token_embedding.weight"]
    x = table[tokens] + parameters["position_embedding.weight"][:4]
    expected = reference.layer_norm(parameters, "final_norm", x) @ table.T
    np.testing.assert_allclose(reference.logits(parameters, tokens, HEADS), expected, rtol=1e-13)


def test_the_norms_stand_before_attention_and_mlp(parameters, tokens):
    """With norms that put out a constant, each block adds the same vector to every position."""
    for name in parameters:
        if name.startswith("blocks.") and name.endswith("_norm.weight"):
            parameters[name][:] = 0
    table = parameters["token_embedding.weight"]
    x = table[tokens] + parameters["position_embedding.weight"][:4]
    for i in range(LAYERS):
        p = {name.removeprefix(f"blocks.{i}."): value for name, value in parameters.items()}
        value = (p["attention_norm.bias"] @ p["attention.qkv.weight"] + p["attention.qkv.bias"])[
            2 * HIDDEN :
        ]
        x = x + value @ p["attention.projection.weight"] + p["attention.projection.bias"]
        up = reference.gelu(p["mlp_norm.bias"] @ p["mlp.up.weight"] + p["mlp.up.bias"])
        x = x + up @ p["mlp.down.weight"] + p["mlp.down.bias"]
    expected = reference.layer_norm(parameters, "final_norm", x) @ table.T
    np.testing.assert_allclose(reference.logits(parameters, tokens, HEADS), expected, rtol=1e-11)


# Loss and gradients


def test_zero_weights_give_the_uniform_loss(tokens, labels):
    zeros = {name: np.zeros(shape) for name, shape in shapes().items()}
    assert reference.loss(zeros, tokens, labels, HEADS) == pytest.approx(math.log(VOCAB), rel=1e-15)


def test_the_loss_is_the_mean_over_valid_tokens(parameters, tokens, labels):
    scores = reference.logits(parameters, tokens, HEADS)
    valid = [(b, s) for b in range(2) for s in range(4) if labels[b, s] != -100]
    each = [math.log(np.exp(scores[t]).sum()) - scores[t][labels[t]] for t in valid]
    expected = sum(each) / 6
    assert reference.loss(parameters, tokens, labels, HEADS) == pytest.approx(expected, rel=1e-14)


def test_ignored_labels_give_no_loss_and_exactly_zero_gradient(parameters, tokens, labels):
    nothing = np.full_like(labels, -100)
    value, gradients = reference.loss_and_gradients(parameters, tokens, nothing, HEADS)
    assert value == 0.0
    assert not any(np.any(g) for g in gradients.values())

    labels[1] = -100  # a sequence of ignored labels is as good as no sequence
    both = reference.loss_and_gradients(parameters, tokens, labels, HEADS)
    first = reference.loss_and_gradients(parameters, tokens[:1], labels[:1], HEADS)
    assert both[0] == pytest.approx(first[0], rel=1e-14)
    for name in parameters:
        np.testing.assert_allclose(both[1][name], first[1][name], atol=1e-14, err_msg=name)


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_a_label_outside_the_vocabulary_is_an_error(parameters, tokens, labels, label):
    labels[0, 0] = label
    with pytest.raises(ValueError, match=r"0\.\.6"):
        reference.loss(parameters, tokens, labels, HEADS)


@pytest.mark.parametrize("name", shapes())
def test_gradient_equals_central_differences(parameters, tokens, labels, name):
    value, gradients = reference.loss_and_gradients(parameters, tokens, labels, HEADS)
    assert isinstance(value, float)
    assert value == reference.loss(parameters, tokens, labels, HEADS)
    assert gradients.keys() == parameters.keys()

    p, h = parameters[name], 1e-5
    expected = np.zeros_like(p)
    for index in np.ndindex(p.shape):
        kept = p[index]
        p[index] = kept + h
        above = reference.loss(parameters, tokens, labels, HEADS)
        p[index] = kept - h
        below = reference.loss(parameters, tokens, labels, HEADS)
        p[index] = kept
        expected[index] = (above - below) / (2 * h)
    assert np.any(np.abs(expected) > 1e-4)  # or the comparison would say nothing
    np.testing.assert_allclose(gradients[name], expected, rtol=1e-6, atol=1e-9)


# The optimizer


def test_clipping_scales_norm_5_down_to_1_and_reports_5():
    gradients = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    clipped, norm = reference.clip(gradients, 1.0)
    assert norm == 5.0
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=1e-15)
    np.testing.assert_allclose(clipped["b"], [[0.8]], rtol=1e-15)


@pytest.mark.parametrize("max_norm", [0, 5.0, 100.0])
def test_clipping_never_scales_up_and_0_means_none(max_norm):
    clipped, norm = reference.clip({"a": np.array([3.0, 4.0])}, max_norm)
    assert norm == 5.0
    np.testing.assert_array_equal(clipped["a"], [3.0, 4.0])


def test_clipping_leaves_zero_gradients_at_zero():
    clipped, norm = reference.clip({"a": np.zeros(2)}, 1.0)
    assert norm == 0.0
    np.testing.assert_array_equal(clipped["a"], [0.0, 0.0])


def test_learning_rate_climbs_a_line_and_descends_a_cosine():
    settings = {"lr": 1.0, "min_lr": 0.2, "warmup": 4, "steps": 12}
    rates = [reference.learning_rate(step, **settings) for step in (0, 1, 3, 4, 6, 8, 12)]
    quarter = 0.6 + 0.4 * math.sqrt(0.5)  # cos(pi / 4)
    np.testing.assert_allclose(rates, [0.25, 0.5, 1.0, 1.0, quarter, 0.6, 0.2], rtol=1e-14)


def test_learning_rate_without_warmup_or_with_nothing_else():
    assert reference.learning_rate(0, lr=1.0, min_lr=0.2, warmup=0, steps=10) == 1.0
    assert reference.learning_rate(3, lr=1.0, min_lr=0.2, warmup=4, steps=4) == 1.0
    assert reference.learning_rate(4, lr=1.0, min_lr=0.2, warmup=4, steps=4) == 1.0


def test_adamw_moves_by_lr_against_the_sign_of_a_constant_gradient():
    p = {"a": np.array([1.0, 2.0, 3.0])}
    array = p["a"]
    adamw = reference.AdamW(0.9, 0.95, weight_decay=0.0)
    for count in (1, 2, 3):
        adamw.step(p, {"a": np.array([7.0, -0.5, 0.0])}, lr=0.1)
        np.testing.assert_allclose(array, [1 - 0.1 * count, 2 + 0.1 * count, 3.0], rtol=1e-7)
    assert p["a"] is array  # in place


def test_adamw_weighs_two_gradients_by_its_betas():
    p = {"a": np.array([0.0])}
    adamw = reference.AdamW(0.5, 0.75, eps=0.0, weight_decay=0.0)
    adamw.step(p, {"a": np.array([1.0])}, lr=1.0)  # to -1
    adamw.step(p, {"a": np.array([3.0])}, lr=1.0)
    # mean (0.5 * 0.5 + 0.5 * 3) / (1 - 0.5^2) = 7/3
    # square (0.75 * 0.25 + 0.25 * 9) / (1 - 0.75^2) = 39/7
    np.testing.assert_allclose(p["a"], [-1 - 7 / 3 / math.sqrt(39 / 7)], rtol=1e-14)


def test_adamw_adds_eps_outside_the_root_of_the_corrected_moment():
    p = {"a": np.array([0.0])}
    reference.AdamW(0.9, 0.95, eps=1e-8, weight_decay=0.0).step(p, {"a": np.array([1e-8])}, lr=1.0)
    np.testing.assert_allclose(p["a"], [-0.5], rtol=1e-12)  # g / (|g| + eps)


def test_weight_decay_is_decoupled_and_for_matrices_only():
    p = {"matrix": np.array([[2.0]]), "vector": np.array([2.0])}
    gradients = {"matrix": np.array([[0.0]]), "vector": np.array([0.0])}
    reference.AdamW(0.9, 0.95, weight_decay=0.5).step(p, gradients, lr=0.1)
    np.testing.assert_allclose(p["matrix"], [[1.9]], rtol=1e-15)  # 2 * (1 - 0.1 * 0.5)
    assert p["vector"] == 2.0


def test_weight_decay_comes_before_the_update():
    p = {"matrix": np.array([[2.0]])}
    reference.AdamW(0.9, 0.95, eps=0.0, weight_decay=0.5).step(p, {"matrix": np.ones((1, 1))}, 0.1)
    np.testing.assert_allclose(p["matrix"], [[1.8]], rtol=1e-14)  # 2 * 0.95 - 0.1, not 1.9 * 0.95


# Training


def test_training_reports_loss_and_norm_before_each_update(parameters, tokens, labels):
    value, gradients = reference.loss_and_gradients(parameters, tokens, labels, HEADS)
    asked = []
    history = reference.train_steps(
        parameters,
        [(tokens, labels)] * 20,
        heads=HEADS,
        lr_of_step=lambda step: asked.append(step) or 0.01,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip=1e-3,
    )
    assert history[0] == (value, reference.gradient_norm(gradients))
    assert asked == list(range(20))
    assert history[-1][0] < 0.9 * history[0][0]


def test_training_is_loss_clip_and_adamw_in_turn(parameters, tokens, labels):
    expected = {name: p.copy() for name, p in parameters.items()}
    batches = [(tokens, labels), (tokens[::-1, 1:], labels[::-1, 1:])]
    adamw = reference.AdamW(0.8, 0.95, weight_decay=0.1)
    for step, batch in enumerate(batches):
        _, gradients = reference.loss_and_gradients(expected, *batch, HEADS)
        adamw.step(expected, reference.clip(gradients, 0.1)[0], lr=0.1 / (step + 1))

    reference.train_steps(
        parameters,
        batches,
        heads=HEADS,
        lr_of_step=lambda step: 0.1 / (step + 1),
        beta1=0.8,
        beta2=0.95,
        weight_decay=0.1,
        clip=0.1,
    )
    for name in parameters:
        np.testing.assert_array_equal(parameters[name], expected[name], err_msg=name)


@pytest.mark.parametrize(("clip", "moved"), [(0, (0.9, 1.0)), (1e-8, (0.1, 0.5))])
def test_training_clips_before_the_update(parameters, tokens, labels, clip, moved):
    """No gradient exceeds the norm; one of at most eps = 1e-8 moves a weight by lr / 2 at most."""
    before = {name: p.copy() for name, p in parameters.items()}
    reference.train_steps(
        parameters,
        [(tokens, labels)],
        heads=HEADS,
        lr_of_step=lambda step: 1.0,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        clip=clip,
    )
    low, high = moved
    assert low < max(np.abs(parameters[name] - before[name]).max() for name in before) <= high
