"""Checkpoints: the whole model in one safetensors file, whatever the mesh that wrote or reads it.

Rank 0 gathers each parameter from the ranks of one replica, puts the pieces together by global
name, and writes `model.safetensors` and `model.json` (sizes, tokenizer, step). Reading, every rank
opens the file and takes the slices that it holds.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from mpiparallel.backend import from_host, to_host
from mpiparallel.data import Tokenizer, tokenizer_from
from mpiparallel.errors import UserError
from mpiparallel.mesh import Coordinates, Mesh
from mpiparallel.model import GPT, every_parameter
from mpiparallel.model_config import ModelConfig

WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"


def gather(model: GPT, mesh: Mesh, placement: tuple[int, ...], what: str = "data") -> dict:
    """The global arrays by name on rank 0; an empty dict elsewhere. Every rank calls.

    what : "data" for weights, "grad" for gradients. The pieces of the first replica are sent to
    rank 0 one parameter at a time, over the world.
    """
    whole: dict[str, np.ndarray] = {}
    mine = {parameter.name: parameter for parameter in model.parameters}
    for parameter in every_parameter(model.config, mesh.tp, placement):
        holder = min(parameter.holders)
        sends = mesh.coordinates.dp == 0 and mesh.coordinates.pp == holder and mesh.rank != 0
        if sends:
            mesh.world.send(getattr(mine[parameter.name], what), 0)
        if mesh.rank != 0:
            continue
        pieces = []
        for tp_rank in range(mesh.tp.size):
            source = Coordinates(0, holder, tp_rank).rank(mesh.pp.size, mesh.tp.size)
            if source == 0:
                pieces.append(to_host(getattr(mine[parameter.name], what)))
            else:
                piece = np.empty(parameter.local_shape, model.gradients.dtype)
                pieces.append(mesh.world.recv(piece, source))
        whole[parameter.name] = parameter.layout.join(pieces, parameter.shape)
    return whole


def save(
    folder: Path,
    model: GPT,
    mesh: Mesh,
    placement: tuple[int, ...],
    tokenizer: Tokenizer,
    step: int,
) -> None:
    """Write a checkpoint into `folder`. Every rank calls; rank 0 writes."""
    from safetensors.numpy import save_file

    weights = gather(model, mesh, placement)
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / WEIGHTS)
        description = {
            "step": step,
            "model": dataclasses.asdict(model.config),
            "tokenizer": tokenizer.describe(),
        }
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def find(path: str) -> Path:
    """The checkpoint folder at `path`: itself, or the newest below it, as in a run's folder.

    Raises UserError where there is none.
    """
    folder = Path(path)
    if (folder / DESCRIPTION).exists():
        return folder
    found = sorted(
        folder.glob("checkpoints/step-*/" + DESCRIPTION), key=lambda file: int(file.parent.name[5:])
    )
    if not found:
        raise UserError(
            f"--checkpoint {path}: there is no checkpoint; legal: the --out folder of a finished "
            f"run, or a folder with {WEIGHTS} and {DESCRIPTION}"
        )
    return found[-1].parent


def read_description(folder: Path) -> tuple[ModelConfig, Tokenizer]:
    """The sizes and the tokenizer of a checkpoint. Raises UserError where they cannot be read."""
    file = folder / DESCRIPTION
    try:
        description = json.loads(file.read_text())
        return ModelConfig(**description["model"]), tokenizer_from(description["tokenizer"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not the description of a checkpoint ({error})") from None


def load(folder: Path, model: GPT, dtype: str) -> None:
    """Fill this rank's weights, as `dtype`, from a checkpoint, reading only its slices. No message.

    Raises UserError for a file that cannot be read, and for a missing or misshapen array.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / WEIGHTS
    try:
        with safe_open(file, framework="numpy") as opened:
            for parameter in model.parameters:
                stored = opened.get_slice(parameter.name)
                if tuple(stored.get_shape()) != parameter.shape:
                    raise UserError(
                        f"{file}: {parameter.name} has shape {tuple(stored.get_shape())}, "
                        f"the model wants {parameter.shape}"
                    )
                local = np.zeros(parameter.local_shape, dtype)
                for here, there in parameter.layout.pieces(
                    parameter.shape, parameter.tp_rank, parameter.tp_size
                ):
                    local[here] = stored[there]
                parameter.data = from_host(local)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not a readable checkpoint ({error})") from None
