"""The command line: which command, which settings, and how a process ends.

A mistake of the user's (`UserError`) is found on every rank before arrays are sent; rank 0 prints
one line and all ranks exit with status 2. Any other exception ends all ranks: the first rank that
fails prints its traceback with its mesh coordinates, and aborts the job with status 1.

Commands import what they need when they run, so that `schedule` works where no MPI is installed
and eight ranks do not load eight times what none of them uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from mpiparallel.errors import UserError


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
    except UserError as error:
        return _refuse(error)


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

    command = commands.add_parser(
        "schedule", help="print or draw a pipeline schedule; needs no MPI"
    )
    from mpiparallel.pipeline import command as schedule_command

    schedule_command.add_arguments(command)
    command.set_defaults(run=schedule_command.run)

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
        text = read_text(settings.data)
        bytes_wanted = settings.tokenizer == "bytes"
        tokenizer = ByteTokenizer() if bytes_wanted else CharTokenizer("".join(sorted(set(text))))
        corpus = Corpus(tokenizer.encode(text), settings.seq_len)
        config = settings.model_config(tokenizer.vocabulary)
        if rank == 0:
            make_folder(settings)
        return settings, config, corpus, tokenizer

    def run(mesh, settings, config, corpus, tokenizer) -> None:
        from mpiparallel.train import train

        train(settings, config, corpus, tokenizer, mesh)

    return run_on_mesh(prepare, run)


def _generate(arguments: argparse.Namespace) -> int:
    from mpiparallel import settings as settings_module

    def prepare(rank: int, ranks: int):
        import dataclasses

        from mpiparallel import checkpoint

        if arguments.tokens < 1:
            raise UserError(f"--tokens {arguments.tokens}: legal: 1 or more")
        if not 0 <= arguments.temperature < float("inf"):
            raise UserError(f"--temperature {arguments.temperature}: legal: 0 or more")
        folder = checkpoint.find(arguments.checkpoint)
        config, tokenizer = checkpoint.read_description(folder)
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
        return settings, config, tokenizer, folder, prompt

    def run(mesh, settings, config, tokenizer, folder, prompt) -> None:
        from mpiparallel import backend, checkpoint
        from mpiparallel.generate import generate
        from mpiparallel.model import GPT
        from mpiparallel.pipeline.executor import Executor

        mesh.limit_blas_threads()
        placement = tuple(range(mesh.pp.size))
        model = GPT(config, mesh.tp, placement, mesh.pp.rank)
        agree(mesh.world.communicator, partial(checkpoint.load, folder, model, settings.dtype))
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
    from mpiparallel.mesh import Mesh

    world = MPI.COMM_WORLD
    failure = FirstFailure(world)
    where = f"rank {world.rank}"
    try:
        prepared = agree(world, partial(prepare, world.rank, world.size))
        settings = prepared[0]
        agree(world, partial(choice.choose, settings.backend, world))
        with Mesh(settings.dp, settings.pp, settings.tp, timeout=settings.timeout) as mesh:
            where = f"rank {mesh.rank} ({mesh.coordinates})"
            run(mesh, *prepared)
        return 0
    except EveryRanksError:
        raise
    except BaseException as error:
        full = backend.current().out_of_memory(error)
        what = f"{where}: {full}" if full else f"{where} failed:\n{traceback.format_exc()}"
        failure.end_all_ranks(f"mpiparallel: {what}")
    finally:
        failure.forget()


class EveryRanksError(UserError):
    """A mistake that all ranks know of, so that all can end in good order."""


def agree(world, find: Callable):
    """find() of this rank. Where it raises UserError on any rank, all ranks raise the error of the
    lowest such rank. Every rank of `world` calls; only the messages of errors are sent."""
    mistake, found = None, None
    try:
        found = find()
    except UserError as error:
        mistake = str(error)
    mistakes = [text for text in world.allgather(mistake) if text is not None]
    if mistakes:
        raise EveryRanksError(mistakes[0])
    return found


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
        self.world.Abort(1)
        os._exit(1)

    def forget(self) -> None:
        """The job ended well: the lowest rank of the node removes the token."""
        if self.leads and os.path.exists(self.path):
            os.unlink(self.path)


def _refuse(error: UserError) -> int:
    """Rank 0 prints the one line; all ranks end with status 2. Every rank calls: a launcher may end
    the job when the first rank exits, so they wait until the line is out."""
    if _rank() == 0:
        print(f"mpiparallel: error: {error}", file=sys.stderr, flush=True)
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Barrier()
    return 2


def _rank() -> int:
    """This process's rank in the world; 0 where it runs alone or where there is no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.rank
