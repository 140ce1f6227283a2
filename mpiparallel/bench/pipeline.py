"""`bench pipeline`: the bubble of a schedule, with real messages and compute replaced by sleeping.

A rank that sleeps needs no core, so eight stages show their true bubble on a laptop with two. The
executor is the one that trains; only its stages are others. Measured as the papers do:

    cost   = the longest time over ranks from a rank's first action to the end of its last
    bubble = (cost - m (F + B)) / cost
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from mpiparallel.backend import xp
from mpiparallel.layers import Later, now
from mpiparallel.mesh import Mesh
from mpiparallel.pipeline import schedules
from mpiparallel.pipeline.executor import Executor, MicroBatch
from mpiparallel.pipeline.messages import derive_messages
from mpiparallel.pipeline.simulate import simulate
from mpiparallel.settings import Settings

HIDDEN = 64  # width of the (1, 1, H) messages


class SleepingStage:
    """A stage that takes time and no processor: forward, and the two halves of backward alike."""

    def __init__(self, is_first: bool, is_last: bool, forward: float, backward: float):
        self.is_first, self.is_last = is_first, is_last
        self.forward_seconds, self.half_seconds = forward, backward / 2

    def forward(self, x, labels=None):
        """Sleep, and make an activation to send."""
        time.sleep(self.forward_seconds)
        return xp.zeros((1, 1, HIDDEN), "float32"), None

    def backward(self, dy, saved, later: Later = now):
        """Sleep for the input gradient; the weight gradient sleeps when it comes."""
        time.sleep(self.half_seconds)
        later(time.sleep, self.half_seconds)
        return xp.zeros((1, 1, HIDDEN), "float32")


@dataclasses.dataclass
class SleepingModel:
    """What the executor asks of a model."""

    stages: dict[int, SleepingStage]
    total_stages: int
    hidden: int = HIDDEN


def measure_pipeline(
    mesh: Mesh, settings: Settings, forward_ms: float, backward_ms: float
) -> dict[str, Any]:
    """Run `settings.steps` steps; the median of the measured bubble. Every rank calls.

    forward_ms, backward_ms : milliseconds of a rank's whole share on one micro-batch.
    """
    assert settings.micro_batches is not None
    schedule = schedules.build(
        settings.schedule, mesh.pp.size, settings.micro_batches, settings.stages_per_rank
    )
    last, share = len(schedule.placement) - 1, 1e-3 / schedule.stages_per_rank
    stages = {
        stage: SleepingStage(stage == 0, stage == last, forward_ms * share, backward_ms * share)
        for stage, owner in enumerate(schedule.placement)
        if owner == mesh.pp.rank
    }
    executor = Executor(SleepingModel(stages, last + 1), mesh.pp, "float32")
    operations = derive_messages(schedule)[mesh.pp.rank]
    tokens = np.zeros((1, 1), np.int32)
    micro_batches = [MicroBatch(tokens, tokens) for _ in range(schedule.micro_batches)]

    work = schedule.micro_batches * (forward_ms + backward_ms) * 1e-3
    bubbles = []
    for _ in range(settings.steps):
        mesh.world.allreduce(np.zeros(1))  # all start together
        mine = executor.run(operations, micro_batches).cost
        cost = float(mesh.world.allreduce(np.array([mine]), "max")[0])
        bubbles.append((cost - work) / cost)
    predicted = simulate(
        schedule,
        forward=forward_ms,
        input_gradient=backward_ms / 2,
        weight_gradient=backward_ms / 2,
    )
    return {
        "schedule": schedule.name,
        "stages": mesh.pp.size,
        "stages_per_rank": schedule.stages_per_rank,
        "micro_batches": schedule.micro_batches,
        "measured_bubble": statistics.median(bubbles),
        "predicted_bubble": float(predicted.bubble),
    }
