"""The settings of a run: one field each, which is a flag, a key of --config and a line of help.

    --global-batch 12        on the command line
    global_batch = 12        in a TOML file, and in the config.toml that every run writes

Flags win over the file, the file over the defaults. `check` finds what cannot work on this number
of ranks before anything is computed or sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiparallel.errors import UserError
from mpiparallel.model_config import ModelConfig
from mpiparallel.pipeline import schedules


def _setting(default: Any, help: str, *, kind: type = int, low: float | None = None, **more) -> Any:
    return dataclasses.field(
        default=default, metadata={"help": help, "kind": kind, "low": low, **more}
    )


@dataclass(frozen=True)
class Settings:
    """Everything that can be set for `train`. None means: chosen from the rest."""

    dp: int | None = _setting(None, "replicas of the model (what pp and tp leave)", low=1)
    pp: int = _setting(1, "pipeline ranks", low=1)
    tp: int = _setting(1, "tensor ranks: cut every layer", low=1)
    schedule: str = _setting(
        "1f1b", "pipeline schedule", kind=str, choices=(*schedules.NAMES, *schedules.ALIASES)
    )
    stages_per_rank: int | None = _setting(
        None, "stages that a pipeline rank owns (what the schedule has, or 2)", low=1
    )
    global_batch: int = _setting(12, "sequences per step, over all replicas", low=1)
    micro_batches: int | None = _setting(
        None,
        "micro-batches per replica and step (2 per pipeline rank, at most one a sequence)",
        low=1,
    )
    seq_len: int = _setting(64, "tokens per sequence", low=1)
    layers: int = _setting(4, "transformer blocks", low=1)
    hidden: int = _setting(128, "width of the model", low=1)
    heads: int = _setting(4, "attention heads", low=1)
    feed_forward: int | None = _setting(None, "width inside the MLP (4 * hidden)", low=1)
    vocab_size: int | None = _setting(None, "entries of the vocabulary (the tokenizer's)", low=1)
    steps: int = _setting(2000, "optimizer steps", low=1)
    lr: float = _setting(1e-3, "highest learning rate", kind=float, low=0)
    min_lr: float = _setting(1e-4, "learning rate at the end", kind=float, low=0)
    warmup: int = _setting(100, "steps of linear warm-up", low=0)
    weight_decay: float = _setting(0.1, "decoupled, on matrices", kind=float, low=0)
    beta1: float = _setting(0.9, "decay of AdamW's first moment", kind=float, low=0, below=1)
    beta2: float = _setting(0.99, "decay of AdamW's second moment", kind=float, low=0, below=1)
    clip: float = _setting(1.0, "largest global gradient norm, 0 for no limit", kind=float, low=0)
    allreduce: str = _setting(
        "auto",
        "gradients on the dp axis: by size and nodes, our ring, or MPI's own",
        kind=str,
        choices=("auto", "ring", "mpi"),
    )
    zero: int = _setting(
        0, "shard over dp: 1 optimizer state, 2 gradients too, 3 weights too", choices=(0, 1, 2, 3)
    )
    bucket_mb: float = _setting(4.0, "MiB of gradients per message", kind=float, low=0)
    overlap: str = _setting(
        "on", "send gradients while backward goes on", kind=str, choices=("on", "off")
    )
    freeze: str = _setting(
        "", "beginnings of names of parameters that are not trained, comma-separated", kind=str
    )
    dtype: str = _setting(
        "float32", "of weights and work", kind=str, choices=("float32", "float64")
    )
    data: str | None = _setting(None, "text file or folder (Python's own documentation)", kind=str)
    tokenizer: str = _setting(
        "char", "a token per character or per UTF-8 byte", kind=str, choices=("char", "bytes")
    )
    eval_every: int = _setting(500, "steps between evaluations, 0 for the end only", low=0)
    seed: int = _setting(1337, "of weights and batches", low=0)
    out: str = _setting("runs/latest", "folder that the run is written to", kind=str)
    save_every: int = _setting(0, "steps between checkpoints, 0 for the end only", low=0)
    keep: int = _setting(3, "newest checkpoints that stay, 0 for all", low=0)
    resume: str | None = _setting(
        None, "go on from a checkpoint: a run's folder, or one of its checkpoints", kind=str
    )
    sample: int = _setting(300, "tokens of sample text at the end, 0 for none", low=0)
    trace: str = _setting(
        "",
        "record a timeline of all steps, or of those from A to B: A-B, counted from 1",
        kind=str,
        nargs="?",
        const="all",
    )
    timeout: float = _setting(
        300.0, "seconds after which a rank stops waiting for another", kind=float, low=0.001
    )

    def model_config(self, vocabulary: int) -> ModelConfig:
        """The sizes of the model; `vocabulary` is the tokenizer's."""
        if self.vocab_size is not None and self.vocab_size < vocabulary:
            raise UserError(
                f"--vocab-size {self.vocab_size}: the text has {vocabulary} different tokens; "
                f"legal: {vocabulary} or more"
            )
        return ModelConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            feed_forward=self.feed_forward or 4 * self.hidden,
            vocabulary=self.vocab_size or vocabulary,
            sequence=self.seq_len,
        )

    @property
    def frozen(self) -> tuple[str, ...]:
        """The beginnings of names of parameters that are not trained."""
        return tuple(filter(None, self.freeze.split(",")))

    def traced_steps(self) -> range:
        """The steps, counted from 1, that a timeline is recorded of. Raises UserError."""
        if self.trace in ("", "all"):
            return range(1, self.steps + 1 if self.trace else 1)
        first, _, last = self.trace.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise UserError(f"--trace {self.trace}: legal: nothing, a step such as 5, or 5-8")
        steps = range(int(first), int(last or first) + 1)
        if not steps or not 1 <= steps[0] <= steps[-1] <= self.steps:
            raise UserError(
                f"--trace {self.trace}: legal: steps from 1 to {self.steps}, the first one first"
            )
        return steps

    def toml(self) -> str:
        """The settings as a file that --config reads."""
        values = dataclasses.asdict(dataclasses.replace(self, resume=None))
        return "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in values.items() if value is not None
        )


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def add_arguments(
    parser: argparse.ArgumentParser,
    names: list[str] | None = None,
    base: Settings | None = None,
) -> None:
    """Make a flag of every setting, or of those in `names`; `base` has other defaults to show.
    Absent flags stay out of the result."""
    for name in names or _FIELDS:
        field = _FIELDS[name]
        value = getattr(base, name) if base else field.default
        default = "" if value is None else f" (default {value})"
        parser.add_argument(
            _flag(name),
            type=field.metadata["kind"],
            choices=field.metadata.get("choices"),
            default=argparse.SUPPRESS,
            metavar=None if "choices" in field.metadata else name.upper(),
            **{key: field.metadata[key] for key in ("nargs", "const") if key in field.metadata},
            help=field.metadata["help"] + default,
        )


def from_arguments(
    arguments: argparse.Namespace, config: str | None = None, base: Settings | None = None
) -> Settings:
    """Settings from parsed flags over a TOML file over `base` or the defaults. Raises UserError."""
    values = _read_config(config) if config else {}
    values |= {name: value for name, value in vars(arguments).items() if name in _FIELDS}
    for name, value in values.items():
        _check_value(name, value)
    return dataclasses.replace(base or Settings(), **values)


def check(settings: Settings, ranks: int) -> Settings:
    """Fill in what follows from the rest; raise UserError for what cannot run on `ranks` ranks."""
    s = settings
    if s.dp is None:
        if ranks % (s.pp * s.tp):
            raise UserError(
                f"--pp {s.pp} --tp {s.tp}: {ranks} ranks are not a multiple of "
                f"pp * tp = {s.pp * s.tp}; start with a multiple, such as mpirun -n {s.pp * s.tp}"
            )
        s = dataclasses.replace(s, dp=ranks // (s.pp * s.tp))
    assert s.dp is not None
    if s.dp * s.pp * s.tp != ranks:
        raise UserError(
            f"--dp {s.dp} --pp {s.pp} --tp {s.tp}: the mesh wants {s.dp} * {s.pp} * {s.tp} = "
            f"{s.dp * s.pp * s.tp} ranks, and there are {ranks}; start with "
            f"mpirun -n {s.dp * s.pp * s.tp}, or choose sizes whose product is {ranks}"
        )
    feed_forward = s.feed_forward or 4 * s.hidden
    for name, length in (("heads", s.heads), ("feed_forward", feed_forward)):
        if length % s.tp:
            raise UserError(
                f"--tp {s.tp}: does not divide {_flag(name)} {length}; "
                f"legal tp: {_listed(_divisors(length))}"
            )
    if s.hidden % s.heads:
        raise UserError(
            f"--heads {s.heads}: does not divide --hidden {s.hidden}; "
            f"legal heads: {_listed(_divisors(s.hidden))}"
        )
    stages = len(schedules.placement(s.schedule, s.pp, s.stages_per_rank))
    if stages > s.layers:
        raise UserError(
            f"--layers {s.layers}: too few for {stages} stages, a layer each at least "
            f"(--pp {s.pp} --schedule {s.schedule}); legal: {stages} or more"
        )
    if s.global_batch % s.dp:
        lower = s.global_batch // s.dp * s.dp
        nearest = [size for size in (lower, lower + s.dp) if size]
        raise UserError(
            f"--global-batch {s.global_batch}: dp={s.dp} does not divide it; "
            f"legal: a multiple of {s.dp}, such as {_listed(nearest)}"
        )
    s.traced_steps()
    names = s.model_config(0).shapes()
    for beginning in s.frozen:
        if not any(name.startswith(beginning) for name in names):
            raise UserError(
                f"--freeze {beginning}: no parameter's name begins so; legal: beginnings of "
                f"{_listed(dict.fromkeys(name.rpartition('.')[0] for name in names))}"
            )
    replica = s.global_batch // s.dp
    if s.micro_batches is None:
        s = dataclasses.replace(s, micro_batches=min(replica, 2 * s.pp) if s.pp > 1 else 1)
    elif s.micro_batches > replica:
        raise UserError(
            f"--micro-batches {s.micro_batches}: a replica has only {replica} of the "
            f"{s.global_batch} sequences of a step; legal: 1 to {replica}"
        )
    return s


def check_resume(settings: Settings, folder: Path, manifest: Any) -> None:
    """Raise UserError where going on from the checkpoint would not be the same run."""
    if manifest.step >= settings.steps:
        raise UserError(
            f"--steps {settings.steps}: {folder} is at step {manifest.step} already; "
            f"legal: more than {manifest.step}"
        )
    if manifest.seed != settings.seed:
        raise UserError(
            f"--seed {settings.seed}: {folder} was trained with another, and the data follow from "
            f"it; legal: {manifest.seed}"
        )


def check_model(config: ModelConfig, stored: ModelConfig, path: str | None) -> None:
    """Raise UserError where a checkpoint is of a model of other sizes."""
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(stored)
    wrong = [name for name in ours if ours[name] != theirs[name]]
    if wrong:
        raise UserError(
            f"--resume {path}: is of another model; legal: "
            + ", ".join(f"{name} {theirs[name]} (not {ours[name]})" for name in wrong)
        )


def _read_config(path: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not TOML ({error})") from None
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in _FIELDS:
            close = difflib.get_close_matches(key, _FIELDS, 1)
            hint = f"did you mean {close[0]}?" if close else f"legal: {_listed(_FIELDS)}"
            raise UserError(f"--config {path}: there is no setting {key}; {hint}")
    return values


def _check_value(name: str, value: Any) -> None:
    meta = _FIELDS[name].metadata
    kind, low, below = meta["kind"], meta["low"], meta.get("below")
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool):
        words = {int: "a whole number", float: "a number", str: "a text"}
        raise UserError(f"{_flag(name)} {value}: legal is {words[kind]}")
    if "choices" in meta and value not in meta["choices"]:
        raise UserError(f"{_flag(name)} {value}: legal: {_listed(meta['choices'])}")
    if low is not None and not (low <= value < (below or float("inf"))):
        upper = f", less than {below}" if below else ""
        raise UserError(f"{_flag(name)} {value}: legal: {low} or more{upper}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(values) -> str:
    return ", ".join(map(str, values))
