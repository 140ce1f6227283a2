"""What recording a timeline costs: steps with and without it in turn, in one run.

    mpirun -n 4 python scripts/trace_cost.py

Prints the medians of both and of the ratios of neighbours, and what an entry takes.
"""

import itertools
import statistics
import time

import numpy as np
from mpi4py import MPI

from mpiparallel import settings as settings_module
from mpiparallel.comm.trace import Trace
from mpiparallel.data import Batch
from mpiparallel.mesh import Mesh
from mpiparallel.settings import Settings
from mpiparallel.train import Trainer

WORLD = MPI.COMM_WORLD
PAIRS, VOCABULARY = 60, 65


def main() -> None:
    pp, tp = (2, 2) if WORLD.size % 4 == 0 else (1, 1)
    settings = settings_module.check(Settings(pp=pp, tp=tp, global_batch=16), WORLD.size)
    assert settings.dp is not None
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (2, settings.global_batch, settings.seq_len))
    batch = Batch(tokens[0], tokens[1], tokens[0].size)
    with Mesh(settings.dp, pp, tp) as mesh:
        mesh.limit_blas_threads()
        trainer = Trainer(settings, settings.model_config(VOCABULARY), mesh)
        trainer.step(batch, 1e-3)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        entries = 0
        for pair in range(PAIRS):
            for traced in (pair % 2 == 0, pair % 2 == 1):
                trace = mesh.watch.trace = Trace() if traced else None
                WORLD.Barrier()
                start = time.perf_counter()
                trainer.step(batch, 1e-3)
                seconds[traced].append(time.perf_counter() - start)
                entries = len(trace.entries) if trace else entries
        mesh.watch.trace = Trace()
        start = time.perf_counter()
        for _ in itertools.repeat(None, 10_000):
            mesh.watch.worked("F", start, start)
        each = (time.perf_counter() - start) / 10_000
    if WORLD.rank == 0:
        plain, recorded = statistics.median(seconds[False]), statistics.median(seconds[True])
        ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
        print(
            f"a step takes {1e3 * plain:.2f} ms, {1e3 * recorded:.2f} ms recorded; median ratio "
            f"{ratio:.3f}\n{entries} entries of {1e6 * each:.2f} us: {entries * each / plain:.2%} "
            f"of the step"
        )


if __name__ == "__main__":
    main()
