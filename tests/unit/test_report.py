"""`report`: its numbers against those of a run made by hand, its files, what it refuses."""

import json
import subprocess
import sys
from html.parser import HTMLParser

import handmade_run
import pytest

from mpiparallel.__main__ import main
from mpiparallel.report.timeline import Span, Step, innermost, read_trace, typical_step

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

SECTIONS = ["loss", "timeline", "step_time", "traffic", "matrix", "memory", "mesh"]
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path):
    handmade_run.write(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The folder of the run with its report, which nobody changes."""
    folder = tmp_path_factory.mktemp("report") / "run"
    handmade_run.write(folder)
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def refused(folder, capsys):
    """refused() runs `report` on the folder, and is the one line with which it refuses."""

    def run(path=folder):
        assert main(["report", str(path)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err

    return run


def test_the_seconds_of_every_rank_are_those_worked_out_by_hand():
    step = typical_step(handmade_run.trace())
    for rank, parts in enumerate(step.split()):
        expected = handmade_run.SPLIT[rank]
        assert {part: seconds * 1e3 for part, seconds in parts.items()} == pytest.approx(expected)


def test_the_seconds_of_every_rank_add_up_to_the_step():
    step = typical_step(handmade_run.trace())
    assert step.seconds == pytest.approx(0.104)
    for parts in step.split():
        assert sum(parts.values()) == pytest.approx(step.seconds)


def test_the_step_of_the_median_length_is_drawn():
    step = typical_step(handmade_run.trace())
    assert (step.number, step.first, step.last) == (7, 6, 8)


def test_communication_inside_compute_is_taken_out_of_it():
    forward = Span("compute", "F", 1.0, 5.0)
    sums = [Span("tp", "allreduce tp", 2.0, 2.5), Span("tp", "allreduce tp", 4.0, 5.0)]
    step = Step(1, 1, 1, 6.0, [[forward, *sums]], [[]])
    parts = step.split()[0]
    assert parts["compute"] == pytest.approx(2.5)
    assert parts["tp"] == pytest.approx(1.5)
    assert parts["other"] == pytest.approx(2.0)
    kinds = [piece.what for piece in innermost(step.spans[0], 6.0)]
    assert kinds == ["other", "compute", "tp", "compute", "tp", "other"]


def test_a_wait_that_ends_before_its_message_was_posted_is_all_bubble():
    # Clocks are aligned to some microseconds only, so a trace can say so.
    trace = handmade_run.trace()
    send = next(e for e in trace["traceEvents"] if e["name"] == "isend pp" and e["tid"] == 0)
    send["args"]["posted"] += 2.5e3
    step = typical_step(trace)
    assert step.split()[1]["pp"] == pytest.approx(0.001)
    assert step.split()[1]["bubble"] == pytest.approx(0.034)
    bubble = next(span for span in step.spans[1] if span.what == "bubble")
    assert bubble.end == pytest.approx(0.012)


def test_operations_on_an_axis_of_one_rank_are_left_out():
    trace = handmade_run.trace()
    forward = next(e for e in trace["traceEvents"] if e["name"] == "F stage 0 mb 0")
    details = {"step": handmade_run.STEP, "op": "allreduce", "axis": "tp", "bytes": 0}
    trace["traceEvents"].append({**forward, "name": "allreduce tp", "cat": "tp", "args": details})
    assert typical_step(trace).split()[0]["tp"] == 0


def test_messages_stand_where_they_were_posted():
    step = typical_step(handmade_run.trace())
    times = [[round(send.start * 1e3, 6) for send in sends] for sends in step.sends]
    assert times == [[10, 20], [42, 73], [11, 21], [43, 74]]


def test_the_report_of_a_traced_run_has_every_picture(reported):
    assert sorted(path.stem for path in (reported / "pictures").iterdir()) == sorted(SECTIONS)
    for path in (reported / "pictures").iterdir():
        assert path.read_bytes().startswith(PNG_HEAD)


def test_a_run_that_was_not_traced_says_how_to_get_the_missing_pictures(folder, capsys):
    (folder / "trace.json").unlink()
    (folder / "pictures").mkdir()
    (folder / "pictures" / "timeline.png").write_bytes(b"of an earlier report")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == (
        f"written to {folder}/report.html, and 5 pictures to {folder}/pictures\n"
    )
    left = {path.stem for path in (folder / "pictures").iterdir()}
    assert left == {*SECTIONS} - {"timeline", "step_time"}
    page = Page(folder)
    for section in ("timeline", "step_time"):
        assert "This run was not traced." in page.texts[section]
        assert (
            f"mpirun -n 4 python -m mpiparallel train --config {folder}/config.toml --trace 6-8"
            in page.texts[section]
        )


def test_the_head_and_the_table_show_the_numbers_of_the_run(reported):
    page = Page(reported)
    for fact in ("dp 2 × pp 2 × tp 1", "4 on 2 nodes", "1,100", "320 tokens/s", "25.0%", "33.3%"):
        assert fact in page.texts["head"]
    assert "dp allreduce 16,000 16,000 2,000 pp isend 6,400 6,400 800" in page.texts["traffic"]


def test_a_run_that_was_really_trained_gives_every_picture(mpiparallel, tmp_path):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    trained = mpiparallel(
        *[4, "train", "--dp", 2, "--pp", 2, "--schedule", "zb-h1", "--micro-batches", 2],
        *["--layers", 2, "--hidden", 16, "--heads", 4, "--seq-len", 8, "--global-batch", 4],
        *["--steps", 4, "--trace", "2-4", "--data", "text.txt", "--out", "run", "--sample", 0],
    )
    assert trained.status == 0, trained.err
    folder = tmp_path / "run"
    assert main(["report", str(folder)]) == 0
    assert {path.stem for path in (folder / "pictures").iterdir()} == {*SECTIONS}
    assert "≠" not in Page(folder).texts["traffic"]
    step = typical_step(read_trace(folder / "trace.json"))
    for parts in step.split():
        assert sum(parts.values()) == pytest.approx(step.seconds)
        assert parts["compute"] > 0
        assert parts["tp"] == 0
    kinds = {
        span.details["kind"] for spans in step.spans for span in spans if span.what == "compute"
    }
    assert kinds == {"F", "I", "W", "optimizer"}


def test_one_rank_sends_nothing(folder):
    summary = handmade_run.summary() | {"mesh": {"dp": 1, "pp": 1, "tp": 1}, "ranks": 1, "nodes": 1}
    summary["node_of_rank"] = [0]
    summary["laws"] = [{"axis": "dp", "op": "allreduce", "counted": 0, "formula": 0}]
    summary["bytes_between"] = {axis: [[0]] for axis in ("tp", "pp", "dp", "world")}
    summary["memory"] = {"parameters": [2000], "gradients": [2000], "optimizer": [4000]}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "trace.json").unlink()
    assert main(["report", str(folder)]) == 0
    page = Page(folder)
    assert "No rank sent anything." in page.texts["traffic"]
    assert "No rank sent anything." in page.texts["matrix"]
    drawn = {path.stem for path in (folder / "pictures").iterdir()}
    assert drawn == {"loss", "memory", "mesh"}


def test_bytes_that_differ_from_the_formula_are_marked(folder):
    summary = handmade_run.summary()
    summary["laws"][0] = {**summary["laws"][0], "formula": 15999}
    summary["laws"][1] = {**summary["laws"][1], "formula": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main(["report", str(folder)]) == 0
    text = Page(folder).texts["traffic"]
    assert "dp allreduce 16,000 ≠ 15,999" in text
    assert "pp isend 6,400 none" in text


def test_the_page_refers_to_nothing_outside_itself(reported):
    assert Page(reported).addresses == ["data:,"]  # the icon: none


@pytest.mark.parametrize(
    ("mesh", "labels"),
    [
        (
            {"dp": 1, "pp": 2, "tp": 2},
            [
                *["pipeline rank 0", "rank 0 · tp0", "rank 1 · tp1"],
                *["pipeline rank 1", "rank 2 · tp0", "rank 3 · tp1"],
            ],
        ),
        ({"dp": 1, "pp": 2, "tp": 1}, ["rank 0 · pp0", "rank 1 · pp1"]),
        ({"dp": 1, "pp": 1, "tp": 1}, ["rank 0"]),
    ],
)
def test_the_rows_of_the_timeline_are_grouped_by_pipeline_rank(mesh, labels):
    from mpiparallel.report import step_pictures

    ranks = mesh["pp"] * mesh["tp"]
    forward = Span("compute", "F", 0.0, 1.0, {"kind": "F"})
    step = Step(1, 1, 1, 1.0, [[forward]] * ranks, [[]] * ranks)
    chart = step_pictures.timeline(step, mesh).chart.to_dict()
    shown = chart["layer"][0]["encoding"]["y"]["axis"]["labelExpr"]
    assert shown.startswith(str(labels))


def test_a_mesh_whose_nodes_take_turns_has_a_box_around_each_rank():
    from mpiparallel.report import mesh_picture

    def boxes(node_of_rank):
        picture = mesh_picture.mesh(
            handmade_run.MESH, node_of_rank, handmade_run.BETWEEN, handmade_run.MEMORY
        )
        return [box["name"] for box in picture.chart.layer[0].data.values]

    assert boxes([0, 0, 1, 1]) == ["node 0", "node 1"]
    assert boxes([0, 1, 1, 0]) == ["node 0", "node 0", "node 1", "node 1"]


def test_a_folder_that_is_not_there(refused, tmp_path):
    assert f"{tmp_path}/nowhere: no such folder" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_a_file_that_is_missing(refused, folder, name):
    (folder / name).unlink()
    assert f"{folder / name}: is not there; legal: the folder of a finished run" in refused()


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_a_file_that_is_cut_short(refused, folder, name):
    (folder / name).write_text((folder / name).read_text()[:-3])
    assert f"{folder / name}: cannot be read" in refused()


def test_a_run_without_a_step(refused, folder):
    (folder / "metrics.jsonl").write_text("")
    assert "metrics.jsonl: has no step in it" in refused()


def test_a_summary_of_an_earlier_version(refused, folder):
    summary = handmade_run.summary()
    del summary["laws"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "summary.json: has no laws" in refused()


@pytest.mark.parametrize("text", ["[]", "{", '{"traceEvents": []}'])
def test_a_trace_that_is_none(refused, folder, text):
    (folder / "trace.json").write_text(text)
    assert "trace.json: not a trace of a training run" in refused()


def test_a_trace_that_lacks_a_message(refused, folder):
    trace = handmade_run.trace()
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if not (event["name"] == "isend pp" and event["tid"] == 2)
    ]
    (folder / "trace.json").write_text(json.dumps(trace))
    assert "rank 2 sent 0 messages to rank 3 in a step, which received 2" in refused()


def test_a_trace_that_lacks_an_operation_of_all_ranks(refused, folder):
    trace = handmade_run.trace()
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if not (event["name"] == "allreduce world" and event["tid"] == 2)
    ]
    (folder / "trace.json").write_text(json.dumps(trace))
    assert "different numbers of operations of all ranks in a step" in refused()


def test_without_altair_one_line_says_what_to_install(folder):
    program = (
        "import sys; sys.modules['altair'] = None\n"
        "from mpiparallel.__main__ import main\n"
        f"sys.exit(main(['report', {str(folder)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'mpiparallel[report]'" in done.stderr


def test_other_commands_do_not_load_the_drawing():
    program = (
        "import sys\n"
        "from mpiparallel.__main__ import main\n"
        "main(['schedule', '--stages', '2', '--micro-batches', '2'])\n"
        "assert not {'altair', 'vl_convert'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


class Page(HTMLParser):
    """A report.html taken apart: the text of every section and of the head, and all addresses."""

    def __init__(self, folder):
        super().__init__()
        self.place = "head"
        self.texts = {}
        self.addresses = []
        self.feed((folder / "report.html").read_text())
        self.texts = {place: " ".join(text.split()) for place, text in self.texts.items()}

    def handle_starttag(self, tag, attributes):
        if tag in ("section", "script"):
            self.place = dict(attributes).get("id", tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "srcset", "action")
        ]

    def handle_data(self, text):
        self.texts[self.place] = self.texts.get(self.place, "") + " " + text
