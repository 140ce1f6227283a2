"""`bench step`: tokens/s of real training steps on random tokens, and the share of matmul peak.

Steps and matrix products take turns in one run, so that both see the same machine, and medians
are compared. FLOPs are the model's (`ModelConfig.step_flops`), recomputation and optimizer not
counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from mpiparallel.backend import synchronize
from mpiparallel.bench.matmul import matmul_peak
from mpiparallel.data import Batch
from mpiparallel.mesh import Mesh
from mpiparallel.settings import Settings
from mpiparallel.train import Trainer

VOCABULARY = 65  # as many characters as a plain English text has


def measure_step(mesh: Mesh, settings: Settings) -> dict[str, Any]:
    """Every rank calls; all get the slowest rank's figures. Runs `settings.steps` steps."""
    threads = mesh.limit_blas_threads()
    config = settings.model_config(VOCABULARY)
    trainer = Trainer(settings, config, mesh)
    generator = np.random.default_rng(settings.seed)
    shape = (settings.global_batch, settings.seq_len)
    tokens = generator.integers(0, config.vocabulary, shape, np.int32)
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), tokens.size)
    trainer.step(batch, settings.lr)
    seconds, rates = [], []
    for _ in range(settings.steps):
        rates.append(matmul_peak(mesh, settings.dtype))
        start = time.perf_counter()
        trainer.step(batch, settings.lr)
        synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    slowest = float(mesh.world.allreduce(np.array([median]), "max")[0])
    flops = config.step_flops(settings.global_batch) / slowest
    peak = statistics.median(rates)
    return {
        "ranks": mesh.size,
        "mesh": f"{settings.dp} x {settings.pp} x {settings.tp}",
        "blas_threads": threads,
        "parameters": config.parameters,
        "step_seconds": slowest,
        "tokens_per_second": tokens.size / slowest,
        "flops_per_second": flops,
        "matmul_flops_per_second": peak,
        "share": flops / peak,
    }
