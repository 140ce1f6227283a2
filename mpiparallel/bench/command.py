"""`bench {matmul,allreduce,step,pipeline}`: parse, measure on every rank, print the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from mpiparallel import backend
from mpiparallel import settings as settings_module
from mpiparallel.errors import UserError
from mpiparallel.pipeline import schedules
from mpiparallel.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmarks as subcommands. Each sets `base`, the settings it starts from,
    `measure(arguments, mesh, settings)` -> dict, and `table(dict)` -> str, what is printed."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    def add(name: str, help: str, measure, base: Settings, flags: list[str]):
        command = benchmarks.add_parser(name, help=help)
        settings_module.add_arguments(command, [*flags, "timeout"], base)
        command.add_argument("--json", action="store_true", help="one JSON object, nothing else")
        command.set_defaults(measure=measure, base=base, table=_table)
        return command

    add(
        "matmul",
        "matrix products of all ranks at the same time",
        _matmul,
        Settings(),
        ["dtype", "backend"],
    )

    allreduce = add(
        "allreduce",
        "our all-reduces beside MPI's, from 8 bytes to 64 MiB, on all ranks",
        _allreduce,
        Settings(),
        ["dtype", "backend"],
    )
    allreduce.add_argument(
        "--bytes", type=int, nargs="+", metavar="N", help="sizes to measure instead"
    )
    allreduce.set_defaults(table=_allreduce_table)

    mesh = ["dp", "pp", "tp", "schedule", "stages_per_rank", "micro_batches"]
    model = ["layers", "heads", "hidden", "feed_forward", "seq_len", "global_batch"]
    add(
        "step",
        "a training step, as a share of the matmul rate",
        _step,
        Settings(layers=6, heads=6, hidden=384, seq_len=256, global_batch=8, steps=5),
        [*mesh, *model, "steps", "dtype", "backend", "allreduce"],
    )

    pipeline = add(
        "pipeline",
        "the bubble of a schedule over all ranks, with sleep for compute",
        _pipeline,
        Settings(micro_batches=8, steps=3),
        ["schedule", "stages_per_rank", "micro_batches", "steps", "backend"],
    )
    for flag, value in (("forward", 20.0), ("backward", 40.0)):
        pipeline.add_argument(
            f"--{flag}-ms",
            type=float,
            default=value,
            metavar="MS",
            help=f"a rank's whole {flag} of a micro-batch (default {value:g})",
        )


def prepare(arguments: argparse.Namespace, rank: int, ranks: int) -> tuple[Settings]:
    """The checked settings of a benchmark. Raises UserError."""
    settings = settings_module.from_arguments(arguments, base=arguments.base)
    if arguments.benchmark == "allreduce":
        for size in arguments.bytes or ():
            if size < 1:
                raise UserError(f"--bytes {size}: legal: 1 or more")
        settings = dataclasses.replace(settings, dp=ranks, global_batch=ranks)
    if arguments.benchmark == "pipeline":
        for flag in ("forward_ms", "backward_ms"):
            if not 0 < getattr(arguments, flag) < 1e6:
                raise UserError(
                    f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: legal: more than 0"
                )
        stages = len(schedules.placement(settings.schedule, ranks, settings.stages_per_rank))
        assert settings.micro_batches is not None
        settings = dataclasses.replace(
            settings, pp=ranks, layers=stages, global_batch=settings.micro_batches
        )
    return (settings_module.check(settings, ranks),)


def measure(arguments: argparse.Namespace, mesh, settings: Settings) -> None:
    """Measure on every rank, print on rank 0."""
    result: dict[str, Any] = arguments.measure(arguments, mesh, settings)
    if mesh.rank != 0:
        return
    result["backend"] = backend.current().name
    if arguments.json:
        print(json.dumps(result))
    else:
        print(backend.current().reason)
        print(arguments.table(result))


def _matmul(arguments: argparse.Namespace, mesh, settings: Settings) -> dict[str, Any]:
    from mpiparallel.bench.matmul import matmul_peak

    threads = mesh.limit_blas_threads()
    rate = matmul_peak(mesh, settings.dtype, seconds=2.0)
    return {
        "ranks": mesh.size,
        "dtype": settings.dtype,
        "blas_threads": threads,
        "matmul_flops_per_second": rate,
    }


def _allreduce(arguments: argparse.Namespace, mesh, settings: Settings) -> dict[str, Any]:
    from mpiparallel.bench.allreduce import SIZES, measure_allreduce

    return measure_allreduce(mesh, settings.dtype, arguments.bytes or SIZES)


def _allreduce_table(result: dict[str, Any]) -> str:
    from mpiparallel.bench.allreduce import table

    return table(result)


def _step(arguments: argparse.Namespace, mesh, settings: Settings) -> dict[str, Any]:
    from mpiparallel.bench.step import measure_step

    return measure_step(mesh, settings)


def _pipeline(arguments: argparse.Namespace, mesh, settings: Settings) -> dict[str, Any]:
    from mpiparallel.bench.pipeline import measure_pipeline

    return measure_pipeline(mesh, settings, arguments.forward_ms, arguments.backward_ms)


def _table(result: dict[str, Any]) -> str:
    return "\n".join(f"{name:<26}{_human(value)}" for name, value in result.items())


def _human(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"
    return "as the environment says" if value is None else str(value)
