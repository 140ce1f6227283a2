"""GPT: which layers make which stage, and which stages live on this rank.

    stage 0              token and position embedding, blocks 0 .. k-1
    stage 1              blocks k .. 2k-1
    ...
    last stage           the last blocks, final norm, output layer, loss

The architecture is GPT-2's (Radford et al. 2019): pre-norm blocks, learned positions, GELU in its
tanh form, and one (V, H) table for input and output. Where the first and the last stage live on
different ranks both hold that table, and their gradients are summed (`pipeline/tied.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group
from mpiparallel.layers import Later, now
from mpiparallel.layers.block import Block
from mpiparallel.layers.embedding import VocabParallelEmbedding, token_table
from mpiparallel.layers.loss import VocabParallelCrossEntropy, VocabParallelLogits
from mpiparallel.layers.norm import LayerNorm
from mpiparallel.model_config import ModelConfig, stage_layers
from mpiparallel.parameter import Parameter

WEIGHT_STD = 0.02  # GPT-2's, whatever the width


class Stage:
    """One contiguous run of layers. The first has the embedding, the last the output and the loss.

    table : the token table, where the stage is first or last.
    """

    def __init__(
        self, config: ModelConfig, stage: int, stages: int, tp: Group, table: Parameter | None
    ):
        self.config = config
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        residual_std = WEIGHT_STD / math.sqrt(2 * config.layers)
        self.blocks = [
            Block(
                f"blocks.{layer}",
                config.hidden,
                config.heads,
                config.feed_forward,
                tp,
                WEIGHT_STD,
                residual_std,
            )
            for layer in stage_layers(config.layers, stages)[stage]
        ]
        layers: list[Any] = list(self.blocks)
        if self.is_first:
            assert table is not None
            self.embedding = VocabParallelEmbedding(table, config.sequence, tp, WEIGHT_STD)
            layers.insert(0, self.embedding)
        if self.is_last:
            assert table is not None
            self.norm = LayerNorm("final_norm", config.hidden, tp)
            self.logits = VocabParallelLogits(table, tp)
            self.loss = VocabParallelCrossEntropy(config.vocabulary, tp)
            layers += [self.norm, self.logits]
        self.parameters = [parameter for layer in layers for parameter in layer.parameters]

    def forward(self, x, labels=None):
        """x: tokens (B, S) on the first stage, else (B, S, H) -> y, saved.

        y : (B, S, H); on the last stage the losses (B, S) of `labels`, and without labels the
        logits (B, S, V/t), for which there is no backward.
        """
        saved = []
        if self.is_first:
            x, kept = self.embedding.forward(x)
            saved.append(kept)
        for block in self.blocks:
            x, kept = block.forward(x)
            saved.append(kept)
        if self.is_last:
            x, norm = self.norm.forward(x)
            x, output = self.logits.forward(x)
            if labels is not None:
                x, loss = self.loss.forward(x, labels)
                saved += [norm, output, loss]
        return x, saved

    def backward(self, dy, saved, later: Later = now):
        """dy (B, S, H), on the last stage the scale of the summed losses -> dx, None on the first.

        `saved` is emptied on the way, so that what a layer kept is free as soon as it is used.
        """
        if self.is_last:
            dy = self.loss.backward(dy, saved.pop())
            dy = self.logits.backward(dy, saved.pop(), later)
            dy = self.norm.backward(dy, saved.pop(), later)
        for block in reversed(self.blocks):
            dy = block.backward(dy, saved.pop(), later)
        if self.is_first:
            self.embedding.backward(dy, saved.pop(), later)
            return None
        return dy


class GPT:
    """The stages of one pipeline rank and their parameters.

    placement : placement[stage] is the pipeline rank that owns it, as a Schedule says.
    pp_rank : whose stages these are. Makes no message; arrays come with `initialize`.
    """

    def __init__(self, config: ModelConfig, tp: Group, placement: tuple[int, ...], pp_rank: int):
        self.config, self.hidden = config, config.hidden
        self.total_stages = len(placement)
        table = token_table(config.vocabulary, config.hidden, tp, WEIGHT_STD)
        self.stages = {
            stage: Stage(config, stage, self.total_stages, tp, table)
            for stage, owner in enumerate(placement)
            if owner == pp_rank
        }
        # A first and a last stage on one rank hold one and the same table.
        unique = {p.name: p for stage in self.stages.values() for p in stage.parameters}
        self.parameters: list[Parameter] = list(unique.values())
        if table in self.parameters:
            table.holders = tuple(sorted({placement[0], placement[-1]}))

    def allocate(self, dtype) -> None:
        """Allocate weights, zero, to be filled from a checkpoint. Gradients are not needed then."""
        for parameter in self.parameters:
            parameter.data = xp.zeros(parameter.local_shape, dtype)

    def initialize(self, seed: int, dtype) -> None:
        """Allocate weights and gradients: weights from (seed, name), gradients zero."""
        for parameter in self.parameters:
            parameter.initialize(seed, dtype)
        self.allocate_gradients(dtype)

    def allocate_gradients(self, dtype) -> None:
        """One flat array `gradients` holds all gradients; each parameter's is a view of it."""
        self.gradients = xp.zeros(sum(p.data.size for p in self.parameters), dtype)
        start = 0
        for parameter in self.parameters:
            end = start + parameter.data.size
            parameter.grad = self.gradients[start:end].reshape(parameter.data.shape)
            start = end

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.zero_grad()


def every_parameter(
    config: ModelConfig, tp: Group, placement: tuple[int, ...]
) -> Iterator[Parameter]:
    """The parameters of the whole model in model order, each once, without arrays: who holds what
    is computed on every rank alike and needs no message. `holders` is set on each."""
    seen: dict[str, Parameter] = {}
    for rank in range(max(placement) + 1):
        for parameter in GPT(config, tp, placement, rank).parameters:
            if parameter.name not in seen:
                parameter.holders = parameter.holders or (rank,)
                seen[parameter.name] = parameter
    yield from seen.values()
