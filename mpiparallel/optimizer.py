"""AdamW, the global gradient norm and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpiparallel.backend import kernels, xp


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).

    One count of steps for all parameters; decay applies where `Parameter.decays`. No message: a
    rank updates what it is given, whole pieces or shards of them.

    parameters : anything with `data`, `grad` (C-contiguous, one shape) and `decays`.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        *,
        beta1: float,
        beta2: float,
        weight_decay: float,
        epsilon: float = 1e-8,
    ):
        self.parameters = parameters
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.weight_decay = weight_decay
        self.first = [xp.zeros_like(parameter.data) for parameter in parameters]
        self.second = [xp.zeros_like(parameter.data) for parameter in parameters]
        self.steps = 0

    def step(self, lr: float, gradient_scale: float = 1.0) -> None:
        """Update every weight from its `grad` times `gradient_scale` (clipping)."""
        self.steps += 1
        for parameter, first, second in zip(self.parameters, self.first, self.second, strict=True):
            kernels.adamw(
                parameter.data,
                parameter.grad,
                first,
                second,
                lr=lr,
                beta1=self.beta1,
                beta2=self.beta2,
                epsilon=self.epsilon,
                decay=self.weight_decay if parameter.decays else 0.0,
                step=self.steps,
                gradient_scale=gradient_scale,
            )


def clip_scale(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most `limit`; limit 0 is no limit."""
    return limit / norm if limit and norm > limit else 1.0


def learning_rate(step: int, *, lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """The rate of step 0, 1, ..: linear up to `lr` over `warmup` steps, then half a cosine down
    to `min_lr` at `steps`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
