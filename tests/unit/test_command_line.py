"""The command line under a real mpirun: what a user's mistakes and failures look like."""

import json
import re

import pytest

TINY = ["--layers", 2, "--hidden", 16, "--heads", 4, "--seq-len", 8, "--global-batch", 4]


@pytest.fixture
def text(tmp_path):
    """A small text file to train on."""
    file = tmp_path / "text.txt"
    file.write_text("to be, or not to be: that is the question.\n" * 20)
    return file


MISTAKES = [
    # ranks, arguments, what the line must name
    (3, ["--dp", 2, "--pp", 2], ["--dp 2", "--pp 2", "--tp 1", "4 ranks", "there are 3"]),
    (3, ["--tp", 2], ["--tp 2", "3 ranks", "multiple of pp * tp = 2"]),
    (4, ["--tp", 4, "--heads", 6], ["--tp 4", "--heads 6", "legal tp: 1, 2, 3, 6"]),
    (4, ["--tp", 4, "--feed-forward", 10], ["--tp 4", "--feed-forward 10", "1, 2, 5, 10"]),
    (2, ["--pp", 2, "--layers", 1], ["--layers 1", "2 stages", "legal: 2 or more"]),
    (3, ["--dp", 3], ["--global-batch 4", "dp=3", "3, 6"]),
    (2, ["--micro-batches", 3], ["--micro-batches 3", "legal: 1 to 2"]),
    (2, ["--hidden", 18], ["--heads 4", "--hidden 18", "1, 2, 3, 6, 9, 18"]),
    (2, ["--vocab-size", 3], ["--vocab-size 3", "legal: 17 or more"]),
    (2, ["--seq-len", 1000], ["too short", "--seq-len 1000", "up to 85"]),
    (2, ["--data", "nowhere.txt"], ["--data nowhere.txt", "no such file"]),
    (2, ["--data", "empty.txt"], ["--data empty.txt", "no text"]),
    (2, ["--data", "binary.dat"], ["--data binary.dat", "UTF-8"]),
    (2, ["--nonsense", 1], ["--nonsense"]),
    (2, ["--dtype", "float16"], ["--dtype", "float16", "float32", "float64"]),
    (2, ["--steps", "many"], ["--steps", "many"]),
    (2, ["--steps", 0], ["--steps 0", "1 or more"]),
    (2, ["--lr", "nan"], ["--lr nan", "0 or more"]),
    (2, ["--beta2", 1], ["--beta2 1", "less than 1"]),
    (2, ["--config", "typo.toml"], ["typo.toml", "layer", "did you mean layers?"]),
    (2, ["--config", "wrong.toml"], ["--layers two", "whole number"]),
    (2, ["--config", "broken.toml"], ["broken.toml", "not TOML"]),
    (2, ["--config", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    (2, ["--freeze", "token,layer.0"], ["--freeze layer.0", "token_embedding", "blocks.1.mlp.up"]),
    (2, ["--trace", "5-3"], ["--trace 5-3", "the first one first"]),
    (2, ["--trace", "0"], ["--trace 0", "1 to 2000"]),
    (2, ["--trace", "often"], ["--trace often", "5-8"]),
    (2, ["--out", "text.txt/run"], ["--out text.txt/run", "cannot be written"]),
]


@pytest.mark.parametrize(("ranks", "arguments", "named"), MISTAKES)
def test_a_mistake_is_one_line_from_rank_0_and_status_2(
    mpiparallel, text, tmp_path, ranks, arguments, named
):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.dat").write_bytes(b"\xff\xfe\xfd" * 100)
    (tmp_path / "typo.toml").write_text("layer = 2\n")
    (tmp_path / "wrong.toml").write_text('layers = "two"\n')
    (tmp_path / "broken.toml").write_text("layers = = 2\n")
    arguments = arguments if "--config" in arguments else [*TINY, *arguments]
    done = mpiparallel(ranks, "train", "--data", text, *arguments)
    assert done.status == 2
    assert done.out == ""
    [line] = done.err.strip().splitlines()
    assert line.startswith("mpiparallel: error: ")
    for part in named:
        assert part in line


def test_a_command_is_asked_for(mpiparallel):
    done = mpiparallel(2)
    assert (done.status, len(done.err.splitlines())) == (2, 1)
    assert "COMMAND" in done.err


def test_help_is_printed_once(mpiparallel):
    done = mpiparallel(4, "train", "--help")
    assert done.status == 0
    assert done.out.count("usage:") == 1
    assert "--global-batch" in done.out


def test_a_run_writes_what_it_promises_and_generate_reads_it_on_another_mesh(
    mpiparallel, text, tmp_path
):
    run = ["train", *TINY, "--data", text, "--steps", 6, "--warmup", 1, "--lr", 0.01]
    run += ["--eval-every", 4, "--out", "run"]
    done = mpiparallel(4, *run, "--pp", 2, "--tp", 2, "--sample", 10)
    assert done.status == 0, done.err
    assert done.err == ""
    assert done.out.count("step 1/6") == 1, "rank 0 alone prints"
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds"}
    assert all(keys <= row.keys() for row in rows)
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mesh"] == {"dp": 1, "pp": 2, "tp": 2}
    assert summary["ranks"] == 4
    # By hand: 2 blocks of 12 h^2 + 13 h, (17 characters + 8 positions) h, the final norm 2 h.
    assert summary["parameters"] == 2 * (12 * 256 + 13 * 16) + 25 * 16 + 2 * 16
    assert {"axis", "op", "calls", "bytes", "seconds"} == summary["ledger"][0].keys()
    counted = {(row["axis"], row["op"]): row["bytes"] for row in summary["ledger"]}
    # (B, S, H) float32 over one boundary, both ways, two tensor ranks, and the tied table's
    # gradient (9 rows a rank, 17 being padded to 18), both ways; six steps.
    boundary = 2 * 2 * 4 * 8 * 16 * 4
    tied = 2 * 2 * 9 * 16 * 4
    assert counted["pp", "isend"] == 6 * (boundary + tied)
    for kind in ("parameters", "gradients", "optimizer"):
        assert len(summary["memory"][kind]) == 4
    assert summary["memory"]["optimizer"] == [2 * n for n in summary["memory"]["parameters"]]
    assert 0 < summary["bubble"]["measured"] < 1
    # 1F1B with 4 micro-batches on 2 ranks: (p-1) / (m+p-1)
    assert summary["bubble"]["predicted"] == pytest.approx(1 / 5)
    assert "tp = 2" in (folder / "config.toml").read_text()

    sample = ["generate", "--checkpoint", "run", "--prompt", "to be", "--tokens", 12]
    outputs = [mpiparallel(1, *sample), mpiparallel(4, *sample, "--tp", 2, "--pp", 2)]
    for done in outputs:
        assert (done.status, done.err) == (0, "")
        assert done.out.startswith("to be")
        assert len(done.out) == len("to be") + 12 + 1
    assert outputs[0].out == outputs[1].out

    # The run's own config.toml gives the same run again.
    again = mpiparallel(4, "train", "--config", "run/config.toml", "--out", "again")
    assert again.status == 0, again.err
    repeated = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["loss"] for row in repeated] == [row["loss"] for row in rows]


def test_a_range_of_steps_is_traced(mpiparallel, text, tmp_path):
    run = ["train", *TINY, "--data", text, "--steps", 4, "--out", "run", "--pp", 2]
    done = mpiparallel(2, *run, "--trace", "2-3")
    assert (done.status, done.err) == (0, "")
    assert "run/trace.json" in done.out
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert trace["otherData"]["steps"] == [2, 3]
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {2, 3}
    assert mpiparallel(2, *run, "--trace").status == 0
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["otherData"]["steps"] == [1, 4]


def test_what_was_sent_is_told_beside_the_laws(mpiparallel, text, tmp_path):
    arguments = ["--data", text, "--steps", 3, "--out", "run", "--pp", 2, "--tp", 2]
    done = mpiparallel(4, "train", *TINY, *arguments)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(row["axis"], row["op"]) for row in summary["laws"]] == [
        ("pp", "isend"),
        ("tp", "allreduce"),
        ("world", "allreduce"),
    ]
    for row in summary["laws"]:
        assert row["counted"] == row["formula"] > 0
        assert f"{row['formula'] / 3:,.0f}" in done.out
        matrix = summary["bytes_between"][row["axis"]]
        assert sum(map(sum, matrix)) == row["counted"]
        assert not any(matrix[rank][rank] for rank in range(4))
    assert "!=" not in done.out
    # Neighbours of a pipeline are two ranks apart, those of a tensor group one.
    assert all(summary["bytes_between"]["pp"][rank][(rank + 2) % 4] for rank in range(4))
    assert all(summary["bytes_between"]["tp"][rank][rank ^ 1] for rank in range(4))
    assert summary["node_of_rank"] == [0, 0, 0, 0]


def test_generate_refuses_what_the_checkpoint_cannot_do(mpiparallel, text, tmp_path):
    assert mpiparallel(1, "train", *TINY, "--data", text, "--steps", 1, "--out", "run").status == 0
    for ranks, arguments, named in [
        (1, ["--checkpoint", "nowhere"], ["--checkpoint nowhere", "no complete checkpoint"]),
        (1, ["--checkpoint", "run", "--prompt", "Zebra"], ["'Z'", "alphabet"]),
        (1, ["--checkpoint", "run", "--tokens", "0"], ["--tokens 0"]),
        (1, ["--checkpoint", "run", "--temperature", "-1"], ["--temperature -1"]),
        (3, ["--checkpoint", "run", "--pp", "3"], ["--layers 2", "3 stages"]),
    ]:
        done = mpiparallel(ranks, "generate", *arguments)
        assert done.status == 2
        [line] = done.err.strip().splitlines()
        assert all(part in line for part in named), line


def test_a_failure_on_one_rank_ends_all_with_one_traceback(mpiparallel, text, tmp_path):
    # A fault put in from outside: sitecustomize makes rank 1's optimizer fail in step 2.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
        "if rank == '1':\n"
        "    import mpiparallel.optimizer as optimizer\n"
        "    step = optimizer.AdamW.step\n"
        "    def broken(self, *arguments):\n"
        "        if self.steps == 1:\n"
        "            raise ZeroDivisionError('planted')\n"
        "        step(self, *arguments)\n"
        "    optimizer.AdamW.step = broken\n"
    )
    done = mpiparallel(
        4,
        "train",
        *TINY,
        "--data",
        text,
        "--steps",
        9,
        "--tp",
        2,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.status != 0
    assert done.seconds < 10
    assert done.err.count("Traceback") == 1
    assert "rank 1 (dp=0, pp=0, tp=1) failed" in done.err
    assert "ZeroDivisionError: planted" in done.err


def test_a_rank_that_never_comes_ends_the_job_at_the_timeout(mpiparallel, text, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "rank = os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')\n"
        "if rank == '1':\n"
        "    import time\n"
        "    import mpiparallel.optimizer as optimizer\n"
        "    optimizer.AdamW.step = lambda *_: time.sleep(60)\n"
    )
    done = mpiparallel(
        2,
        "train",
        *TINY,
        *("--data", text, "--steps", 9, "--tp", 2, "--timeout", 2),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.status != 0
    assert done.seconds < 20
    assert "Traceback" not in done.err
    assert re.search(r"rank 0 \(dp=0, pp=0, tp=0\) waited 2 s in allreduce on axis tp", done.err)
    table = done.err[done.err.index("rank  dp pp tp") :].splitlines()
    assert re.match(
        r" +0 +0 +0 +0 +step 2, stage 0, micro-batch 0, F +allreduce on axis tp .*, 2\.\d s",
        table[1],
    )
    assert re.match(r" +1 .*no answer: computing, or stopped", table[2])
