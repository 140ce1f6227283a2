"""The parts of scripts/gpu_check.py that need no GPU: judging results, and its measurement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpiparallel.backend import choice

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def finished(status=0, out="", err=""):
    return {"status": status, "seconds": 1.0, "out": out, "err": err}


def test_every_failure_is_named_by_its_path(gpu_check):
    results = {
        "device": "a GPU",
        "tests": {"1 ranks": {"status": 0}, "2 ranks": {"status": 1}, "4 ranks": {"status": None}},
        "benchmark": {"ours": {"status": 0}, "target": {"status": 1}},
    }
    assert gpu_check.failures(results) == [
        "tests / 2 ranks",
        "tests / 4 ranks",
        "benchmark / target",
    ]


@pytest.mark.parametrize(("ours", "met"), [(79.0, False), (80.0, True), (200.0, True)])
def test_the_target_is_four_fifths_of_torch(gpu_check, monkeypatch, ours, met):
    rates = iter([ours, 100.0])
    monkeypatch.setattr(
        gpu_check,
        "run",
        lambda *_: finished(out=f'noise\n{{"tokens_per_second": {next(rates)}}}\n'),
    )
    results = gpu_check.check_benchmark(gpu_check.parse([]))
    assert results["of_torch_eager"] == ours / 100
    assert (gpu_check.failures(results) == []) is met


def test_without_torch_there_is_no_target_to_miss(gpu_check, monkeypatch):
    said = iter(['{"tokens_per_second": 5.0}', '{"skipped": "torch is not installed"}'])
    monkeypatch.setattr(gpu_check, "run", lambda *_: finished(out=next(said)))
    results = gpu_check.check_benchmark(gpu_check.parse([]))
    assert "target" not in results
    assert gpu_check.failures(results) == []


def test_tests_run_on_the_device_on_all_the_ranks_asked_for(gpu_check, monkeypatch):
    calls = []

    def run(command, seconds, **environment):
        calls.append((command, environment))
        return finished(1 if "4" in command else 0, "3 passed in 1s")

    monkeypatch.setattr(gpu_check, "run", run)
    results = gpu_check.check_tests(gpu_check.parse(["--mpirun", "srun -x", "--ranks", "1", "4"]))
    assert calls[0][0][:4] == ["srun", "-x", "-n", "1"]
    assert [environment for _, environment in calls[:2]] == [
        {"MPIPARALLEL_TEST_BACKEND": "cupy"}
    ] * 2
    assert results["1 ranks"]["said"] == ["3 passed in 1s"]
    assert gpu_check.failures(results) == ["4 ranks"]


def test_the_measurement_trains_the_model_that_it_is_asked_for():
    sizes = dict(layers=2, heads=2, hidden=32, seq_len=16, vocab_size=97, batch=2, steps=6)
    program = [sys.executable, str(SCRIPTS / "gpu_benchmark.py"), "ours", "numpy"]
    done = subprocess.run([*program, json.dumps(sizes)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    # By hand: 2 blocks of 12 h^2 + 13 h, (97 tokens + 16 positions) h, the final norm 2 h.
    assert result["parameters"] == 2 * (12 * 1024 + 13 * 32) + 113 * 32 + 64
    assert result["tokens_per_second"] == pytest.approx(32 / result["step_seconds"])
    assert result["last_loss"] < result["first_loss"]
    assert 0 < result["share_of_float32"] < 1


@pytest.mark.skipif(choice.device_trouble() is None, reason="there is a GPU")
def test_without_a_device_the_script_says_so_in_one_line(tmp_path):
    program = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--out", str(tmp_path / "no.json")]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert not (tmp_path / "no.json").exists()
