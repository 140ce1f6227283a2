"""Damaged and hostile checkpoints: one line that names the file, status 2, nothing loaded in part.

Every case runs the real command in this process, a world of one rank.
"""

import copy
import hashlib
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpiparallel.checkpoint.boxes import Box, flat_boxes
from mpiparallel.checkpoint.manifest import parse_manifest
from mpiparallel.cli import main
from mpiparallel.errors import UserError

TRAIN = [
    *("--layers", "1", "--hidden", "8", "--heads", "2"),
    *("--seq-len", "8", "--global-batch", "2", "--sample", "0"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with two checkpoints, steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("to be or not to be\n" * 20)
    out = folder / "run"
    data = ["--data", str(folder / "text.txt"), "--out", str(out)]
    assert main(["train", *TRAIN, *data, "--steps", "2", "--save-every", "1"]) == 0
    return out


@pytest.fixture
def checkpoint(run, tmp_path):
    """A copy of the newest checkpoint, to be damaged."""
    return shutil.copytree(run / "checkpoints" / "step-2", tmp_path / "step-2")


def generate(folder, capsys):
    """(status, lines on standard error but for the backend's, what was printed)."""
    capsys.readouterr()
    status = main(["generate", "--checkpoint", str(folder), "--tokens", "3"])
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("backend ")]
    return status, lines, said.out


def refused(folder, capsys, *named):
    status, lines, printed = generate(folder, capsys)
    assert status == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("mpiparallel: error: ")
    assert printed == ""
    for part in named:
        assert part in lines[0], lines[0]


def edit(folder, change):
    """Change the parsed manifest."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def sign(folder):
    """Make sizes and checksums of the manifest those of the files, as a forger would."""

    def change(values):
        for name, file in values["files"].items():
            content = (folder / name).read_bytes()
            file.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())

    edit(folder, change)


WEIGHTS = "rank-00000.safetensors"


def test_the_undamaged_one_is_read(checkpoint, capsys):
    status, lines, printed = generate(checkpoint, capsys)
    assert (status, lines) == (0, [])
    assert len(printed) == 4


def test_a_truncated_file(checkpoint, capsys):
    path = checkpoint / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])
    refused(checkpoint, capsys, WEIGHTS, "bytes, the manifest says")


def test_a_flipped_byte(checkpoint, capsys):
    path = checkpoint / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    refused(checkpoint, capsys, WEIGHTS, "damaged", "checksum")


def test_a_missing_file(checkpoint, capsys):
    (checkpoint / WEIGHTS).unlink()
    refused(checkpoint, capsys, WEIGHTS, "cannot be read")


def first_array(values):
    return values["arrays"]["blocks.0.mlp.up.weight"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.update(format=99), ["format 99", "legal: 1"]),
        (lambda v: v.pop("format"), ["format None"]),
        (lambda v: first_array(v)["slices"].pop(), ["blocks.0.mlp.up.weight", "missing"]),
        (lambda v: first_array(v)["slices"].append(first_array(v)["slices"][0]), ["twice"]),
        (lambda v: v["arrays"].pop("final_norm.bias"), ["no array final_norm.bias"]),
        (lambda v: v["model"].update(hidden=16), ["has shape", "the model wants"]),
        (lambda v: v["model"].update(hidden=10**15), ["has shape", "the model wants"]),
        (lambda v: v["model"].update(heads=3), ["heads 3", "hidden 8"]),
        (lambda v: v["model"].update(layers=10**15), ["cannot be in"]),
        (lambda v: v["model"].update(layers=2), ["no array blocks.1"]),
        (lambda v: v["model"].update(layers="two"), ["layers", "not a number"]),
        (lambda v: v["model"].update(extra=1), ["model has"]),
        (lambda v: first_array(v).update(shape=[8]), ["does not lie in"]),
        (lambda v: first_array(v).update(shape=[2**40, 2**40]), ["missing"]),
        (lambda v: first_array(v).update(dtype="object"), ["dtype 'object'"]),
        (lambda v: first_array(v)["slices"][0].update(file="../../x.safetensors"), ["plain NAME"]),
        (lambda v: first_array(v)["slices"][0].update(file="/etc/passwd"), ["plain NAME"]),
        (lambda v: first_array(v)["slices"][0].update(key="no such"), [WEIGHTS]),
        (lambda v: v["files"].update({"../x.safetensors": {}}), ["plain NAME"]),
        (lambda v: v["files"][WEIGHTS].update(bytes=10**18), ["the manifest says"]),
        (lambda v: v["files"][WEIGHTS].update(bytes=1), ["cannot hold its"]),
        (lambda v: v["tokenizer"].update(kind="pickle"), ["tokenizer 'pickle'"]),
        (lambda v: v["tokenizer"].update(alphabet=""), ["tokenizer of 0"]),
        (lambda v: v["tokenizer"].update(alphabet="zyx"), ["not in order"]),
        (lambda v: v.update(step=-1), ["step"]),
    ],
)
def test_a_manifest_that_lies(checkpoint, capsys, change, named):
    edit(checkpoint, change)
    refused(checkpoint, capsys, *named)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "NaN", "[]", '"text"', "\ufeff{}", "{}"])
def test_a_manifest_that_is_no_manifest(checkpoint, capsys, text):
    (checkpoint / "manifest.json").write_text(text)
    refused(checkpoint, capsys, "manifest.json")


def test_a_manifest_that_is_no_text(checkpoint, capsys):
    (checkpoint / "manifest.json").write_bytes(b"\xff\xfe\x00" * 10)
    refused(checkpoint, capsys, "manifest.json", "cannot be read")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(checkpoint, capsys, value):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(checkpoint / WEIGHTS)
    arrays["3"].flat[0] = value
    save_file(arrays, checkpoint / WEIGHTS)
    sign(checkpoint)
    refused(checkpoint, capsys, WEIGHTS, "NaN or infinite")


@pytest.mark.parametrize("size", [0, 7, 2**31, 2**63, 2**64 - 1])
def test_an_absurd_header_size(checkpoint, capsys, size):
    path = checkpoint / WEIGHTS
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    sign(checkpoint)
    refused(checkpoint, capsys, WEIGHTS, "not a readable safetensors file")


def test_an_array_of_another_shape_in_the_file(checkpoint, capsys):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(checkpoint / WEIGHTS)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    key = first_array(manifest)["slices"][0]["key"]
    arrays[key] = arrays[key].reshape(-1)
    save_file(arrays, checkpoint / WEIGHTS)
    sign(checkpoint)
    refused(checkpoint, capsys, WEIGHTS, "the manifest says")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_fuzzed_header_is_refused_in_one_line_or_read(run, tmp_path, capsys, data):
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "checkpoints" / "step-2", folder)
    path = folder / WEIGHTS
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    sign(folder)
    status, lines, _ = generate(folder, capsys)
    assert (status, len(lines)) in ((0, 0), (2, 1)), lines


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(values, path=()):
    """Every position in a JSON value."""
    yield path
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_fuzzed_manifest_is_refused_in_one_line_or_accepted(run, data):
    values = json.loads((run / "checkpoints" / "step-2" / "manifest.json").read_text())
    values = copy.deepcopy(values)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(values))))
        if not path:
            values = data.draw(JSON)
            break
        target = values
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(JSON)
    said = "manifest.json: accepted"
    try:
        parse_manifest(values, "manifest.json")
    except UserError as error:
        said = str(error)
    assert said.startswith("manifest.json: ")
    assert "\n" not in said


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.integers(0, 125),
    st.integers(0, 125),
)
def test_a_flat_range_is_cut_into_boxes_that_cover_it_in_order(shape, first, last):
    array = np.arange(np.prod(shape)).reshape(shape)
    last = min(last, array.size)
    covered = []
    for offset, box in flat_boxes(shape, first, last):
        whole = Box((0,) * len(shape), shape)
        values = array[box.within(whole)].reshape(-1)
        assert values[0] == offset
        covered += values.tolist()
    assert covered == list(range(first, last))
    assert sum(1 for _ in flat_boxes(shape, first, last)) <= 2 * len(shape) - 1


# ---- which checkpoint a folder means ----


def test_the_newest_complete_one_is_taken_and_an_incomplete_one_passed_over(run, tmp_path, capsys):
    out = shutil.copytree(run, tmp_path / "copy")
    newest = out / "checkpoints" / "step-2" / WEIGHTS
    newest.write_bytes(newest.read_bytes()[:-1])
    (out / "checkpoints" / "step-3").mkdir()
    capsys.readouterr()
    data = ["--data", str(run.parent / "text.txt"), "--out", str(tmp_path / "next")]
    assert main(["train", *TRAIN, *data, "--steps", "4", "--resume", str(out)]) == 0
    said = capsys.readouterr()
    assert f"going on from {out}/checkpoints/step-1" in said.out
    warnings = said.err.splitlines()
    assert len(warnings) == 2
    assert "step-3 is incomplete (no manifest.json)" in warnings[0]
    assert "step-2 is incomplete" in warnings[1]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hidden", "16"], ["another model", "hidden 8 (not 16)"]),
        (["--seed", "5"], ["--seed 5", "legal: 1337"]),
        (["--steps", "2"], ["--steps 2", "at step 2 already", "more than 2"]),
        (["--resume", "nowhere"], ["--resume nowhere", "no complete checkpoint"]),
    ],
)
def test_a_resume_that_would_not_be_the_same_run_is_refused(run, tmp_path, capsys, flags, named):
    capsys.readouterr()
    data = ["--data", str(run.parent / "text.txt"), "--out", str(tmp_path / "next")]
    status = main(["train", *TRAIN, *data, "--steps", "4", "--resume", str(run), *flags])
    said = capsys.readouterr()
    assert status == 2
    [line] = said.err.splitlines()
    for part in named:
        assert part in line
    assert not (tmp_path / "next").exists()


def test_metrics_of_a_resumed_run_are_those_of_an_undisturbed_one(run, tmp_path):
    def train(out, *flags):
        data = ["--data", str(run.parent / "text.txt"), "--out", str(tmp_path / out)]
        assert main(["train", *TRAIN, *data, "--steps", "6", "--eval-every", "2", *flags]) == 0
        rows = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        keys = ("step", "loss", "lr", "grad_norm", "val_loss")
        return [[json.loads(row).get(key) for key in keys] for row in rows]

    straight = train("straight")
    train("broken", "--save-every", "2", "--keep", "0")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-6")
    assert train("broken", "--resume", str(tmp_path / "broken")) == straight
    first = str(tmp_path / "broken" / "checkpoints" / "step-2")
    assert train("elsewhere", "--resume", first) == straight[2:]


@pytest.mark.parametrize("good", [True, False])
def test_a_command_gives_its_communicators_back(checkpoint, capsys, good):
    # MPICH has 2,048 of them, and a refusal may come before the mesh, or on it.
    if not good:
        edit(checkpoint, lambda values: values["files"][WEIGHTS].update(sha256="0" * 64))
    for _ in range(300):
        status, *_ = generate(checkpoint, capsys)
        assert (status == 0) == good
