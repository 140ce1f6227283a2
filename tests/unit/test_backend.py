"""Which backend is chosen, what is said of it, and what happens where its device is missing."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import strict_array

from mpiparallel import backend
from mpiparallel.backend import choice, kernels, xp
from mpiparallel.backend.numpy_backend import NumpyBackend

TESTS = Path(strict_array.__file__).parent
TINY = ["--layers", 2, "--hidden", 16, "--heads", 4, "--seq-len", 8, "--global-batch", 4]
no_gpu_here = pytest.mark.skipif(choice.device_trouble() is None, reason="there is a GPU")


@pytest.fixture
def stand_in(tmp_path):
    """Processes of the command line find a CuPy with two GPUs; `more` is run by each at its start,
    where `rank` is its rank."""

    def prepare(more=""):
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\n"
            f"sys.path.append({str(TESTS)!r})\n"
            "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
            "import strict_array\n"
            "sys.modules.update(strict_array.modules(gpus=2))\n"
            "from mpiparallel.backend.cupy_backend import CupyBackend\n"
            "CupyBackend.kernels = strict_array.kernels\n"
            "CupyBackend.matmul_size = 64\n" + more
        )

    return prepare


@pytest.fixture
def numpy_again():
    """Whatever a test installs, NumPy is the backend after it."""
    yield
    backend.install(NumpyBackend())


def test_modules_that_imported_the_seam_follow_what_is_installed(numpy_again):
    assert xp.matmul is np.matmul
    assert kernels.gelu is NumpyBackend.kernels.gelu

    class Other:
        class xp:
            matmul = "theirs"

        class kernels:
            gelu = "theirs too"

    backend.install(Other())
    assert (xp.matmul, kernels.gelu) == ("theirs", "theirs too")
    with pytest.raises(AttributeError):
        _ = xp.argsort
    backend.install(NumpyBackend())
    assert xp.matmul is np.matmul


@no_gpu_here
def test_cupy_without_a_device_is_one_line_and_status_2(mpiparallel):
    done = mpiparallel(2, "train", *TINY, "--backend", "cupy")
    assert (done.status, done.out) == (2, "")
    [line] = done.err.splitlines()
    for part in ("--backend cupy", "rank 0", "legal here: numpy, auto", "[cuda12]", "[cuda13]"):
        assert part in line


@no_gpu_here
def test_auto_without_a_device_takes_numpy_and_says_why(mpiparallel):
    done = mpiparallel(2, "train", *TINY, "--steps", 1, "--sample", 0, "--out", "run")
    assert done.status == 0, done.err
    assert re.search(r"^backend numpy: .+ on rank 0$", done.out, re.MULTILINE)


def test_auto_takes_the_gpus_that_answer_and_trains_as_numpy_does(mpiparallel, stand_in, tmp_path):
    stand_in()
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question.\n" * 20)
    run = ["train", *TINY, "--steps", 3, "--dtype", "float64", "--sample", 5, "--eval-every", 2]
    run += ["--data", "text.txt"]
    env = {choice.AWARE: "0"}
    done = mpiparallel(4, *run, "--tp", 2, "--pp", 2, "--out", "on_gpu", env=env)
    assert done.status == 0, done.err
    assert (
        "backend cupy: 4 ranks on 2 stand-in a node, device arrays through pinned host memory "
        f"({choice.AWARE}=0)\n" in done.out
    )
    assert mpiparallel(1, *run, "--backend", "numpy", "--out", "on_cpu").status == 0
    losses = [
        re.findall(r'"loss": ([^,]+)', (tmp_path / name / "metrics.jsonl").read_text())
        for name in ("on_gpu", "on_cpu")
    ]
    np.testing.assert_allclose(*np.array(losses, float), rtol=1e-10)
    # Either side reads what the other wrote.
    texts = []
    for written, reader in [("on_gpu", "numpy"), ("on_cpu", "cupy"), ("on_cpu", "numpy")]:
        wanted = ["--tokens", 8, "--dtype", "float64", "--backend", reader]
        made = mpiparallel(2, "generate", "--checkpoint", written, *wanted, env=env)
        assert made.status == 0, made.err
        assert made.err.startswith(f"backend {reader}")
        texts.append(made.out)
    assert texts[0] == texts[1] == texts[2]


def test_benchmarks_name_their_backend(mpiparallel, stand_in):
    stand_in()
    done = mpiparallel(2, "bench", "matmul", "--json", env={choice.AWARE: "1"})
    assert done.status == 0, done.err
    assert '"backend": "cupy"' in done.out


def test_a_full_gpu_is_one_line_with_rank_bytes_and_advice(mpiparallel, stand_in):
    stand_in(
        "if rank == '1':\n"
        "    import mpiparallel.optimizer as optimizer\n"
        "    def full(*_):\n"
        "        raise strict_array.OutOfMemoryError(123456789, 42)\n"
        "    optimizer.AdamW.step = full\n"
    )
    done = mpiparallel(4, "train", *TINY, "--tp", 2, "--steps", 2, env={choice.AWARE: "0"})
    assert done.status == 1
    [line] = [line for line in done.err.splitlines() if line.startswith("mpiparallel")]
    assert "Traceback" not in done.err
    for part in (
        "rank 1 (dp=0, pp=0, tp=1): GPU 1 is out of memory",
        "123,456,789 bytes asked",
        "3,000 of 10,000 free and 200 kept by this rank, shared by 2 ranks",
        "use more --micro-batches",
    ):
        assert part in line


def test_a_wrong_override_is_one_line_and_status_2(mpiparallel, stand_in):
    stand_in()
    done = mpiparallel(2, "train", *TINY, env={choice.AWARE: "yes"})
    assert done.status == 2
    assert done.err == f"mpiparallel: error: {choice.AWARE}=yes: legal: 0, 1\n"


@pytest.mark.parametrize(
    ("program", "proved", "words"),
    [
        ("print('proved')", True, "sent one"),
        ("print('not')", False, "status 0"),
        ("import os; os.abort()", False, "status -6"),
        ("print('proved'); raise SystemExit(3)", False, "status 3"),
        ("import time; time.sleep(60)", False, "TimeoutExpired"),
    ],
)
def test_a_probe_may_crash_or_hang_and_only_success_proves(monkeypatch, program, proved, words):
    monkeypatch.setattr(choice, "PROBE_SECONDS", 2)
    found, why = choice.probe([sys.executable, "-c", program])
    assert found is proved
    assert words in why


def test_a_probe_is_a_job_of_its_own(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "5")
    program = "import os; print(os.environ.get('PMI_RANK', 'proved'))"
    assert choice.probe([sys.executable, "-c", program])[0]


def test_the_probe_sends_device_arrays(stand_in, tmp_path, monkeypatch):
    # The stand-in's device memory is host memory: an MPI may have it if `pointers` says so.
    path = os.pathsep.join([str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv(choice.AWARE, raising=False)
    command = [sys.executable, "-m", "mpiparallel.comm.gpu_probe"]
    stand_in()
    assert choice.probe(command)[0] is False
    stand_in("strict_array.STREAM.pointers = True\n")
    found, why = choice.probe(command)
    assert found, why
