"""What only a GPU can prove, in one run: correctness on the device, then speed. Writes one JSON.

    python scripts/gpu_check.py                      everything; one GPU is enough
    python scripts/gpu_check.py --only benchmark     tests, checkpoints or benchmark alone
    python scripts/gpu_check.py --backend numpy --ranks 1 2 --model tiny    try it without a GPU

tests        `tests/mpi` and the kernels' tests on CuPy, on 1, 2 and 4 ranks that share the GPUs:
             the serial reference in float64, float32 beside it, every mesh, every schedule
checkpoints  trained on the GPU and continued to text on the CPU, and the reverse
benchmark    tokens/s of a 124M-parameter GPT-2 at sequence 1024 in float32, as a share of the
             device's measured float32 and TF32 matmul rates, and against PyTorch eager (TF32 off)
             in the same run where torch is installed; the target is at least 0.8 times PyTorch

The exit status is 0 if nothing failed and the target, where it could be measured, is met.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TARGET = 0.8  # of PyTorch eager
MODELS = {
    "gpt2": dict(layers=12, heads=12, hidden=768, seq_len=1024, vocab_size=50257),
    "tiny": dict(layers=2, heads=2, hidden=32, seq_len=16, vocab_size=97),
}
TRAIN = ["--layers", "2", "--hidden", "64", "--heads", "4", "--seq-len", "32", "--steps", "20"]


def run(command: list[str], seconds: float, **environment: str) -> dict[str, Any]:
    """A command's status, seconds, output; status None where it ran out of time."""
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"status": None, "seconds": seconds, "out": "", "err": "out of time"}
    return {
        "status": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "out": done.stdout,
        "err": done.stderr[-4000:],
    }


def summary(done: dict[str, Any]) -> dict[str, Any]:
    """What of a command goes into the JSON: its last words, and more where it failed."""
    words = done["out"].strip().splitlines()
    kept = {"status": done["status"], "seconds": done["seconds"], "said": words[-1:]}
    return kept if done["status"] == 0 else {**kept, "out": done["out"][-4000:], "err": done["err"]}


def check_tests(options: argparse.Namespace) -> dict[str, Any]:
    """The test-suite on the device, by number of ranks; and the kernels' own tests."""
    results = {}
    for ranks in options.ranks:
        suite = ["-m", "pytest", "tests/mpi", "--with-mpi", "--only-mpi", "-o", "timeout=300"]
        command = [*options.mpirun, "-n", str(ranks), sys.executable, *suite]
        name = "cupy" if options.backend == "cupy" else "numpy"
        done = run(command, options.seconds, MPIPARALLEL_TEST_BACKEND=name)
        results[f"{ranks} ranks"] = summary(done)
    kernels = ["-m", "pytest", "tests/unit/test_kernels.py", "tests/unit/test_cupy_names.py"]
    results["kernels"] = summary(run([sys.executable, *kernels], options.seconds))
    return results


def check_checkpoints(options: argparse.Namespace) -> dict[str, Any]:
    """Weights cross over: what one backend wrote the other reads, and both then say the same."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for writer in (options.backend, "numpy"):
            out, program = str(Path(folder, writer)), [sys.executable, "-m", "mpiparallel"]
            command = [*options.mpirun, "-n", "2", *program, "train", *TRAIN, "--tp", "2"]
            command += ["--backend", writer, "--dtype", "float64", "--sample", "0", "--out", out]
            trained = run(command, options.seconds)
            results[f"trained on {writer}"] = summary(trained)
            texts = []
            for reader in (options.backend, "numpy"):
                command = [*options.mpirun, "-n", "1", *program, "generate", "--checkpoint", out]
                command += ["--backend", reader, "--dtype", "float64", "--temperature", "0"]
                read = run([*command, "--tokens", "40"], options.seconds)
                texts.append(read["out"])
                results[f"written on {writer}, read on {reader}"] = summary(read)
            same = texts[0] == texts[1] != ""
            results[f"written on {writer}, both say the same"] = {"status": 0 if same else 1}
    return results


def check_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Each in a process of its own, so that neither holds memory while the other is measured."""
    results: dict[str, Any] = {}
    sizes = json.dumps({**MODELS[options.model], "batch": options.batch, "steps": options.steps})
    for name in ("ours", "torch"):
        program = str(HERE / "gpu_benchmark.py")
        command = [sys.executable, program, name, options.backend, sizes]
        done = run(command, options.seconds)
        result = summary(done)
        if done["status"] == 0:
            result |= json.loads(done["out"].strip().splitlines()[-1])
            result.pop("said")
        results[name] = result
    theirs = results["torch"].get("tokens_per_second")
    if theirs and "tokens_per_second" in results["ours"]:
        ratio = results["ours"]["tokens_per_second"] / theirs
        results["of_torch_eager"] = ratio
        results["target"] = {"status": 0 if ratio >= TARGET else 1, "at_least": TARGET}
    return results


CHECKS = {"tests": check_tests, "checkpoints": check_checkpoints, "benchmark": check_benchmark}


def failures(results: dict[str, Any], path: str = "") -> list[str]:
    """The paths of everything in the results whose status is not 0."""
    found = []
    for name, value in results.items():
        if isinstance(value, dict):
            where = f"{path}{name}"
            if value.get("status", 0) != 0:
                found.append(where)
            found += failures(value, f"{where} / ")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="prove on a GPU what only a GPU can prove")
    parser.add_argument("--only", choices=CHECKS, action="append", help="this check (all)")
    parser.add_argument("--out", default="gpu_check.json", help="the JSON file")
    parser.add_argument("--mpirun", default="mpirun", type=shlex.split, help="the launcher")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="for the tests")
    parser.add_argument("--backend", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="of the benchmark")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=10, help="measured, after two unmeasured")
    parser.add_argument("--seconds", type=float, default=1800, help="limit for each command")
    options = parser.parse_args(arguments)
    if isinstance(options.mpirun, str):
        options.mpirun = [options.mpirun]
    return options


def device_name(backend: str) -> str | None:
    """The GPU's name, None on the CPU."""
    if backend != "cupy":
        return None
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"]
    return name.decode() if isinstance(name, bytes) else name


def main() -> int:
    """Run the checks, write the JSON, say what failed."""
    sys.path.insert(0, str(ROOT))
    from mpiparallel.backend.choice import device_trouble

    options = parse()
    trouble = device_trouble() if options.backend == "cupy" else None
    if trouble:
        print(f"gpu_check: {trouble}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"device": device_name(options.backend), "backend": options.backend}
    for name in options.only or CHECKS:
        print(f"{name} ..", flush=True)
        results[name] = CHECKS[name](options)
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    failed = failures(results)
    print("\n".join(f"failed: {each}" for each in failed) or "nothing failed")
    print(f"written to {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
