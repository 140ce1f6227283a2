"""Device arrays on their way to MPI: which transport, what is synchronised, who has which GPU.

On the stand-in for CuPy (MPIPARALLEL_TEST_BACKEND=strict), where every other test of this folder
runs as well.
"""

import sys

import numpy as np
import pytest
from conftest import BACKEND, WORLD
from memory import device, equal

from mpiparallel import backend
from mpiparallel.backend import choice, xp
from mpiparallel.comm import transport
from mpiparallel.mesh import Mesh

pytestmark = [
    pytest.mark.mpi(min_size=1),
    pytest.mark.skipif(BACKEND != "strict", reason="of the stand-in for CuPy"),
]


@pytest.fixture
def stream():
    return xp.cuda.get_current_stream()


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): the node has so many; the backend is chosen anew. As it was, after the test."""
    before = backend.current()

    def have(count):
        monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", lambda: count)
        choice.choose("auto", WORLD)
        return backend.current()

    yield have
    backend.install(before)


def test_device_arrays_are_what_the_suite_computes_on():
    array = device(np.ones(3))
    assert not isinstance(array, np.ndarray)
    for mix in (lambda: array + np.ones(3), lambda: np.ones(3) * array, lambda: np.exp(array)):
        with pytest.raises(TypeError):
            mix()
    for leak in (np.asarray, memoryview, np.concatenate, np.linalg.norm):
        with pytest.raises(TypeError):
            leak(array)
    with pytest.raises(TypeError):
        WORLD.Allreduce(array, np.empty(3))
    total = array.sum()
    assert (type(total), total.shape, float(total)) == (type(array), (), 3.0)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_rank_takes_the_gpu_of_its_rank_on_the_node(gpus, count):
    chosen = gpus(count)
    assert chosen.device == WORLD.rank % count
    assert chosen.sharing == sum(rank % count == chosen.device for rank in range(WORLD.size))


def test_auto_takes_numpy_everywhere_where_one_rank_has_no_device(gpus, monkeypatch):
    missing = "no GPU answers (broken)" if WORLD.rank == WORLD.size - 1 else None
    monkeypatch.setattr(choice, "device_trouble", lambda: missing)
    chosen = gpus(1)
    assert chosen.name == "numpy"
    assert chosen.reason == f"backend numpy: no GPU answers (broken) on rank {WORLD.size - 1}"


@pytest.mark.mpi(min_size=2)
def test_the_transport_is_the_one_that_was_asked_for(world, way):
    array = device(np.ones(3))
    collective, message = (
        type(world._transports.collective(array, "float64")),
        type(world._transports.point_to_point(array)),
    )
    assert (collective, message) == {
        "staged": (transport.Staged, transport.Staged),
        "direct": (transport.Device, transport.Device),
        "nccl": (transport.Stream, transport.Staged),
    }[way]
    # Host arrays go straight to MPI, and so do for NCCL the dtypes that it does not know.
    assert type(world._transports.collective(np.ones(3), "float64")) is transport.Host
    if way == "nccl":
        assert type(world._transports.collective(array, "complex128")) is transport.Staged


@pytest.mark.mpi(min_size=2)
def test_setting_nccl_up_is_not_counted(world, way):
    world.allreduce(device(np.ones(3)))
    assert [row["op"] for row in world.ledger.rows()] == ["allreduce"]


def test_a_rank_alone_moves_nothing_to_the_host(stream):
    with Mesh(WORLD.size, 1, 1) as mesh:
        array = device(np.ones(4))
        assert isinstance(mesh.tp._transports.collective(array).communicator, transport.Alone)
        before = stream.synchronized
        equal_later = [mesh.tp.allreduce(array), mesh.tp.allgather(array), mesh.tp.bcast(array)]
        equal_later += [mesh.tp.reduce_scatter(array), mesh.tp.alltoall(array)]
        assert stream.synchronized == before
        for result in equal_later:
            equal(result, np.ones(4))
        assert mesh.ledger.rows()[0]["bytes"] == 0


@pytest.mark.mpi(min_size=2)
def test_the_stream_is_synchronised_before_mpi_gets_a_buffer(world, way, stream, monkeypatch):
    # The stand-in refuses a pointer while work is queued; here the refusal itself is shown.
    if way != "direct":
        pytest.skip("of device pointers")
    array = device(np.ones(4))
    array += 1
    assert stream.pending
    equal(world.allreduce(array), np.full(4, 2.0 * world.size))
    monkeypatch.setattr(transport.Device, "ready", lambda self: None)
    array += 1
    with pytest.raises(TypeError, match="expecting buffer"):
        world.allreduce(array)


def test_a_download_waits_for_the_stream_and_an_upload_is_over_when_it_returns(stream):
    array = device(np.arange(6.0).reshape(2, 3))
    array *= 2
    assert stream.pending
    there = backend.current().download(array.T)
    assert not stream.pending
    equal(there, 2 * np.arange(6.0).reshape(2, 3).T)
    for target in (device(np.zeros((3, 2))), device(np.zeros((2, 3))).T):
        backend.current().upload(there, target)
        assert not stream.pending, "the host memory may be used again"
        equal(target, there)
