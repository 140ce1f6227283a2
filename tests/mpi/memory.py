"""Both sides of the memory: tests make and judge arrays with NumPy, the package may compute on a
device. On NumPy's own backend `device` and `host` change nothing."""

import numpy as np

from mpiparallel import backend


def device(array):
    """An array of the backend, of a dtype that devices have; any other stays on the host."""
    array = np.asarray(array)
    known = array.dtype.kind in "biufc" and array.dtype.isnative
    return backend.from_host(array) if known else array


def host(array):
    """The NumPy array of what a test got."""
    return array if np.isscalar(array) else backend.to_host(array)


def equal(actual, expected, message=""):
    """Equal shapes and elements, wherever they are."""
    actual, expected = (host(a) if hasattr(a, "dtype") else a for a in (actual, expected))
    np.testing.assert_array_equal(actual, expected, message)


def close(actual, expected, **tolerance):
    """Equal within a tolerance, wherever they are."""
    actual, expected = (host(a) if hasattr(a, "dtype") else a for a in (actual, expected))
    np.testing.assert_allclose(actual, expected, **tolerance)
