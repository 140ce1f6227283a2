"""The laws of traffic and memory: what each kind of parallelism sends and holds in one step.

With t = tp, A = B S H numbers of activations, P the trainable parameters that one rank of a mesh
holds, and everything added up over all ranks, a ring all-reduce of n bytes over p ranks being
2(p-1) n (Patarasuk and Yuan 2009):

    tensor      2(t-1) times: A for each of 4 all-reduces in every block (two forward, two
                backward; Shoeybi et al. 2019, section 3), A for the embedding forward, A for the
                output layer backward, and three numbers a position for the loss
    pipeline    t times: A down and A up over every boundary between stages on different ranks
                (Narayanan et al. 2021, section 2.2), and the gradient of the tied table both ways
    data        2(dp-1) P of every rank of a replica: the all-reduce of gradients. ZeRO sends the
                same as reduce-scatter and all-gather; its third stage gathers once more
                (Rajbhandari et al. 2020, section 7)
    world       2(R-1) times three numbers in float64: loss, norm, and whether to stop

The number of micro-batches is in none of them. Between nodes, sums of short arrays go by recursive
doubling, which sends more than a ring; no law is stated for those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from mpiparallel.model_config import ModelConfig, stage_layers
from mpiparallel.settings import Settings

# Parameters that are cut over tp; all others are whole on every tensor rank.
_CUT = (
    "attention.qkv.weight",
    "attention.qkv.bias",
    "attention.projection.weight",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.down.weight",
)
_TABLE = "token_embedding.weight"


@dataclass(frozen=True)
class Step:
    """One step of a run: all that its traffic and memory follow from.

    placement[stage] : the pipeline rank that owns the stage. global_batch : sequences, B, each of
    config.sequence tokens, S. itemsize : bytes of a number, of weights and activations. zero : the
    stage of ZeRO. frozen : beginnings of names of parameters that are not trained.
    """

    config: ModelConfig
    dp: int
    pp: int
    tp: int
    placement: tuple[int, ...]
    global_batch: int
    itemsize: int = 4
    zero: int = 0
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings, config: ModelConfig, placement: tuple[int, ...]) -> Step:
        """A step of a run with these settings, checked ones (`settings.check`)."""
        assert settings.dp is not None
        return cls(
            config,
            settings.dp,
            settings.pp,
            settings.tp,
            placement,
            settings.global_batch,
            int(settings.dtype.removeprefix("float")) // 8,
            settings.zero,
            settings.frozen,
        )


def traffic(step: Step) -> dict[tuple[str, str], int]:
    """(axis, operation) -> bytes sent in one step by all ranks together, as the ledger names
    them. Operations that send nothing are left out."""
    found = {
        ("tp", "allreduce"): tensor_bytes(step),
        ("pp", "isend"): pipeline_bytes(step),
        **{("dp", operation): sent for operation, sent in data_bytes(step).items()},
        ("world", "allreduce"): 2 * (step.dp * step.pp * step.tp - 1) * 3 * 8,
    }
    return {where: sent for where, sent in found.items() if sent}


def tensor_bytes(step: Step) -> int:
    """Bytes of the all-reduces inside layers, of all tensor groups."""
    config = step.config
    positions = step.global_batch * config.sequence
    numbers = (4 * config.layers + 2) * positions * config.hidden + 3 * positions
    return 2 * (step.tp - 1) * numbers * step.itemsize


def pipeline_bytes(step: Step) -> int:
    """Bytes of activations and gradients between stages, and of the tied table's gradient."""
    config, placement = step.config, step.placement
    crossings = sum(a != b for a, b in pairwise(placement))
    activations = step.global_batch * config.sequence * config.hidden
    table = 0
    if placement[0] != placement[-1] and not _TABLE.startswith(step.frozen):
        # Under ZeRO each replica sends its shard, and together they are one table.
        replicas = 1 if step.zero else step.dp
        table = replicas * local_size(_TABLE, config.shapes()[_TABLE], step.tp)
    return 2 * step.tp * (crossings * activations + table) * step.itemsize


def data_bytes(step: Step) -> dict[str, int]:
    """operation -> bytes of gradients, and under ZeRO of weights, over the dp axis."""
    held = sum(parameters(step, rank, frozen=False) for rank in range(step.pp))
    once = (step.dp - 1) * step.tp * held * step.itemsize
    if step.zero == 0:
        return {"allreduce": 2 * once}
    return {"reduce_scatter": once, "allgather": once * (2 if step.zero == 3 else 1)}


def memory(step: Step) -> dict[str, int]:
    """kind -> bytes that all ranks together hold between steps.

    In float32, of P parameters a rank: 4 P of weights, 4 P of gradients, 8 P of Adam's moments;
    ZeRO leaves a dp-th of the moments (1), of the gradients (2) and of the weights (3). Frozen
    parameters have weights alone, whole.
    """
    ranks = range(step.pp)
    held = step.tp * step.itemsize * sum(parameters(step, rank, frozen=False) for rank in ranks)
    still = step.tp * step.itemsize * sum(parameters(step, rank, frozen=True) for rank in ranks)

    def copies(from_stage: int) -> int:
        return 1 if step.zero >= from_stage else step.dp

    return {
        "parameters": copies(3) * held + step.dp * still,
        "gradients": copies(2) * held,
        "optimizer": copies(1) * 2 * held,
    }


def parameters(step: Step, pp_rank: int, *, frozen: bool) -> int:
    """P: how many trainable, or how many frozen, parameters a rank of this pipeline rank holds."""
    stages = [stage for stage, rank in enumerate(step.placement) if rank == pp_rank]
    last = len(step.placement) - 1
    blocks = stage_layers(step.config.layers, len(step.placement))
    here = [f"blocks.{layer}." for stage in stages for layer in blocks[stage]]
    here += [_TABLE, "position_embedding."] if 0 in stages else []
    here += [_TABLE, "final_norm."] if last in stages else []
    return sum(
        local_size(name, shape, step.tp)
        for name, shape in step.config.shapes().items()
        if name.startswith(tuple(here)) and name.startswith(step.frozen) == frozen
    )


def local_size(name: str, shape: tuple[int, ...], tp: int) -> int:
    """Numbers of one parameter that one tensor rank holds; the table is padded to a multiple."""
    if name == _TABLE:
        return -(-shape[0] // tp) * shape[1]
    return math.prod(shape) // (tp if name.endswith(_CUT) else 1)
