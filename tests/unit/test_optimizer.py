"""AdamW, clipping, the learning rate: values worked out by hand or by the book in float64."""

import math

import numpy as np
import pytest

from mpiparallel.backend import kernels
from mpiparallel.optimizer import AdamW, clip_scale, learning_rate
from mpiparallel.parameter import Layout, Parameter

RATE = dict(lr=1e-3, min_lr=1e-4, warmup=100, steps=2000)


def test_the_rate_warms_up_linearly_and_falls_as_half_a_cosine():
    assert learning_rate(0, **RATE) == pytest.approx(1e-5)
    assert learning_rate(99, **RATE) == pytest.approx(1e-3)
    assert learning_rate(100, **RATE) == pytest.approx(1e-3)
    assert learning_rate(1050, **RATE) == pytest.approx(5.5e-4)  # half way
    assert learning_rate(2000, **RATE) == pytest.approx(1e-4)
    assert learning_rate(9999, **RATE) == pytest.approx(1e-4)
    assert learning_rate(0, lr=1.0, min_lr=0.0, warmup=0, steps=1) == 1.0
    assert learning_rate(5, lr=1.0, min_lr=0.0, warmup=10, steps=3) == 0.6


def test_clipping_scales_only_what_is_too_long():
    assert clip_scale(5.0, 1.0) == 0.2
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(5.0, 0.0) == 1.0  # 0 is no limit


def make(shape, name="weight"):
    parameter = Parameter(name, shape, Layout(), "ones", 0, 1)
    parameter.initialize(0, "float64")
    parameter.grad = np.zeros(shape)
    return parameter


def test_decay_applies_to_matrices_and_is_decoupled():
    matrix, bias = make((2, 3)), make((3,), "bias")
    optimizer = AdamW([matrix, bias], beta1=0.9, beta2=0.99, weight_decay=0.1)
    optimizer.step(0.5)  # gradients are zero: only decay moves anything
    np.testing.assert_allclose(matrix.data, 1 - 0.5 * 0.1)
    np.testing.assert_array_equal(bias.data, 1)


@pytest.mark.parametrize("size", [1, 1000, 100_001])  # within a block, and across blocks
def test_adamw_equals_the_textbook(size):
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


def test_the_square_sum_is_exact_in_float32():
    # 2^24 ones: a float32 sum stops at 2^24 when 1 is added one at a time.
    values = np.ones(2**24 + 3, "float32")
    assert kernels.square_sum(values) == 2**24 + 3
    assert math.isinf(kernels.square_sum(np.array([np.inf], "float32")))
