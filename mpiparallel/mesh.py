"""Mesh: the ranks of a job arranged as dp x pp x tp, with one Group per axis.

tp varies fastest, then pp, then dp. mpirun numbers ranks node by node, so tensor groups, which
talk most, fill a node before a pipeline crosses to the next one. 2 x 2 x 2:

              tp 0   tp 1
    dp 0 pp 0    0 --- 1        tp groups  [0,1] [2,3] [4,5] [6,7]   all-reduces in every layer
         pp 1    2 --- 3        pp groups  [0,2] [1,3] [4,6] [5,7]   activations, gradients
    dp 1 pp 0    4 --- 5        dp groups  [0,4] [1,5] [2,6] [3,7]   one all-reduce per step
         pp 1    6 --- 7
"""

from __future__ import annotations

import os

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpiparallel.comm.group import Group
from mpiparallel.comm.ledger import Ledger
from mpiparallel.comm.node import NodeLayout
from mpiparallel.comm.watch import Watch
from mpiparallel.coordinates import Coordinates
from mpiparallel.errors import UserError

AXES = ("dp", "pp", "tp")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class Mesh:
    """Ranks, their coordinates and their Groups. All ranks of the communicator make it together.

    Parameters
    ----------
    dp, pp, tp : sizes of the axes; their product must be the size of the communicator.
    communicator : mpi4py communicator, the world by default; the Mesh works on copies of it.
    timeout : seconds after which a wait on any Group gives up.

    Attributes
    ----------
    coordinates : this rank's `Coordinates`.
    dp, pp, tp, world : `Group`s; `rank` and `size` of each are the coordinate and the axis size.
    node : number of the node this rank runs on, counted by lowest rank; nodes : their number.
    node_of : the node of every rank.
    node_ranks, node_cores : ranks on this rank's node, and cores that they may run on together.
        `dp.layout` says which ranks of the dp axis share a node: its all-reduces use that.
    ledger : the `Ledger` that all Groups count in. watch : the `Watch` that they share.

    Raises UserError where the communicator is not dp x pp x tp ranks.
    """

    def __init__(
        self,
        dp: int,
        pp: int,
        tp: int,
        communicator: MPI.Intracomm = MPI.COMM_WORLD,
        *,
        timeout: float = 300.0,
    ):
        check_world(communicator.size, dp, pp, tp)
        self.shape = Coordinates(dp, pp, tp)
        self.coordinates = Coordinates.of(communicator.rank, pp, tp)
        self.ledger = Ledger()
        self.watch = Watch(communicator, self.coordinates)
        here = self.coordinates

        def group(axis: str, color: int) -> Group:
            return Group(
                communicator.Split(color, communicator.rank),
                axis,
                ledger=self.ledger,
                where=f"rank {communicator.rank} ({here})",
                timeout=timeout,
                watch=self.watch,
            )

        # Ranks with one color share a group: those that agree in the other two coordinates.
        self.dp = group("dp", here.pp * tp + here.tp)
        self.pp = group("pp", here.dp * tp + here.tp)
        self.tp = group("tp", here.dp * pp + here.pp)
        self.world = group("world", 0)
        self.node_of = _nodes(communicator)
        self.node = self.node_of[communicator.rank]
        self.nodes = len(set(self.node_of))
        every_core = communicator.allgather(_cores())
        neighbours = [rank for rank, node in enumerate(self.node_of) if node == self.node]
        self.node_cores = len(set().union(*(every_core[rank] for rank in neighbours)))
        self.node_ranks = len(neighbours)
        for axis in (*AXES, "world"):
            self.group(axis).crowded = self.node_ranks > self.node_cores
        replicas = (Coordinates(replica, here.pp, here.tp).rank(pp, tp) for replica in range(dp))
        nodes = [self.node_of[rank] for rank in replicas]
        self.dp.layout = NodeLayout(self.dp, nodes)

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def group(self, axis: str) -> Group:
        """The Group of an axis by its name."""
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp, "world": self.world}[axis]

    def world_rank(self, axis: str, rank: int) -> int:
        """The rank in the world of the `rank`-th of this rank's group on an axis."""
        if axis == "world":
            return rank
        _, pp, tp = self.shape
        return self.coordinates._replace(**{axis: rank}).rank(pp, tp)

    def limit_blas_threads(self) -> int | None:
        """Set this rank's BLAS threads to cores / ranks on its node, at least one.

        Returns the number, or None where the user has set one in the environment.
        """
        if any(name in os.environ for name in THREAD_VARIABLES):
            return None
        threads = max(1, min(len(_cores()), self.node_cores // self.node_ranks))
        threadpool_limits(threads, user_api="blas")
        return threads

    def free(self) -> None:
        """Give the communicators back. All ranks call it."""
        for axis in (*AXES, "world"):
            self.group(axis).free()
        self.watch.free()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, _kind, error, _traceback) -> None:
        # Freeing is collective: after an error that is not agreed on the others may not come.
        if error is None or getattr(error, "agreed", False):
            self.free()


def check_world(ranks: int, dp: int, pp: int, tp: int) -> None:
    """Raise UserError unless `ranks` is dp * pp * tp, naming all of them."""
    if min(dp, pp, tp) < 1 or dp * pp * tp != ranks:
        raise UserError(
            f"the mesh dp={dp} x pp={pp} x tp={tp} wants {dp * pp * tp} ranks, and there are "
            f"{ranks}: start with mpirun -n {dp * pp * tp}, or choose sizes with product {ranks}"
        )


def _cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _nodes(communicator: MPI.Intracomm) -> list[int]:
    """The node of every rank: ranks that can share memory are on one node."""
    shared = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    first = shared.bcast(communicator.rank)
    shared.Free()
    firsts = communicator.allgather(first)
    number = {rank: node for node, rank in enumerate(sorted(set(firsts)))}
    return [number[rank] for rank in firsts]
