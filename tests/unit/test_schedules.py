"""Pipeline schedules are complete, can run, hold what they state, and are those of the papers."""

from dataclasses import replace
from itertools import product

import pytest

from mpiparallel.errors import UserError
from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.action import Action, Schedule, ScheduleError
from mpiparallel.pipeline.check import check


def sizes(name):
    """All (ranks, micro-batches, stages per rank) that are tested."""
    only = schedules.FAMILIES[name].stages_per_rank
    return product(range(1, 9), range(1, 17), [only] if only else [1, 2, 3, 4])


def actions(text):
    return tuple(Action.parse(word) for word in text.split())


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_schedule_is_complete_free_of_deadlock_and_holds_what_it_states(name):
    for ranks, micro_batches, stages in sizes(name):
        schedule = schedules.build(name, ranks, micro_batches, stages)
        check(schedule, schedules.stated_peaks(name, ranks, micro_batches, stages))
        assert schedule.stages_per_rank == stages


def test_an_action_prints_and_parses():
    assert str(Action("F", 0, 1)) == "0F1"
    assert Action.parse("12W34") == Action("W", 12, 34)
    for text in ("F1", "0F", "0X1", "-1F0", "0F1 ", ""):
        with pytest.raises(ValueError, match="is not an action"):
            Action.parse(text)


# The figures of the papers, or their rule carried out by hand for fewer ranks; counted from 0.


def test_one_f_one_b_is_the_papers():
    lists = schedules.build("1f1b", 4, 8).actions
    assert lists[0] == actions("0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7")
    assert lists[3] == actions("3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7")


def test_interleaved_is_the_papers():
    lists = schedules.build("interleaved", 2, 4, 2).actions
    assert lists[0] == actions("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")
    assert lists[1] == actions("1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3")


def test_breadth_first_takes_all_micro_batches_through_a_stage():
    assert schedules.build("breadth-first", 2, 2, 2).actions[1] == actions(
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
    )


def test_zb_h1_and_zb_h2_are_the_papers():
    lists = schedules.build("zb-h1", 4, 8).actions
    assert lists[0][:12] == actions("0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2")
    assert lists[3][:12] == actions("3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1")
    lists = schedules.build("zb-h2", 4, 8).actions
    assert lists[0][:10] == actions("0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7")
    assert lists[3][-9:] == actions("3F7 3I7 3W1 3W2 3W3 3W4 3W5 3W6 3W7")


def test_zb_v_runs_down_and_up_again():
    schedule = schedules.build("zb-v", 3, 5)
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    assert schedule.actions[0][:8] == actions("0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0")
    assert schedule.actions[2][:6] == actions("2F0 3F0 2F1 3F1 2F2 3F2")


def test_looped_placement_deals_stages_out_in_turns():
    assert schedules.placement("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert schedules.placement("gpipe", 3) == (0, 1, 2)


def test_interleaved_with_one_stage_per_rank_is_1f1b():
    assert schedules.build("interleaved", 4, 6, 1).actions == schedules.build("1f1b", 4, 6).actions


def test_breadth_first_with_one_stage_per_rank_is_gpipe():
    assert (
        schedules.build("breadth-first", 4, 6, 1).actions == schedules.build("gpipe", 4, 6).actions
    )


def test_aliases_of_the_zero_bubble_repository():
    assert schedules.build("zb1p", 3, 4) == schedules.build("zb-h1", 3, 4)
    assert schedules.build("zb2p", 3, 4) == schedules.build("zb-h2", 3, 4)


@pytest.mark.parametrize(
    ("name", "times_1f1b"),
    [("zb-h1", lambda p: 1), ("zb-v", lambda p: 1), ("zb-h2", lambda p: (2 * p - 1) / p)],
)
def test_peak_activations_relative_to_1f1b(name, times_1f1b):
    for ranks in range(1, 9):
        highest = max(schedules.stated_peaks("1f1b", ranks, 16))
        stages = schedules.build(name, ranks, 16).stages_per_rank
        peaks = schedules.stated_peaks(name, ranks, 16)
        assert {peak / stages for peak in peaks} == {times_1f1b(ranks) * highest}


def test_interleaving_multiplies_peak_activations_as_the_paper_says():
    for p, v in product(range(1, 9), (2, 3, 4)):
        peak = schedules.stated_peaks("interleaved", p, 2 * p, v)[0]
        assert peak / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_forward_only_visits_every_stage_in_model_order():
    schedule = schedules.forward_only(2, (0, 1, 1, 0))
    assert schedule.actions == (actions("0F0 0F1 3F0 3F1"), actions("1F0 1F1 2F0 2F1"))


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("1f1", None, "--schedule 1f1: legal: gpipe, 1f1b, interleaved, breadth-first, zb-h1"),
        ("1f1b", 2, "--stages-per-rank 2: not with --schedule 1f1b; legal: 1"),
        ("zb-v", 1, "--stages-per-rank 1: not with --schedule zb-v; legal: 2"),
        ("dualpipe-v", 3, "--stages-per-rank 3: not with --schedule dualpipe-v; legal: 2"),
        ("interleaved", 0, "--stages-per-rank 0: not with --schedule interleaved; legal: 1 or"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_legal_ones(name, stages, message):
    with pytest.raises(UserError, match=f"^{message}"):
        schedules.build(name, 4, 8, stages)
    with pytest.raises(UserError, match=f"^{message}"):
        schedules.placement(name, 4, stages)


def test_no_ranks_and_no_micro_batches_are_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        schedules.build("gpipe", 0, 1)
    with pytest.raises(ValueError, match="0 micro-batches"):
        schedules.build("gpipe", 1, 0)


# The checker refuses what is broken. Two ranks, two micro-batches, one stage each.

GOOD = ("0F0 0F1 0I0 0W0 0B1", "1F0 1B0 1F1 1I1 1W1")


def two_ranks(first, second):
    return Schedule("test", 2, 2, (0, 1), (actions(first), actions(second)))


def test_a_good_schedule_passes():
    check(two_ranks(*GOOD), stated_peaks=[2, 1])


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, " 0F1", "", "rank 0: 0F1 is missing"),
        (1, " 1B0", "", "rank 1: 1B0 is missing, or 1I0 and 1W0"),
        (0, " 0W0", "", "rank 0: 0W0 is missing, and 0I0 is only half of 0B0"),
        (0, " 0I0", "", "rank 0: 0B0 is missing, or 0I0 and 0W0"),
        (0, " 0B1", " 0B1 0W1", "rank 0: 0B1 and its half 0W1 both run"),
        (1, " 1B0", " 1B0 1B0", "rank 1: 1B0 runs twice"),
        (1, " 1B0", " 1B0 0B0", "rank 1: 0B0 belongs to rank 0, which owns stage 0"),
        (1, " 1F1", " 1F1 1F2", "rank 1: 1F2 is outside of 2 stages and 2 micro-batches"),
        (1, " 1F1", " 1F1 2F1", "rank 1: 2F1 is outside of 2 stages and 2 micro-batches"),
        (1, "1F0 1B0", "1B0 1F0", "rank 1: 1B0 runs before 1F0, which it needs"),
        (0, "0I0 0W0", "0W0 0I0", "rank 0: 0W0 runs before 0I0, which it needs"),
    ],
)
def test_a_broken_schedule_is_refused_by_rank_and_action(rank, old, new, message):
    lists = list(GOOD)
    assert old in lists[rank]
    lists[rank] = lists[rank].replace(old, new)
    with pytest.raises(ScheduleError, match=f"^{message}"):
        check(two_ranks(*lists))


def test_ranks_that_wait_in_a_circle_are_refused():
    # Rank 0 wants the gradient of micro-batch 0 before it sends the activation of 1; rank 1 wants
    # the activation of 1 first.
    circle = two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    message = (
        "rank 0 cannot run 0B0: it needs 1I0, which rank 1 has not run; "
        "rank 1 cannot run 1F1: it needs 0F1, which rank 0 has not run"
    )
    with pytest.raises(ScheduleError, match=message):
        check(circle)


def test_neighbours_on_one_rank_in_the_wrong_order_are_refused():
    schedule = Schedule("test", 1, 1, (0, 0), (actions("0F0 1F0 0B0 1B0"),))
    with pytest.raises(ScheduleError, match="rank 0: 0B0 runs before 1I0, which it needs"):
        check(schedule)


def test_an_action_of_no_known_kind_is_refused():
    lists = two_ranks(*GOOD).actions
    broken = replace(two_ranks(*GOOD), actions=((Action("X", 0, 0), *lists[0]), lists[1]))
    with pytest.raises(ScheduleError, match="rank 0: 0X0 is none of F, B, I, W"):
        check(broken)


def test_a_list_too_few_and_a_rank_without_stages_are_refused():
    good = two_ranks(*GOOD)
    with pytest.raises(ScheduleError, match=r"2 ranks, but lists for 1 and stages on ranks \[0, 1"):
        check(replace(good, actions=good.actions[:1]))
    with pytest.raises(ScheduleError, match=r"2 ranks, but lists for 2 and stages on ranks \[0\]"):
        check(replace(good, placement=(0, 0)))


@pytest.mark.parametrize("stated", [[1, 1], [3, 1]])
def test_a_wrong_statement_of_peak_activations_is_refused(stated):
    with pytest.raises(ScheduleError, match=f"^rank 0: holds .* 2 .*; test states {stated[0]}"):
        check(two_ranks(*GOOD), stated)
