"""Saving: every rank writes the pieces that it owns, at the same time, into a file of its own.

1. rank 0 makes the part folder; all wait for it          (one small message)
2. every rank writes rank-R.safetensors and flushes it to disk
3. rank 0 learns what is in every file, writes the manifest, renames the folder, moves the pointer

Where any rank cannot write, all ranks learn of it, the part folder goes, and the checkpoints that
were there stay.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpiparallel.backend import to_host
from mpiparallel.checkpoint.boxes import Box, Piece
from mpiparallel.checkpoint.files import flush, part_folder, publish
from mpiparallel.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredArray,
    StoredFile,
    StoredSlice,
)
from mpiparallel.comm.agree import agree
from mpiparallel.comm.group import Group
from mpiparallel.errors import RunError

T = TypeVar("T")
CHUNK = 1 << 20  # bytes that are read at a time for a checksum


def save(
    final: Path,
    pieces: Iterable[Piece],
    world: Group,
    *,
    keep: int,
    **about: Any,
) -> None:
    """Write the checkpoint folder `final`. Every rank calls with its own pieces.

    keep : this many of the newest checkpoints stay, 0 for all. about : `step`, `seed`,
    `optimizer_steps`, `mesh`, `config` and `tokenizer` of the Manifest.
    Raises RunError on every rank where any rank cannot write; nothing is left of it then.
    """
    part = part_folder(final)
    try:
        _on_rank_0(world, final, partial(_make, part))
        mine = agree(world, _writing(world, final, partial(_write, part, world.rank, pieces)))
        every = world.allgather_json(mine)
        _on_rank_0(world, final, lambda: _finish(part, final, _describe(every, about), keep))
    except RunError:
        _on_rank_0(world, final, partial(shutil.rmtree, part, ignore_errors=True))
        raise


def sha256(path: Path) -> str:
    """The checksum of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _make(part: Path) -> None:
    if part.exists():  # of a save that was interrupted
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _write(part: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write this rank's file; what the manifest is to say about it."""
    from safetensors.numpy import save_file

    owned = [piece for piece in pieces if piece.owned]
    if not owned:
        return {}
    name = f"rank-{rank:05d}.safetensors"
    arrays = {
        str(key): np.ascontiguousarray(to_host(piece.array)) for key, piece in enumerate(owned)
    }
    save_file(arrays, part / name)
    flush(part / name)
    return {
        "file": name,
        "bytes": (part / name).stat().st_size,
        "sha256": sha256(part / name),
        "slices": [
            [piece.name, piece.shape, str(arrays[str(key)].dtype), piece.box.start, piece.box.stop]
            for key, piece in enumerate(owned)
        ],
    }


def _describe(every: list[dict[str, Any]], about: dict[str, Any]) -> Manifest:
    """The manifest of what all ranks wrote."""
    files: dict[str, StoredFile] = {}
    slices: dict[str, list[StoredSlice]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for written in every:
        if not written:
            continue
        files[written["file"]] = StoredFile(written["bytes"], written["sha256"])
        for key, (name, shape, dtype, start, stop) in enumerate(written["slices"]):
            kinds[name] = (tuple(shape), dtype)
            part = StoredSlice(written["file"], str(key), Box(tuple(start), tuple(stop)))
            slices.setdefault(name, []).append(part)
    arrays = {name: StoredArray(*kinds[name], tuple(slices[name])) for name in sorted(slices)}
    return Manifest(files=files, arrays=arrays, **about)


def _finish(part: Path, final: Path, manifest: Manifest, keep: int) -> None:
    (part / MANIFEST).write_text(manifest.to_json() + "\n", encoding="utf-8")
    flush(part / MANIFEST)
    publish(final, keep)


def _on_rank_0(world: Group, final: Path, work: Callable[[], None]) -> None:
    agree(world, _writing(world, final, work) if world.rank == 0 else lambda: None)


def _writing(world: Group, final: Path, work: Callable[[], T]) -> Callable[[], T]:
    """work(), whose trouble with the disk is a RunError in one line."""

    def run() -> T:
        try:
            return work()
        except OSError as error:
            raise RunError(
                f"{final}: cannot be written on rank {world.rank} ({error.strerror or error}); "
                f"the checkpoints saved before are intact"
            ) from None

    return run
