"""The command line: which command, which settings, and how a process ends.

A mistake of the user's (`UserError`) is found before arrays are sent, and agreed on; rank 0 prints
one line and all ranks exit with status 2. Any other exception ends all ranks: the first rank that
fails prints its traceback with its mesh coordinates, and aborts the job with status 1.

Commands import what they need when they run, so that `schedule` works where no MPI is installed
and eight ranks do not load eight times what none of them uses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from mpiparallel.errors import OneLineError, UserError


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors: the caller knows which rank may print."""

    def __init__(self, **more):
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def print_help(self, file=None) -> None:
        if _rank() == 0:
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
        return _end(error)


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
        if _rank() == 0:
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


def run_on_mesh(prepare: Callable, run: Callable) -> int:
    """Run a command that needs ranks.

    prepare(rank, ranks) -> (settings, ...) finds the user's mistakes on every rank, and sends
    nothing. Where one finds any all ranks end with status 2. Then run(mesh, settings, ...) on the
    mesh and the backend that the settings ask for. A full GPU is said in one line, status 1.
    """
    from mpi4py import MPI

    from mpiparallel import backend
    from mpiparallel.backend import choice
    from mpiparallel.comm.agree import agree
    from mpiparallel.comm.group import Group
    from mpiparallel.mesh import Mesh

    world = Group(MPI.COMM_WORLD.Dup(), "world")
    failure = FirstFailure(MPI.COMM_WORLD)
    where = world.where
    try:
        prepared = agree(world, partial(prepare, world.rank, world.size))
        settings = prepared[0]
        agree(world, partial(choice.choose, settings.backend, world.communicator))
        with Mesh(settings.dp, settings.pp, settings.tp, timeout=settings.timeout) as mesh:
            where = mesh.world.where
            run(mesh, *prepared)
        world.free()
        return 0
    except BaseException as error:
        if getattr(error, "agreed", False):
            world.free()
            raise
        hung = type(error).__name__ == "CommunicationTimeout"  # says where by itself, in a table
        full = backend.current().out_of_memory(error)
        if hung:
            what = f"error: {error}"
        elif full:
            what = f"error: {where}: {full}"
        else:
            what = f"{where} failed:\n{traceback.format_exc()}"
        failure.end_all_ranks(f"mpiparallel: {what}")
    finally:
        failure.forget()


class FirstFailure:
    """Lets the first rank of a node that fails speak, and no other.

    A token file stands in the temporary folder while the job runs. Who removes it may print: the
    system lets exactly one process do that.
    """

    def __init__(self, world):
        from mpi4py import MPI

        self.world = world
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        path = None
        if node.rank == 0:
            handle, path = tempfile.mkstemp(prefix="mpiparallel-")
            os.close(handle)
        self.path, self.leads = node.bcast(path), node.rank == 0
        node.Free()

    def end_all_ranks(self, text: str) -> NoReturn:
        """Print `text` on the first rank that comes here, and end the job with status 1."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            time.sleep(5)  # the rank that was first is ending this one
        else:
            print(text, file=sys.stderr, flush=True)
            _until_read(sys.stderr.fileno())
        self.world.Abort(1)
        os._exit(1)

    def forget(self) -> None:
        """The job ended well: the lowest rank of the node removes the token."""
        if self.leads and os.path.exists(self.path):
            os.unlink(self.path)


def _until_read(pipe: int) -> None:
    """Wait, at most 5 s, until the launcher has read all that was written to this pipe: MPICH's
    drops what is left there when a rank aborts the job (3 times in 25 on a quiet laptop)."""
    import fcntl
    import termios

    end = time.monotonic() + 5
    with contextlib.suppress(OSError):  # a file or a terminal: nobody has to read it
        while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))) and time.monotonic() < end:
            time.sleep(0.01)


def _end(error: OneLineError) -> int:
    """Rank 0 prints the one line; all ranks end with its status. Every rank calls: a launcher may
    end the job when the first rank exits, so they wait until the line is out."""
    if _rank() == 0:
        print(f"mpiparallel: error: {error}", file=sys.stderr, flush=True)
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Barrier()
    return error.status


def _rank() -> int:
    """This process's rank in the world; 0 where it runs alone or where there is no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.rank
