"""Group: what every collective and message gives, for any array a NumPy user would pass."""

import numpy as np
import pytest
from memory import close, device, equal, host
from mpi4py import MPI

from mpiparallel.comm import buffers
from mpiparallel.comm.group import Group
from mpiparallel.comm.ledger import Ledger, ring_bytes
from mpiparallel.comm.pending import CommunicationTimeout

pytestmark = pytest.mark.mpi(min_size=1)

DTYPES = ["int8", "uint16", "int32", "int64", "float32", "float64", "complex64", "complex128"]


def per_rank(world, shape, dtype="float64"):
    """What each rank contributes: (p, *shape), the same array on every rank."""
    values = np.arange(world.size * int(np.prod(shape, dtype=int))) % 17
    return values.reshape(world.size, *shape).astype(dtype)


def awkward(array):
    """The same values in memory that is neither contiguous nor, on the host, writable."""
    spread = device(np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype))
    view = spread[..., ::2]
    view[...] = device(array)
    if isinstance(view, np.ndarray):  # devices have no read-only memory
        view.flags.writeable = False
    return view


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
def test_allreduce_sums_any_dtype_and_shape(world, dtype, shape):
    every = per_rank(world, shape, dtype)
    result = world.allreduce(device(every[world.rank]))
    equal(result, every.sum(0, dtype=dtype))
    assert result.dtype == dtype
    assert result.shape == shape


@pytest.mark.parametrize("op", ["max", "min"])
def test_allreduce_takes_the_largest_and_the_smallest(world, op):
    every = per_rank(world, (5,)) - 3
    equal(world.allreduce(device(every[world.rank]), op), getattr(every, op)(0))


def test_allreduce_of_bool_is_what_numpy_add_does(world):
    mine = device([world.rank == 0, False, True])
    result = world.allreduce(mine)
    equal(result, [True, False, True])
    assert result.dtype == bool


def test_float16_is_reduced_in_float32(world):
    # 2048 + 1 + 1 in float16 stays 2048 if each sum is rounded; 2050 is the right value.
    mine = device(np.array([2048.0 if world.rank == 0 else 1.0], "float16"))
    exact = np.float16(2048 + world.size - 1)
    result = world.allreduce(mine)
    assert result.dtype == np.float16
    equal(result, [exact])


def test_byte_swapped_arrays_are_summed_by_value(world):
    result = world.allreduce(np.array([1.5, 2.0], ">f8"))
    equal(result, np.array([1.5, 2.0]) * world.size)


def test_results_are_returned_and_inputs_left_alone(world):
    x = device(np.ones(3))
    y = world.allreduce(x)
    assert y is not x
    equal(x, 1)
    assert world.allreduce(x, out=x) is x
    equal(x, world.size)


def test_out_may_be_strided_and_may_overlap_the_input(world):
    memory = device(np.arange(6.0))
    out = memory[1:]
    assert world.allreduce(memory[:5], out=out) is out
    equal(memory, [0, *np.arange(5.0) * world.size])
    target = device(np.zeros((3, 4)))
    world.allreduce(device(np.ones((3, 2))), out=target[:, ::2])
    equal(target[:, ::2], world.size)
    equal(target[:, 1::2], 0)


def test_non_contiguous_and_read_only_arrays_are_taken(world):
    p, every = world.size, per_rank(world, (world.size, 4))
    mine = awkward(every[world.rank])
    equal(world.allreduce(mine), every.sum(0))
    equal(world.allgather(mine), every.reshape(p * p, 4))
    equal(world.reduce_scatter(mine), every.sum(0)[world.rank : world.rank + 1])
    equal(world.alltoall(mine), every[:, world.rank])
    equal(world.bcast(mine, root=p - 1), every[-1])
    right, left = (world.rank + 1) % p, (world.rank - 1) % p
    target = device(np.zeros((4, p))).T
    pending = world.irecv(target, left)
    world.send(mine, right)
    assert pending.wait() is target
    equal(target, every[left])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_allgather_joins_along_a_dim(world, dim):
    every = per_rank(world, (2, 3, 4))
    equal(world.allgather(device(every[world.rank]), dim=dim), np.concatenate(every, axis=dim))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_and_alltoall_cut_along_a_dim(world, dim):
    p = world.size
    every = per_rank(world, (2 * p, 3 * p, 4 * p))
    parts = np.split(every.sum(0), p, axis=dim)
    equal(world.reduce_scatter(device(every[world.rank]), dim=dim), parts[world.rank])
    blocks = [np.split(array, p, axis=dim)[world.rank] for array in every]
    equal(world.alltoall(device(every[world.rank]), dim=dim), np.concatenate(blocks, axis=dim))


def test_zero_length_arrays_go_through_every_operation(world):
    empty = device(np.zeros((world.size, 0)))
    assert world.allgather(empty).shape == (world.size**2, 0)
    assert world.reduce_scatter(empty).shape == (1, 0)
    assert world.alltoall(empty).shape == empty.shape
    assert world.bcast(empty).shape == empty.shape
    peer = world.size - 1 - world.rank
    pending = world.irecv(device(np.zeros(0)), peer)
    world.send(device(np.zeros(0)), peer)
    assert pending.wait().shape == (0,)


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "float16", ">f4", "datetime64[s]", "i4,f8"])
def test_a_message_keeps_dtype_and_values(world, dtype):
    sent = device(np.arange(4).astype("i8").astype(dtype))
    peer = world.size - 1 - world.rank
    pending = world.irecv(device(np.empty(4, dtype)), peer)
    world.send(sent, peer)
    received = pending.wait()
    assert received.dtype == sent.dtype
    equal(received, sent)
    equal(world.bcast(sent), sent)


def test_long_messages_are_cut_into_pieces(world, monkeypatch):
    monkeypatch.setattr(buffers, "MAX_ELEMENTS", 7)
    p = world.size
    every = per_rank(world, (p, 23))
    mine = device(every[world.rank])
    equal(world.allreduce(mine), every.sum(0))
    equal(world.allgather(mine, dim=1), np.concatenate(every, axis=1))
    equal(world.reduce_scatter(mine)[0], every.sum(0)[world.rank])
    equal(world.alltoall(mine), every[:, world.rank])
    equal(world.bcast(mine, root=p - 1), every[-1])
    peer = p - 1 - world.rank
    pending = world.irecv(device(np.zeros((p, 23))), peer)
    world.send(mine, peer)
    equal(pending.wait(), every[peer])


def test_operations_under_way_keep_their_arrays_alive(world):
    many, mine, peer = range(40), world.rank, world.size - 1 - world.rank
    received = [world.irecv(device(np.zeros(128)), peer) for _ in many]
    summed = [world.iallreduce(device(np.full(128, float(k + mine)))) for k in many]
    sent = [world.isend(device(np.full(128, float(k * mine))), peer) for k in many]
    for k in many:
        equal(summed[k].wait(), np.full(128, float(sum(k + rank for rank in range(world.size)))))
        equal(received[k].wait(), np.full(128, float(k * peer)))
        sent[k].wait()


def test_all_ranks_get_the_same_bits_twice(world):
    mine = device(np.random.default_rng(world.rank).standard_normal(1001).astype("float32"))
    first, second = world.allreduce(mine), world.allreduce(mine)
    assert len(set(world.communicator.allgather(first.tobytes()))) == 1
    assert first.tobytes() == second.tobytes()


def test_wrong_arguments_are_refused_before_any_message(world):
    x = device(np.ones(3))
    with pytest.raises(ValueError, match="out is float32"):
        world.allreduce(x, out=device(np.ones(3, "float32")))
    if isinstance(x, np.ndarray):
        with pytest.raises(ValueError, match="read-only"):
            world.allreduce(x, out=awkward(x))
    else:
        with pytest.raises(ValueError, match="both in device memory"):
            world.allreduce(x, out=np.ones(3))
    with pytest.raises(ValueError, match="not a reduction"):
        world.allreduce(x, "product")
    with pytest.raises(TypeError, match="no sum of dtype"):
        world.allreduce(np.array(["a"]))
    with pytest.raises(TypeError, match="Python objects"):
        world.isend(np.array([object()]), 0)
    with pytest.raises(ValueError, match="no rank"):
        world.isend(x, world.size)
    with pytest.raises(ValueError, match="tag"):
        world.irecv(x, 0, tag=-1)
    with pytest.raises(ValueError, match="out of range"):
        world.allgather(x, dim=1)
    if world.size > 1:
        with pytest.raises(ValueError, match="multiple"):
            world.reduce_scatter(device(np.ones(world.size + 1)))


def test_the_ledger_counts_what_a_ring_would_send(world):
    p, rank = world.size, world.rank
    world.ledger = Ledger()
    world.allreduce(device(np.zeros(5 * p)))
    world.allgather(device(np.zeros(5)))
    world.reduce_scatter(device(np.zeros(5 * p, "float32")))
    world.alltoall(device(np.zeros(p, "int32")))
    world.bcast(device(np.zeros(3)), root=0)
    pending = world.irecv(device(np.zeros(2)), (rank - 1) % p)
    world.isend(device(np.zeros(2)), (rank + 1) % p).wait()
    pending.wait()
    counted = {row["op"]: (row["calls"], row["bytes"]) for row in world.ledger.rows()}
    assert counted == {
        "allreduce": (1, 2 * (p - 1) * 40),
        "allgather": (1, (p - 1) * 40),
        "reduce_scatter": (1, (p - 1) * 20),
        "alltoall": (1, (p - 1) * 4),
        "bcast": (1, (p - 1) * 24 if rank == 0 else 0),
        "isend": (1, 16),
        "irecv": (1, 0),
    }
    assert all(row["axis"] == "world" and row["seconds"] > 0 for row in world.ledger.rows())


def test_ring_bytes_are_the_published_fractions():
    assert ring_bytes("allreduce", 1000, 4, 2) == 1500  # 2 (p-1)/p
    assert ring_bytes("allgather", 1000, 4, 2) == 750
    assert ring_bytes("allreduce", 1000, 1, 0) == 0


@pytest.mark.parametrize(("op", "times"), [("allreduce", 2), ("allgather", 1), ("alltoall", 1)])
def test_ring_bytes_add_up_exactly_where_chunks_are_unequal(op, times):
    assert sum(ring_bytes(op, 100, 7, rank) for rank in range(7)) == times * 6 * 100


def test_the_ledger_knows_to_whom_bytes_went(world):
    p, rank = world.size, world.rank
    right = (rank + 1) % p
    world.ledger = Ledger()
    world.allreduce(np.zeros(5 * p))  # counted as a ring's: to the right neighbour
    world.alltoall(np.zeros(p, "int32"))
    world.bcast(np.zeros(3), root=0)
    pending = world.irecv(np.zeros(2), (rank - 2) % p)
    world.isend(np.zeros(2), (rank + 2) % p).wait()
    pending.wait()
    expected = [4 + 24 * (rank == 0) if peer != rank else 0 for peer in range(p)]
    expected[right] += 2 * (p - 1) * 40
    expected[(rank + 2) % p] += 16
    assert world.ledger.bytes_to("world", rank, p) == expected
    assert sum(expected) == sum(row["bytes"] for row in world.ledger.rows())


@pytest.mark.mpi(min_size=2)
def test_a_receive_nobody_sends_gives_up_and_says_where(world):
    if world.rank != 0:
        return
    impatient = Group(MPI.COMM_SELF.Dup(), "pp", where="rank 3 (dp=0, pp=1, tp=1)", timeout=0.2)
    with pytest.raises(CommunicationTimeout) as caught:
        impatient.recv(device(np.zeros(1)), 0)
    message = str(caught.value)
    assert "rank 3 (dp=0, pp=1, tp=1) waited 0.2 s in recv on axis pp from pp 0" in message


@pytest.mark.mpi(min_size=2)
def test_a_collective_that_others_miss_gives_up(world):
    # On a communicator of its own, which is never freed: the operation stays open.
    impatient = Group(world.communicator.Dup(), "tp")
    impatient.allreduce(device(np.zeros(1)))  # all ranks are here
    impatient.timeout = 0.3
    if world.rank == 0:
        with pytest.raises(CommunicationTimeout, match=r"allreduce on axis tp with its \d ranks"):
            impatient.allreduce(device(np.zeros(1)))
    world.allreduce(device(np.zeros(1)))
    if world.rank != 0:
        impatient.allreduce(device(np.zeros(1)))


# ---- <F x, y> == <x, F* y>: each primitive is the adjoint of another ----


def inner(world, a, b):
    return float(world.allreduce(np.array([np.vdot(host(a), host(b))]))[0])


def adjoint_pairs(world):
    """(name, forward, shape of x, adjoint, shape of y); the product is over all ranks' arrays."""
    p = world.size

    def one_rank(array, root):
        return array if world.rank == root else device(np.zeros(array.shape))

    def scatter_sum(y):  # the adjoint of a broadcast from rank 0
        return one_rank(world.allreduce(y), 0)

    def shift(step):
        def run(x):
            pending = world.irecv(device(np.zeros(x.shape)), (world.rank - step) % p, tag=1)
            sent = world.isend(x, (world.rank + step) % p, tag=1)
            sent.wait()
            return pending.wait()

        return run

    return [
        ("allreduce", world.allreduce, (4,), world.allreduce, (4,)),
        ("allgather", world.allgather, (3,), world.reduce_scatter, (3 * p,)),
        ("reduce_scatter", world.reduce_scatter, (3 * p,), world.allgather, (3,)),
        ("alltoall", world.alltoall, (3 * p,), world.alltoall, (3 * p,)),
        ("bcast", world.bcast, (4,), scatter_sum, (4,)),
        ("send-recv", shift(1), (4,), shift(-1), (4,)),
    ]


@pytest.mark.parametrize("index", range(6))
def test_primitives_have_their_adjoints(world, index):
    _name, forward, x_shape, adjoint, y_shape = adjoint_pairs(world)[index]
    generator = np.random.default_rng(100 + world.rank)
    x, y = (device(generator.standard_normal(shape)) for shape in (x_shape, y_shape))
    close(inner(world, forward(x), y), inner(world, x, adjoint(y)), rtol=1e-12, atol=1e-12)
