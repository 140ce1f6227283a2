"""Checkpoint folders: where they are, which is the newest, how one appears whole or not at all.

    OUT/checkpoints/.step-500.part/     being written; renamed when every file is on disk
    OUT/checkpoints/step-500/           complete
    OUT/checkpoints/newest              one line, the newest folder's name; replaced last

A rename is one act for the file system: a process killed at any moment leaves the folders that
were complete before it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from mpiparallel.checkpoint.manifest import MANIFEST, read_manifest
from mpiparallel.errors import UserError

FOLDER, NEWEST = "checkpoints", "newest"
_STEP = re.compile(r"step-(\d+)")


def step_folder(out: Path, step: int) -> Path:
    """Where the checkpoint of a step goes."""
    return out / FOLDER / f"step-{step}"


def part_folder(final: Path) -> Path:
    """Where it is written until it is complete."""
    return final.with_name(f".{final.name}.part")


def flush(path: Path) -> None:
    """Have the system write a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(final: Path, keep: int) -> None:
    """Turn the part folder, all of whose files are flushed, into `final`; move the pointer; remove
    all but the `keep` newest (0 keeps all). One rank calls."""
    part = part_folder(final)
    flush(part)
    if final.exists():  # the same step was saved before: a resumed run passes it again
        shutil.rmtree(final)
    part.rename(final)
    flush(final.parent)
    pointer = final.parent / NEWEST
    draft = final.parent / f".{NEWEST}.part"
    draft.write_text(final.name + "\n")
    flush(draft)
    draft.rename(pointer)
    flush(final.parent)
    if keep:
        for old in _steps(final.parent)[keep:]:
            shutil.rmtree(old)


def find(path: str, flag: str, warn: Callable[[str], None]) -> Path:
    """The checkpoint that `path` means: itself, or the newest complete one of a run's folder.

    flag : "--resume" or "--checkpoint", for the message. warn : is told of incomplete ones that
    are passed over. Raises UserError where there is none.
    """
    folder = Path(path)
    if (folder / MANIFEST).exists():
        return folder
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    for candidate in _steps(inside):
        problem = incomplete(candidate)
        if problem is None:
            return candidate
        warn(f"{candidate} is incomplete ({problem}) and passed over")
    raise UserError(
        f"{flag} {path}: there is no complete checkpoint; legal: the --out folder of a run that "
        f"has saved one, or one of its checkpoints/step-N"
    )


def incomplete(folder: Path) -> str | None:
    """What a checkpoint folder lacks, None where every file is there in its full size. Raises
    UserError where the manifest is there and wrong: that is damage, not an interrupted save."""
    if not (folder / MANIFEST).exists():
        return f"no {MANIFEST}"
    for name, file in read_manifest(folder).files.items():
        path = folder / name
        if not path.exists():
            return f"no {name}"
        if path.stat().st_size < file.bytes:
            return f"{name} has {path.stat().st_size} of {file.bytes} bytes"
    return None


def _steps(folder: Path) -> list[Path]:
    """The step folders, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]
