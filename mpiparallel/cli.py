"""The command line: which command with which settings. How a job of ranks ends is in `job`.

Commands import what they need when they run, so that `schedule` works where no MPI is installed
and eight ranks do not load eight times what none of them uses.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NoReturn

from mpiparallel.errors import OneLineError, UserError
from mpiparallel.job import end_in_one_line, rank_in_world, run_on_mesh


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors: the caller knows which rank may print."""

    def __init__(self, **more):
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def print_help(self, file=None) -> None:
        if rank_in_world() == 0:
            super().print_help(file)


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status. The `mpiparallel` script and `python -m mpiparallel`."""
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            raise UserError(
                f"unknown argument {unknown[0]}; see `mpiparallel {arguments.command} -h`"
            )
        return arguments.run(arguments)
    except OneLineError as error:
        return end_in_one_line(error)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mpiparallel", description="Hybrid parallelism, readable: data x pipeline x tensor."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("train", help="train a GPT on a text, on any dp x pp x tp mesh")
    command.add_argument("--config", metavar="FILE.toml", help="settings from a file; flags win")
    from mpiparallel import settings

    settings.add_arguments(command)
    command.set_defaults(run=_train)

    command = commands.add_parser("generate", help="sample text from a checkpoint, on any mesh")
    command.add_argument("--checkpoint", required=True, metavar="DIR", help="a run or a checkpoint")
    command.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from")
    command.add_argument("--tokens", type=int, default=300, help="how many to sample (default 300)")
    command.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest (default 0.8)"
    )
    settings.add_arguments(command, ["dp", "pp", "tp", "seed", "dtype", "backend", "timeout"])
    command.set_defaults(run=_generate)

    command = commands.add_parser("export", help="a checkpoint as one file in GPT-2's names")
    command.add_argument("checkpoint", metavar="DIR", help="a run or a checkpoint")
    command.add_argument("file", metavar="FILE", help="model.safetensors; config.json goes beside")
    command.set_defaults(run=_export)

    command = commands.add_parser("import", help="a GPT-2 of Hugging Face as a checkpoint")
    command.add_argument("file", metavar="FILE", help="model.safetensors, with config.json beside")
    command.add_argument("out", metavar="DIR", help="folder that the checkpoint goes under")
    command.set_defaults(run=_import)

    command = commands.add_parser(
        "schedule", help="print or draw a pipeline schedule; needs no MPI"
    )
    from mpiparallel.pipeline import command as schedule_command

    schedule_command.add_arguments(command)
    command.set_defaults(run=schedule_command.run)

    command = commands.add_parser("report", help="pictures of a finished run; needs no MPI")
    from mpiparallel.report import command as report_command

    report_command.add_arguments(command)
    command.set_defaults(run=report_command.run)

    command = commands.add_parser("doctor", help="what is here, and what of it will hurt")
    from mpiparallel import doctor

    doctor.add_arguments(command)
    command.set_defaults(run=_doctor)

    command = commands.add_parser("bench", help="measure this machine")
    from mpiparallel.bench import command as bench_command

    bench_command.add_arguments(command)
    command.set_defaults(run=_bench)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from mpiparallel import settings as settings_module

    def prepare(rank: int, ranks: int):
        from mpiparallel.data import ByteTokenizer, CharTokenizer, Corpus, read_text
        from mpiparallel.report.run import make_folder

        settings = settings_module.from_arguments(arguments, arguments.config)
        settings = settings_module.check(settings, ranks)
        checkpoint = None
        if settings.resume:
            checkpoint = _find_checkpoint(settings.resume, "--resume")
            settings_module.check_resume(settings, *checkpoint)
        text = read_text(settings.data)
        tokenizer: Any
        if checkpoint:
            tokenizer = checkpoint[1].tokenizer
        elif settings.tokenizer == "bytes":
            tokenizer = ByteTokenizer()
        else:
            tokenizer = CharTokenizer("".join(sorted(set(text))))
        corpus = Corpus(tokenizer.encode(text), settings.seq_len)
        config = settings.model_config(tokenizer.vocabulary)
        if checkpoint:
            settings_module.check_model(config, checkpoint[1].config, settings.resume)
        if rank == 0:
            make_folder(settings)
        return settings, config, corpus, tokenizer, checkpoint

    def run(mesh, settings, config, corpus, tokenizer, checkpoint) -> None:
        from mpiparallel.train import train

        if checkpoint and mesh.rank == 0:
            print(f"going on from {checkpoint[0]}", flush=True)
        train(settings, config, corpus, tokenizer, mesh, checkpoint)

    return run_on_mesh(prepare, run)


def _find_checkpoint(path: str, flag: str):
    """The folder and the manifest of the checkpoint that a flag names. Raises UserError."""
    from mpiparallel.checkpoint.files import find
    from mpiparallel.checkpoint.manifest import read_manifest

    def warn(text: str) -> None:
        if rank_in_world() == 0:
            print(f"mpiparallel: warning: {text}", file=sys.stderr, flush=True)

    folder = find(path, flag, warn)
    return folder, read_manifest(folder)


def _generate(arguments: argparse.Namespace) -> int:
    from mpiparallel import settings as settings_module

    def prepare(rank: int, ranks: int):
        import dataclasses

        if arguments.tokens < 1:
            raise UserError(f"--tokens {arguments.tokens}: legal: 1 or more")
        if not 0 <= arguments.temperature < float("inf"):
            raise UserError(f"--temperature {arguments.temperature}: legal: 0 or more")
        folder, manifest = _find_checkpoint(arguments.checkpoint, "--checkpoint")
        config, tokenizer = manifest.config, manifest.tokenizer
        settings = dataclasses.replace(
            settings_module.from_arguments(arguments),
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            feed_forward=config.feed_forward,
            seq_len=config.sequence,
        )
        # The batch is one sequence, the same on every replica.
        settings = dataclasses.replace(settings, global_batch=ranks, micro_batches=1)
        settings = settings_module.check(settings, ranks)
        prompt = tokenizer.encode(arguments.prompt or tokenizer.start)
        return settings, folder, manifest, prompt

    def run(mesh, settings, folder, manifest, prompt) -> None:
        from mpiparallel import backend
        from mpiparallel.checkpoint.load import load, verify
        from mpiparallel.checkpoint.trainer_state import model_pieces
        from mpiparallel.comm.agree import agree
        from mpiparallel.generate import generate
        from mpiparallel.model import GPT
        from mpiparallel.pipeline.executor import Executor

        mesh.limit_blas_threads()
        tokenizer, placement = manifest.tokenizer, tuple(range(mesh.pp.size))
        agree(mesh.world, partial(verify, folder, manifest, mesh.rank, mesh.size))
        model = GPT(manifest.config, mesh.tp, placement, mesh.pp.rank)
        model.allocate(settings.dtype)
        agree(mesh.world, partial(load, folder, manifest, model_pieces(model)))
        drawn = generate(
            Executor(model, mesh.pp, settings.dtype),
            mesh,
            placement,
            prompt,
            tokens=arguments.tokens,
            vocabulary=tokenizer.vocabulary,
            temperature=arguments.temperature,
            seed=settings.seed,
        )
        if mesh.rank == 0:
            print(backend.current().reason, file=sys.stderr, flush=True)
            print(arguments.prompt, end="", flush=True)
        for text in tokenizer.stream(drawn):
            if mesh.rank == 0:
                print(text, end="", flush=True)
        if mesh.rank == 0:
            print()

    return run_on_mesh(prepare, run)


def _export(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mpiparallel.settings import Settings

    def prepare(rank: int, ranks: int):
        return Settings(dp=ranks), *_find_checkpoint(arguments.checkpoint, "export")

    def run(mesh, settings, folder, manifest) -> None:
        from mpiparallel.checkpoint.gpt2 import export
        from mpiparallel.checkpoint.load import verify
        from mpiparallel.comm.agree import agree

        agree(mesh.world, partial(verify, folder, manifest, mesh.rank, mesh.size))
        file = Path(arguments.file)
        agree(mesh.world, lambda: export(folder, manifest, file) if mesh.rank == 0 else None)
        if mesh.rank == 0:
            print(f"{folder} written to {file} and {file.parent / 'config.json'}")

    return run_on_mesh(prepare, run)


def _import(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from mpiparallel.settings import Settings

    def prepare(rank: int, ranks: int):
        from mpiparallel.checkpoint.gpt2 import read

        return Settings(dp=ranks), read(Path(arguments.file)) if rank == 0 else None

    def run(mesh, settings, found) -> None:
        from mpiparallel.checkpoint.boxes import Box, Piece
        from mpiparallel.checkpoint.files import step_folder
        from mpiparallel.checkpoint.save import save

        folder = step_folder(Path(arguments.out), 0)
        config, tokenizer, arrays = found or (None, None, {})
        pieces = [
            Piece(name, array.shape, Box((0,) * array.ndim, array.shape), array, owned=True)
            for name, array in arrays.items()
        ]
        save(
            folder,
            pieces,
            mesh.world,
            keep=0,
            step=0,
            seed=settings.seed,
            optimizer_steps=0,
            mesh={"dp": 1, "pp": 1, "tp": 1},
            config=config,
            tokenizer=tokenizer,
        )
        if config:
            print(f"{arguments.file}: {config.parameters:,} parameters, imported to {folder}")

    return run_on_mesh(prepare, run)


def _doctor(arguments: argparse.Namespace) -> int:
    from mpiparallel import doctor

    return run_on_mesh(partial(doctor.prepare, arguments), partial(doctor.run, arguments))


def _bench(arguments: argparse.Namespace) -> int:
    from mpiparallel.bench import command

    return run_on_mesh(partial(command.prepare, arguments), partial(command.measure, arguments))
