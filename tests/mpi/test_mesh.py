"""Mesh: who is where, which groups there are, what is given back, how many BLAS threads."""

import os

import numpy as np
import pytest
from conftest import WORLD, factorings
from threadpoolctl import threadpool_info

from mpiparallel.errors import UserError
from mpiparallel.mesh import THREAD_VARIABLES, Coordinates, Mesh

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("shape", factorings())
def test_groups_are_the_ranks_that_agree_in_the_other_coordinates(shape):
    with Mesh(*shape) as mesh:
        here = mesh.coordinates
        everyone = WORLD.allgather(tuple(here))
        for axis, name in enumerate(("dp", "pp", "tp")):
            group = mesh.group(name)
            assert (group.rank, group.size) == (here[axis], shape[axis])
            members = group.communicator.allgather(WORLD.rank)
            agreeing = [
                rank
                for rank, there in enumerate(everyone)
                if all(there[other] == here[other] for other in range(3) if other != axis)
            ]
            assert members == agreeing
        assert here.rank(shape[1], shape[2]) == WORLD.rank


@pytest.mark.mpi(min_size=8)
def test_tp_varies_fastest_on_2_x_2_x_2():
    with Mesh(2, 2, 2) as mesh:
        groups = {
            name: sorted(
                {tuple(row) for row in WORLD.allgather(group.communicator.allgather(WORLD.rank))}
            )
            for name, group in (("tp", mesh.tp), ("pp", mesh.pp), ("dp", mesh.dp))
        }
    assert groups == {
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "pp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }


def test_coordinates_of_the_512_gpu_example():
    # 16 x 4 x 8 = 512: eight tensor ranks fill a node, a pipeline is four nodes.
    assert Coordinates.of(0, 4, 8) == (0, 0, 0)
    assert Coordinates.of(7, 4, 8) == (0, 0, 7)
    assert Coordinates.of(8, 4, 8) == (0, 1, 0)
    assert Coordinates.of(511, 4, 8) == (15, 3, 7)


def test_a_world_that_is_not_the_product_is_refused_with_all_factors():
    with pytest.raises(UserError) as caught:
        Mesh(3, 5, 7)
    message = str(caught.value)
    assert all(part in message for part in ("dp=3", "pp=5", "tp=7", "105", f"are {WORLD.size}:"))


def test_ranks_of_one_machine_are_one_node():
    with Mesh(WORLD.size, 1, 1) as mesh:
        assert mesh.node_of == [0] * WORLD.size
        assert (mesh.node, mesh.nodes, mesh.node_ranks) == (0, 1, WORLD.size)


def test_making_and_freeing_a_mesh_5000_times_leaks_no_communicator():
    # MPICH and Open MPI both run out of context ids long before 5,000 x 4 communicators.
    for _ in range(5000 // WORLD.size):
        Mesh(1, WORLD.size, 1).free()
    with Mesh(1, 1, WORLD.size) as mesh:
        assert mesh.tp.allreduce(np.ones(1))[0] == WORLD.size


def test_blas_threads_are_cores_over_ranks_unless_the_user_set_them(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with Mesh(WORLD.size, 1, 1) as mesh:
        threads = mesh.limit_blas_threads()
        cores = len(os.sched_getaffinity(0))
        assert threads == max(1, cores // WORLD.size)
        blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        assert blas
        assert set(blas) == {threads}
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert mesh.limit_blas_threads() is None
