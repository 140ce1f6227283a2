"""What the package takes from CuPy is there, with the keywords that it is called with.

Names come from the package's own syntax trees. Skipped where CuPy is not installed; no GPU is
needed. The stand-in is held to CuPy as well: it offers nothing that CuPy does not have.
"""

import ast
import inspect
import warnings
from pathlib import Path

import pytest
import strict_array

import mpiparallel

# What each module means by these names.
ROOTS = {"xp": "cupy", "cupy": "cupy", "library": "cupy", "cupyx": "cupyx"}
UFUNC_KEYWORDS = {"out", "dtype", "casting"}


@pytest.fixture(scope="module")
def libraries():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy", exc_type=ImportError)
        import cupyx
    return {"cupy": cupy, "cupyx": cupyx}


def uses():
    """(where, library, dotted name, keywords of the call or None), over the whole package."""
    folder = Path(mpiparallel.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                parts = ast.unparse(node).split(".")
                known = [index for index, part in enumerate(parts) if part in ROOTS]
                if not known or any(not part.isidentifier() for part in parts):
                    continue
                name = parts[known[-1] + 1 :]
                call = calls.get(id(node))
                keywords = None if call is None else {each.arg for each in call.keywords}
                where = f"{file.relative_to(folder)}:{node.lineno}"
                yield where, ROOTS[parts[known[-1]]], name, keywords


def find(module, name):
    for part in name:
        module = getattr(module, part)
    return module


def test_the_names_that_are_looked_for_are_found():
    found = {".".join(name) for _, _, name, _ in uses()}
    wanted = {"matmul", "empty_like", "RawModule", "cuda.runtime.memGetInfo", "empty_pinned"}
    assert wanted | {"moveaxis", "cuda.get_current_stream"} <= found


def test_every_function_exists_and_takes_our_keywords(libraries):
    for where, library, name, keywords in uses():
        value = find(libraries[library], name)  # AttributeError names what is missing
        if not keywords:
            continue
        try:
            parameters = inspect.signature(value).parameters
        except (TypeError, ValueError):
            parameters = UFUNC_KEYWORDS if type(value).__name__ == "ufunc" else keywords
        assert keywords <= set(parameters), f"{where}: {'.'.join(name)} takes no {keywords}"


def test_the_stand_in_offers_nothing_that_cupy_does_not_have(libraries):
    def compare(ours, theirs, path):
        for name, value in vars(ours).items():
            if name.startswith("__"):
                continue
            if name == "nccl":  # a module of its own, imported by name
                continue
            assert hasattr(theirs, name), f"{path}.{name} is not CuPy's"
            if not callable(value) and name in ("cuda", "runtime", "memory"):
                compare(value, getattr(theirs, name), f"{path}.{name}")

    modules = strict_array.modules()
    compare(modules["cupy"], libraries["cupy"], "cupy")
    compare(modules["cupyx"], libraries["cupyx"], "cupyx")
    for name in vars(strict_array.StrictArray):
        if not name.startswith("_"):
            assert hasattr(libraries["cupy"].ndarray, name), f"ndarray.{name} is not CuPy's"


def test_the_stand_in_has_nccls_names_where_nccl_is(libraries):
    nccl = pytest.importorskip("cupy_backends.cuda.libs.nccl", exc_type=ImportError)
    import strict_nccl

    for name in vars(strict_nccl):
        if name.startswith(("NCCL_", "get_", "group")):
            assert hasattr(nccl, name), name
    for name in vars(strict_nccl.NcclCommunicator):
        if not name.startswith("_"):
            assert hasattr(nccl.NcclCommunicator, name), name
