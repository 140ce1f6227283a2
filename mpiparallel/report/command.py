"""`report DIR`: pictures of a finished run. Needs no MPI; altair and vl-convert draw.

DIR/report.html             everything on one page, works from a file:// address
DIR/pictures/NAME.png       the same pictures
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

from mpiparallel.errors import UserError
from mpiparallel.report.timeline import read_trace, typical_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's one argument."""
    parser.add_argument("folder", metavar="DIR", help="the folder of a finished run (train --out)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0. Raises UserError where something is missing or is not a run's."""
    try:
        from mpiparallel.report import page
    except ImportError as error:
        raise UserError(
            f"report: needs altair and vl-convert-python ({error}); install them with "
            f"pip install 'mpiparallel[report]'"
        ) from None
    folder = Path(arguments.folder)
    pictures, facts = _read(folder)
    drawn = folder / "pictures"
    html = folder / "report.html"
    try:
        drawn.mkdir(exist_ok=True)
        for picture in pictures:
            file = drawn / f"{picture.name}.png"
            if picture.chart:
                file.write_bytes(page.png(picture))
            else:
                file.unlink(missing_ok=True)  # of an earlier report
        html.write_text(page.page(f"Run {folder.resolve().name}", facts, pictures))
    except OSError as error:
        raise UserError(f"report {folder}: cannot be written ({error.strerror})") from None
    count = sum(picture.chart is not None for picture in pictures)
    print(f"written to {html}, and {count} pictures to {drawn}")
    return 0


def _read(folder: Path) -> tuple[list, dict[str, str]]:
    """The pictures of a run, in the page's order, and what its head says."""
    from mpiparallel.report import mesh_picture, pictures, step_pictures
    from mpiparallel.report.picture import Picture

    if not folder.is_dir():
        raise UserError(f"report {folder}: no such folder; legal: the folder of a finished run")
    settings = _parse(folder / "config.toml", tomllib.loads)
    metrics = _parse(folder / "metrics.jsonl", _lines)
    summary = _parse(folder / "summary.json", json.loads)
    missing = [key for key in ("laws", "bytes_between", "node_of_rank") if key not in summary]
    if missing:
        raise UserError(
            f"{folder / 'summary.json'}: has no {missing[0]}, as an earlier version wrote it; "
            f"train again"
        )
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'}: has no step in it")
    mesh, steps = summary["mesh"], summary["steps"] - summary["resumed_from"]

    trace = folder / "trace.json"
    if trace.exists():
        step = typical_step(read_trace(trace))
        of_step = [step_pictures.timeline(step, mesh), step_pictures.split(step, mesh)]
    else:
        last = summary["steps"]
        how = (
            "This run was not traced. To get this picture, train again with some steps traced: "
            f"`mpirun -n {summary['ranks']} python -m mpiparallel train "
            f"--config {folder / 'config.toml'} --trace {max(1, last - 2)}-{last}`, "
            "and then `report` again."
        )
        of_step = [
            Picture("timeline", "Timeline of a step", how),
            Picture("step_time", "Where the time of a step went", how),
        ]
    return [
        pictures.loss(metrics, settings["global_batch"] * settings["seq_len"]),
        *of_step,
        pictures.traffic(summary["laws"], steps),
        pictures.matrix(summary["bytes_between"]),
        pictures.memory(summary["memory"], mesh),
        mesh_picture.mesh(
            mesh, summary["node_of_rank"], summary["bytes_between"], summary["memory"]
        ),
    ], _facts(summary, settings)


def _facts(summary: dict, settings: dict) -> dict[str, str]:
    mesh, nodes = summary["mesh"], summary["nodes"]
    facts = {
        "mesh": " × ".join(f"{axis} {mesh[axis]}" for axis in ("dp", "pp", "tp")),
        "ranks": f"{summary['ranks']} on {nodes} node{'s' if nodes > 1 else ''}",
        "parameters": f"{summary['parameters']:,}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens/s",
        "steps": f"{summary['steps']:,}",
        "loss": f"{summary['loss']:.4f}",
    }
    if summary["val_loss"] is not None:
        facts["validation loss"] = f"{summary['val_loss']:.4f}"
    facts["schedule"] = settings["schedule"]
    facts["micro-batches"] = f"{settings['micro_batches']}"
    facts["bubble, measured"] = f"{summary['bubble']['measured']:.1%}"
    facts["bubble, predicted"] = f"{summary['bubble']['predicted']:.1%}"
    return facts


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def _parse(path: Path, parse: Any) -> Any:
    """The content of a run's file. Raises UserError where it is not there or cannot be read."""
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path}: is not there; legal: the folder of a finished run (train --out)"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
