"""AdamW, clipping, the learning rate: values worked out by hand or by the book in float64."""

import numpy as np
import pytest

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
