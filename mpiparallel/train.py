"""Training: read this file from top to bottom and you have seen a step of hybrid parallelism.

    forward, backward    pp: Isend/Irecv between stages    tp: all-reduces inside every layer
    average gradients    dp: one all-reduce of this rank's share of the parameters
    sum tied gradients   pp: first and last stage exchange the token table's gradient
    loss and norm        world: one all-reduce of two numbers
    clip, AdamW          no message

Every rank runs `train`; rank 0 alone prints and writes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpiparallel import checkpoint
from mpiparallel.data import Batch, Corpus, Tokenizer
from mpiparallel.data_parallel.gradients import average_gradients
from mpiparallel.generate import generate
from mpiparallel.mesh import Mesh
from mpiparallel.model import GPT
from mpiparallel.model_config import ModelConfig
from mpiparallel.optimizer import AdamW, clip_scale, learning_rate, local_square_sum
from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.executor import Executor, MicroBatch, Outcome
from mpiparallel.pipeline.messages import derive_messages
from mpiparallel.pipeline.tied import sum_tied_gradients
from mpiparallel.report.run import RunLog
from mpiparallel.settings import Settings

EVALUATION_ROWS = 8  # sequences per micro-batch where there is no backward to keep memory for


@dataclass
class StepResult:
    """What every rank knows after a step: global loss, gradient norm before clipping, and what
    this rank's part of the pipeline did."""

    loss: float
    grad_norm: float
    outcome: Outcome


class Trainer:
    """One rank's part of the model, and the step that all ranks take together.

    settings : checked ones (`settings.check`). config : the model's sizes.
    """

    def __init__(self, settings: Settings, config: ModelConfig, mesh: Mesh):
        assert settings.micro_batches is not None
        self.settings, self.mesh = settings, mesh
        self.schedule = schedules.build(
            settings.schedule, mesh.pp.size, settings.micro_batches, settings.stages_per_rank
        )
        self.placement = self.schedule.placement
        self.operations = derive_messages(self.schedule)[mesh.pp.rank]
        self.model = GPT(config, mesh.tp, self.placement, mesh.pp.rank)
        self.model.initialize(settings.seed, settings.dtype)
        self.executor = Executor(self.model, mesh.pp, settings.dtype)
        self.optimizer = AdamW(
            self.model.parameters,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
        )

    def step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step over a global batch. Every rank calls with the whole batch."""
        result = self.gradients(batch)
        self.optimizer.step(lr, clip_scale(result.grad_norm, self.settings.clip))
        return result

    def gradients(self, batch: Batch) -> StepResult:
        """The global loss and, in `Parameter.grad`, the gradients that the optimizer sees."""
        mesh, model = self.mesh, self.model
        model.zero_grad()
        shard = batch.shard(mesh.dp.rank, mesh.dp.size)
        # Averaging over replicas divides by dp; the loss is to be divided by all valid tokens.
        scale = mesh.dp.size / max(1, batch.valid)
        outcome = self.executor.run(self.operations, self._micro_batches(shard), scale)

        average_gradients(model.gradients, mesh.dp, self.settings.allreduce)
        sum_tied_gradients(model.parameters, mesh.pp)

        # Each loss and each gradient is counted by one rank: the sum is the global one.
        loss = _sum_losses(outcome) if mesh.tp.rank == 0 else 0.0
        squares = local_square_sum(model.parameters, mesh.pp.rank) if mesh.dp.rank == 0 else 0.0
        loss, squares = mesh.world.allreduce(np.array([loss, squares]))
        return StepResult(loss / max(1, batch.valid), math.sqrt(squares), outcome)

    def evaluate(self, corpus: Corpus) -> float:
        """The mean loss over the whole validation split. Forward only; the ledger leaves it out."""
        mesh = self.mesh
        count = self.schedule.micro_batches
        operations = derive_messages(schedules.forward_only(count, self.placement))[mesh.pp.rank]
        total, valid = 0.0, 0
        with mesh.ledger.aside():
            for batch in corpus.validation_batches(mesh.dp.size * count * EVALUATION_ROWS):
                shard = batch.shard(mesh.dp.rank, mesh.dp.size)
                outcome = self.executor.run(operations, self._micro_batches(shard))
                total += _sum_losses(outcome) if mesh.tp.rank == 0 else 0.0
                valid += batch.valid
            return float(mesh.world.allreduce(np.array([total]))[0]) / valid

    def sample(self, tokenizer: Tokenizer, tokens: int) -> str:
        """A sample of what the model writes, from a line break on. Every rank calls."""
        with self.mesh.ledger.aside():
            drawn = generate(
                self.executor,
                self.mesh,
                self.placement,
                tokenizer.encode(tokenizer.start),
                tokens=tokens,
                vocabulary=tokenizer.vocabulary,
                temperature=0.8,
                seed=self.settings.seed,
            )
            return tokenizer.decode(list(drawn))

    def _micro_batches(self, shard: Batch) -> list[MicroBatch]:
        """Cut a replica's rows as evenly as can be; the first micro-batches take what is over."""
        count = self.schedule.micro_batches
        return [
            MicroBatch(tokens, labels)
            for tokens, labels in zip(
                np.array_split(shard.tokens, count),
                np.array_split(shard.labels, count),
                strict=True,
            )
        ]


def _sum_losses(outcome: Outcome) -> float:
    """The summed losses of a rank's micro-batches, in float64; 0 where it has no last stage."""
    return float(sum(losses.sum(dtype=np.float64) for losses in outcome.outputs.values()))


def train(
    settings: Settings, config: ModelConfig, corpus: Corpus, tokenizer: Tokenizer, mesh: Mesh
) -> None:
    """Train, print progress, and write the run to `settings.out`. Every rank calls."""
    threads = mesh.limit_blas_threads()
    trainer = Trainer(settings, config, mesh)
    log = RunLog(settings, config, mesh)
    log.start(threads, tokenizer.vocabulary, len(corpus.train))
    for step in range(settings.steps):
        rate = learning_rate(
            step,
            lr=settings.lr,
            min_lr=settings.min_lr,
            warmup=settings.warmup,
            steps=settings.steps,
        )
        started = time.perf_counter()
        batch = corpus.batch(settings.seed, step, settings.global_batch)
        result = trainer.step(batch, rate)
        seconds = time.perf_counter() - started
        last = step + 1 == settings.steps
        evaluates = last or (settings.eval_every and (step + 1) % settings.eval_every == 0)
        val_loss = trainer.evaluate(corpus) if evaluates else None
        log.step(step + 1, result, rate, seconds, val_loss)
    folder = Path(settings.out) / "checkpoints" / f"step-{settings.steps}"
    with mesh.ledger.aside():
        checkpoint.save(folder, trainer.model, mesh, trainer.placement, tokenizer, settings.steps)
    log.finish(trainer.model, trainer.optimizer, trainer.schedule)
    if settings.sample:
        log.sample(trainer.sample(tokenizer, settings.sample))
