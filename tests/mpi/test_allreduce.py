"""All-reduce: every algorithm, on any size, dtype and number of ranks; its bits and its bytes."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiparallel.comm import half, recursive_doubling, window
from mpiparallel.comm.allreduce import allreduce, allreduce_steps, choose
from mpiparallel.comm.group import CommunicationTimeout, Group
from mpiparallel.comm.ledger import Ledger
from mpiparallel.comm.node import NodeLayout

pytestmark = pytest.mark.mpi(min_size=1)

WORLD = MPI.COMM_WORLD
# Groups of 3 and of 5 ranks are cut from 4 and 8, and pretended nodes from the ranks of one.
CASES = [
    (algorithm, size)
    for algorithm in ("auto", "window", "recursive_doubling", "ring", "mpi", "hierarchical")
    for size in sorted({WORLD.size, min(WORLD.size, 3), min(WORLD.size, 5)})
    if (size > 1 or algorithm not in ("window", "hierarchical"))
    and (size in (4, 8) or algorithm != "hierarchical")
]


def make_group(size, node_of=None):
    """The first `size` ranks as a Group, None on the others; small blocks, so that many are cut."""
    part = WORLD.Split(0 if WORLD.rank < size else MPI.UNDEFINED, WORLD.rank)
    if part == MPI.COMM_NULL:
        return None
    group = Group(part, "dp", timeout=20)
    group.layout = NodeLayout(group, node_of or [0] * size)
    return group


@pytest.fixture
def group(request, monkeypatch):
    """Of the case's size, on the pretended nodes of its algorithm."""
    algorithm, size = request.param
    monkeypatch.setattr(window, "BLOCK", 8192)
    monkeypatch.setattr(window, "SMALL", 1024)
    monkeypatch.setattr(window, "STRIP", 512)
    nodes = [rank // 2 for rank in range(size)] if algorithm == "hierarchical" else None
    made = make_group(size, nodes)
    yield made
    if made is not None:
        made.free()


def cases(test):
    """Run a test(group, algorithm) for every algorithm on every size, on the ranks of the group."""
    return pytest.mark.parametrize(
        ("group", "algorithm"),
        [(case, case[0]) for case in CASES],
        indirect=["group"],
        ids=[f"{algorithm}-{size}" for algorithm, size in CASES],
    )(test)


def contributions(size, length, dtype):
    """What each of `size` ranks adds, the same on every rank: whole numbers, exact in any order."""
    return (np.arange(size * length) % 11).reshape(size, length).astype(dtype)


LENGTHS = (0, 1, 2, 3, 7, 8, 127, 1000, 6001)
DTYPES = ("int64", "uint8", "int16", "float32", "float64", "float16", "complex128", "bool")


@cases
def test_every_element_of_any_length_and_dtype_is_summed(group, algorithm):
    if group is None:
        return
    for dtype in DTYPES:
        for length in LENGTHS:
            every = contributions(group.size, length, dtype)
            mine = every[group.rank].copy()
            allreduce(group, mine, algorithm)
            expected = every.sum(0, dtype=dtype)
            np.testing.assert_array_equal(mine, expected, err_msg=f"{length} of {dtype}")


@cases
def test_all_ranks_end_with_the_same_bits_and_get_them_again(group, algorithm):
    if group is None:
        return
    for length in (5, 999, 5003):
        every = np.random.default_rng(3).standard_normal((group.size, length), "float32")
        first, second = every[group.rank].copy(), every[group.rank].copy()
        allreduce(group, first, algorithm)
        allreduce(group, second, algorithm)
        np.testing.assert_allclose(first, every.sum(0, dtype="float64"), rtol=0, atol=1e-5)
        assert len(set(group.communicator.allgather(first.tobytes()))) == 1
        assert first.tobytes() == second.tobytes()


@cases
def test_arrays_of_any_shape_are_summed_in_place(group, algorithm):
    if group is None:
        return
    for shape in ((), (3, 5), (2, 0), (40, 2, 30)):
        array = np.full(shape, group.rank + 1.0)
        allreduce(group, array, algorithm)
        np.testing.assert_array_equal(array, group.size * (group.size + 1) / 2)


@cases
def test_several_under_way_at_once_keep_apart(group, algorithm):
    if group is None:
        return
    arrays = [np.full(length, 1.0 + number) for number, length in enumerate((900, 5, 2000, 0, 40))]
    # Each rank resumes them in another order, as soon as their messages are there.
    running = [(allreduce_steps(group, array, algorithm), ()) for array in arrays]
    order = np.random.default_rng(group.rank)
    while running:
        steps, needed = running.pop(order.integers(len(running)))
        if all(pending.test() for pending in needed):
            needed = next(steps, None)
        if needed is not None:
            running.append((steps, needed))
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(array, (1.0 + number) * group.size)


@cases
def test_the_ledger_counts_one_call_and_the_bytes_that_were_sent(group, algorithm):
    if group is None:
        return
    p, ring_share = group.size, 2 * (group.size - 1)
    log2 = p.bit_length() - 1
    for length in (8 * p, 800 * p):
        group.ledger = Ledger()
        for part in group.layout.grid or ():
            part.ledger = group.ledger
        allreduce(group, np.zeros(length, "float32"), algorithm)
        [row] = group.ledger.rows()
        assert (row["axis"], row["op"], row["calls"]) == ("dp", "allreduce", 1)
        n, sent = 4 * length, row["bytes"]
        if algorithm in ("ring", "mpi", "auto", "window"):
            assert sent == ring_share * n // p
        elif algorithm == "recursive_doubling":
            total = group.communicator.allreduce(sent)
            extra = p - (1 << log2)
            assert total == ((1 << log2) * log2 + 2 * extra) * n
        else:  # two ranks a node: the array once inside, half of it log2 k times between nodes
            assert sent == n + (log2 - 1) * n // 2


@pytest.mark.mpi(min_size=4)
def test_long_arrays_cross_between_nodes_as_a_ring(monkeypatch):
    monkeypatch.setattr(recursive_doubling, "UP_TO", 0)
    p = WORLD.size // 2 * 2
    group = make_group(p, [rank % (p // 2) for rank in range(p)])  # dealt out to p/2 nodes in turn
    if group is None:
        return
    inside, across = group.layout.grid
    assert (inside.size, across.size) == (2, p // 2)
    assert choose(group, 10**6) == "hierarchical"
    array = np.full(8 * p, 1.0)
    across.ledger = Ledger()
    allreduce(group, array, "hierarchical")
    np.testing.assert_array_equal(array, p)
    # Half of the array, 2 (k-1)/k times: a node of two sends 2 (k-1)/k of the array.
    nodes, half_array = p // 2, array.nbytes // 2
    assert across.ledger.row("dp", "allreduce").bytes == 2 * (nodes - 1) * half_array // nodes
    group.free()


@pytest.mark.parametrize("algorithm", ["auto", "ring", "mpi"])
def test_half_precision_is_summed_in_float32_and_rounded_once(algorithm):
    group = make_group(WORLD.size)
    # Rounded after each addition 2048 + 1 (float16) and 256 + 1 (bfloat16) would stay as they are.
    for large, to_bits in ((2048.0, np.float16), (256.0, None)):
        mine = np.array([large if group.rank == 0 else 1.0], "float32")
        exact = np.array([large + group.size - 1], "float32")
        if to_bits is None:
            bits = half.narrow(mine)
            allreduce(group, bits, algorithm, bfloat16=True)
            assert bits.dtype == np.uint16
            assert bits[0] == half.narrow(exact)[0]
        else:
            array = mine.astype(to_bits)
            allreduce(group, array, algorithm)
            assert array[0] == exact.astype(to_bits)[0]
    group.free()


def test_bfloat16_rounds_to_nearest_even_and_keeps_infinity_and_nan():
    # By hand: 1 + 2^-8 is half way between 1 and 1 + 2^-7, and 1 + 3 * 2^-8 between odd and even.
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, 3.4e38], "float32")
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7F80]
    assert half.narrow(values).tolist() == expected
    # Rounding up would carry the last two into the sign, and rounding down the first to infinity.
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view("float32")
    assert np.isnan(half.widen(half.narrow(nan))).all()
    bits = np.array([0x3F81, 0x8001, 0x7F7F], np.uint16)
    np.testing.assert_array_equal(half.narrow(half.widen(bits)), bits)


def test_auto_goes_by_size_and_nodes():
    p = WORLD.size
    one_node, alone, uneven = [0] * p, list(range(p)), [0] * (p - 1) + [1]
    pairs = [rank // 2 for rank in range(p)]
    expected = [(one_node, "window" if p > 1 else "ring"), (alone, "ring")]
    expected += [(uneven, "ring")] if p > 1 else []
    expected += [(pairs, "hierarchical")] if p in (4, 8) else []
    for node_of, algorithm in expected:
        group = make_group(p, node_of)
        assert choose(group, 10**6) == algorithm, node_of
        assert choose(group, 10**8) == ("ring" if algorithm == "window" else algorithm)
        assert choose(group, 8) == ("window" if algorithm == "window" else "mpi")
        group.free()


def test_what_cannot_be_summed_is_refused_on_every_rank(world):
    with pytest.raises(ValueError, match="contiguous"):
        allreduce(world, np.ones((4, 4)).T)
    with pytest.raises(ValueError, match="writable"):
        allreduce(world, np.broadcast_to(1.0, (1,)))
    with pytest.raises(ValueError, match="use auto or one of window"):
        allreduce(world, np.ones(3), "tree")
    with pytest.raises(TypeError, match="no sum of dtype"):
        allreduce(world, np.array(["a"]))
    if world.size > 1:
        with pytest.raises(ValueError, match="share a node"):
            allreduce(world, np.ones(3), "window")
        with pytest.raises(ValueError, match="several nodes"):
            allreduce(world, np.ones(3), "hierarchical")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("length", [1, 100_000])
def test_a_rank_that_never_comes_to_the_window_is_given_up(length):
    group = make_group(WORLD.size)
    group.timeout = 0.2
    if group.rank == 0:
        with pytest.raises(CommunicationTimeout, match="allreduce on axis dp"):
            allreduce(group, np.ones(length))
    WORLD.Barrier()
    group.free()
