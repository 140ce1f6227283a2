"""The command `schedule`: what it prints, draws and refuses."""

import argparse
import json
import subprocess
import sys

import pytest

from mpiparallel.errors import UserError
from mpiparallel.pipeline import command, schedules
from mpiparallel.pipeline.simulate import simulate
from mpiparallel.report.schedule_plot import draw_schedules
from mpiparallel.report.schedule_view import show_schedule


def parse(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def schedule(capsys):
    def run(*arguments):
        assert command.run(parse(*arguments)) == 0
        return capsys.readouterr().out

    return run


def test_the_picture_and_the_numbers_of_a_small_schedule(schedule):
    text = schedule("--schedule", "zb-h1", "--stages", "3", "--micro-batches", "4")
    assert text.startswith(
        """\
zb-h1: 3 pipeline ranks of 1 stage, 4 micro-batches

        0              5              10
rank 0  F0 F1 F2 ......I0 W0 F3 I1 W1 I2 W2 I3 W3
rank 1     F0 F1 ...I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

F forward   I backward, input gradient   W backward, weight gradient   . idle
the number is the micro-batch

bubble    14.3% of the whole time, 16.7% of the ideal time m(F+I+W)
cost      14, makespan 14
messages  16
"""
    )
    assert "bubble = (cost - m(F+I+W)) / cost, the idle share of the whole time" in text


def test_second_stages_of_a_rank_are_in_lower_case(schedule):
    text = schedule("--schedule", "zb-v", "--stages", "2", "--micro-batches", "3")
    assert "rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2\n" in text
    assert "lower case is the second of a rank's 2 stages\n" in text


def test_whole_backwards_are_twice_as_wide(schedule):
    text = schedule("--schedule", "1f1b", "--stages", "2", "--micro-batches", "2")
    assert "rank 0  F0 F1 ......B0--- ...B1---\nrank 1     F0 B0--- F1 B1---\n" in text


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (4, 8), (8, 16), (3, 120)])
def test_the_picture_fits_and_shows_every_action(name, ranks, micro_batches):
    timeline = simulate(schedules.build(name, ranks, micro_batches))
    text = show_schedule(timeline, width=110, colour=False)
    assert max(map(len, text.splitlines())) <= 110
    for rank, spans in enumerate(timeline.spans):
        lines = [line for line in text.splitlines() if line.startswith(f"rank {rank} ")]
        row = "".join(line[len("rank 0  ") :] for line in lines)
        letters = "".join(letter for letter in row if letter.isalpha())
        assert letters.upper() == "".join(action.kind for action, _, _ in spans)


def test_actions_far_shorter_than_others_do_not_stretch_the_picture():
    timeline = simulate(schedules.build("zb-h1", 4, 8), weight_gradient=0.001, message=0.01)
    lines = show_schedule(timeline, width=110, colour=False).splitlines()
    assert len(lines) < 30
    rows = [line for line in lines if line.startswith("rank ")]
    assert "I7" in rows[0]
    assert not any("W" in row for row in rows)  # no column for a thousandth of a forward


def test_colour_changes_nothing_but_colour():
    timeline = simulate(schedules.build("dualpipe-v", 2, 4))
    coloured = show_schedule(timeline, width=110, colour=True)
    assert "\033[48;5;25;38;5;231mF0" in coloured
    for kind, background in (("B", 30), ("I", 37), ("W", 28)):
        assert f"\033[48;5;{background};38;5;231m {kind} \033[0m" in coloured
    first = coloured.splitlines()[3]
    plain = "".join(part.partition("m")[2] for part in ("m" + first).split("\033["))
    assert plain.rstrip() == show_schedule(timeline, width=110, colour=False).splitlines()[3]


def test_json_is_one_object_with_the_rows_that_scripts_rely_on(schedule):
    printed = schedule("--schedule", "zb-v", "--stages", "4", "--micro-batches", "8", "--json")
    assert json.loads(printed)["rows"] == [
        {
            "schedule": "zb-v",
            "stages": 4,
            "stages_per_rank": 2,
            "micro_batches": 8,
            "bubble": 0.0,
            "makespan": 25.5,
            "messages": 96,
            "peak_activations": [4.0, 4.0, 4.0, 4.0],
        }
    ]


def test_compare_shows_all_eight(schedule):
    arguments = ("--compare", "--stages", "4", "--micro-batches", "8")
    rows = json.loads(schedule(*arguments, "--json"))["rows"]
    assert [(row["schedule"], round(row["bubble"], 4)) for row in rows] == [
        ("gpipe", 0.2727),
        ("1f1b", 0.2727),
        ("interleaved", 0.1579),
        ("breadth-first", 0.1579),
        ("zb-h1", 0.1111),
        ("zb-h2", 0.0),
        ("zb-v", 0.0),
        ("dualpipe-v", 0.0588),
    ]
    text = schedule(*arguments)
    assert (
        "1f1b                     1   27.3%     37.5%        33        48          4    3" in text
    )
    assert "the idle share of the whole time" in text


def test_compare_gives_stages_per_rank_to_those_that_take_any(schedule):
    rows = json.loads(schedule("--compare", "--stages-per-rank", "3", "--json"))["rows"]
    assert [row["stages_per_rank"] for row in rows] == [1, 1, 3, 3, 1, 1, 2, 2]


def test_durations_are_exact(schedule):
    durations = ["--forward", "1/3", "--input-gradient", "0.1", "--weight-gradient", "2e-1"]
    printed = schedule("--schedule", "1f1b", *durations, "--json")
    assert json.loads(printed)["rows"][0]["bubble"] == 3 / 11


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_picture(schedule, tmp_path, suffix):
    path = tmp_path / f"picture.{suffix}"
    schedule("--schedule", "dualpipe-v", "--plot", str(path))
    head = path.read_bytes()[:300]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in head or b"<?xml" in head


def test_the_picture_has_a_box_and_a_number_for_every_action():
    names = ["1f1b", "zb-v"]
    timelines = [simulate(schedules.build(name, 2, 12)) for name in names]
    figure = draw_schedules(timelines)
    for axes, timeline, name in zip(figure.axes, timelines, names, strict=True):
        actions = [action for spans in timeline.spans for action, _, _ in spans]
        assert len(axes.patches) == len(actions) + 2  # and the grey bubble of each rank
        assert [text.get_text() for text in axes.texts] == [str(a.micro_batch) for a in actions]
        assert axes.get_title(loc="left").startswith(f"{name}     bubble ")
        grey, *boxes = axes.patches[: 1 + len(timeline.spans[0])]
        assert (grey.get_x(), grey.get_width()) == (0, timeline.spans[0][-1][2])
        for box, (_, start, end) in zip(boxes, timeline.spans[0], strict=True):
            assert (box.get_x(), box.get_y(), box.get_width()) == (start, -0.5, end - start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "0"], "--stages 0: legal: 1 or more"),
        (["--micro-batches", "-1"], "--micro-batches -1: legal: 1 or more"),
        (["--schedule", "zb-v", "--stages-per-rank", "3"], "--stages-per-rank 3: .*legal: 2"),
        (["--plot", "no/such/folder/x.png"], "--plot no/such/folder/x.png: cannot be written"),
        (["--plot", "x.what"], "--plot x.what: cannot be written .*png"),
    ],
)
def test_mistakes_are_refused_with_the_setting_and_legal_values(arguments, message):
    with pytest.raises(UserError, match=f"^{message}"):
        command.run(parse(*arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--forward", "0"], "--forward: 0: legal: a number above 0"),
        (["--forward", "-1"], "--forward: -1: legal: a number above 0"),
        (["--message", "-0.5"], "--message: -0.5: legal: a number of 0 or more"),
        (["--weight-gradient", "nan"], "--weight-gradient: nan: legal: a number above 0"),
        (["--schedule", "pipedream"], "--schedule: invalid choice: 'pipedream'"),
    ],
)
def test_mistakes_that_the_parser_finds(arguments, message):
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(*arguments)


def test_the_command_needs_neither_mpi_nor_numpy_nor_matplotlib():
    program = (
        "import argparse, sys\n"
        "from mpiparallel.pipeline import command\n"
        "parser = argparse.ArgumentParser()\n"
        "command.add_arguments(parser)\n"
        "command.run(parser.parse_args(['--compare']))\n"
        "loaded = {'mpi4py', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
