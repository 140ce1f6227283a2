"""Watch: what every rank is doing, for the moment when nothing moves any more.

A rank whose wait has lasted for --timeout seconds asks all others what they do. Ranks that wait
answer between two polls; one that does not answer is computing, or has stopped. The answers make
a table:

    rank  dp pp tp  doing                               waiting for
       0   0  0  0  step 3, stage 0, micro-batch 1, B   irecv on axis pp from pp 1, 5.0 s
       1   0  1  0  no answer: computing, or stopped

Questions and answers travel on a communicator of their own, past everything that hangs.
"""

from __future__ import annotations

import json
import time
from typing import Any

from mpi4py import MPI

from mpiparallel.comm.trace import Entry, Trace

_ASK, _ANSWER = 1, 2
ANSWER_SECONDS = 2.0  # how long to wait for answers
LOOK_SECONDS = 0.05  # how often a rank that waits looks for questions


class Watch:
    """One rank's part. All Groups of a Mesh share one; all ranks of the Mesh make it together.

    step, action : what the rank is doing, kept up to date by the trainer and the executor.
    waiting : the operation that it waits for, and since when; kept up to date by `Pending.wait`.
    trace : where what it does is recorded, while it is.
    """

    def __init__(self, communicator: MPI.Intracomm | None = None, coordinates: Any = ()):
        self.communicator = communicator.Dup() if communicator else None
        self.coordinates = list(coordinates)
        self.step: int | None = None
        self.action: Any = None
        self.waiting: tuple[str, float] | None = None
        self.trace: Trace | None = None

    def worked(self, what: str, start: float, end: float) -> None:
        """Record work that the rank has done, if a trace is being kept."""
        if self.trace is not None:
            self.trace.add(Entry(what, "", start, end, self.step, self.action))

    def free(self) -> None:
        """Give the communicator back. All ranks call it."""
        if self.communicator:
            self.communicator.Free()

    def answer(self) -> None:
        """Answer whoever has asked. Called by a rank that waits."""
        comm, status = self.communicator, MPI.Status()
        while comm and comm.Iprobe(MPI.ANY_SOURCE, _ASK, status):
            comm.Recv(bytearray(1), status.source, _ASK)
            comm.Isend(json.dumps(self.state()).encode(), status.source, _ANSWER).Free()

    def state(self) -> dict[str, Any]:
        """What this rank says when it is asked."""
        doing = [] if self.step is None else [f"step {self.step}"]
        if self.action is not None:
            action = self.action
            doing.append(f"stage {action.stage}, micro-batch {action.micro_batch}, {action.kind}")
        waiting = ""
        if self.waiting:
            what, since = self.waiting
            waiting = f"{what}, {time.perf_counter() - since:.1f} s"
        return {"at": self.coordinates, "doing": ", ".join(doing), "waiting": waiting}

    def table(self) -> str:
        """Ask all ranks, wait ANSWER_SECONDS for the answers, and put them in a table. One rank,
        or several, may call; the others need only be waiting."""
        comm = self.communicator
        if comm is None:
            return ""
        answers = {comm.rank: self.state()}
        for rank in range(comm.size):
            if rank != comm.rank:
                comm.Isend(b"?", rank, _ASK).Free()
        status, start = MPI.Status(), time.perf_counter()
        while len(answers) < comm.size and time.perf_counter() - start < ANSWER_SECONDS:
            self.answer()
            if comm.Iprobe(MPI.ANY_SOURCE, _ANSWER, status):
                text = bytearray(status.Get_count(MPI.BYTE))
                comm.Recv(text, status.source, _ANSWER)
                answers[status.source] = json.loads(text)
            time.sleep(0.001)
        return _table(answers, comm.size)


def _table(answers: dict[int, dict[str, Any]], ranks: int) -> str:
    doing = [answers[rank]["doing"] for rank in answers]
    width = max(map(len, [*doing, "doing"]))
    lines = [f"rank  dp pp tp  {'doing':<{width}}  waiting for"]
    for rank in range(ranks):
        if rank not in answers:
            lines.append(f"{rank:>4}   ?  ?  ?  no answer: computing, or stopped")
            continue
        state = answers[rank]
        at = " ".join(f"{axis:>2}" for axis in state["at"])
        lines.append(f"{rank:>4}  {at}  {state['doing']:<{width}}  {state['waiting'] or 'nothing'}")
    return "\n".join(lines)
