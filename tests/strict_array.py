"""A stand-in for CuPy where there is no GPU: stricter than NumPy wherever CuPy is.

`StrictArray` keeps its values in a NumPy array that nobody else sees. It refuses to become a NumPy
array by itself, to be combined with one, and to show its memory to MPI; a reduction of it is an
array of no dims and not a number; its flags say nothing of writing. `modules()` are a `cupy` and a
`cupyx` made of it, with no function that CuPy does not have, with a stream that remembers whether
work was queued since it was last waited for, and with an NCCL that works over MPI. The package's
own CuPy backend runs on them unchanged.
"""

import functools
import operator
import types

import numpy as np
import strict_nccl
from mpi4py import MPI

from mpiparallel.backend import numpy_kernels

SCALARS = (bool, int, float, complex, np.generic, type(None), slice, type(...), str, type, np.dtype)


class Stream:
    """The one stream. `pending` : work was queued that nobody has waited for. `pointers` : whether
    MPI may have device pointers."""

    ptr, pending, pointers, synchronized = 0, False, False, 0

    def synchronize(self):
        self.pending = False
        self.synchronized += 1


STREAM = Stream()


def unwrap(value):
    """What NumPy may compute with; TypeError for a host array."""
    if isinstance(value, StrictArray):
        return value._array
    if isinstance(value, tuple):
        return tuple(map(unwrap, value))
    if isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}: a device array is not mixed with it")


def wrap(value):
    """NumPy's result as the device's: scalars become arrays of no dims."""
    if isinstance(value, tuple):
        return tuple(map(wrap, value))
    return StrictArray(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def on_device(function, views=False):
    """A NumPy function that takes and gives device arrays. It queues work, unless all that it does
    is to look at its first argument in another way (`views`)."""

    @functools.wraps(function)
    def call(*arguments, **keywords):
        keywords = {key: unwrap(value) for key, value in keywords.items()}
        arguments = tuple(map(unwrap, arguments))
        result = function(*arguments, **keywords)
        if not (views and np.may_share_memory(arguments[0], result)):
            STREAM.pending = True
        return wrap(result)

    return call


class StrictArray:
    """An array on a device that is not there."""

    __slots__ = ("__weakref__", "_array")
    __array_ufunc__ = None  # NumPy's operators give up, and ours refuse
    __hash__ = None

    def __init__(self, array):
        self._array = array

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed: use get()")

    def __array_function__(self, function, *_):
        raise TypeError(f"numpy.{function.__name__} was called with a device array")

    def __reduce_ex__(self, _):
        raise TypeError("a device array is not sent as a Python object")

    @property
    def __cuda_array_interface__(self):
        if not STREAM.pointers:
            raise TypeError("MPI cannot reach device memory")
        if STREAM.pending:
            raise RuntimeError("the stream was not synchronised before MPI got the buffer")
        return {**self._array.__array_interface__, "strides": self._array.strides, "version": 3}

    shape = property(lambda self: self._array.shape)
    strides = property(lambda self: self._array.strides)
    dtype = property(lambda self: self._array.dtype)
    size = property(lambda self: self._array.size)
    ndim = property(lambda self: self._array.ndim)
    nbytes = property(lambda self: self._array.nbytes)
    itemsize = property(lambda self: self._array.itemsize)
    T = property(lambda self: wrap(self._array.T))
    data = property(lambda self: types.SimpleNamespace(ptr=self._array.ctypes.data))

    @property
    def flags(self):
        flags = self._array.flags
        names = ("c_contiguous", "f_contiguous", "owndata")
        return types.SimpleNamespace(**{name: flags[name.upper()] for name in names})

    def get(self, stream=None, order="C", out=None, blocking=True):
        assert blocking, "a download that nobody waits for"
        STREAM.synchronize()
        if out is None:
            return self._array.copy(order)
        if not out.flags.c_contiguous or (out.shape, out.dtype) != (self.shape, self.dtype):
            raise ValueError("out must be contiguous and of the array's shape and dtype")
        out[...] = self._array
        return out

    def set(self, array, stream=None):
        if type(array) is not np.ndarray:
            raise TypeError("Only a NumPy array can be set")
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            raise ValueError("Shape or dtype mismatch")
        if not self._array.flags.c_contiguous:
            raise RuntimeError("Cannot set to a non-contiguous array")
        self._array[...] = array
        STREAM.pending = True

    def __setitem__(self, index, value):
        self._array[unwrap(index)] = unwrap(value)
        STREAM.pending = True

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def _number(self, kind):
        if self.size != 1:
            raise TypeError("only an array of one element is a number")
        STREAM.synchronize()
        return kind(self._array.reshape(())[()])

    def __bool__(self):
        return self._number(bool)

    def __int__(self):
        return self._number(int)

    def __float__(self):
        return self._number(float)

    def __index__(self):
        return self._number(operator.index)

    def __repr__(self):
        return f"StrictArray({self.dtype}{self.shape})"

    def tobytes(self):
        return self.get().tobytes()

    def tolist(self):
        return self.get().tolist()


METHODS = [
    *("all", "any", "argmax", "argmin", "copy", "fill", "max", "mean", "min", "nonzero", "std"),
    "sum",
]
VIEWS = ["__getitem__", "astype", "ravel", "reshape", "swapaxes", "transpose", "view"]
BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"]
BINARY += ["lshift", "rshift"]
COMPARE = ["lt", "le", "gt", "ge", "eq", "ne"]
UNARY = ["neg", "pos", "abs", "invert"]


def in_place(operation):
    """The operator that changes its left side."""

    def change(self, other):
        operation(self._array, unwrap(other))
        STREAM.pending = True
        return self

    return change


def reflected(operation):
    """The operator with its sides exchanged."""
    return on_device(lambda self, other: operation(other, self))


for name in [*METHODS, *VIEWS]:
    setattr(StrictArray, name, on_device(getattr(np.ndarray, name), views=name in VIEWS))
for name in BINARY:
    setattr(StrictArray, f"__{name}__", on_device(getattr(operator, f"__{name}__")))
    setattr(StrictArray, f"__r{name}__", reflected(getattr(operator, f"__{name}__")))
    setattr(StrictArray, f"__i{name}__", in_place(getattr(operator, f"__i{name}__")))
for name in COMPARE + UNARY:
    setattr(StrictArray, f"__{name}__", on_device(getattr(operator, f"__{name}__")))

# The functions that our code takes from CuPy; test_cupy_names.py holds them to CuPy itself.
FUNCTIONS = [
    *(
        "arange",
        "argsort",
        "empty",
        "empty_like",
        "exp",
        "flatnonzero",
        "isfinite",
        "isnan",
        "log",
        "matmul",
        "nonzero",
        "ones",
    ),
    *("where", "zeros", "zeros_like"),
]
VIEW_FUNCTIONS = ["ascontiguousarray", "moveaxis"]

kernels = types.SimpleNamespace(
    **{
        name: on_device(getattr(numpy_kernels, name))
        for name in vars(numpy_kernels)
        if not name.startswith("_") and callable(getattr(numpy_kernels, name))
    }
)


def asarray(array, dtype=None):
    """The explicit way onto the device; a copy of a host array."""
    if isinstance(array, StrictArray):
        return array if dtype is None else array.astype(dtype, copy=False)
    STREAM.pending = True
    return StrictArray(np.array(array, dtype))


def empty_pinned(shape, dtype=float, order="C"):
    """Host memory with nothing sensible in it."""
    return np.frombuffer(
        bytearray(b"\x7f") * (int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape)


class OutOfMemoryError(MemoryError):
    """With CuPy's message."""

    def __init__(self, size, total):
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes)."
        )


class Event:
    """Done when the NCCL calls before it are."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.requests = []

    def record(self, stream=None):
        self.requests = strict_nccl.take_posted()

    @property
    def done(self):
        return MPI.Request.Testall(self.requests)


class Device:
    """A GPU by its number."""

    def __init__(self, device):
        self.id = device

    def use(self):
        return self


def modules(gpus=1):
    """cupy, cupy.cuda, cupy.cuda.nccl and cupyx by name, for sys.modules."""
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: gpus,
        deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
        memGetInfo=lambda: (3000, 10000),
        getDeviceProperties=lambda device: {"name": b"stand-in"},
    )
    cuda, cupy, cupyx = (types.ModuleType(name) for name in ("cupy.cuda", "cupy", "cupyx"))
    vars(cuda).update(
        runtime=runtime,
        Device=Device,
        Event=Event,
        get_current_stream=lambda: STREAM,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        nccl=strict_nccl,
    )
    for name in FUNCTIONS + VIEW_FUNCTIONS:
        setattr(cupy, name, on_device(getattr(np, name), views=name in VIEW_FUNCTIONS))
    vars(cupy).update(
        ndarray=StrictArray,
        asarray=asarray,
        inf=np.inf,
        cuda=cuda,
        get_default_memory_pool=lambda: types.SimpleNamespace(free_bytes=lambda: 200),
    )
    cupyx.empty_pinned = empty_pinned
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": strict_nccl, "cupyx": cupyx}
