"""Layouts: how an array is cut, put together again, and what follows from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiparallel.parameter import Layout, Parameter


@given(
    parts=st.integers(1, 8),
    width=st.integers(0, 4),
    sections=st.integers(1, 3),
    cut=st.integers(0, 1),
    short=st.integers(0, 7),
)
def test_cutting_and_joining_is_the_identity(parts, width, sections, cut, short):
    length = sections * parts * width
    padding = sections == 1
    if padding:
        length = max(0, length - short)
    shape = (length, 3) if cut == 0 else (3, length)
    whole = np.random.default_rng(0).standard_normal(shape)
    layout = Layout(cut, sections, padding)
    shards = [layout.shard(whole, part, parts) for part in range(parts)]
    assert len({shard.shape for shard in shards}) == 1, "all pieces have one shape"
    assert {shard.shape for shard in shards} == {layout.local_shape(shape, parts)}
    np.testing.assert_array_equal(layout.join(shards, shape), whole)


def test_a_fused_qkv_is_cut_in_each_of_its_three_parts():
    whole = np.array(["q0", "q1", "k0", "k1", "v0", "v1"])
    layout = Layout(0, sections=3)
    assert layout.shard(whole, 0, 2).tolist() == ["q0", "k0", "v0"]
    assert layout.shard(whole, 1, 2).tolist() == ["q1", "k1", "v1"]


def test_padding_is_zero_and_outside_the_whole():
    layout = Layout(0, padding=True)
    shards = [layout.shard(np.array([1.0, 2, 3, 4, 5]), part, 4) for part in range(4)]
    assert [shard.tolist() for shard in shards] == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_a_cut_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="is not cut by 4"):
        Layout(0).local_shape((6,), 4)


def test_one_copy_of_each_piece_counts():
    def make(layout, tp_rank, holders=()):
        return Parameter("p", (4,), layout, "zeros", tp_rank, 2, holders)

    assert [make(Layout(0), rank).counts_on(0) for rank in (0, 1)] == [True, True]
    assert [make(Layout(), rank).counts_on(0) for rank in (0, 1)] == [True, False]
    tied = make(Layout(0), 1, holders=(0, 3))
    assert [tied.counts_on(rank) for rank in (0, 3)] == [True, False]


def test_initial_weights_depend_on_seed_and_name_alone():
    def draw(seed, name, tp_rank=0, tp_size=1):
        made = Parameter(name, (6, 4), Layout(1), 0.5, tp_rank, tp_size)
        made.initialize(seed, "float64")
        return made.data

    whole = draw(1, "a")
    np.testing.assert_array_equal(draw(1, "a"), whole)
    np.testing.assert_array_equal(np.hstack([draw(1, "a", r, 2) for r in range(2)]), whole)
    assert not np.array_equal(draw(2, "a"), whole)
    assert not np.array_equal(draw(1, "b"), whole)
    # The scale is that of the whole matrix, whatever the shard.
    many = Parameter("many", (200, 200), Layout(1), 0.02, 3, 4)
    many.initialize(0, "float64")
    assert many.data.std() == pytest.approx(0.02, rel=0.02)
