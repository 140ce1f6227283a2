"""What a run prints and writes: progress lines, metrics.jsonl, summary.json. Rank 0 alone does.

    step    20/2000   loss 3.1021   lr 2.00e-04    61,300 tokens/s   31% of matmul peak

`matmul peak` is what the processors that the ranks share reach together on plain matrix products,
measured when the run starts; the share is the model's FLOPs (`ModelConfig.step_flops`) of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import IO, Any

from mpiparallel.bench.matmul import matmul_peak
from mpiparallel.comm.ledger import Ledger
from mpiparallel.comm.trace import Trace
from mpiparallel.errors import UserError
from mpiparallel.mesh import AXES, Mesh
from mpiparallel.model_config import ModelConfig
from mpiparallel.pipeline.simulate import simulate
from mpiparallel.plan import laws
from mpiparallel.report import chrome
from mpiparallel.settings import Settings

QUIET_SECONDS = 5.0  # a progress line at most so often, besides the first, the last, evaluations


def make_folder(settings: Settings) -> None:
    """Create the run's folder and its config.toml. Raises UserError where that cannot be done."""
    folder = Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(settings.toml())
    except OSError as error:
        raise UserError(
            f"--out {settings.out}: cannot be written ({error.strerror}); legal: a folder that "
            f"exists or can be made"
        ) from None


class RunLog:
    """Follows a run on every rank; rank 0 prints and writes.

    Making it measures the matmul peak, so every rank makes it. first : steps that an earlier run
    did; its rows stay in metrics.jsonl, what came after them goes.
    """

    def __init__(self, settings: Settings, config: ModelConfig, mesh: Mesh, first: int = 0):
        self.first = first
        self.settings, self.config, self.mesh = settings, config, mesh
        self.busy = self.cost = self.seconds = 0.0
        self.last_line = -QUIET_SECONDS
        self.val_loss: float | None = None
        self.peak = matmul_peak(mesh, settings.dtype)
        self.metrics: IO[str] | None = None
        if mesh.rank == 0:
            path = Path(settings.out) / "metrics.jsonl"
            before = path.read_text().splitlines(keepends=True)[:first] if path.exists() else []
            path.write_text("".join(before))
            self.metrics = path.open("a", buffering=1)

    def start(self, threads: int | None, tokenizer_size: int, train_tokens: int) -> None:
        """Say what is about to run."""
        s, mesh = self.settings, self.mesh
        blas = "as the environment says" if threads is None else str(threads)
        self._print(
            f"{self.config.parameters:,} parameters, {self.config.layers} layers on dp={s.dp} x "
            f"pp={s.pp} x tp={s.tp} = {mesh.size} ranks, {mesh.nodes} node"
            f"{'s' if mesh.nodes > 1 else ''}, BLAS threads per rank: {blas}\n"
            f"{train_tokens:,} training tokens, {tokenizer_size} different; "
            f"{s.global_batch} x {s.seq_len} tokens a step, {s.micro_batches} micro-batches, "
            f"schedule {s.schedule}; matmul peak {self.peak / 1e9:.0f} GFLOP/s"
        )

    def step(self, step: int, result, lr: float, seconds: float, val_loss: float | None) -> None:
        """Take note of a step (counted from 1): `result` is the Trainer's StepResult."""
        s = self.settings
        self.seconds += seconds
        self.busy += result.outcome.busy
        self.cost += result.outcome.cost
        rate = s.global_batch * s.seq_len / seconds
        row: dict[str, Any] = {
            "step": step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": rate,
            "step_seconds": seconds,
        }
        if val_loss is not None:
            row["val_loss"] = self.val_loss = val_loss
        self.loss = result.loss
        if self.metrics:
            self.metrics.write(json.dumps(row) + "\n")
        now = time.monotonic()
        if val_loss is not None or step == s.steps or now - self.last_line >= QUIET_SECONDS:
            self.last_line = now
            share = self.config.step_flops(s.global_batch) / seconds / self.peak
            evaluated = "" if val_loss is None else f"   validation loss {val_loss:.4f}"
            self._print(
                f"step {step:>{len(str(s.steps))}}/{s.steps}   loss {result.loss:.4f}   "
                f"lr {lr:.2e}   {rate:>9,.0f} tokens/s   {share:>4.0%} of matmul peak{evaluated}"
            )

    def stopped(self, step: int) -> None:
        """Say that the run ended early, as asked, and how to go on."""
        out = self.settings.out
        self._print(
            f"stopped after step {step}, as asked; go on with\n    mpirun -n {self.mesh.size} "
            f"python -m mpiparallel train --config {out}/config.toml --resume {out}"
        )

    def trace(self, trace: Trace) -> None:
        """Write trace.json. Every rank calls."""
        file = Path(self.settings.out) / "trace.json"
        dropped = chrome.write(file, trace, self.mesh)
        said = f"timeline written to {file}: open it in ui.perfetto.dev"
        if dropped:
            said += (
                f"; it is full, {dropped:,} entries are missing: record fewer steps, such as "
                f"--trace {self.settings.steps}"
            )
        self._print(said)

    def finish(self, trainer) -> None:
        """Write summary.json of a Trainer's run. Every rank calls."""
        optimizer, state = trainer.optimizer, trainer.data_parallel
        mesh, s = self.mesh, self.settings
        mine: dict[str, Any] = {
            "ledger": mesh.ledger.rows(),
            "bytes_to": {axis: self._bytes_to(axis) for axis in (*AXES, "world")},
            "busy": self.busy,
            "cost": self.cost,
            "memory": {
                **state.bytes_held(),
                "optimizer": sum(a.nbytes for a in optimizer.first + optimizer.second),
            },
            "peak_parameters": state.peak_parameters,
            "communication": {"exposed": state.exposed, "hidden": state.hidden},
        }
        every = mesh.world.allgather_json(mine)
        if mesh.rank != 0:
            return
        cost = max(rank["cost"] for rank in every)
        work = sum(rank["busy"] for rank in every) / len(every)
        ledger = Ledger.merge([rank["ledger"] for rank in every])
        summary = {
            "mesh": {"dp": s.dp, "pp": s.pp, "tp": s.tp},
            "ranks": mesh.size,
            "nodes": mesh.nodes,
            "parameters": self.config.parameters,
            "steps": s.steps,
            "resumed_from": self.first,
            "loss": self.loss,
            "val_loss": self.val_loss,
            "seconds": self.seconds,
            "tokens_per_second": (s.steps - self.first) * s.global_batch * s.seq_len / self.seconds,
            "matmul_flops_per_second": self.peak,
            "ledger": ledger,
            "laws": self._laws(trainer, ledger),
            "bytes_between": {
                axis: [rank["bytes_to"][axis] for rank in every] for axis in mine["bytes_to"]
            },
            "node_of_rank": mesh.node_of,
            "memory": {kind: [rank["memory"][kind] for rank in every] for kind in mine["memory"]},
            "peak_parameter_bytes": [rank["peak_parameters"] for rank in every],
            "gradient_communication_seconds": {
                kind: [rank["communication"][kind] for rank in every]
                for kind in mine["communication"]
            },
            "bubble": {
                "measured": (cost - work) / cost,
                "predicted": float(simulate(trainer.schedule).bubble),
            },
        }
        (Path(s.out) / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        assert self.metrics
        self.metrics.close()
        self._print(self._traffic(summary["laws"]))
        self._print(f"written to {s.out}")

    def sample(self, text: str) -> None:
        """Show what the model writes."""
        self._print(f"\na sample of what it writes:\n\n{text}\n")

    def _bytes_to(self, axis: str) -> list[int]:
        """Bytes that this rank has sent on an axis to each rank of the world."""
        mesh, group = self.mesh, self.mesh.group(axis)
        found = [0] * mesh.size
        for peer, sent in enumerate(mesh.ledger.bytes_to(axis, group.rank, group.size)):
            found[mesh.world_rank(axis, peer)] += sent
        return found

    def _laws(self, trainer, ledger: list[dict]) -> list[dict[str, Any]]:
        """Rows of axis, op, and the bytes of the run: counted, and by formula (plan/laws.py)."""
        formula = laws.traffic(laws.Step.of(self.settings, self.config, trainer.placement))
        steps = self.settings.steps - self.first
        counted = {(row["axis"], row["op"]): row["bytes"] for row in ledger if row["bytes"]}
        return [
            {
                "axis": axis,
                "op": op,
                "counted": counted.get((axis, op), 0),
                "formula": formula.get((axis, op), 0) * steps,
            }
            for axis, op in sorted(counted.keys() | formula.keys())
        ]

    def _traffic(self, rows: list[dict]) -> str:
        """Bytes by axis and operation, counted and by formula, of a step, all ranks together."""
        steps = self.settings.steps - self.first
        lines = ["bytes sent per step, all ranks together:", ""]
        lines.append(f"    {'axis':<6} {'operation':<15}{'counted':>14} {'by formula':>14}")
        for row in rows:
            same = "" if row["counted"] == row["formula"] else "   !="
            lines.append(
                f"    {row['axis']:<6} {row['op']:<15}{row['counted'] / steps:>14,.0f} "
                f"{row['formula'] / steps:>14,.0f}{same}"
            )
        return "\n".join([*lines, ""])

    def _print(self, text: str) -> None:
        if self.mesh.rank == 0:
            print(text, flush=True, file=sys.stdout)
