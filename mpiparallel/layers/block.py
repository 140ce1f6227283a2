"""A transformer block as in GPT-2: normalise, attend, add; normalise, feed forward, add.

Four all-reduces of (B, S, H) over tp per micro-batch: attention and MLP, forward and backward.
"""

from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.layers.attention import Attention
from mpiparallel.layers.mlp import MLP
from mpiparallel.layers.norm import LayerNorm


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        name: str,
        hidden: int,
        heads: int,
        feed_forward: int,
        tp: Group,
        std: float,
        residual_std: float,
    ):
        self.attention_norm = LayerNorm(f"{name}.attention_norm", hidden, tp)
        self.attention = Attention(f"{name}.attention", hidden, heads, tp, std, residual_std)
        self.mlp_norm = LayerNorm(f"{name}.mlp_norm", hidden, tp)
        self.mlp = MLP(f"{name}.mlp", hidden, feed_forward, tp, std, residual_std)
        self.parameters = (
            self.attention_norm.parameters
            + self.attention.parameters
            + self.mlp_norm.parameters
            + self.mlp.parameters
        )

    def forward(self, x):
        """x (B, S, H) -> y (B, S, H)."""
        normed, norm1 = self.attention_norm.forward(x)
        y, attention = self.attention.forward(normed)
        y += x
        normed, norm2 = self.mlp_norm.forward(y)
        z, mlp = self.mlp.forward(normed)
        z += y
        return z, (norm1, attention, norm2, mlp)

    def backward(self, dz, saved, later: Later = now):
        """dz (B, S, H) -> dx (B, S, H)."""
        norm1, attention, norm2, mlp = saved
        dy = self.mlp_norm.backward(self.mlp.backward(dz, mlp, later), norm2, later)
        dy += dz
        dx = self.attention_norm.backward(
            self.attention.backward(dy, attention, later), norm1, later
        )
        dx += dy
        return dx
