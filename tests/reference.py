"""The serial oracle: GPT-2 in plain NumPy, one process, float64, nothing shared with the package.

Every multi-rank test compares with this file, so it imports nothing of what it judges, and its
gradients come from `autograd` (https://github.com/HIPS/autograd), never from a backward by hand.

    tokens -> embed -> [ x + attention(norm(x)) -> x + mlp(norm(x)) ] * L -> norm -> tied head

Parameters are a dict from global name to float64 array, with y = x @ W + b throughout:

    token_embedding.weight       (V, H), also the output head    position_embedding.weight  (T, H)
    blocks.{i}.attention_norm    .weight (H,)     .bias (H,)
    blocks.{i}.attention.qkv     .weight (H, 3H)  .bias (3H,)    columns [q | k | v], each by head
    blocks.{i}.attention.projection  .weight (H, H)  .bias (H,)
    blocks.{i}.mlp_norm          .weight (H,)     .bias (H,)
    blocks.{i}.mlp.up            .weight (H, F)   .bias (F,)
    blocks.{i}.mlp.down          .weight (F, H)   .bias (H,)
    final_norm                   .weight (H,)     .bias (H,)

B batch, S sequence, T longest sequence, H hidden, N heads, D = H / N, F feed-forward, V vocab,
L layers. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

import math

import autograd.numpy as np
from autograd import value_and_grad

IGNORED = -100  # a label that asks for no loss


# The model


def linear(parameters, name, x):
    """x (..., in) -> (..., out)."""
    return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def layer_norm(parameters, name, x):
    """x (..., H) -> (..., H): mean 0 and variance 1 over H, then scaled and shifted."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    normal = centred / np.sqrt(variance + 1e-5)
    return normal * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def gelu(x):
    """GELU in the tanh form of GPT-2, element by element."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def log_softmax(x):
    """x (..., n) -> (..., n): logarithms of probabilities over the last dim."""
    shifted = x - np.max(x, axis=-1, keepdims=True)  # so that exp cannot overflow
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def attention(parameters, name, x, heads):
    """Causal self-attention: x (B, S, H) -> (B, S, H)."""
    batch, length, hidden = x.shape
    head_dim = hidden // heads

    qkv = linear(parameters, f"{name}.qkv", x)  # (B, S, 3H)
    qkv = np.reshape(qkv, (batch, length, 3, heads, head_dim))
    q, k, v = np.transpose(qkv, (2, 0, 3, 1, 4))  # (B, N, S, D) each

    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(head_dim)  # (B, N, S, S)
    seen = np.tril(np.ones((length, length), dtype=bool))  # row: who looks, column: at whom
    weights = np.exp(log_softmax(np.where(seen, scores, -np.inf)))
    context = np.transpose(weights @ v, (0, 2, 1, 3))  # (B, S, N, D)

    return linear(parameters, f"{name}.projection", np.reshape(context, x.shape))


def mlp(parameters, name, x):
    """x (B, S, H) -> (B, S, H), through F features."""
    return linear(parameters, f"{name}.down", gelu(linear(parameters, f"{name}.up", x)))


def logits(parameters, tokens, heads):
    """tokens (B, S) int -> logits (B, S, V). More than T tokens are an IndexError."""
    embedding = parameters["token_embedding.weight"]  # (V, H)
    positions = np.arange(tokens.shape[1])
    x = embedding[tokens] + parameters["position_embedding.weight"][positions]  # (B, S, H)

    layers = sum(name.endswith(".attention.qkv.weight") for name in parameters)
    for block in (f"blocks.{i}" for i in range(layers)):
        normal = layer_norm(parameters, f"{block}.attention_norm", x)
        x = x + attention(parameters, f"{block}.attention", normal, heads)
        normal = layer_norm(parameters, f"{block}.mlp_norm", x)
        x = x + mlp(parameters, f"{block}.mlp", normal)

    return layer_norm(parameters, "final_norm", x) @ embedding.T


def loss(parameters, tokens, labels, heads):
    """Cross-entropy summed over the valid labels, divided by their number; 0.0 if there are none.

    tokens (B, S) int, labels (B, S) int, where -100 is ignored; any other label outside the
    vocabulary is a ValueError.
    """
    log_probabilities = log_softmax(logits(parameters, tokens, heads))  # (B, S, V)
    vocab = log_probabilities.shape[-1]
    valid = labels != IGNORED
    if np.any(valid & ((labels < 0) | (labels >= vocab))):
        raise ValueError(f"labels must be {IGNORED} or in 0..{vocab - 1}")
    one_hot = labels[..., None] == np.arange(vocab)  # (B, S, V), no column for an ignored label
    return -np.sum(log_probabilities * one_hot) / max(1, np.sum(valid))


def loss_and_gradients(parameters, tokens, labels, heads):
    """The loss as a float, and its gradient for every parameter: a dict of the same shapes."""
    value, gradients = value_and_grad(loss)(parameters, tokens, labels, heads)
    return float(value), gradients


# The optimizer


def gradient_norm(gradients):
    """The 2-norm of all gradients taken as one long vector."""
    return math.sqrt(sum(float(np.sum(g**2)) for g in gradients.values()))


def clip(gradients, max_norm):
    """Gradients scaled by min(1, max_norm / norm), and the norm before; max_norm 0: unscaled."""
    norm = gradient_norm(gradients)
    scale = max_norm / norm if 0 < max_norm < norm else 1.0
    return {name: scale * g for name, g in gradients.items()}, norm


def learning_rate(step, *, lr, min_lr, warmup, steps):
    """Of step 0, 1, ..: a line up to lr over warmup steps, then half a cosine down to min_lr."""
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019); only matrices decay."""

    def __init__(self, beta1, beta2, eps=1e-8, *, weight_decay):
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.count = 0
        self.mean, self.square = {}, {}  # name -> running mean of the gradient, of its square

    def step(self, parameters, gradients, lr):
        """One update of the arrays in parameters, in place."""
        self.count += 1
        for name, p in parameters.items():
            g = gradients[name]
            mean = self.beta1 * self.mean.get(name, 0.0) + (1 - self.beta1) * g
            square = self.beta2 * self.square.get(name, 0.0) + (1 - self.beta2) * g**2
            self.mean[name], self.square[name] = mean, square

            if p.ndim == 2:
                p *= 1 - lr * self.weight_decay
            # Both averages start from zero; dividing by the weight seen so far undoes that.
            unbiased_mean = mean / (1 - self.beta1**self.count)
            unbiased_square = square / (1 - self.beta2**self.count)
            p -= lr * unbiased_mean / (np.sqrt(unbiased_square) + self.eps)


# Training


def train_step(parameters, tokens, labels, optimizer, *, heads, lr, max_norm):
    """One step on one global batch: updates parameters in place, returns (loss, norm)."""
    value, gradients = loss_and_gradients(parameters, tokens, labels, heads)
    gradients, norm = clip(gradients, max_norm)
    optimizer.step(parameters, gradients, lr)
    return value, norm


def train_steps(parameters, batches, *, heads, lr_of_step, beta1, beta2, weight_decay, clip):
    """Trains from a fresh optimizer; updates parameters in place.

    batches is a list of (tokens, labels), one global batch for each step; lr_of_step(step) is the
    learning rate of step 0, 1, ..; clip is the largest norm, 0 for none. Returns a list of
    (loss, norm): the loss before each update and the gradient norm before clipping.
    """
    optimizer = AdamW(beta1, beta2, weight_decay=weight_decay)
    return [
        train_step(
            parameters, tokens, labels, optimizer, heads=heads, lr=lr_of_step(step), max_norm=clip
        )
        for step, (tokens, labels) in enumerate(batches)
    ]
