"""Checkpoints on real meshes: any mesh loads what any other saved, and a resumed run is the run."""

import dataclasses
import itertools
import json
import tracemalloc

import numpy as np
import pytest
from conftest import WORLD, factorings
from small import SMALL, VOCABULARY, batch, gather, trainer

from mpiparallel.checkpoint import save as save_module
from mpiparallel.checkpoint.boxes import Box, Piece
from mpiparallel.checkpoint.load import load, verify
from mpiparallel.checkpoint.manifest import read_manifest
from mpiparallel.data import IdTokenizer
from mpiparallel.errors import RunError

pytestmark = pytest.mark.mpi(min_size=1)

TOKENIZER = IdTokenizer(VOCABULARY)


def state(made):
    """Weights and both moments by global name on rank 0, and the step count."""
    return {what: gather(made, what) or {} for what in ("weights", "moments")}, made.optimizer.steps


def assert_same_bits(one, other):
    assert one[1] == other[1]
    for kind, arrays in one[0].items():
        assert arrays.keys() == other[0][kind].keys()
        for name, array in arrays.items():
            assert array.tobytes() == other[0][kind][name].tobytes(), (kind, name)


def saved(made, path):
    """Save into `path` as the run's folder; the checkpoint's folder."""
    made.settings = dataclasses.replace(made.settings, out=str(path))
    return made.save(TOKENIZER, made.optimizer.steps)


def resumed(made, folder):
    made.resume(folder, read_manifest(folder))


def test_a_chain_of_meshes_keeps_every_bit(shared_path):
    """Train two steps on one mesh, then save and load through all the others, and back."""
    meshes = factorings()
    chain = [*meshes, meshes[0]]
    with trainer(*chain[0], layers=9) as made:
        for step in range(2):
            made.step(batch(step), 1e-2)
        first = state(made)
        folder = saved(made, shared_path / "0")
    for number, mesh in enumerate(chain[1:], 1):
        with trainer(*mesh, layers=9) as made:
            resumed(made, folder)
            assert_same_bits(state(made), first)
            folder = saved(made, shared_path / str(number))


@pytest.mark.parametrize("mesh", factorings())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ten_steps_are_five_steps_saved_and_five_resumed(shared_path, mesh, dtype):
    changes = dict(layers=max(3, mesh[1]), dtype=dtype)
    with trainer(*mesh, **changes) as made:
        straight = [made.step(batch(step), 1e-2).loss for step in range(6)]
        right = state(made)
    with trainer(*mesh, **changes) as made:
        losses = [made.step(batch(step), 1e-2).loss for step in range(3)]
        folder = saved(made, shared_path)
    with trainer(*mesh, **changes) as made:
        resumed(made, folder)
        losses += [made.step(batch(step), 1e-2).loss for step in range(3, 6)]
        assert_same_bits(state(made), right)
    assert losses == straight


def test_going_on_on_another_mesh_is_equal_to_rounding(shared_path):
    meshes = factorings()
    with trainer(*meshes[0], layers=9) as made:
        for step in range(2):
            made.step(batch(step), 1e-2)
        folder = saved(made, shared_path)
        right = [made.step(batch(step), 1e-2).loss for step in range(2, 4)]
    for mesh in meshes[1:]:
        with trainer(*mesh, layers=9) as made:
            resumed(made, folder)
            losses = [made.step(batch(step), 1e-2).loss for step in range(2, 4)]
        np.testing.assert_allclose(losses, right, rtol=1e-10)


def test_every_rank_writes_a_share_and_no_element_is_written_twice(shared_path):
    dp = WORLD.size
    with trainer(dp, 1, 1) as made:
        folder = saved(made, shared_path)
        held = sum(parameter.data.size for parameter in made.model.parameters)
    manifest = read_manifest(folder)
    assert len(manifest.files) == dp, "replicas share the writing"
    stored = sum(part.box.size for array in manifest.arrays.values() for part in array.slices)
    assert stored == 3 * held  # weights and two moments, once
    verify(folder, manifest, 0, 1)


def test_a_rank_reads_its_own_share_and_a_slice_at_most(shared_path):
    rows, columns = 4096, 64
    with trainer(1, 1, WORLD.size, vocab_size=rows, hidden=columns, layers=1) as made:
        folder = saved(made, shared_path)
    # Load the table by columns, which was saved by rows: a part of every slice.
    width = columns // WORLD.size
    box = Box((0, WORLD.rank * width), (rows, (WORLD.rank + 1) * width))
    wanted = np.empty(box.shape)
    piece = Piece("token_embedding.weight", (rows, columns), box, wanted, owned=False)
    manifest = read_manifest(folder)
    assert len(manifest.arrays[piece.name].slices) == WORLD.size
    tracemalloc.start()
    load(folder, manifest, [piece])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    right = np.random.default_rng([5, *piece.name.encode()]).standard_normal((rows, columns))
    np.testing.assert_array_equal(wanted, 0.3 * right[box.within(Box((0, 0), (rows, columns)))])
    own, one_slice = wanted.nbytes, rows * columns * 8 // WORLD.size
    assert peak <= own + one_slice + 300_000, f"{peak} bytes for a share of {own}"


def test_only_the_newest_stay_and_the_pointer_names_the_newest(shared_path):
    with trainer(*factorings()[0], keep=2) as made:
        for step in range(4):
            made.step(batch(step), 1e-2)
            saved(made, shared_path)
    folder = shared_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["newest", "step-3", "step-4"]
    assert (folder / "newest").read_text() == "step-4\n"


@pytest.mark.parametrize("broken", range(4))
def test_a_failed_save_leaves_the_checkpoint_before_it(shared_path, monkeypatch, broken):
    """The disk fills up on the last rank, at each of the places where something is written."""
    with trainer(*factorings()[-1]) as made:
        made.step(batch(0), 1e-2)
        before = saved(made, shared_path)
        right = state(made)
        made.step(batch(1), 1e-2)

        def full(*_arguments, **_more):
            raise OSError(28, "No space left on device")

        names = ["_make", "_write", "_finish", "flush"]
        if broken in (0, 2) or WORLD.rank == WORLD.size - 1:
            monkeypatch.setattr(save_module, names[broken], full)
        with pytest.raises(RunError, match=r"No space left on device.*before are intact"):
            saved(made, shared_path)
        monkeypatch.undo()
        assert sorted(path.name for path in before.parent.iterdir()) == ["newest", "step-1"]
        resumed(made, before)
        assert_same_bits(state(made), right)


@pytest.mark.parametrize("what", ["weight", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_names_the_first_bad_parameter(what):
    mesh = factorings()[-1]  # all ranks in one pipeline, or in one tensor group
    culprit = WORLD.size - 1
    with trainer(*mesh, layers=max(3, mesh[1])) as made:
        made.step(batch(0), 1e-2)
        name = ""
        if WORLD.rank == culprit:
            parameter = next(p for p in made.model.parameters if p.name.endswith("mlp.up.weight"))
            name = parameter.name
            if what == "weight":
                parameter.data[0, 0] = np.nan
            else:
                add = parameter.add_grad_matmul

                def poisoned(a, b):
                    add(a, b)
                    parameter.grad[0, 0] = np.inf

                parameter.add_grad_matmul = poisoned
        before = [shard.data.tobytes() for shard in made.data_parallel.shards()]
        with pytest.raises(RunError) as caught:
            made.step(batch(1), 1e-2)
        name = WORLD.bcast(name, root=culprit)
        message = str(caught.value)
        assert message.startswith("step 2: loss ")
        assert f"first seen on rank {culprit} (" in message
        assert f"{name}, its {what}" in message
        assert before == [shard.data.tobytes() for shard in made.data_parallel.shards()]
        assert made.optimizer.steps == 1
    assert len(set(WORLD.allgather(message))) == 1


def test_the_manifest_says_what_is_where(shared_path):
    with trainer(*factorings()[0]) as made:
        folder = saved(made, shared_path)
    values = json.loads((folder / "manifest.json").read_text())
    assert values["format"] == 1
    assert values["model"]["hidden"] == SMALL.hidden
    sizes = dict(zip(("dp", "pp", "tp"), factorings()[0], strict=True))
    assert values["mesh"] == sizes | {"zero": 0}
    weight = values["arrays"]["blocks.0.mlp.up.weight"]
    assert weight["shape"] == [SMALL.hidden, SMALL.feed_forward]
    assert weight["dtype"] == "float64"
    suffixes = {name.rsplit("/", 1)[1] for name in values["arrays"] if "/" in name}
    assert suffixes == {"first", "second"}
    for array in itertools.islice(values["arrays"].values(), 5):
        for part in array["slices"]:
            assert part["file"] in values["files"]
