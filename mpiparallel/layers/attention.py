"""Causal multi-head attention, its heads cut over tp (Vaswani et al. 2017, Shoeybi et al. 2019).

Heads do not talk to each other, so a tp rank computes N/t of them from x to the projection alone:
the only messages are those of the two linear layers, one all-reduce forward and one backward.
"""

import math

from mpiparallel.backend import kernels, xp
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.layers.linear import ColumnParallelLinear, RowParallelLinear


class Attention:
    """softmax(q k^T / sqrt(D)) v with each query seeing itself and what came before, projected."""

    def __init__(
        self, name: str, hidden: int, heads: int, tp: Group, std: float, residual_std: float
    ):
        self.local_heads, self.head_dim = heads // tp.size, hidden // heads
        self.scale = 1 / math.sqrt(self.head_dim)
        self.qkv = ColumnParallelLinear(f"{name}.qkv", hidden, 3 * hidden, tp, std, sections=3)
        self.projection = RowParallelLinear(f"{name}.projection", hidden, hidden, tp, residual_std)
        self.parameters = self.qkv.parameters + self.projection.parameters

    def forward(self, x):
        """x (B, S, H) -> y (B, S, H)."""
        batch, sequence, _ = x.shape
        qkv, qkv_saved = self.qkv.forward(x)  # (B, S, 3 H/t)
        q, k, v = self._heads(qkv)  # each (B, N/t, S, D)
        probabilities = xp.matmul(q, k.swapaxes(2, 3))
        kernels.causal_softmax(probabilities, self.scale)  # (B, N/t, S, S)
        context = xp.empty((batch, sequence, self.local_heads * self.head_dim), x.dtype)
        heads = context.reshape(batch, sequence, self.local_heads, self.head_dim)
        xp.matmul(probabilities, v, out=heads.swapaxes(1, 2))
        y, projection_saved = self.projection.forward(context)
        return y, (qkv, probabilities, qkv_saved, projection_saved)

    def backward(self, dy, saved, later: Later = now):
        """dy (B, S, H) -> dx (B, S, H)."""
        qkv, probabilities, qkv_saved, projection_saved = saved
        batch, sequence, _ = dy.shape
        dcontext = self.projection.backward(dy, projection_saved, later)
        dcontext = dcontext.reshape(batch, sequence, self.local_heads, self.head_dim).swapaxes(1, 2)
        q, k, v = self._heads(qkv)
        dqkv = xp.empty_like(qkv)
        dq, dk, dv = self._heads(dqkv)
        xp.matmul(probabilities.swapaxes(2, 3), dcontext, out=dv)
        dscores = xp.matmul(dcontext, v.swapaxes(2, 3))
        kernels.causal_softmax_backward(dscores, probabilities, self.scale)
        xp.matmul(dscores, k, out=dq)
        xp.matmul(dscores.swapaxes(2, 3), q, out=dk)
        return self.qkv.backward(dqkv, qkv_saved, later)

    def _heads(self, qkv):
        """Views of q, k and v, each (B, N/t, S, D), in a fused (B, S, 3 H/t)."""
        batch, sequence, _ = qkv.shape
        split = qkv.reshape(batch, sequence, 3, self.local_heads, self.head_dim)
        return (split[:, :, part].swapaxes(1, 2) for part in range(3))
