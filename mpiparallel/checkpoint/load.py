"""Loading onto any mesh: every rank copies, out of memory-mapped files, the slices that it holds.

A piece that is wanted and a slice that is stored are boxes of one global array, and what both
cover is copied. So the mesh that saved and the mesh that loads need not know of each other, and a
rank's memory grows by its own share and one slice at most. No message, but for the checksums: the
ranks share out the files and tell each other what they found.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mpiparallel.backend import from_host, on_host
from mpiparallel.checkpoint.boxes import Piece
from mpiparallel.checkpoint.manifest import Manifest
from mpiparallel.checkpoint.save import sha256
from mpiparallel.errors import UserError


def verify(folder: Path, manifest: Manifest, rank: int, ranks: int) -> None:
    """Compare sizes and checksums of this rank's part of the files. Raises UserError."""
    for name, file in sorted(manifest.files.items())[rank::ranks]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != file.bytes:
                raise UserError(f"{path}: has {size} bytes, the manifest says {file.bytes}")
            if sha256(path) != file.sha256:
                raise UserError(f"{path}: is damaged, its checksum is not the manifest's")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def load(folder: Path, manifest: Manifest, pieces: Iterable[Piece]) -> None:
    """Fill the arrays of `pieces` from a verified checkpoint.

    Values are converted to the dtype of the piece. Raises UserError for an array that is not there
    or has another shape, for a file that is not what the manifest says, and for NaN or infinity;
    the pieces may be filled in part then, and are not to be used.
    """
    from safetensors import SafetensorError, safe_open

    opened: dict[str, object] = {}
    for piece in pieces:
        stored = manifest.arrays.get(piece.name)
        if stored is None:
            raise UserError(f"{folder}: there is no array {piece.name} in this checkpoint")
        if stored.shape != piece.shape:
            raise UserError(
                f"{folder}: {piece.name} has shape {stored.shape}, the model wants {piece.shape}"
            )
        target = np.empty(piece.box.shape, piece.array.dtype)
        for part in stored.slices:
            common = part.box.common(piece.box)
            if common is None:
                continue
            path = folder / part.file
            try:
                if part.file not in opened:
                    opened[part.file] = safe_open(path, framework="numpy")
                tensor = opened[part.file].get_slice(part.key)  # type: ignore[attr-defined]
                shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                if shape != part.box.shape or dtype != _code(stored.dtype):
                    raise UserError(
                        f"{path}: the slice of {piece.name} is {dtype} {shape}, the manifest says "
                        f"{_code(stored.dtype)} {part.box.shape}"
                    )
                values = tensor[common.within(part.box)]
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: not a readable safetensors file ({error})") from None
            if not np.isfinite(values).all():
                raise UserError(f"{path}: {piece.name} has a value that is NaN or infinite")
            target[common.within(piece.box)] = values
        piece.array[...] = target if on_host(piece.array) else from_host(target)


def _code(dtype: str) -> str:
    """How safetensors names a dtype."""
    return {"float32": "F32", "float64": "F64"}[dtype]
