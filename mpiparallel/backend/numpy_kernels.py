"""The elementwise kernels of the transformer and of AdamW, for NumPy.

NumPy makes one pass through memory per operation. Each kernel therefore walks through its arrays
in blocks that stay in a core's cache and does all of its operations on a block before the next
one: the arithmetic is the textbook's, only the order of the passes is changed.

Shapes: rows of length H are (..., H). Results have the dtype of the input.
"""

import math

import numpy as np

_BLOCK = 32768  # elements per block: a few arrays of this size fit in a core's second-level cache
_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBE = 0.044715


def _blocks(length: int, row: int = 1):
    """Slices over `length` rows of `row` elements, about _BLOCK elements each."""
    step = max(1, _BLOCK // row)
    return (slice(start, start + step) for start in range(0, length, step))


def gelu(x):
    """GELU in its tanh form: y = x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2/pi).

    x : any shape. Returns y and dy/dx, which is all that backward needs
    (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    """
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    flat_x, flat_y, flat_slope = x.reshape(-1), y.reshape(-1), slope.reshape(-1)
    for block in _blocks(flat_x.size):
        xb = flat_x[block]
        squared = xb * xb
        inner = squared * (_GELU_SCALE * _GELU_CUBE)
        inner += _GELU_SCALE
        inner *= xb
        tanh = np.tanh(inner, out=inner)
        half = tanh * 0.5
        half += 0.5
        np.multiply(xb, half, out=flat_y[block])
        # slope = half + x/2 (1 - tanh^2) c (1 + 3 * 0.044715 x^2)
        squared *= 1.5 * _GELU_SCALE * _GELU_CUBE
        squared += 0.5 * _GELU_SCALE
        squared *= xb
        tanh *= tanh
        np.subtract(1, tanh, out=tanh)
        squared *= tanh
        np.add(half, squared, out=flat_slope[block])
    return y, slope


def layer_norm(x, weight, bias, epsilon: float):
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim.

    x : (..., H); weight, bias : (H,). Returns y (..., H) and what backward needs: the normalised
    x (..., H) and 1 / sqrt(variance + epsilon) per row.
    """
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    y, normalised = np.empty_like(rows), np.empty_like(rows)
    scale = np.empty((len(rows), 1), x.dtype)
    for block in _blocks(len(rows), hidden):
        nb, sb = normalised[block], scale[block]
        np.subtract(rows[block], rows[block].mean(1, keepdims=True), out=nb)
        variance = np.einsum("rh,rh->r", nb, nb)[:, None] / hidden
        np.divide(1, np.sqrt(variance + epsilon), out=sb)
        nb *= sb
        np.multiply(nb, weight, out=y[block])
        y[block] += bias
    return y.reshape(x.shape), (normalised, scale)


def layer_norm_backward(dy, weight, saved):
    """The gradients of `layer_norm`: dx (..., H), and those of weight and bias (H,)."""
    normalised, scale = saved
    hidden = dy.shape[-1]
    rows = dy.reshape(-1, hidden)
    dx = np.empty_like(rows)
    dweight, dbias = np.zeros_like(weight), np.zeros_like(weight)
    for block in _blocks(len(rows), hidden):
        db, nb, xb = rows[block], normalised[block], dx[block]
        dbias += db.sum(0)
        dweight += np.einsum("rh,rh->h", db, nb)
        np.multiply(db, weight, out=xb)
        mean = xb.mean(1, keepdims=True)
        along = np.einsum("rh,rh->r", xb, nb)[:, None] / hidden
        xb -= mean
        xb -= nb * along
        xb *= scale[block]
    return dx.reshape(dy.shape), dweight, dbias


def causal_softmax(scores, scale: float):
    """Softmax over keys of scale * scores, where a query sees itself and earlier keys; in place.

    scores : (B, N, S, S), query by key. Returns it, now probabilities, zero above the diagonal.
    """
    sequence = scores.shape[-1]
    future = np.triu(np.full((sequence, sequence), -np.inf, scores.dtype), 1)
    for matrix in scores.reshape(-1, sequence, sequence):
        matrix *= scale
        matrix += future
        matrix -= matrix.max(1, keepdims=True)
        np.exp(matrix, out=matrix)
        matrix /= matrix.sum(1, keepdims=True)
    return scores


def causal_softmax_backward(dprobabilities, probabilities, scale: float):
    """The gradient of `causal_softmax` with respect to its scores; in place of dprobabilities."""
    sequence = probabilities.shape[-1]
    square = (-1, sequence, sequence)
    for dp, p in zip(dprobabilities.reshape(square), probabilities.reshape(square), strict=True):
        dp -= np.einsum("qk,qk->q", dp, p)[:, None]
        dp *= p
        dp *= scale
    return dprobabilities


def add_rows(target, rows, values) -> None:
    """target[rows[i]] += values[i] for every i; rows may repeat.

    target : (V, H); rows : (n,) integers; values : (n, H).
    """
    if len(rows) == 0:
        return
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    target[ordered[starts]] += np.add.reduceat(values[order], starts, axis=0)


def square_sum(array) -> float:
    """The sum of squares of a C-contiguous array, accumulated in float64."""
    flat = array.reshape(-1)
    return float(
        sum(np.square(flat[block], dtype=np.float64).sum() for block in _blocks(flat.size))
    )


def adamw(
    weight, gradient, first, second, *, lr, beta1, beta2, epsilon, decay, step, gradient_scale
) -> None:
    """One AdamW step on one parameter, in place (Loshchilov and Hutter 2019, arXiv 1711.05101).

    weight, gradient, first, second : arrays of one shape, C-contiguous; first and second are the
    moments. step counts from 1. The gradient is multiplied by `gradient_scale` (clipping) as it
    is read. decay is decoupled: weight *= 1 - lr * decay.
    """
    correct_first, correct_second = 1 - beta1**step, 1 - beta2**step
    arrays = [array.reshape(-1) for array in (weight, gradient, first, second)]
    for block in _blocks(weight.size):
        w, g, m, v = (array[block] for array in arrays)
        g = g * gradient_scale
        m *= beta1
        m += (1 - beta1) * g
        g *= g
        g *= 1 - beta2
        v *= beta2
        v += g
        denominator = v / correct_second
        np.sqrt(denominator, out=denominator)
        denominator += epsilon
        np.divide(m, denominator, out=denominator)
        denominator *= lr / correct_first
        if decay:
            w *= 1 - lr * decay
        w -= denominator
