"""A job of ranks: how a command gets its mesh, and how all ranks end when one of them cannot go on.

A mistake of the user's (`UserError`) is found before arrays are sent, and agreed on; rank 0 prints
one line and all ranks exit with status 2. Any other exception ends all ranks: the first rank that
fails prints its traceback with its mesh coordinates, and aborts the job with status 1.

MPI is imported by what needs it, for the commands that work where there is none.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from mpiparallel.errors import OneLineError


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


def end_in_one_line(error: OneLineError) -> int:
    """Rank 0 prints the one line; all ranks end with its status. Every rank calls: a launcher may
    end the job when the first rank exits, so they wait until the line is out."""
    if rank_in_world() == 0:
        print(f"mpiparallel: error: {error}", file=sys.stderr, flush=True)
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Barrier()
    return error.status


def rank_in_world() -> int:
    """This process's rank in the world; 0 where it runs alone or where there is no MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.rank
