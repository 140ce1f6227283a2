"""Messages follow from the actions: the right ones, between the right ranks, posted in time."""

from itertools import product

import pytest

from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.action import Action, Schedule, ScheduleError
from mpiparallel.pipeline.check import check, check_messages
from mpiparallel.pipeline.messages import (
    Message,
    PostReceive,
    Send,
    WaitReceive,
    derive_messages,
)


def messages(lists, kind):
    return [entry.message for operations in lists for entry in operations if type(entry) is kind]


def test_two_ranks_one_micro_batch_word_for_word():
    activation = Message("activation", 1, 0, sender=0, receiver=1)
    gradient = Message("gradient", 0, 0, sender=1, receiver=0)
    assert derive_messages(schedules.build("1f1b", 2, 1)) == (
        (
            Action("F", 0, 0),
            PostReceive(gradient),
            Send(activation),
            WaitReceive(gradient),
            Action("B", 0, 0),
        ),
        (
            PostReceive(activation),
            WaitReceive(activation),
            Action("F", 1, 0),
            Action("B", 1, 0),
            Send(gradient),
        ),
    )


def test_the_input_gradient_is_sent_before_the_weight_gradient_is_computed():
    last_rank = derive_messages(schedules.build("zb-h1", 2, 1))[1]
    assert [type(entry) if isinstance(entry, Send) else str(entry) for entry in last_rank[-3:]] == [
        "1I0",
        Send,
        "1W0",
    ]


@pytest.mark.parametrize(
    ("name", "boundaries"),
    [
        ("gpipe", lambda p: p - 1),
        ("zb-h2", lambda p: p - 1),
        ("interleaved", lambda p: 2 * p - 1 if p > 1 else 0),
        ("zb-v", lambda p: 2 * (p - 1)),  # the last rank's two stages need no message
    ],
)
def test_one_message_per_boundary_micro_batch_and_direction(name, boundaries):
    for ranks, micro_batches in product((1, 2, 5), (1, 4)):
        lists = derive_messages(schedules.build(name, ranks, micro_batches))
        sent = messages(lists, Send)
        assert len(sent) == len(set(sent)) == 2 * micro_batches * boundaries(ranks)
        for kind in ("activation", "gradient"):
            assert sum(message.kind == kind for message in sent) == len(sent) // 2


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)])
def test_forward_only_sends_activations_and_cannot_deadlock(placement):
    lists = derive_messages(schedules.forward_only(5, placement))
    check_messages(lists)
    assert {message.kind for message in messages(lists, Send)} == {"activation"}


@pytest.mark.parametrize(
    ("name", "buffers"), [("gpipe", 2), ("1f1b", 2), ("zb-h1", 2), ("zb-v", 3)]
)
def test_few_buffers_stand_ready_at_a_time(name, buffers):
    most = 0
    for operations in derive_messages(schedules.build(name, 8, 16)):
        ready = 0
        for entry in operations:
            ready += isinstance(entry, PostReceive) - isinstance(entry, WaitReceive)
            most = max(most, ready)
    assert most == buffers


def test_a_message_that_nobody_uses_is_refused():
    schedule = Schedule("test", 2, 1, (0, 1), ((Action("F", 0, 0),), ()))
    with pytest.raises(
        ScheduleError, match="rank 0: 0F0 makes the activation of micro-batch 0 for"
    ):
        derive_messages(schedule)


# What `check_messages` refuses: the lists of 1F1B on two ranks, broken in one place.


def lists_of_1f1b():
    return [list(operations) for operations in derive_messages(schedules.build("1f1b", 2, 3))]


def move(operations, entry, before):
    operations.remove(entry)
    operations.insert(operations.index(before), entry)


def test_receives_that_are_posted_only_when_they_are_waited_for_deadlock(monkeypatch):
    lists = lists_of_1f1b()
    for operations in lists:
        for entry in [entry for entry in operations if isinstance(entry, PostReceive)]:
            move(operations, entry, WaitReceive(entry.message))
    message = (
        "deadlock: rank 0 waits in Send of the activation of micro-batch 1 for stage 1 to rank 1 "
        "after 0F1; rank 1 waits in Send of the gradient of micro-batch 0 for stage 0 to rank 0 "
        "after 1B0"
    )
    with pytest.raises(ScheduleError, match=message):
        check_messages(lists)
    monkeypatch.setattr("mpiparallel.pipeline.check.derive_messages", lambda schedule: lists)
    with pytest.raises(ScheduleError, match=message):
        check(schedules.build("1f1b", 2, 3))


def test_a_receive_that_is_never_sent_deadlocks():
    lists = lists_of_1f1b()
    lists[0].remove(Send(Message("activation", 1, 2, 0, 1)))
    with pytest.raises(
        ScheduleError, match="rank 1 waits in WaitReceive of the activation of micr"
    ):
        check_messages(lists)


def test_a_wait_before_its_post_is_refused():
    lists = lists_of_1f1b()
    message = Message("gradient", 0, 1, 1, 0)
    move(lists[0], WaitReceive(message), before=PostReceive(message))
    with pytest.raises(ScheduleError, match="rank 0: waits for the gradient of micro-batch 1 for"):
        check_messages(lists)


def test_a_receive_that_nobody_waits_for_is_refused():
    lists = lists_of_1f1b()
    lists[0].remove(WaitReceive(Message("gradient", 0, 2, 1, 0)))
    with pytest.raises(ScheduleError, match=r"rank 0: the gradient .* is posted and never waited"):
        check_messages(lists)
    lists[1].remove(Send(Message("gradient", 0, 2, 1, 0)))
    with pytest.raises(ScheduleError, match="never waited for, and rank 1 never sends it"):
        check_messages(lists)


@pytest.mark.parametrize("kind", [Send, WaitReceive, PostReceive])
def test_an_operation_that_comes_twice_or_on_the_wrong_rank_is_refused(kind):
    message = Message("gradient", 0, 2, 1, 0)
    rank = 1 if kind is Send else 0
    lists = lists_of_1f1b()
    lists[rank].append(kind(message))
    with pytest.raises(ScheduleError, match=f"rank {rank}: {kind.__name__} of .* comes twice"):
        check_messages(lists)
    lists = lists_of_1f1b()
    lists[1 - rank].append(kind(message))
    with pytest.raises(ScheduleError, match=f"rank {1 - rank}: .* belongs to rank {rank}"):
        check_messages(lists)
