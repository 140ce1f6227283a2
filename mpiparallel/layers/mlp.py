"""The feed-forward half of a block: columns, GELU, rows. One all-reduce forward, one backward."""

from mpiparallel.backend import kernels
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP:
    """y = gelu(x @ Up + b) @ Down + c, with the feed-forward dim F cut over tp."""

    def __init__(
        self, name: str, hidden: int, feed_forward: int, tp: Group, std: float, residual_std: float
    ):
        self.up = ColumnParallelLinear(f"{name}.up", hidden, feed_forward, tp, std)
        self.down = RowParallelLinear(f"{name}.down", feed_forward, hidden, tp, residual_std)
        self.parameters = self.up.parameters + self.down.parameters

    def forward(self, x):
        """x (B, S, H) -> y (B, S, H)."""
        inner, up = self.up.forward(x)  # (B, S, F/t)
        activated, slope = kernels.gelu(inner)
        y, down = self.down.forward(activated)
        return y, (up, slope, down)

    def backward(self, dy, saved, later: Later = now):
        """dy (B, S, H) -> dx (B, S, H)."""
        up, slope, down = saved
        dinner = self.down.backward(dy, down, later)
        dinner *= slope
        return self.up.backward(dinner, up, later)
