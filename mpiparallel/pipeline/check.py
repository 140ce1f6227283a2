"""The checker: proves of any list of actions that it is a training step that can run.

1. Complete: every stage runs F of every micro-batch once, and either B once or I and W once, on the
   rank that owns the stage, and nothing else runs.
2. In order: no rank runs an action before what it needs, and the ranks do not wait in a circle.
3. Free of deadlock when every send blocks until its receive is posted: the lists of
   `derive_messages` are executed step by step under that rule, the hardest that MPI may apply.
4. As small as stated: no rank ever holds other peak activations than the schedule's closed form.

Each failure is a ScheduleError that names the rank, the action and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpiparallel.pipeline.action import KINDS, Action, Schedule, ScheduleError
from mpiparallel.pipeline.messages import (
    Message,
    Operation,
    PostReceive,
    Send,
    WaitReceive,
    derive_messages,
)
from mpiparallel.pipeline.simulate import peak_activations


def check(schedule: Schedule, stated_peaks: Sequence[int] | None = None) -> None:
    """Raise ScheduleError unless all of the above holds.

    stated_peaks[rank] : the peak in stages' activations, as `schedules.stated_peaks` gives it.
    None leaves point 4 out.
    """
    check_complete(schedule)
    check_order(schedule)
    check_messages(derive_messages(schedule))
    if stated_peaks is not None:
        check_peaks(schedule, stated_peaks)


def check_complete(schedule: Schedule) -> None:
    """Point 1."""
    stages, owner = len(schedule.placement), schedule.placement
    if len(schedule.actions) != schedule.ranks or set(owner) != set(range(schedule.ranks)):
        raise ScheduleError(
            f"{schedule.ranks} ranks, but lists for {len(schedule.actions)} and stages on ranks "
            f"{sorted(set(owner))}"
        )
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in KINDS:
                raise ScheduleError(f"rank {rank}: {action} is none of {', '.join(KINDS)}")
            if not (
                0 <= action.stage < stages and 0 <= action.micro_batch < schedule.micro_batches
            ):
                raise ScheduleError(
                    f"rank {rank}: {action} is outside of {stages} stages and "
                    f"{schedule.micro_batches} micro-batches"
                )
            if owner[action.stage] != rank:
                raise ScheduleError(
                    f"rank {rank}: {action} belongs to rank {owner[action.stage]}, which owns "
                    f"stage {action.stage}"
                )
            if action in seen:
                raise ScheduleError(f"rank {rank}: {action} runs twice")
            seen.add(action)
    for stage, rank in enumerate(owner):
        for micro_batch in range(schedule.micro_batches):
            f, b, i, w = (Action(kind, stage, micro_batch) for kind in KINDS)
            if f not in seen:
                raise ScheduleError(f"rank {rank}: {f} is missing")
            if b in seen and (i in seen or w in seen):
                half = i if i in seen else w
                raise ScheduleError(f"rank {rank}: {b} and its half {half} both run")
            if b not in seen and i not in seen:
                raise ScheduleError(f"rank {rank}: {b} is missing, or {i} and {w}")
            if b not in seen and w not in seen:
                raise ScheduleError(f"rank {rank}: {w} is missing, and {i} is only half of {b}")


def check_order(schedule: Schedule) -> None:
    """Point 2, within each rank; `derive_messages` finds ranks that wait in a circle."""
    last = len(schedule.placement) - 1
    for rank, actions in enumerate(schedule.actions):
        made: set[tuple[str, int, int]] = set()
        for action in actions:
            for need in action.needs(last):
                kind, stage, micro_batch = need
                if schedule.placement[stage] == rank and need not in made:
                    raise ScheduleError(
                        f"rank {rank}: {action} runs before {stage}{kind}{micro_batch}, "
                        f"which it needs"
                    )
            made.add(action.result)


def check_messages(lists: Sequence[Sequence[Operation]]) -> None:
    """Point 3: execute the ranks' lists with sends that block until their receive is posted.

    Also: every receive is posted before it is waited for, and every message is sent once, posted
    once and waited for once, by the ranks that it names.
    """
    posted: set[Message] = set()
    sent: set[Message] = set()
    waited: set[Message] = set()
    positions = [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, operations in enumerate(lists):
            for operation in operations[positions[rank] :]:
                if not isinstance(operation, Action):
                    _check_place(rank, operation, posted, sent, waited)
                match operation:
                    case PostReceive(message):
                        posted.add(message)
                    case WaitReceive(message):
                        if message not in sent:
                            break
                        waited.add(message)
                    case Send(message):
                        if message not in posted:
                            break
                        sent.add(message)
                positions[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} waits in {_describe(operations, at)}"
        for rank, (at, operations) in enumerate(zip(positions, lists, strict=True))
        if at < len(operations)
    ]
    if stuck:
        raise ScheduleError("deadlock: " + "; ".join(stuck))
    for message in posted - waited:
        raise ScheduleError(
            f"rank {message.receiver}: {message} is posted and never waited for"
            + ("" if message in sent else f", and rank {message.sender} never sends it")
        )


def check_peaks(schedule: Schedule, stated: Sequence[int]) -> None:
    """Point 4."""
    unit = schedule.stages_per_rank
    for rank, (peak, wanted) in enumerate(zip(peak_activations(schedule), stated, strict=True)):
        if peak * unit != wanted:
            raise ScheduleError(
                f"rank {rank}: holds the activations of {peak * unit} stages and micro-batches "
                f"at its peak; {schedule.name} states {wanted}"
            )


def _check_place(rank: int, operation, posted: set, sent: set, waited: set) -> None:
    """Each operation on the right rank, once, and a wait after its post."""
    message = operation.message
    right = message.sender if isinstance(operation, Send) else message.receiver
    done = {PostReceive: posted, WaitReceive: waited, Send: sent}[type(operation)]
    name = type(operation).__name__
    if rank != right:
        raise ScheduleError(f"rank {rank}: {name} of {message} belongs to rank {right}")
    if message in done:
        raise ScheduleError(f"rank {rank}: {name} of {message} comes twice")
    if isinstance(operation, WaitReceive) and message not in posted:
        raise ScheduleError(f"rank {rank}: waits for {message} before the receive is posted")


def _describe(operations: Sequence[Operation], at: int) -> str:
    """The operation a rank stands at, and the action that it belongs to."""
    operation = operations[at]
    assert isinstance(operation, Send | WaitReceive)
    message = operation.message
    if isinstance(operation, Send):
        before = [entry for entry in operations[:at] if isinstance(entry, Action)]
        after = f" after {before[-1]}" if before else ""
        return f"Send of {message} to rank {message.receiver}{after}"
    action = next((entry for entry in operations[at:] if isinstance(entry, Action)), "its end")
    return f"WaitReceive of {message} from rank {message.sender} before {action}"
