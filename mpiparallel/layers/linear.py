"""Linear layers cut by columns and by rows (Shoeybi et al. 2019, arXiv 1909.08053).

                    y = x @ W + b          x : (..., in)   W : (in, out)   y : (..., out)

    ColumnParallelLinear            [ W0 | W1 ]    each rank makes some columns of y
        forward     y_r  = x @ W_r + b_r           no message: x is whole on every rank
        backward    dx   = sum_r dy_r @ W_r^T      Allreduce      (the paper's f)

    RowParallelLinear               [ W0 ]         each rank holds some columns of x
                                    [ W1 ]
        forward     y    = sum_r x_r @ W_r + b     Allreduce      (the paper's g)
        backward    dx_r = dy @ W_r^T              no message: dy is whole on every rank

Column then row, with something elementwise between them, costs one all-reduce each way.
"""

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.parameter import Layout, Parameter


class ColumnParallelLinear:
    """y_r = x @ W_r + b_r: W is cut by columns over tp, and so is y.

    sections : parts of the columns that are cut each by itself (3 for a fused q|k|v).
    std : standard deviation of the initial weights. All ranks of tp call forward and backward.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, tp: Group, std: float, sections: int = 1
    ):
        self.tp = tp
        cut = (tp.rank, tp.size)
        self.weight = Parameter(f"{name}.weight", (inputs, outputs), Layout(1, sections), std, *cut)
        self.bias = Parameter(f"{name}.bias", (outputs,), Layout(0, sections), "zeros", *cut)
        self.parameters = [self.weight, self.bias]

    def forward(self, x):
        """x (..., in), whole -> y (..., out / t), cut."""
        y = times(x, self.weight.data)
        y += self.bias.data
        return y, x

    def backward(self, dy, saved, later: Later = now):
        """dy (..., out / t), cut -> dx (..., in), whole."""
        x = saved
        dx = times(dy, self.weight.data.T)
        self.tp.allreduce(dx, out=dx)
        later(_add_gradients, self.weight, self.bias, x, dy)
        return dx


class RowParallelLinear:
    """y = sum_r x_r @ W_r + b: W is cut by rows over tp, x by columns; y is whole.

    The bias is whole on every rank and added once, after the sum. All ranks of tp call.
    """

    def __init__(self, name: str, inputs: int, outputs: int, tp: Group, std: float):
        self.tp = tp
        cut = (tp.rank, tp.size)
        self.weight = Parameter(f"{name}.weight", (inputs, outputs), Layout(0), std, *cut)
        self.bias = Parameter(f"{name}.bias", (outputs,), Layout(), "zeros", *cut)
        self.parameters = [self.weight, self.bias]

    def forward(self, x):
        """x (..., in / t), cut -> y (..., out), whole."""
        y = times(x, self.weight.data)
        self.tp.allreduce(y, out=y)
        y += self.bias.data
        return y, x

    def backward(self, dy, saved, later: Later = now):
        """dy (..., out), whole -> dx (..., in / t), cut."""
        x = saved
        dx = times(dy, self.weight.data.T)
        later(_add_gradients, self.weight, self.bias, x, dy)
        return dx


def times(x, matrix):
    """x @ matrix as one product of two matrices, which is what BLAS is fastest at.
    x (..., in), matrix (in, out) -> (..., out)."""
    return xp.matmul(x.reshape(-1, x.shape[-1]), matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _add_gradients(weight: Parameter, bias: Parameter, x, dy) -> None:
    """dW += x^T @ dy, db += sum of dy over rows."""
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    weight.add_grad_matmul(x.T, dy)
    bias.add_grad(dy.sum(0))
