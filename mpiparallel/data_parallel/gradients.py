"""The one message of plain data parallelism: the average of the gradients over the replicas.

Every replica has computed the gradients of its share of the global batch. One all-reduce per step
over the dp axis gives all of them the average: 2 (dp-1)/dp of the parameters that a rank holds, in
bytes sent per rank, however large the batch. On a mesh with pp and tp a rank holds, and sends,
only its share of the model.
"""

from mpiparallel.comm.allreduce import allreduce
from mpiparallel.comm.group import Group


def average_gradients(gradients, dp: Group, algorithm: str = "auto") -> None:
    """Average a flat array over the dp axis, in place. All ranks of the axis call it.

    algorithm : of the sum, see `comm/allreduce.py`.
    """
    allreduce(dp, gradients, algorithm)
    gradients /= dp.size
