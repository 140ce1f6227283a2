"""The simulator agrees with the closed forms of the papers, exactly."""

from fractions import Fraction
from itertools import product

import pytest

from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.action import Schedule, ScheduleError
from mpiparallel.pipeline.simulate import simulate

# (F, I, W): what the papers draw, and numbers that nothing cancels out of.
EQUAL = (12, 12, 12)
LATE_BACKWARD = (24, 36, 12)
ANY = [EQUAL, LATE_BACKWARD, (12, 24, 36)]
SIZES = list(product(range(1, 9), range(1, 17)))


def run(name, ranks, micro_batches, durations, stages=None, message=0):
    forward, input_gradient, weight_gradient = durations
    return simulate(
        schedules.build(name, ranks, micro_batches, stages),
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        message=message,
    )


def idle(timeline):
    return timeline.cost - timeline.work


@pytest.mark.parametrize("durations", ANY)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_have_the_bubble_of_the_papers(name, durations):
    for p, m in SIZES:
        timeline = run(name, p, m, durations)
        assert timeline.bubble == Fraction(p - 1, m + p - 1)
        assert timeline.bubble_of_ideal == Fraction(p - 1, m)
        assert timeline.makespan == timeline.cost == (m + p - 1) * sum(durations)


@pytest.mark.parametrize("durations", ANY)
@pytest.mark.parametrize("name", ["interleaved", "breadth-first"])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_looped_schedules_divide_the_bubble_by_the_stages_per_rank(name, v, durations):
    for p, m in SIZES:
        timeline = run(name, p, m, durations, v)
        assert timeline.cost * v == ((v - 1) * max(m, p) + m + p - 1) * sum(durations)
        if m >= p:
            assert timeline.bubble == Fraction(p - 1, v * m + p - 1)
            assert timeline.bubble_of_ideal == Fraction(p - 1, v * m)


@pytest.mark.parametrize(("f", "i", "w"), [EQUAL, LATE_BACKWARD, (36, 24, 12), (12, 24, 12)])
@pytest.mark.parametrize(
    ("name", "limit"), [("zb-h1", lambda p: p), ("zb-h2", lambda p: 2 * p - 1)]
)
def test_zb_h1_and_zb_h2_idle_what_the_paper_says(name, limit, f, i, w):
    for p, m in SIZES:
        timeline = run(name, p, m, (f, i, w))
        assert idle(timeline) == (p - 1) * (f + i) - (min(m, limit(p)) - 1) * w
        if m >= limit(p):
            paper = f + i - w if name == "zb-h1" else f + i - 2 * w
            assert idle(timeline) == (p - 1) * paper


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_and_zb_h2_none():
    for p in range(2, 9):
        one = idle(run("1f1b", p, 16, EQUAL))
        assert idle(run("zb-h1", p, 16, EQUAL)) * 3 == one
        assert run("zb-h2", p, 16, EQUAL).bubble == 0


def test_zb_v_idles_nothing_from_2p_minus_1_micro_batches_on():
    for p, m in SIZES:
        timeline = run("zb-v", p, m, EQUAL)
        assert idle(timeline) == max(0, 2 * p - 1 - m) * EQUAL[0]
        assert (timeline.bubble == 0) == (m >= 2 * p - 1)


def test_dualpipe_v_idles_half_of_what_fused_blocks_idle():
    for p, m in SIZES:
        if m >= 2 * p:
            assert idle(run("dualpipe-v", p, m, EQUAL)) * 2 == (p - 1) * EQUAL[0]


@pytest.mark.parametrize(("f", "i", "w"), [EQUAL, LATE_BACKWARD, (36, 36, 24)])
def test_dualpipe_v_with_fused_pairs_idles_what_is_published(f, i, w):
    both, backward = f + i + w, i + w
    for p in range(1, 9):
        for m in (2 * p, 2 * p + 1, 3 * p):
            cost = cost_with_fused_pairs(schedules.build("dualpipe-v", p, m), f, i, w)
            assert cost - 2 * m * both == (p - 1) * (both + backward - 3 * w)


def cost_with_fused_pairs(schedule, f, i, w):
    """Where a forward is followed by a whole backward of the rank's other stage, the two start when
    the inputs of both are there, and their results are there when both are through. In the times
    of one stage."""
    duration = {"F": f, "I": i, "W": w, "B": i + w}
    last = len(schedule.placement) - 1
    blocks = []
    for actions in schedule.actions:
        blocks.append([])
        for action in actions:
            before = blocks[-1][-1] if blocks[-1] else ()
            alone = len(before) == 1 and before[0].kind == "F"
            if action.kind == "B" and alone and before[0].stage != action.stage:
                blocks[-1][-1] = (*before, action)
            else:
                blocks[-1].append((action,))
    ends, clocks, starts = {}, [0] * schedule.ranks, [None] * schedule.ranks
    while any(blocks):
        for rank, todo in enumerate(blocks):
            needs = {need for action in todo[0] for need in action.needs(last)} if todo else {0}
            if needs <= ends.keys():
                start = max([clocks[rank], *(ends[need] for need in needs)])
                starts[rank] = start if starts[rank] is None else starts[rank]
                clocks[rank] = start + sum(duration[action.kind] for action in todo[0])
                ends.update({action.result: clocks[rank] for action in todo.pop(0)})
    return max(end - start for start, end in zip(starts, clocks, strict=True))


def test_v_schedules_start_backward_on_rank_0_and_end_there_sooner():
    # With one micro-batch everything waits for everything: two trips, and the last weight gradient.
    assert run("zb-v", 4, 1, (1, 1, 1)).makespan == 4 + 4 + Fraction(1, 2) + Fraction(1, 2)


def test_messages_take_time_between_ranks_only():
    # One micro-batch, two ranks: F, message, F, B, message, B.
    timeline = run("1f1b", 2, 1, (1, 1, 1), message=Fraction(1, 2))
    assert timeline.makespan == 1 + Fraction(1, 2) + 1 + 2 + Fraction(1, 2) + 2
    assert timeline.bubble == Fraction(7 - 3, 7)
    assert [[(str(a), start, end) for a, start, end in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0B0", 5, 7)],
        [("1F0", Fraction(3, 2), Fraction(5, 2)), ("1B0", Fraction(5, 2), Fraction(9, 2))],
    ]
    alone = run("zb-v", 1, 3, (1, 1, 1), message=100)
    assert alone.makespan == 9


def test_the_cost_is_the_longest_span_of_a_rank_and_the_makespan_goes_over_all():
    timeline = run("zb-h2", 4, 8, (1, 1, 1))
    assert timeline.cost == 24
    assert timeline.makespan == 27


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_action_starts_as_early_as_it_can_and_never_earlier(name):
    message = Fraction(1, 4)
    timeline = run(name, 4, 6, (2, 3, 1), message=message)
    placement = timeline.schedule.placement
    stages = len(placement) // 4
    # An input gradient is there at the end of an I or a B.
    ends = {
        (a.kind, a.stage, a.micro_batch): end for spans in timeline.spans for a, _, end in spans
    }
    for rank, spans in enumerate(timeline.spans):
        free = 0
        for action, start, end in spans:
            s, i = action.stage, action.micro_batch
            earliest = [free]
            if action.kind == "F" and s > 0:
                earliest.append(ends["F", s - 1, i] + message * (placement[s - 1] != rank))
            if action.kind in "BI":
                earliest.append(ends["F", s, i])
                if s + 1 < len(placement):
                    arrived = ends.get(("I", s + 1, i), ends.get(("B", s + 1, i)))
                    earliest.append(arrived + message * (placement[s + 1] != rank))
            if action.kind == "W":
                earliest.append(ends["I", s, i])
            assert start == max(earliest)
            assert end - start == Fraction({"F": 2, "I": 3, "W": 1, "B": 4}[action.kind], stages)
            free = end


def test_floats_are_taken_as_they_are():
    timeline = run("1f1b", 4, 8, (0.02, 0.02, 0.02))
    assert timeline.bubble == pytest.approx(3 / 11)


def test_ranks_that_wait_in_a_circle_are_refused():
    schedule = schedules.build("1f1b", 2, 2)
    stuck = tuple(tuple(reversed(actions)) for actions in schedule.actions)
    with pytest.raises(ScheduleError, match="rank 0 cannot run 0B1"):
        simulate(Schedule("test", 2, 2, (0, 1), stuck))


def test_throughput_grows_with_micro_batches_as_measured_on_hardware():
    # Qi et al. 2023, 1.5B parameters on 8 A100s: samples/GPU/s of 1F1B at m = 24, 32, 64. The ratio
    # of two throughputs is the ratio of (1 - bubble).
    measured = {24: 11.8, 32: 12.5, 64: 13.6}
    busy = {m: 1 - run("1f1b", 8, m, EQUAL).bubble for m in measured}
    for m in (32, 64):
        assert float(busy[m] / busy[24]) == pytest.approx(measured[m] / measured[24], rel=0.02)
