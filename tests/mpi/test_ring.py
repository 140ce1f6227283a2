"""The written-out ring: every element, on any number of ranks, and the bytes it promises."""

import numpy as np
import pytest
from memory import close, device, equal, host

from mpiparallel.comm import ring
from mpiparallel.comm.allreduce import allreduce
from mpiparallel.comm.ledger import Ledger

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.mark.parametrize("length", [0, 1, 3, 7, 10, 1000])
@pytest.mark.parametrize("dtype", ["int64", "float32", "float64"])
def test_ring_allreduce_sums_every_element(world, length, dtype):
    array = device(np.ones(length, dtype))
    allreduce(world, array, "ring")
    equal(array, world.size)


def test_ring_allreduce_equals_a_sum_over_ranks(world):
    every = np.random.default_rng(0).standard_normal((world.size, 5, 7))
    mine = device(every[world.rank].copy())
    allreduce(world, mine, "ring")
    close(mine, every.sum(0), rtol=1e-13, atol=1e-14)
    assert len(set(world.communicator.allgather(mine.tobytes()))) == 1


def test_ring_reduce_scatter_leaves_the_sum_of_chunk_r_on_rank_r(world):
    every = np.random.default_rng(1).standard_normal((world.size, 11))
    mine = device(every[world.rank].copy())
    ring.run(ring.reduce_scatter_steps(world, mine))
    bounds = ring.chunk_bounds(11, world.size)
    own = slice(bounds[world.rank], bounds[world.rank + 1])
    close(mine[own], every.sum(0)[own], rtol=1e-13, atol=1e-14)
    ring.run(ring.allgather_steps(world, mine))
    close(mine, every.sum(0), rtol=1e-13, atol=1e-14)


def test_ring_sends_two_p_minus_one_over_p_of_the_array(world):
    p = world.size
    world.ledger = Ledger()
    allreduce(world, device(np.zeros(6 * p, "float32")), "ring")
    [row] = world.ledger.rows()
    assert (row["op"], row["calls"], row["bytes"]) == ("allreduce", 1, 2 * (p - 1) * 24)


def test_ring_reduce_scatter_and_allgather_are_adjoint(world):
    # x: a full array per rank -> its chunk of the sum; y: a chunk per rank -> the full array.
    generator = np.random.default_rng(world.rank)
    x = generator.standard_normal(9)
    bounds = ring.chunk_bounds(9, world.size)
    own = slice(bounds[world.rank], bounds[world.rank + 1])
    y = generator.standard_normal(9)
    scattered, gathered = x.copy(), np.zeros(9)
    gathered[own] = y[own]
    scattered, gathered = device(scattered), device(gathered)
    ring.run(ring.reduce_scatter_steps(world, scattered))
    ring.run(ring.allgather_steps(world, gathered))
    scattered, gathered = host(scattered), host(gathered)
    left = world.allreduce(np.array([np.vdot(scattered[own], y[own])]))
    right = world.allreduce(np.array([np.vdot(x, gathered)]))
    close(left, right, rtol=1e-12)
