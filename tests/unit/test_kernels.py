"""The kernels of both backends against the formulas, across block borders and in both dtypes."""

import math

import numpy as np
import pytest
from kernel_sets import kernel_set

SHAPES = [(1, 1), (3, 5), (700, 96)]  # the last one spans several blocks
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@pytest.fixture(params=["numpy", "cupy"])
def kernels(request, monkeypatch):
    return kernel_set(request.param, monkeypatch)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def close(actual, expected, dtype):
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_and_its_slope(kernels, shape, dtype):
    x = (3 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)

    def by_the_book(x):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + np.tanh(inner))

    y, slope = kernels.gelu(x)
    wide = x.astype("float64")
    close(y, by_the_book(wide), dtype)
    difference = (by_the_book(wide + 1e-6) - by_the_book(wide - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope, difference, rtol=1e-4, atol=1e-4)


def test_gelu_is_finite_for_large_inputs(kernels, dtype):
    y, slope = kernels.gelu(np.array([-1e4, -50, 50, 1e4], dtype))
    np.testing.assert_array_equal(y, [0, 0, 50, 1e4])
    np.testing.assert_array_equal(slope, [0, 0, 1, 1])


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(kernels, shape, dtype):
    generator = np.random.default_rng(1)
    x = generator.standard_normal(shape).astype(dtype)
    weight, bias = generator.standard_normal((2, shape[-1])).astype(dtype)
    y, _ = kernels.layer_norm(x, weight, bias, 1e-5)
    wide = x.astype("float64")
    normalised = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    close(y, normalised * weight + bias, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_backward_equals_central_differences(kernels, shape):
    generator = np.random.default_rng(2)
    x, dy, direction = generator.standard_normal((3, *shape))
    weight, bias, along = generator.standard_normal((3, shape[-1]))
    _, saved = kernels.layer_norm(x, weight, bias, 1e-5)
    dx, dweight, dbias = kernels.layer_norm_backward(dy, weight, saved)

    def slope(moved):
        step = 1e-5
        return float(((moved(step) - moved(-step)) * dy).sum()) / (2 * step)

    def norm(x, weight, bias):
        return kernels.layer_norm(x, weight, bias, 1e-5)[0]

    for gradient, moved, by in [
        (dx, lambda t: norm(x + t * direction, weight, bias), direction),
        (dweight, lambda t: norm(x, weight + t * along, bias), along),
        (dbias, lambda t: norm(x, weight, bias + t * along), along),
    ]:
        assert slope(moved) == pytest.approx(float((gradient * by).sum()), rel=1e-5, abs=1e-5)


def test_causal_softmax(kernels, dtype):
    scores = np.random.default_rng(3).standard_normal((2, 3, 7, 7)).astype(dtype)
    expected = np.exp(scores.astype("float64") * 0.5) * np.tril(np.ones((7, 7)))
    expected /= expected.sum(-1, keepdims=True)
    result = kernels.causal_softmax(scores, 0.5)
    close(result, expected, dtype)
    assert (result[..., np.triu_indices(7, 1)[0], np.triu_indices(7, 1)[1]] == 0).all()


def test_causal_softmax_is_stable_for_huge_scores(kernels, dtype):
    result = kernels.causal_softmax(np.full((1, 1, 2, 2), 1e30, dtype), 1.0)
    np.testing.assert_array_equal(result[0, 0], [[1, 0], [0.5, 0.5]])


def test_causal_softmax_backward_equals_central_differences(kernels):
    scores, dp, direction = np.random.default_rng(4).standard_normal((3, 1, 2, 5, 5))
    probabilities = kernels.causal_softmax(scores.copy(), 0.7)
    gradient = kernels.causal_softmax_backward(dp.copy(), probabilities, 0.7)
    step = 1e-5
    up, down = (kernels.causal_softmax(scores + s * direction, 0.7) for s in (step, -step))
    slope = float(((up - down) * dp).sum()) / (2 * step)
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-7)


@pytest.mark.parametrize("rows", [[], [2], [1, 1, 1], [4, 0, 4, 2, 0]])
def test_add_rows_adds_every_row_also_repeated_ones(kernels, rows):
    values = np.random.default_rng(5).standard_normal((len(rows), 3))
    target = np.ones((5, 3))
    expected = target.copy()
    np.add.at(expected, np.array(rows, int), values)
    kernels.add_rows(target, np.array(rows, int), values)
    np.testing.assert_allclose(target, expected, rtol=1e-14)


@pytest.mark.parametrize("size", [1, 1000, 100_001])  # within a block, and across blocks
def test_adamw_equals_the_textbook(kernels, size):
    generator = np.random.default_rng(size)
    weight, first, second = generator.standard_normal(size), np.zeros(size), np.zeros(size)
    w, m, v = weight.copy(), 0.0, 0.0
    for step in range(1, 4):
        gradient = generator.standard_normal(size)
        kernels.adamw(
            weight,
            gradient,
            first,
            second,
            lr=0.01,
            beta1=0.8,
            beta2=0.95,
            epsilon=1e-8,
            decay=0.1,
            step=step,
            gradient_scale=0.5,
        )
        g = gradient * 0.5
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        m_hat, v_hat = m / (1 - 0.8**step), v / (1 - 0.95**step)
        w = w * (1 - 0.01 * 0.1) - 0.01 * m_hat / (np.sqrt(v_hat) + 1e-8)
        np.testing.assert_allclose(weight, w, rtol=1e-12, atol=1e-15)
    # The gradient is the caller's: clipping does not write to it.
    np.testing.assert_array_equal(gradient * 0.5, g)


def test_the_square_sum_is_exact_in_float32(kernels):
    # 2^24 ones: a float32 sum stops at 2^24 when 1 is added one at a time.
    values = np.ones(2**24 + 3, "float32")
    assert kernels.square_sum(values) == 2**24 + 3
    assert math.isinf(kernels.square_sum(np.array([np.inf], "float32")))
