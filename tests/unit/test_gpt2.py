"""Hugging Face's GPT-2, in and out: the same arrays, and the logits that their library computes.

tests/data/gpt2 is a tiny model saved by `transformers`, with logits recorded by
scripts/record_gpt2_logits.py. Where `transformers` is installed it is asked itself as well.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import load_file, save_file

from mpiparallel.checkpoint.gpt2 import read
from mpiparallel.cli import main
from mpiparallel.mesh import Mesh
from mpiparallel.model import GPT

RECORDED = Path(__file__).parent.parent / "data" / "gpt2"


def our_logits(file, tokens):
    """(B, S, V) in float64."""
    config, _, arrays = read(file)
    with Mesh(1, 1, 1, MPI.COMM_SELF) as mesh:
        model = GPT(config, mesh.tp, (0,), 0)
        for parameter in model.parameters:
            parameter.load(arrays[parameter.name].astype("float64"))
        logits, _ = model.stages[0].forward(np.asarray(tokens, np.int32))
    return logits


def test_logits_are_those_that_transformers_computed():
    recorded = json.loads((RECORDED / "tokens.json").read_text())
    logits = our_logits(RECORDED / "model.safetensors", recorded["tokens"])
    np.testing.assert_allclose(logits, recorded["logits"], rtol=1e-10, atol=1e-10)
    assert np.ptp(recorded["logits"]) > 5, "small logits would hide differences"


@pytest.fixture
def imported(tmp_path, capsys):
    """The recorded model as a checkpoint of ours."""
    assert main(["import", str(RECORDED / "model.safetensors"), str(tmp_path / "run")]) == 0
    assert "parameters, imported to" in capsys.readouterr().out
    return tmp_path / "run"


def test_import_and_export_give_every_array_back(imported, tmp_path):
    file = tmp_path / "out" / "model.safetensors"
    assert main(["export", str(imported), str(file)]) == 0
    before, after = load_file(RECORDED / "model.safetensors"), load_file(file)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes(), name
    theirs = json.loads((RECORDED / "config.json").read_text())
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    for key in ours.keys() - {"n_inner"}:  # theirs is null, which means 4 times the width
        assert ours[key] == theirs[key], key
    assert ours["n_inner"] == 4 * theirs["n_embd"]


def test_an_imported_model_speaks_in_numbers(imported, capsys):
    generate = ["generate", "--checkpoint", str(imported)]
    assert main([*generate, "--prompt", "3 1", "--tokens", "4"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["3", "1"]
    assert len(words) == 6
    assert all(0 <= int(word) < 11 for word in words)
    assert main([*generate, "--prompt", "hello"]) == 2
    assert "'hello' is not a token of this model" in capsys.readouterr().err


def test_the_names_of_the_published_files_are_read_too(tmp_path):
    """Without the prefix, with causal masks, and with the output layer stored again."""
    arrays = {
        name.removeprefix("transformer."): array
        for name, array in load_file(RECORDED / "model.safetensors").items()
    }
    arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 7, 7), "float32"))
    arrays["lm_head.weight"] = arrays["wte.weight"].copy()
    save_file(arrays, tmp_path / "model.safetensors")
    shutil.copy(RECORDED / "config.json", tmp_path)
    recorded = json.loads((RECORDED / "tokens.json").read_text())
    logits = our_logits(tmp_path / "model.safetensors", recorded["tokens"])
    np.testing.assert_allclose(logits, recorded["logits"], rtol=1e-10, atol=1e-10)


def test_a_text_model_keeps_its_tokenizer_on_the_way_out_and_in(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 20)
    train = ["--layers", "1", "--hidden", "8", "--heads", "2", "--seq-len", "8", "--sample", "0"]
    folders = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    assert main(["train", *train, *folders, "--global-batch", "2", "--steps", "1"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m.safetensors")]) == 0
    assert main(["import", str(tmp_path / "m.safetensors"), str(tmp_path / "again")]) == 0
    printed = []
    for run in ("run", "again"):
        capsys.readouterr()
        assert main(["generate", "--checkpoint", str(tmp_path / run), "--prompt", "to "]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a, c: c.update(model_type="llama"), ["model_type", "'gpt2'"]),
        (lambda a, c: c.update(activation_function="relu"), ["activation_function", "gelu_new"]),
        (lambda a, c: c.update(n_head=3), ["n_head 3", "width 8"]),
        (lambda a, c: c.pop("n_head"), ["n_head is None"]),
        (lambda a, c: a.pop("transformer.ln_f.bias"), ["ln_f.bias is missing"]),
        (lambda a, c: a.update(extra=np.zeros(1)), ["extra is no part of GPT-2"]),
        (lambda a, c: a["transformer.wte.weight"].fill(np.nan), ["wte.weight", "not finite"]),
        (lambda a, c: a.clear(), ["not a GPT-2"]),
    ],
)
def test_what_is_not_gpt2_is_refused_in_one_line(tmp_path, capsys, change, named):
    arrays = load_file(RECORDED / "model.safetensors")
    config = json.loads((RECORDED / "config.json").read_text())
    change(arrays, config)
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "run")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    for part in named:
        assert part in line
    assert not (tmp_path / "run").exists()


def test_transformers_reads_what_we_export(imported, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    file = tmp_path / "out" / "model.safetensors"
    assert main(["export", str(imported), str(file)]) == 0
    model = transformers.GPT2LMHeadModel.from_pretrained(file.parent).double().eval()
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(our_logits(file, tokens), theirs, rtol=1e-10, atol=1e-10)
