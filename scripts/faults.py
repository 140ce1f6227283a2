"""Nine classic faults of parallel training, each put in from outside by replacing one small piece.

`scripts/mistakes.py` shows them. As a pytest plugin (`-p faults`, with this folder on PYTHONPATH
and MPIPARALLEL_FAULT set to a name) it puts one into a test run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from mpiparallel.backend import xp
from mpiparallel.layers.block import Block
from mpiparallel.layers.embedding import VocabParallelEmbedding
from mpiparallel.layers.linear import RowParallelLinear
from mpiparallel.layers.loss import IGNORE
from mpiparallel.parameter import Layout, Parameter
from mpiparallel.pipeline.executor import Executor


@dataclass(frozen=True)
class Fault:
    """patch() is a context manager that puts it in. mesh : dp, pp, tp where it shows. seen : what a
    user would see. test : the id of one of our tests that catches it, from tests/mpi on. schedule :
    of the pipeline.
    """

    title: str
    mesh: tuple[int, int, int]
    seen: str
    test: str
    patch: Callable[[], Any]
    schedule: str = "1f1b"


def reused_buffer():
    """Messages of one shape are all received into one array; backward still needs the first."""
    kept: dict[Any, Any] = {}

    def empty(shape, dtype):
        return kept.setdefault((shape, dtype), xp.empty(shape, dtype))

    return mock.patch("mpiparallel.pipeline.executor.xp", SimpleNamespace(empty=empty))


def undivided():
    """Each micro-batch has the mean loss of its own tokens, and the means are added up."""
    right = Executor.run

    def run(self, operations, micro_batches, loss_scale=1.0):
        return right(self, operations, micro_batches, loss_scale * len(micro_batches))

    return mock.patch.object(Executor, "run", run)


def dropped_residual():
    """Backward goes through attention and forgets the way around it."""

    def backward(self, dz, saved, *later):
        norm1, attention, norm2, mlp = saved
        dy = self.mlp_norm.backward(self.mlp.backward(dz, mlp, *later), norm2, *later)
        dy += dz
        return self.attention_norm.backward(
            self.attention.backward(dy, attention, *later), norm1, *later
        )

    return mock.patch.object(Block, "backward", backward)


def bias_on_every_rank():
    """The bias is added before the all-reduce, which adds it up with the rest."""

    def forward(self, x):
        y = xp.matmul(x, self.weight.data) + self.bias.data
        return self.tp.allreduce(y, out=y), x

    return mock.patch.object(RowParallelLinear, "forward", forward)


def norm_counts_copies():
    """Every tensor rank counts the gradients that all of them have."""
    return mock.patch.object(Parameter, "counts_on", return_value=True)


def untied():
    """First and last stage each go their own way with their copy of the table."""
    return mock.patch("mpiparallel.train.sum_tied_gradients", return_value=None)


def straight_qkv():
    """Q, K and V side by side are cut like one matrix: some ranks get no V at all."""

    def layout(cut=None, sections=1, padding=False):
        return Layout(cut, 1, padding)

    return mock.patch("mpiparallel.layers.linear.Layout", layout)


def off_by_one():
    """A rank takes the first token of the next rank's range as well, for its own last row."""
    right = VocabParallelEmbedding.forward

    def forward(self, tokens):
        rows = len(self.table.data)
        last = self.tp.rank == self.tp.size - 1
        beyond = tokens == (self.tp.rank + 1) * rows
        return right(self, tokens if last else xp.where(beyond, tokens - 1, tokens))

    return mock.patch.object(VocabParallelEmbedding, "forward", forward)


def local_mean():
    """Each replica divides by the tokens that it has itself, and the means are averaged."""
    right = Executor.run

    def run(self, operations, micro_batches, loss_scale=1.0):
        own = sum(int((batch.labels != IGNORE).sum()) for batch in micro_batches)
        return right(self, operations, micro_batches, 1.0 / max(1, own))

    return mock.patch.object(Executor, "run", run)


GRADIENTS = "test_meshes.py::test_gradients_equal_the_serial_ones"
FAULTS = {
    fault.patch.__name__: fault
    for fault in (
        Fault(
            "a receive buffer is reused while backward needs it",
            (1, 2, 2),
            "another loss in every run of the same command",
            "test_executor.py::test_every_schedule_gives_the_serial_gradients",
            reused_buffer,
            schedule="zb-h1",  # in which weight gradients wait, and need what was received
        ),
        Fault(
            "no division by the number of micro-batches",
            (1, 2, 2),
            "gradients as many times too large; clipping hides it",
            GRADIENTS,
            undivided,
        ),
        Fault(
            "a residual's gradient is dropped",
            (1, 2, 2),
            "lower layers learn less",
            GRADIENTS,
            dropped_residual,
        ),
        Fault(
            "a row-parallel bias is added on every rank",
            (1, 2, 2),
            "another loss from the first step on whose bias is not zero",
            GRADIENTS,
            bias_on_every_rank,
        ),
        Fault(
            "a replicated gradient counts tp times in the norm",
            (1, 2, 2),
            "a norm too large, so clipping sets in too early",
            "test_meshes.py::test_three_adamw_steps_equal_the_serial_ones",
            norm_counts_copies,
        ),
        Fault(
            "tied embeddings are not summed",
            (1, 2, 2),
            "two tables that drift apart",
            GRADIENTS,
            untied,
        ),
        Fault(
            "a fused QKV is cut straight through",
            (1, 2, 2),
            "almost nothing: fresh weights are as good in any order; a checkpoint is not",
            GRADIENTS,
            straight_qkv,
        ),
        Fault(
            "off by one in the vocabulary's range",
            (1, 2, 2),
            "one token in the vocabulary is another one as well",
            GRADIENTS,
            off_by_one,
        ),
        Fault(
            "the local mean in place of the global",
            (2, 2, 1),
            "replicas with few valid tokens weigh too much",
            GRADIENTS,
            local_mean,
        ),
    )
}


def pytest_configure(config) -> None:
    """As a plugin: put in the fault that the environment names, for good."""
    FAULTS[os.environ["MPIPARALLEL_FAULT"]].patch().start()
