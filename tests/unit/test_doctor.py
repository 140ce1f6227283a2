"""doctor: its judgements of machines that we do not have, and what it says of this one."""

import json

import pytest

from mpiparallel.doctor import judge, launched

GOOD = {
    "mpi": "MPICH 5",
    "launched": 8,
    "ranks": 8,
    "mesh": {"dp": 2, "pp": 1, "tp": 4},
    "node_of_rank": [0, 0, 0, 0, 1, 1, 1, 1],
    "ranks_per_node": [4, 4],
    "cores_per_node": [16, 16],
    "blas_threads": [4] * 8,
    "gpus_per_node": [0, 0],
    "cupy": "CuPy is not installed",
    "backend": "numpy",
    "gpu_aware": False,
}


def test_a_good_cluster_gets_no_advice():
    assert judge(GOOD) == []
    gpus = {"gpus_per_node": [4, 4], "backend": "cupy", "gpu_aware": True}
    assert judge(GOOD | gpus) == []


CASES = {
    "more ranks than cores": (
        {"cores_per_node": [16, 2], "blas_threads": [4] * 4 + [1] * 4},
        "4 ranks on the 2 cores of node 1",
        "at most 2",
    ),
    "too many threads": (
        {"blas_threads": [16] * 4 + [4] * 4},
        "64 BLAS threads on the 16 cores of node 0",
        "to 4",
    ),
    "another mpirun": (
        {
            "ranks": 1,
            "mesh": {"dp": 1, "pp": 1, "tp": 1},
            "node_of_rank": [0],
            "ranks_per_node": [1],
            "cores_per_node": [16],
            "blas_threads": [16],
            "gpus_per_node": [0],
        },
        "started 8 processes, and each is rank 0 of 1",
        "another MPI than mpi4py's (MPICH 5)",
    ),
    "tensor groups over the network": (
        {"mesh": {"dp": 1, "pp": 1, "tp": 8}},
        "1 of 1 tensor groups span nodes, the one of rank 0",
        "--tp among 1, 2, 4",
    ),
    "ranks dealt out": (
        {"node_of_rank": [0, 1] * 4, "mesh": {"dp": 2, "pp": 2, "tp": 2}},
        "4 of 4 tensor groups span nodes",
        "node by node",
    ),
    "a GPU that MPI cannot see": (
        {"gpus_per_node": [4, 4], "backend": "cupy"},
        "MPI cannot see the GPU",
        "MPIPARALLEL_GPU_AWARE=1",
    ),
    "a GPU without CuPy": (
        {"gpus_per_node": [4, 4]},
        "will not be used: CuPy is not installed",
        "cuda12",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_trouble_is_found_alone_and_comes_with_what_to_do(name):
    facts, finding, advice = CASES[name]
    [found] = judge(GOOD | facts)
    assert finding in found["finding"]
    assert advice in found["advice"]


def test_the_word_of_launchers():
    assert launched({}) == (1, 0)
    assert launched({"PMI_SIZE": "4", "PMI_RANK": "3"}) == (4, 3)
    assert launched({"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "3"}) == (3, 0)
    assert launched({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}) == (2, 1)
    assert launched({"SLURM_NTASKS": "64"}) == (1, 0), "an allocation is not a launch"


def test_it_says_what_is_here_once(mpiparallel):
    done = mpiparallel(4, "doctor", "--tp", 2)
    assert (done.status, done.err) == (0, "")
    assert done.out.count("MPI  ") == 1
    assert "4 on 1 node (4), dp=2 x pp=1 x tp=2" in done.out


def test_json_is_one_object(mpiparallel):
    done = mpiparallel(2, "doctor", "--json", env={"OMP_NUM_THREADS": "64"})
    assert (done.status, done.err) == (0, "")
    facts = json.loads(done.out)
    assert facts["ranks"] == facts["launched"] == 2
    used, cores = sum(facts["blas_threads"]), facts["cores_per_node"][0]
    assert used >= 2 * min(64, cores), "as the user said, as far as BLAS goes"
    told = any("BLAS threads" in found["finding"] for found in facts["findings"])
    assert told == (used > max(2, cores))


def test_a_mesh_that_does_not_fit_is_one_line(mpiparallel):
    done = mpiparallel(3, "doctor", "--tp", 2)
    assert done.status == 2
    [line] = done.err.splitlines()
    assert "--tp 2" in line


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_foreign_launcher_is_seen_and_one_process_says_so(mpiparallel, rank):
    # What each process of another MPI's mpirun sees: a world of its own.
    names = ("OMPI_COMM_WORLD", "PMI")  # one of them is this mpirun's own, and set by it
    other = {f"{name}_SIZE": "2" for name in names} | {f"{name}_RANK": rank for name in names}
    done = mpiparallel(1, "doctor", "--tp", 2, env=other)
    assert done.status == 0
    assert ("started 2 processes, and each is rank 0 of 1" in done.out) == (rank == "0")
    assert (done.out == "") == (rank == "1")
