"""The one message of plain data parallelism: the average of the gradients over the replicas.

Every replica has computed the gradients of its share of the global batch. One all-reduce per step
over the dp axis gives all of them the average: 2 (dp-1)/dp of the parameters that a rank holds, in
bytes sent per rank, however large the batch. On a mesh with pp and tp a rank holds, and sends,
only its share of the model.
"""

from mpiparallel.comm import ring
from mpiparallel.comm.group import Group


def average_gradients(gradients, dp: Group, algorithm: str = "ring") -> None:
    """Average a flat array over the dp axis, in place. All ranks of the axis call it.

    algorithm : "ring" for the one written out in `comm/ring.py`, "mpi" for MPI's own Allreduce.
    """
    if algorithm == "ring":
        ring.run(ring.allreduce_steps(dp, gradients))
    else:
        dp.allreduce(gradients, out=gradients)
    gradients /= dp.size
