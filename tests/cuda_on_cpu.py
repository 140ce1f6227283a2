"""CUDA C++ run on a CPU: `RawModule` for the stand-in of CuPy in strict_array.py.

The very source that a GPU gets is compiled by g++ behind a few lines that say what a block is: its
threads are threads here, `__syncthreads` is a barrier that they share, and blocks run one after
another. Arguments are passed as CUDA's driver does, by address, and as CuPy types them: an int is
64 bits wide, a float is a double, an array is its address. So a wrong argument is wrong here too.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = shutil.which("g++")

PROLOGUE = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>
#define __global__
#define __device__ static
#define __shared__ static
using std::max;
struct Index3 { unsigned x; };
static thread_local Index3 threadIdx, blockIdx;
static Index3 blockDim;
static std::barrier<>* block;
static void __syncthreads() { block->arrive_and_wait(); }
"""

EPILOGUE = """
template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(P*)arguments[I]...);
}
template <class... P>
void launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void** arguments) {
    std::barrier<> together(threads);
    block = &together;
    blockDim.x = threads;
    std::vector<std::thread> running;
    for (unsigned thread = 0; thread < threads; thread++)
        running.emplace_back([=] {
            threadIdx.x = thread;
            for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
                call(kernel, arguments, std::index_sequence_for<P...>());
                __syncthreads();
            }
        });
    for (auto& each : running) each.join();
}
template <class... P> constexpr int count(void (*)(P...)) { return sizeof...(P); }
"""

EXPORT = """
extern "C" int count_{0}() {{ return count({0}); }}
extern "C" void launch_{0}(unsigned blocks, unsigned threads, void** arguments) {{
    launch({0}, blocks, threads, arguments);
}}
"""


class RawModule:
    """As `cupy.RawModule`: source text and compiler options in, kernels by name out."""

    def __init__(self, *, code, options=()):
        names = re.findall(r"__global__ void (\w+)\(", code)
        source = PROLOGUE + code + EPILOGUE + "".join(map(EXPORT.format, names))
        with tempfile.TemporaryDirectory() as folder:
            file, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
            file.write_text(source)
            flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
            subprocess.run([COMPILER, *flags, *options, file, "-o", library], check=True)
            self.library = ctypes.CDLL(str(library))

    def get_function(self, name):
        """kernel(grid, block, arguments), as CuPy's."""
        launch, wanted = self.library[f"launch_{name}"], self.library[f"count_{name}"]()

        def kernel(grid, block, arguments):
            assert len(arguments) == wanted, f"{name} takes {wanted} arguments"
            values = [_as_c(value) for value in arguments]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
            launch(ctypes.c_uint(grid[0]), ctypes.c_uint(block[0]), pointers)

        return kernel


def _as_c(value):
    if isinstance(value, int):
        return ctypes.c_longlong(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return ctypes.c_void_p(value.data.ptr)
