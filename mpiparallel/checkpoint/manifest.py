"""The manifest of a checkpoint: what is in which file. JSON, read with suspicion.

    {"format": 1, "step": 500, "seed": 1337, "optimizer_steps": 500,
     "mesh": {"dp": 2, "pp": 2, "tp": 2}, "model": {"layers": 4, ...}, "tokenizer": {...},
     "files": {"rank-00000.safetensors": {"bytes": 1234, "sha256": "..."}},
     "arrays": {"blocks.0.mlp.up.weight": {"shape": [128, 512], "dtype": "float32", "slices": [
         {"file": "rank-00000.safetensors", "key": "0", "start": [0, 0], "stop": [128, 256]}]}}}

Arrays are named by the parameter's global name, moments by that name and `/first`, `/second`.
A manifest that is accepted has slices that lie in their arrays, do not overlap, cover them, and fit
into their files; file names are plain names. Nothing here opens the files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mpiparallel.checkpoint.boxes import Box
from mpiparallel.data import Tokenizer, tokenizer_from
from mpiparallel.errors import UserError
from mpiparallel.model_config import ModelConfig

MANIFEST = "manifest.json"
FORMAT = 1
DTYPES = {"float32": 4, "float64": 8}
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_LARGEST = 2**62  # of any number in a manifest: products stay far from what arithmetic minds


@dataclass(frozen=True)
class StoredFile:
    """bytes : its size. sha256 : of its content, in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredSlice:
    """box of an array is the tensor `key` of `file`."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class StoredArray:
    """A global array and where its slices are."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class Manifest:
    """See the module."""

    step: int
    seed: int
    optimizer_steps: int
    mesh: dict[str, int]
    config: ModelConfig
    tokenizer: Tokenizer
    files: dict[str, StoredFile]
    arrays: dict[str, StoredArray]

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps(
            {
                "format": FORMAT,
                "step": self.step,
                "seed": self.seed,
                "optimizer_steps": self.optimizer_steps,
                "mesh": self.mesh,
                "model": dataclasses.asdict(self.config),
                "tokenizer": self.tokenizer.describe(),
                "files": {name: dataclasses.asdict(file) for name, file in self.files.items()},
                "arrays": {
                    name: {
                        "shape": array.shape,
                        "dtype": array.dtype,
                        "slices": [
                            {
                                "file": part.file,
                                "key": part.key,
                                "start": part.box.start,
                                "stop": part.box.stop,
                            }
                            for part in array.slices
                        ],
                    }
                    for name, array in self.arrays.items()
                },
            },
            indent=1,
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises UserError naming the file and what is wrong."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    return parse_manifest(values, str(path))


def parse_manifest(values: Any, where: str) -> Manifest:
    """A manifest from parsed JSON. Raises UserError, `where` first, for anything unexpected."""
    read = _Reader(where)
    root = read.mapping(values, "the manifest")
    version = root.get("format")
    if version != FORMAT:
        read.wrong(f"format {version!r} is not known; legal: {FORMAT}")
    model = read.mapping(root.get("model"), "model")
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    if sorted(model) != sorted(fields):
        read.wrong(f"model has {sorted(model)}, wanted {sorted(fields)}")
    config = ModelConfig(**{name: read.number(model[name], name, low=1) for name in fields})
    if config.hidden % config.heads:
        read.wrong(f"heads {config.heads} does not divide hidden {config.hidden}")
    mesh = read.mapping(root.get("mesh"), "mesh")
    files = {
        read.file_name(name): StoredFile(
            bytes=read.number(read.mapping(file, name).get("bytes"), f"bytes of {name}"),
            sha256=read.text(file.get("sha256"), f"sha256 of {name}"),
        )
        for name, file in read.mapping(root.get("files"), "files").items()
    }
    arrays = {
        name: _parse_array(read, name, read.mapping(array, name), files)
        for name, array in read.mapping(root.get("arrays"), "arrays").items()
    }
    _check_model(read, config, arrays)
    _check_room(read, arrays, files)
    return Manifest(
        step=read.number(root.get("step"), "step"),
        seed=read.number(root.get("seed"), "seed"),
        optimizer_steps=read.number(root.get("optimizer_steps"), "optimizer_steps"),
        mesh={axis: read.number(size, axis, low=0) for axis, size in mesh.items()},
        config=config,
        tokenizer=_parse_tokenizer(read, root.get("tokenizer"), config),
        files=files,
        arrays=arrays,
    )


def _parse_array(read: _Reader, name: str, array: dict, files: dict) -> StoredArray:
    shape = read.numbers(array.get("shape"), f"shape of {name}")
    dtype = read.text(array.get("dtype"), f"dtype of {name}")
    if dtype not in DTYPES:
        read.wrong(f"dtype {dtype!r} of {name} is not known; legal: {', '.join(DTYPES)}")
    slices = []
    for part in read.sequence(array.get("slices"), f"slices of {name}"):
        part = read.mapping(part, f"a slice of {name}")
        file = read.file_name(part.get("file"))
        if file not in files:
            read.wrong(f"{name} is in {file}, which is not among the files")
        start = read.numbers(part.get("start"), f"start of a slice of {name}")
        stop = read.numbers(part.get("stop"), f"stop of a slice of {name}")
        if not len(start) == len(stop) == len(shape) or not all(
            a < b <= length for a, b, length in zip(start, stop, shape, strict=True)
        ):
            read.wrong(f"the slice {start} to {stop} of {name} does not lie in {shape}")
        key = read.text(part.get("key"), f"key of a slice of {name}")
        slices.append(StoredSlice(file, key, Box(start, stop)))
    if sum(part.box.size for part in slices) != math.prod(shape):
        read.wrong(f"a slice of {name} is missing, or there twice")
    slices.sort(key=lambda part: part.box.start)
    for number, part in enumerate(slices):
        for other in slices[number + 1 :]:
            if other.box.start[0] >= part.box.stop[0]:
                break
            if part.box.common(other.box):
                read.wrong(f"two slices of {name} overlap, and others are missing")
    return StoredArray(shape, dtype, tuple(slices))


def _check_model(read: _Reader, config: ModelConfig, arrays: dict[str, StoredArray]) -> None:
    """Every weight of the model is there, in its shape. Moments may be missing."""
    if config.layers > len(arrays):
        read.wrong(f"a model of {config.layers} layers cannot be in {len(arrays)} arrays")
    for name, shape in config.shapes().items():
        if name not in arrays:
            read.wrong(f"there is no array {name}")
        if arrays[name].shape != shape:
            read.wrong(f"{name} has shape {arrays[name].shape}, the model wants {shape}")


def _check_room(read: _Reader, arrays: dict[str, StoredArray], files: dict) -> None:
    """Every file is large enough for the slices that are said to be in it."""
    wanted = dict.fromkeys(files, 0)
    for array in arrays.values():
        for part in array.slices:
            wanted[part.file] += part.box.size * DTYPES[array.dtype]
    for name, size in wanted.items():
        if size > files[name].bytes:
            read.wrong(f"{name} of {files[name].bytes} bytes cannot hold its {size}")


def _parse_tokenizer(read: _Reader, value: Any, config: ModelConfig) -> Tokenizer:
    description = read.mapping(value, "tokenizer")
    for key, entry in description.items():
        read.text(entry, f"{key} of tokenizer")
    try:
        tokenizer = tokenizer_from(description)
    except (KeyError, ValueError):
        read.wrong(f"tokenizer {description.get('kind')!r} is not known")
    if not 1 <= tokenizer.vocabulary <= config.vocabulary:
        read.wrong(f"tokenizer of {tokenizer.vocabulary} tokens, model of {config.vocabulary}")
    alphabet = description.get("alphabet", "")
    if list(alphabet) != sorted(set(alphabet)):
        read.wrong("alphabet of tokenizer is not in order")
    return tokenizer


class _Reader:
    """Takes values out of parsed JSON, each only if it is what it should be."""

    def __init__(self, where: str):
        self.where = where

    def wrong(self, what: str) -> NoReturn:
        """End with one line, whatever is in the file."""
        raise UserError(f"{self.where}: {what}"[:400].encode(errors="replace").decode())

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        """A JSON object."""
        if not isinstance(value, dict):
            self.wrong(f"{what} is not an object")
        return value

    def sequence(self, value: Any, what: str) -> list:
        """A JSON array."""
        if not isinstance(value, list):
            self.wrong(f"{what} is not a list")
        return value

    def number(self, value: Any, what: str, low: int = 0) -> int:
        """A whole number."""
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < _LARGEST:
            self.wrong(f"{what} is not a number from {low} up")
        return value

    def numbers(self, value: Any, what: str) -> tuple[int, ...]:
        """One or two whole numbers: arrays here are vectors and matrices."""
        values = self.sequence(value, what)
        if not 1 <= len(values) <= 2:
            self.wrong(f"{what} is not one or two numbers")
        return tuple(self.number(entry, what) for entry in values)

    def text(self, value: Any, what: str) -> str:
        """A text."""
        if not isinstance(value, str):
            self.wrong(f"{what} is not a text")
        return value

    def file_name(self, value: Any) -> str:
        """A plain file name, of this folder and no other."""
        if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
            self.wrong(f"the file name {value!r} is not a plain NAME.safetensors")
        return value
