"""`bench allreduce --json`: what scripts read from it."""

import json

import pytest


def test_bench_allreduce_puts_ours_beside_mpi_and_memcpy(mpiparallel):
    done = mpiparallel(3, "bench", "allreduce", "--json", "--bytes", 8, 120_000)
    assert (done.status, done.err) == (0, "")
    result = json.loads(done.out)
    assert result.keys() == {"rows", "memcpy_bytes_per_second", "backend"}
    assert result["memcpy_bytes_per_second"] > 0
    names = ("mpi", "auto", "recursive_doubling", "ring")
    assert [(row["ranks"], row["bytes"], row["algorithm"]) for row in result["rows"]] == [
        (3, size, name) for size in (8, 120_000) for name in names
    ]
    for row in result["rows"]:
        # 2 (p-1)/p of the array over the time
        assert row["bytes_per_second"] * row["seconds"] == pytest.approx(4 / 3 * row["bytes"])


def test_bench_allreduce_prints_a_line_per_size(mpiparallel):
    done = mpiparallel(2, "bench", "allreduce", "--bytes", 8, 4096)
    assert done.status == 0
    backend, first, *lines = done.out.splitlines()
    assert backend.startswith("backend ")
    assert first.startswith("memcpy ")
    assert [line.split()[0] for line in lines] == ["8", "4096"]
    assert all("x mpi" in line and "of memcpy" in line for line in lines)


def test_bench_allreduce_refuses_a_size_below_1(mpiparallel):
    done = mpiparallel(2, "bench", "allreduce", "--bytes", 0)
    assert done.status == 2
    assert done.err.strip() == "mpiparallel: error: --bytes 0: legal: 1 or more"
