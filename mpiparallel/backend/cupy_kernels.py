"""The elementwise kernels of the transformer and of AdamW, for CuPy: same names, same results.

The arithmetic is in `kernels.cu`, a launch or two per kernel. Arrays are device arrays; what is
in place changes its C-contiguous argument, other inputs may be non-contiguous. See
`numpy_kernels.py` for shapes and formulas.
"""

from __future__ import annotations

import functools
from pathlib import Path

import cupy

THREADS = 256  # per block
PARTS = 64  # of the rows, whose shares of a weight gradient are added up in a second launch


@functools.cache
def _module(dtype: str):
    """`kernels.cu` compiled for "float32" or "float64"."""
    real = {"float32": "float", "float64": "double"}[dtype]
    source = Path(__file__).with_name("kernels.cu").read_text()
    return cupy.RawModule(code=source, options=(f"-DREAL={real}",))


def _launch(name: str, like, blocks: int, *arguments) -> None:
    """Run a kernel, compiled for the dtype of `like`, on so many blocks; nothing for none."""
    if blocks:
        _module(like.dtype.name).get_function(name)((blocks,), (THREADS,), arguments)


def _blocks(elements: int) -> int:
    return -(-elements // THREADS)


def gelu(x):
    """y and dy/dx of GELU in its tanh form."""
    x = cupy.ascontiguousarray(x)
    y, slope = cupy.empty_like(x), cupy.empty_like(x)
    _launch("gelu", x, _blocks(x.size), x, y, slope, x.size)
    return y, slope


def layer_norm(x, weight, bias, epsilon: float):
    """y (..., H); the normalised x as rows (n, H), and 1 / sqrt(variance + epsilon) (n, 1)."""
    hidden = x.shape[-1]
    rows = cupy.ascontiguousarray(x).reshape(-1, hidden)
    y, normalised = cupy.empty_like(rows), cupy.empty_like(rows)
    scale = cupy.empty((len(rows), 1), x.dtype)
    _launch(
        "layer_norm_rows",
        x,
        len(rows),
        rows,
        weight,
        bias,
        y,
        normalised,
        scale,
        hidden,
        float(epsilon),
    )
    return y.reshape(x.shape), (normalised, scale)


def layer_norm_backward(dy, weight, saved):
    """dx (..., H), and the gradients of weight and bias (H,)."""
    normalised, scale = saved
    hidden = dy.shape[-1]
    rows = cupy.ascontiguousarray(dy).reshape(-1, hidden)
    count = len(rows)
    dx = cupy.empty_like(rows)
    _launch("layer_norm_backward_rows", dy, count, rows, weight, normalised, scale, dx, hidden)
    sums = cupy.empty((2, PARTS, hidden), dy.dtype)
    wide = _blocks(hidden)
    _launch(
        "layer_norm_weights",
        dy,
        PARTS * wide,
        rows,
        normalised,
        sums[0],
        sums[1],
        count,
        hidden,
        PARTS,
        wide,
    )
    dweight, dbias = sums.sum(axis=1)
    return dx.reshape(dy.shape), dweight, dbias


def causal_softmax(scores, scale: float):
    """Softmax over keys of scale * scores (B, N, S, S), C-contiguous; in place."""
    sequence = scores.shape[-1]
    rows = scores.size // sequence
    _launch("causal_softmax_rows", scores, rows, scores, sequence, float(scale))
    return scores


def causal_softmax_backward(dprobabilities, probabilities, scale: float):
    """The gradient with respect to the scores; in place of dprobabilities, C-contiguous."""
    sequence = probabilities.shape[-1]
    rows = probabilities.size // sequence
    _launch(
        "causal_softmax_backward_rows",
        probabilities,
        rows,
        dprobabilities,
        probabilities,
        sequence,
        float(scale),
    )
    return dprobabilities


def add_rows(target, rows, values) -> None:
    """target[rows[i]] += values[i]; target (V, H) C-contiguous, rows (n,), values (n, H)."""
    count = len(rows)
    if count == 0:
        return
    rows = rows.astype("int64", copy=False)
    values = cupy.ascontiguousarray(values)
    order = cupy.argsort(rows, kind="stable")
    ordered = rows[order]
    first = cupy.ones(count, "bool")
    first[1:] = ordered[1:] != ordered[:-1]
    starts = cupy.flatnonzero(first)
    runs = len(starts)
    _launch(
        "add_runs", target, runs, target, rows, values, order, starts, runs, count, target.shape[1]
    )


def square_sum(array) -> float:
    """The sum of squares of a C-contiguous array, accumulated in float64."""
    blocks = min(PARTS, _blocks(array.size))
    sums = cupy.zeros(PARTS, "float64")
    _launch("square_sums", array, blocks, array, sums, array.size, blocks)
    return float(sums.sum())


def adamw(
    weight, gradient, first, second, *, lr, beta1, beta2, epsilon, decay, step, gradient_scale
) -> None:
    """One AdamW step on one parameter, in place; arrays C-contiguous."""
    scalars = (
        *(lr, beta1, beta2, epsilon, 1 - lr * decay),
        *(1 - beta1**step, 1 - beta2**step, gradient_scale),
    )
    arrays = (weight, gradient, first, second)
    count = weight.size
    _launch("adamw", weight, _blocks(count), *arrays, count, *map(float, scalars))
