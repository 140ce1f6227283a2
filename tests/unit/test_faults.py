"""Faults of a real job: killed ranks, planted deadlocks, bad numbers, full disks, signals."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
TINY = ["--layers", 2, "--hidden", 16, "--heads", 2, "--seq-len", 8, "--global-batch", 4]
RANK = "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"


@pytest.fixture
def train(mpiparallel, tmp_path):
    """train(ranks, *flags, plant="") trains on a small text; `plant` is code that every rank runs
    first, with its number in `rank`."""
    (tmp_path / "text.txt").write_text(
        "it was the best of times, it was the worst of times;\n" * 30
    )

    def run(ranks, *flags, plant=""):
        (tmp_path / "sitecustomize.py").write_text("import os\n" + RANK + plant)
        flags = [*TINY, "--data", "text.txt", "--out", "run", "--sample", 0, *flags]
        return mpiparallel(ranks, "train", *flags, env={"PYTHONPATH": str(tmp_path)})

    return run


@pytest.mark.timeout(240)
def test_twenty_kills_lose_nothing_but_time():
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "soak.py"),
            "--kills",
            "20",
            "--seed",
            str(int(time.time())),
        ],
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    assert "20 kills" in done.stdout


def test_a_receive_that_nobody_sends_ends_with_a_table_of_all_ranks(train):
    plant = (
        "if rank == '2':\n"
        "    from mpiparallel.comm import group\n"
        "    import mpiparallel.pipeline.executor as executor\n"
        "    right = executor._tag if hasattr(executor, '_tag') else executor.Executor._tag\n"
        "    executor.Executor._tag = lambda self, message: right(self, message) + 1000\n"
    )
    done = train(4, "--pp", 2, "--tp", 2, "--steps", 3, "--timeout", 2, plant=plant)
    assert done.status != 0
    assert done.seconds < 20
    assert "Traceback" not in done.err
    assert done.err.count("in vain") == 1, "one rank speaks"
    table = [line for line in done.err.splitlines() if line[:4].strip().isdecimal()]
    assert [line.split()[:4] for line in table] == [
        ["0", "0", "0", "0"],
        ["1", "0", "0", "1"],
        ["2", "0", "1", "0"],
        ["3", "0", "1", "1"],
    ]
    assert "step 1, stage 1, micro-batch 0" in table[2]
    assert "irecv on axis pp from pp 0" in table[2]
    assert all(" s" in line for line in table), "every rank says since when"


def test_a_mismatched_collective_ends_with_the_table(train):
    plant = (
        "if rank == '1':\n"
        "    import mpiparallel.layers.linear as linear\n"
        "    linear.ColumnParallelLinear.backward = lambda self, dy, x, later: (\n"
        "        dy @ self.weight.data.swapaxes(-2, -1)\n"
        "    )\n"
    )
    done = train(2, "--tp", 2, "--steps", 3, "--timeout", 2, plant=plant)
    assert done.status != 0
    assert done.seconds < 20
    assert done.err.count("in vain") == 1, "one rank speaks"
    table = [line for line in done.err.splitlines() if line[:4].strip().isdecimal()]
    # Rank 1 left out the all-reduces of backward, all of one length: it is ahead.
    assert [line.split("axis ")[1].split()[0] for line in table] == ["tp", "world"]


def test_a_loss_that_is_not_a_number_ends_all_ranks_and_leaves_the_last_checkpoint(train, tmp_path):
    plant = (
        "if rank == '3':\n"
        "    import mpiparallel.optimizer as optimizer\n"
        "    step = optimizer.AdamW.step\n"
        "    def broken(self, *arguments):\n"
        "        step(self, *arguments)\n"
        "        if self.steps == 3:\n"
        "            names = [shard.parameter.name for shard in self.parameters]\n"
        "            number = names.index('blocks.1.mlp.up.weight')\n"
        "            self.parameters[number].data[0] = float('nan')\n"
        "    optimizer.AdamW.step = broken\n"
    )
    done = train(4, "--pp", 2, "--tp", 2, "--steps", 9, "--save-every", 2, plant=plant)
    assert done.status == 1
    [line] = done.err.splitlines()
    assert "step 4: loss nan" in line
    assert "first seen on rank 3 (dp=0, pp=1, tp=1), blocks.1.mlp.up.weight, its weight" in line
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["newest", "step-2"]
    assert train(4, "--pp", 2, "--tp", 2, "--steps", 9, "--resume", "run").status == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full to write to")
def test_a_full_disk_is_one_line_and_the_checkpoint_before_it_is_intact(train, tmp_path):
    plant = (
        "if rank == '1':\n"
        "    import mpiparallel.checkpoint.save as save\n"
        "    write, calls = save._write, []\n"
        "    def full(part, number, pieces):\n"
        "        calls.append(1)\n"
        "        if len(calls) == 2:\n"
        "            (part / f'rank-{number:05d}.safetensors').symlink_to('/dev/full')\n"
        "            with open('/dev/full', 'wb', buffering=0) as file:\n"
        "                file.write(b'x')\n"
        "        return write(part, number, pieces)\n"
        "    save._write = full\n"
    )
    done = train(2, "--steps", 9, "--save-every", 2, plant=plant)
    assert done.status == 1
    [line] = done.err.splitlines()
    assert "step-4: cannot be written on rank 1 (No space left on device)" in line
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["newest", "step-2"]
    assert "going on from run/checkpoints/step-2" in train(2, "--steps", 3, "--resume", "run").out


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(train, tmp_path, name):
    # Rank 1 sends it to itself in its fifth step: batch systems signal any or all ranks.
    plant = (
        "if rank == '1':\n"
        "    import signal\n"
        "    import mpiparallel.optimizer as optimizer\n"
        "    step = optimizer.AdamW.step\n"
        "    def asked(self, *arguments):\n"
        "        if self.steps == 4:\n"
        f"            os.kill(os.getpid(), signal.{name})\n"
        "        step(self, *arguments)\n"
        "    optimizer.AdamW.step = asked\n"
    )
    done = train(2, "--steps", 500, plant=plant)
    assert (done.status, done.err) == (0, "")
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 6, "the signal came in step 5, and all ranks learn of it in step 6"
    lines = done.out.splitlines()
    assert lines[-2] == "stopped after step 6, as asked; go on with"
    command = "mpirun -n 2 python -m mpiparallel train --config run/config.toml --resume run"
    assert lines[-1].strip() == command
    assert (tmp_path / "run/checkpoints/newest").read_text() == "step-6\n"
