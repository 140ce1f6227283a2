"""Training: read this file from top to bottom and you have seen a step of hybrid parallelism.

    forward, backward    pp: Isend/Irecv between stages    tp: all-reduces inside every layer
    average gradients    dp: all-reduces of this rank's share of the parameters, in buckets, that
                         start while backward goes on
    sum tied gradients   pp: first and last stage exchange the token table's gradient
    loss, norm, stop     world: one all-reduce of three numbers
    clip, AdamW          no message

Every rank runs `train`; rank 0 alone prints and writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpiparallel.backend import xp
from mpiparallel.checkpoint.files import step_folder
from mpiparallel.checkpoint.load import load, verify
from mpiparallel.checkpoint.manifest import Manifest
from mpiparallel.checkpoint.save import save
from mpiparallel.checkpoint.trainer_state import moment_pieces, weight_pieces
from mpiparallel.comm.agree import agree
from mpiparallel.comm.trace import Trace
from mpiparallel.data import Batch, Corpus, Tokenizer
from mpiparallel.data_parallel.zero import DataParallel
from mpiparallel.errors import RunError
from mpiparallel.generate import generate
from mpiparallel.mesh import Coordinates, Mesh
from mpiparallel.model import GPT
from mpiparallel.model_config import ModelConfig
from mpiparallel.optimizer import AdamW, clip_scale, learning_rate
from mpiparallel.parameter import Parameter
from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.executor import Executor, MicroBatch, Outcome
from mpiparallel.pipeline.messages import derive_messages
from mpiparallel.pipeline.tied import sum_tied_gradients
from mpiparallel.report.run import RunLog
from mpiparallel.settings import Settings
from mpiparallel.signals import StopRequest

EVALUATION_ROWS = 8  # sequences per micro-batch where there is no backward to keep memory for


@dataclass
class StepResult:
    """What every rank knows after a step: global loss, gradient norm before clipping, whether any
    rank was asked to stop, and what this rank's part of the pipeline did."""

    loss: float
    grad_norm: float
    stop: bool
    outcome: Outcome


class Trainer:
    """One rank's part of the model, and the step that all ranks take together.

    settings : checked ones (`settings.check`). config : the model's sizes. stop : true once this
    rank was asked to stop; all ranks learn of it with the next step.
    """

    def __init__(
        self,
        settings: Settings,
        config: ModelConfig,
        mesh: Mesh,
        stop: StopRequest | None = None,
    ):
        self.stop = StopRequest() if stop is None else stop
        assert settings.micro_batches is not None
        self.settings, self.mesh = settings, mesh
        self.schedule = schedules.build(
            settings.schedule, mesh.pp.size, settings.micro_batches, settings.stages_per_rank
        )
        self.placement = self.schedule.placement
        self.operations = derive_messages(self.schedule)[mesh.pp.rank]
        self.model = GPT(config, mesh.tp, self.placement, mesh.pp.rank)
        self.model.initialize(settings.seed, settings.dtype)
        for parameter in self.model.parameters:
            parameter.frozen = parameter.name.startswith(settings.frozen)
        self.data_parallel = DataParallel(
            self.model,
            mesh.dp,
            stage=settings.zero,
            algorithm=settings.allreduce,
            bucket_bytes=settings.bucket_mb * 2**20,
            overlap=settings.overlap == "on",
        )
        self.executor = Executor(self.model, mesh.pp, settings.dtype)
        self.executor.between = self.data_parallel.advance
        self.optimizer = AdamW(
            self.data_parallel.shards(),
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
        )

    def step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step over a global batch. Every rank calls with the whole batch.

        Raises RunError on every rank, and changes nothing, where loss or norm is not finite.
        """
        watch, begun = self.mesh.watch, time.perf_counter()
        watch.step = self.optimizer.steps + 1
        result = self.gradients(batch)
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            raise self._diverged(batch, result)
        known = time.perf_counter()
        self.optimizer.step(lr, clip_scale(result.grad_norm, self.settings.clip))
        watch.worked("optimizer", known, time.perf_counter())
        self.data_parallel.publish_weights()
        watch.worked("step", begun, time.perf_counter())
        return result

    def gradients(self, batch: Batch) -> StepResult:
        """The global loss, and the gradients that the optimizer sees, in this rank's shards."""
        mesh, state = self.mesh, self.data_parallel
        state.start_step(self.schedule.micro_batches)
        shard = batch.shard(mesh.dp.rank, mesh.dp.size)
        # Averaging over replicas divides by dp; the loss is to be divided by all valid tokens.
        scale = mesh.dp.size / max(1, batch.valid)
        outcome = self.executor.run(self.operations, self._micro_batches(shard), scale)

        state.finish_gradients()
        sum_tied_gradients(state.tied_gradients(), mesh.pp)

        # Each loss and each gradient is counted by one rank: the sum is the global one.
        loss = _sum_losses(outcome) if mesh.tp.rank == 0 else 0.0
        squares = state.square_sum(mesh.pp.rank)
        asked = float(self.stop.name != "")
        loss, squares, asked = mesh.world.allreduce(np.array([loss, squares, asked]))
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        return StepResult(float(loss) / max(1, batch.valid), norm, asked > 0, outcome)

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

    def save(self, tokenizer: Tokenizer, step: int) -> Path:
        """Write the checkpoint of a step; the folder. Every rank calls. Raises RunError."""
        folder = step_folder(Path(self.settings.out), step)
        state, mesh = self.data_parallel, self.mesh
        with mesh.ledger.aside():
            save(
                folder,
                [*weight_pieces(state, mesh), *moment_pieces(state, self.optimizer, mesh)],
                mesh.world,
                keep=self.settings.keep,
                step=step,
                seed=self.settings.seed,
                optimizer_steps=self.optimizer.steps,
                mesh={
                    "dp": mesh.dp.size,
                    "pp": mesh.pp.size,
                    "tp": mesh.tp.size,
                    "zero": state.stage,
                },
                config=self.model.config,
                tokenizer=tokenizer,
            )
        return folder

    def resume(self, folder: Path, manifest: Manifest) -> None:
        """Take weights, moments and step count from a checkpoint of any mesh. Every rank calls.
        Raises UserError on every rank where any of it cannot be used."""
        state, mesh = self.data_parallel, self.mesh
        with mesh.ledger.aside():
            agree(mesh.world, partial(verify, folder, manifest, mesh.rank, mesh.size))
            pieces = list(weight_pieces(state, mesh))
            if manifest.optimizer_steps:
                pieces += moment_pieces(state, self.optimizer, mesh)
            agree(mesh.world, partial(load, folder, manifest, pieces))
            state.publish_weights()
        self.optimizer.steps = manifest.optimizer_steps

    def _diverged(self, batch: Batch, result: StepResult) -> RunError:
        """What to say of a step whose loss or norm is not finite: the first rank that holds a bad
        weight, and otherwise the first whose own gradients, before the average, are bad.

        Buckets stand in the order of backward, so the first bad gradient in them came first.
        """
        mesh, state = self.mesh, self.data_parallel
        found = _first_bad((s.parameter, s.data) for s in state.shards())
        found = found and f"{found}, its weight"
        if not any(mesh.world.allgather_json(found)):
            state.start_step(self.schedule.micro_batches)
            state.overlap = False  # the gradients are looked at before they are summed
            shard = batch.shard(mesh.dp.rank, mesh.dp.size)
            self.executor.run(
                self.operations, self._micro_batches(shard), mesh.dp.size / max(1, batch.valid)
            )
            found = _first_bad((p, p.grad) for bucket in state.buckets for p in bucket.parameters)
            found = found and f"{found}, its gradient"
        where = [
            f"rank {rank} ({Coordinates.of(rank, mesh.pp.size, mesh.tp.size)}), {name}"
            for rank, name in enumerate(mesh.world.allgather_json(found))
            if name
        ]
        error = RunError(
            f"step {self.optimizer.steps + 1}: loss {result.loss}, gradient norm "
            f"{result.grad_norm}; first seen on {where[0] if where else 'no single parameter'}; "
            f"the last checkpoint is as it was"
        )
        error.agreed = True
        return error

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


def _first_bad(arrays: Iterable[tuple[Parameter, Any]]) -> str:
    """The name of the first parameter whose array has a NaN or an infinity; "" for none."""
    for parameter, array in arrays:
        if not bool(xp.isfinite(array).all()):
            return parameter.name
    return ""


def _sum_losses(outcome: Outcome) -> float:
    """The summed losses of a rank's micro-batches, in float64; 0 where it has no last stage."""
    return float(sum(losses.sum(dtype=np.float64) for losses in outcome.outputs.values()))


def train(
    settings: Settings,
    config: ModelConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    mesh: Mesh,
    checkpoint: tuple[Path, Manifest] | None = None,
) -> None:
    """Train, print progress, and write the run to `settings.out`. Every rank calls.

    checkpoint : the folder and manifest to go on from.
    """
    threads = mesh.limit_blas_threads()
    with StopRequest() as stop:
        trainer = Trainer(settings, config, mesh, stop)
        first = 0
        if checkpoint:
            trainer.resume(*checkpoint)
            first = checkpoint[1].step
        trace, traced = Trace(), settings.traced_steps()
        log = RunLog(settings, config, mesh, first)
        log.start(threads, tokenizer.vocabulary, len(corpus.train))
        for step in range(first, settings.steps):
            rate = learning_rate(
                step,
                lr=settings.lr,
                min_lr=settings.min_lr,
                warmup=settings.warmup,
                steps=settings.steps,
            )
            started = time.perf_counter()
            batch = corpus.batch(settings.seed, step, settings.global_batch)
            done = step + 1
            mesh.watch.trace = trace if done in traced else None
            result = trainer.step(batch, rate)
            mesh.watch.trace = None
            seconds = time.perf_counter() - started

            last = done == settings.steps
            val_loss = None
            if last or (settings.eval_every and done % settings.eval_every == 0):
                val_loss = trainer.evaluate(corpus)
            log.step(done, result, rate, seconds, val_loss)
            if last or result.stop or (settings.save_every and done % settings.save_every == 0):
                trainer.save(tokenizer, done)
            if traced and (done == traced[-1] or (result.stop and done in traced)):
                log.trace(trace)
            if result.stop and not last:
                log.stopped(done)
                return
        log.finish(trainer)
        if settings.sample:
            log.sample(trainer.sample(tokenizer, settings.sample))
