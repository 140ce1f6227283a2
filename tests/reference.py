"""The serial GPT: one process, plain NumPy, float64, written from GPT-2's description.

Nothing here comes from the package, and no derivative is written by hand: gradients are those of
autograd. Everything parallel is held to this file.

Shapes: B batch, S sequence, H hidden, N heads, D head dim, V vocabulary.
"""

import math

import autograd.numpy as np
from autograd import value_and_grad

IGNORED = -100


def layer_norm(x, weight, bias):
    """(..., H) -> (..., H)."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred**2, axis=-1, keepdims=True)
    return centred / np.sqrt(variance + 1e-5) * weight + bias


def attention(x, p, prefix, heads):
    """Causal multi-head attention: (B, S, H) -> (B, S, H)."""
    batch, sequence, hidden = x.shape
    qkv = x @ p[prefix + "qkv.weight"] + p[prefix + "qkv.bias"]

    def split(part):  # -> (B, N, S, D)
        columns = qkv[:, :, part * hidden : (part + 1) * hidden]
        return np.transpose(
            np.reshape(columns, (batch, sequence, heads, hidden // heads)), (0, 2, 1, 3)
        )

    q, k, v = split(0), split(1), split(2)
    scores = np.einsum("bnqd,bnkd->bnqk", q, k) / math.sqrt(hidden // heads)
    visible = np.tril(np.ones((sequence, sequence)))
    scores = np.where(visible, scores, -1e300)
    scores = scores - np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores) * visible
    weights = weights / np.sum(weights, axis=-1, keepdims=True)
    context = np.einsum("bnqk,bnkd->bqnd", weights, v)
    context = np.reshape(context, (batch, sequence, hidden))
    return context @ p[prefix + "projection.weight"] + p[prefix + "projection.bias"]


def mlp(x, p, prefix):
    """(B, S, H) -> (B, S, H)."""
    inner = x @ p[prefix + "up.weight"] + p[prefix + "up.bias"]
    cubic = inner + 0.044715 * inner**3
    activated = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * cubic))
    return activated @ p[prefix + "down.weight"] + p[prefix + "down.bias"]


def logits(parameters, tokens, heads):
    """tokens (B, S) -> (B, S, V)."""
    p = parameters
    layers = 1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks."))
    table = p["token_embedding.weight"]
    x = table[tokens] + p["position_embedding.weight"][: tokens.shape[1]]
    for layer in range(layers):
        b = f"blocks.{layer}."
        normed = layer_norm(x, p[b + "attention_norm.weight"], p[b + "attention_norm.bias"])
        x = x + attention(normed, p, b + "attention.", heads)
        normed = layer_norm(x, p[b + "mlp_norm.weight"], p[b + "mlp_norm.bias"])
        x = x + mlp(normed, p, b + "mlp.")
    x = layer_norm(x, p["final_norm.weight"], p["final_norm.bias"])
    return x @ table.T


def loss(parameters, tokens, labels, heads):
    """The mean of -log softmax(logits)[label] over labels that are not IGNORED; 0 for none."""
    scores = logits(parameters, tokens, heads)
    rows, columns = np.nonzero(labels != IGNORED)
    if len(rows) == 0:
        return 0.0
    chosen = scores[rows, columns]  # (n, V)
    largest = np.max(chosen, axis=-1, keepdims=True)
    log_sum = largest[:, 0] + np.log(np.sum(np.exp(chosen - largest), axis=-1))
    return np.mean(log_sum - chosen[np.arange(len(rows)), labels[rows, columns]])


def loss_and_gradients(parameters, tokens, labels, heads):
    """The loss, and its derivative with respect to every parameter by name."""
    value, gradients = value_and_grad(loss)(parameters, tokens, labels, heads)
    return float(value), gradients


def gradient_norm(gradients):
    """The length of all gradients laid end to end."""
    return math.sqrt(sum(float(np.sum(g**2)) for g in gradients.values()))


def clip(gradients, max_norm):
    """(gradients scaled to at most max_norm, their norm before); max_norm 0 does not clip."""
    norm = gradient_norm(gradients)
    scale = min(1.0, max_norm / norm) if max_norm and norm else 1.0
    return {name: scale * g for name, g in gradients.items()}, norm


def learning_rate(step, *, lr, min_lr, warmup, steps):
    """Steps count from 0: linear up to lr, then half a cosine down to min_lr."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class AdamW:
    """Algorithm 2 of Loshchilov and Hutter 2019, decay on matrices only."""

    def __init__(self, beta1, beta2, eps=1e-8, weight_decay=0.0):
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.m, self.v, self.t = {}, {}, 0

    def step(self, parameters, gradients, lr):
        """Update the arrays in `parameters` in place."""
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = self.beta1 * self.m.get(name, 0) + (1 - self.beta1) * g
            self.v[name] = self.beta2 * self.v.get(name, 0) + (1 - self.beta2) * g**2
            m_hat = self.m[name] / (1 - self.beta1**self.t)
            v_hat = self.v[name] / (1 - self.beta2**self.t)
            if parameters[name].ndim == 2:
                parameters[name] *= 1 - lr * self.weight_decay
            parameters[name] -= lr * m_hat / (np.sqrt(v_hat) + self.eps)


def train_steps(parameters, batches, *, heads, lr_of_step, beta1, beta2, weight_decay, max_norm):
    """Train on the (tokens, labels) of `batches`, in place; a list of (loss, norm)."""
    optimizer, history = AdamW(beta1, beta2, weight_decay=weight_decay), []
    for step, (tokens, labels) in enumerate(batches):
        value, gradients = loss_and_gradients(parameters, tokens, labels, heads)
        clipped, norm = clip(gradients, max_norm)
        optimizer.step(parameters, clipped, lr_of_step(step))
        history.append((value, norm))
    return history
