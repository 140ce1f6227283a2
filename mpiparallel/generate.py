"""Sampling text from a model on any mesh.

Each new token is one forward pass of the last S tokens down the pipeline. The last stage joins the
logits of the vocabulary's parts, draws, and broadcasts the token to every rank. The draw depends on
(seed, position) and never on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiparallel.backend import to_host
from mpiparallel.mesh import Coordinates, Mesh
from mpiparallel.pipeline.executor import Executor, MicroBatch
from mpiparallel.pipeline.messages import derive_messages
from mpiparallel.pipeline.schedules import forward_only


def generate(
    executor: Executor,
    mesh: Mesh,
    placement: tuple[int, ...],
    prompt: np.ndarray,
    *,
    tokens: int,
    vocabulary: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """Yield `tokens` new tokens after `prompt` (n,), n >= 1. Every rank calls and gets them all.

    vocabulary : draw among the first so many (the tokenizer's). temperature : divides the logits;
    0 takes the most likely token.
    """
    operations = derive_messages(forward_only(1, placement))[mesh.pp.rank]
    sequence = executor.model.config.sequence
    speaker = Coordinates(0, placement[-1], 0).rank(mesh.pp.size, mesh.tp.size)
    context = np.asarray(prompt, np.int32)
    for position in range(tokens):
        context = context[-sequence:]
        outputs = executor.run(operations, [MicroBatch(context[None])]).outputs
        token = np.zeros(1, np.int64)
        if outputs:
            last = outputs[0][:, -1]  # (1, V/t): what follows the last token
            logits = to_host(mesh.tp.allgather(last, dim=1))[0, :vocabulary]
            token[0] = _draw(logits.astype(np.float64), temperature, seed, position)
        mesh.world.bcast(token, root=speaker, out=token)
        context = np.append(context, np.int32(token[0]))
        yield int(token[0])


def _draw(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    cumulated = np.cumsum(np.exp(scaled))
    point = np.random.default_rng([seed, position]).random() * cumulated[-1]
    return int(np.searchsorted(cumulated, point, side="right"))
