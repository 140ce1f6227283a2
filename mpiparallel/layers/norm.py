"""LayerNorm over the hidden dim (Ba et al. 2016, arXiv 1607.06450)."""

from mpiparallel.backend import kernels
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.parameter import Layout, Parameter


class LayerNorm:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias.

    x is whole on every tp rank and dy too (the column-parallel layer behind it has summed it), so
    every rank computes the same gradients and no message is needed.
    """

    def __init__(self, name: str, hidden: int, tp: Group, epsilon: float = 1e-5):
        self.epsilon = epsilon
        cut = (tp.rank, tp.size)
        self.weight = Parameter(f"{name}.weight", (hidden,), Layout(), "ones", *cut)
        self.bias = Parameter(f"{name}.bias", (hidden,), Layout(), "zeros", *cut)
        self.parameters = [self.weight, self.bias]

    def forward(self, x):
        """x (..., H) -> y (..., H)."""
        return kernels.layer_norm(x, self.weight.data, self.bias.data, self.epsilon)

    def backward(self, dy, saved, later: Later = now):
        """dy (..., H) -> dx (..., H). The weights' gradients come with dx: `later` is not used,
        for they are small, and to wait they would hold two arrays of the size of x."""
        dx, dweight, dbias = kernels.layer_norm_backward(dy, self.weight.data, saved)
        self.weight.add_grad(dweight)
        self.bias.add_grad(dbias)
        return dx
