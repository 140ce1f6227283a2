"""From actions to messages: what each pipeline rank sends and receives, and when it is ready to.

Neighbouring stages on different ranks exchange one message per micro-batch and direction:

    stage s-1                stage s
       F  --- activation -->    F
      B,I <--- gradient ----   B,I

Around its actions a rank's list then holds `PostReceive` (a buffer is ready, nothing waits),
`WaitReceive` just before the action that uses the message, and `Send` just after the action that
makes it.

When is a receive posted? Let all ranks work in rounds: in each, every rank runs its next action if
earlier rounds made its inputs. A message that is made in round t has its receive posted after the
last action that its receiver runs before round t, ahead of that action's sends. That is early
enough for sends that block until the receive is posted: once the rounds before t are through,
sends included, the actions of round t have their inputs and their sends have their receives, so
round t gets through as well. And it is late enough: no buffer stands ready before the neighbour
starts on what fills it. So a message can arrive while its receiver computes, at the price of two
buffers, one in use and one ready, where a rank has messages to use at the rate that they come.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeAlias

from mpiparallel.pipeline.action import Action, Schedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Message:
    """What a stage gets from its neighbour for one micro-batch.

    kind : "activation" (the input of its forward) or "gradient" (of its output).
    stage : the stage that receives it. sender, receiver : pipeline ranks.
    """

    kind: str
    stage: int
    micro_batch: int
    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"the {self.kind} of micro-batch {self.micro_batch} for stage {self.stage}"


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Have a buffer ready for the message; does not wait."""

    message: Message


@dataclass(frozen=True, slots=True)
class WaitReceive:
    """Wait until the message is in its buffer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send what the last action made."""

    message: Message


Operation: TypeAlias = Action | PostReceive | WaitReceive | Send


def derive_messages(schedule: Schedule) -> tuple[tuple[Operation, ...], ...]:
    """Per pipeline rank: the actions of the schedule, in their order, with their messages.

    Neighbouring stages on one rank hand their arrays over without a message. Raises ScheduleError
    where the actions wait for each other in a circle, or a message has no action that uses it.
    """
    rounds = run_in_rounds(schedule)
    # posts[rank][k] : receives that rank posts after its action k-1, by the round that makes them.
    posts: list[dict[int, list[tuple[int, Message]]]] = [{} for _ in schedule.actions]
    received = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            message = incoming(action, schedule.placement)
            if message:
                made = rounds[action.needs(len(schedule.placement) - 1)[0]]
                before = bisect_left(actions, made, key=lambda other: rounds[other.result])
                posts[rank].setdefault(before, []).append((made, message))
                received.add(message)

    lists = []
    for rank, actions in enumerate(schedule.actions):
        operations: list[Operation] = []
        for position in range(len(actions) + 1):
            send: Message | None = None
            if position > 0:
                action = actions[position - 1]
                message = incoming(action, schedule.placement)
                operations += [WaitReceive(message)] if message else []
                operations.append(action)
                send = outgoing(action, schedule.placement)
                if send and send not in received:
                    raise ScheduleError(
                        f"rank {rank}: {action} makes {send}, but rank {send.receiver} has no "
                        f"action that uses it"
                    )
            due = sorted(posts[rank].get(position, []), key=lambda entry: entry[0])
            operations += [PostReceive(message) for _, message in due]
            operations += [Send(send)] if send else []
        lists.append(tuple(operations))
    return tuple(lists)


def incoming(action: Action, placement: tuple[int, ...]) -> Message | None:
    """The message that the action waits for, if it needs one."""
    stage, last = action.stage, len(placement) - 1
    if action.kind == "F" and stage > 0:
        kind, source = "activation", stage - 1
    elif action.kind in "BI" and stage < last:
        kind, source = "gradient", stage + 1
    else:
        return None
    if placement[source] == placement[stage]:
        return None
    return Message(kind, stage, action.micro_batch, placement[source], placement[stage])


def outgoing(action: Action, placement: tuple[int, ...]) -> Message | None:
    """The message that carries the action's result away, if another rank waits for it."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind)
    if step is None or not 0 <= action.stage + step < len(placement):
        return None
    return incoming(Action(action.kind, action.stage + step, action.micro_batch), placement)


def run_in_rounds(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """In which round each result is made, when every rank runs one action per round or waits.

    Raises ScheduleError where the ranks come to wait for each other, naming who waits for what.
    """
    last = len(schedule.placement) - 1
    rounds: dict[tuple[str, int, int], int] = {}
    positions = [0] * len(schedule.actions)
    number = 0
    while any(at < len(todo) for at, todo in zip(positions, schedule.actions, strict=True)):
        ready = []
        for rank, actions in enumerate(schedule.actions):
            if positions[rank] < len(actions):
                action = actions[positions[rank]]
                if all(need in rounds for need in action.needs(last)):
                    ready.append((rank, action))
        if not ready:
            raise ScheduleError("; ".join(_stuck(schedule, positions, rounds)))
        for rank, action in ready:
            rounds[action.result] = number
            positions[rank] += 1
        number += 1
    return rounds


def _stuck(schedule: Schedule, positions: list[int], made: dict) -> list[str]:
    """For each rank that cannot go on: its next action, and what that waits for."""
    last = len(schedule.placement) - 1
    lines = []
    for rank, (at, actions) in enumerate(zip(positions, schedule.actions, strict=True)):
        if at < len(actions):
            kind, stage, micro_batch = next(n for n in actions[at].needs(last) if n not in made)
            lines.append(
                f"rank {rank} cannot run {actions[at]}: it needs {stage}{kind}{micro_batch}, "
                f"which rank {schedule.placement[stage]} has not run"
            )
    return lines
