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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
        self.layers: list[Any] = list(self.blocks)
        if self.is_first:
            assert table is not None
            self.embedding = VocabParallelEmbedding(table, config.sequence, tp, WEIGHT_STD)
            self.layers.insert(0, self.embedding)
        if self.is_last:
            assert table is not None
            self.norm = LayerNorm("final_norm", config.hidden, tp)
            self.logits = VocabParallelLogits(table, tp)
            self.loss = VocabParallelCrossEntropy(config.vocabulary, tp)
            self.layers += [self.norm, self.logits]
        # hold(layer, "F" or "B") is entered while a layer's weights are in use by forward or by
        # backward: ZeRO's third stage has them only then.
        self.hold: Callable[[Any, str], AbstractContextManager[None]] = lambda *_: nullcontext()

    def forward(self, x, labels=None):
        """x: tokens (B, S) on the first stage, else (B, S, H) -> y, saved.

        y : (B, S, H); on the last stage the losses (B, S) of `labels`, and without labels the
        logits (B, S, V/t), for which there is no backward.
        """
        saved = []
        for layer in self.layers:
            with self.hold(layer, "F"):
                x, kept = layer.forward(x)
            saved.append(kept)
        if self.is_last and labels is not None:
            x, kept = self.loss.forward(x, labels)
            saved.append(kept)
        return x, saved

    def backward(self, dy, saved, later: Later = now):
        """dy (B, S, H), on the last stage the scale of the summed losses -> dx, None on the first.

        `saved` is emptied on the way, so that what a layer kept is free as soon as it is used.
        """
        if self.is_last:
            dy = self.loss.backward(dy, saved.pop())
        for layer in reversed(self.layers):
            with self.hold(layer, "B"):
                dy = layer.backward(dy, saved.pop(), later)
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
        self.layers = [layer for stage in self.stages.values() for layer in stage.layers]
        # A first and a last stage on one rank hold one and the same table.
        unique = {p.name: p for layer in self.layers for p in layer.parameters}
        self.parameters: list[Parameter] = list(unique.values())
        if table in self.parameters:
            table.holders = tuple(sorted({placement[0], placement[-1]}))

    def allocate(self, dtype) -> None:
        """Allocate weights, zero, to be filled from a checkpoint."""
        for parameter in self.parameters:
            parameter.data = xp.zeros(parameter.local_shape, dtype)

    def initialize(self, seed: int, dtype) -> None:
        """Allocate weights, drawn from (seed, name)."""
        for parameter in self.parameters:
            parameter.initialize(seed, dtype)
