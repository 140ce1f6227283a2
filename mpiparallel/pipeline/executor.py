"""The executor runs one rank's list of a pipeline schedule: compute, Isend, Irecv.

A schedule says which stage works on which micro-batch in which order; `derive_messages` adds the
sends and receives between neighbours. Here each entry of that list becomes one call:

    PostReceive     pp.irecv      into a fresh buffer
    WaitReceive     pending.wait
    0F1 0B1         stage 0 runs forward, backward of micro-batch 1
    0I1 0W1         the two halves of backward: the input gradient now, the weight gradients later
    Send            pp.isend      what the last action made; it is waited for when it is done

Activations go down the pipeline and gradients come up, (b, S, H) each, and nothing else: the pp
axis never sees a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpiparallel.backend import xp
from mpiparallel.comm.group import Group, Pending
from mpiparallel.layers import Later, now
from mpiparallel.pipeline.action import Action
from mpiparallel.pipeline.messages import Message, PostReceive, Send, WaitReceive


@dataclass
class MicroBatch:
    """tokens and labels, both (b, S) integers; labels are None where only logits are wanted."""

    tokens: Any
    labels: Any = None


@dataclass
class Outcome:
    """What a rank knows after running its list.

    outputs : on the last stage, by micro-batch: the losses (b, S), or the logits without labels.
    spans : (action, start, end) in seconds of time.perf_counter.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    spans: list[tuple[Action, float, float]] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds spent in actions."""
        return sum(end - start for _, start, end in self.spans)

    @property
    def cost(self) -> float:
        """Seconds from the start of the first action to the end of the last."""
        return self.spans[-1][2] - self.spans[0][1]


class Executor:
    """Runs operation lists over the stages of this pipeline rank.

    model : a GPT, or what has `stages`, `total_stages` and `hidden` like one. pp : the Group of
    the pp axis. dtype : of the (b, S, H) arrays that travel; b and S are the micro-batch's.
    """

    def __init__(self, model: Any, pp: Group, dtype):
        self.model, self.pp, self.dtype = model, pp, dtype
        self.between: Callable[[], None] = lambda: None  # called after every action

    def run(self, operations, micro_batches: list[MicroBatch], loss_scale: float = 1.0) -> Outcome:
        """Run this rank's operations over the micro-batches, the same on every pipeline rank.

        loss_scale : what is differentiated is loss_scale * (sum of the losses of all positions).
        Every pipeline rank calls, with its own list of one schedule. Weight gradients are added
        to `Parameter.grad`.
        """
        self.micro_batches, self.loss_scale = micro_batches, loss_scale
        self.outcome = Outcome()
        # Inputs of actions to come and results to be sent: (kind, receiving stage, micro-batch).
        self.arrays: dict[tuple[str, int, int], Any] = {}
        # What backward needs, and weight-gradient work that waits: (stage, micro-batch).
        self.saved: dict[tuple[int, int], Any] = {}
        self.waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.keeps = any(isinstance(entry, Action) and entry.kind in "BI" for entry in operations)

        posted: dict[Message, Pending] = {}
        sending: list[Pending] = []
        for entry in operations:
            match entry:
                case PostReceive(message):
                    batch, sequence = micro_batches[message.micro_batch].tokens.shape
                    buffer = xp.empty((batch, sequence, self.model.hidden), self.dtype)
                    self.pp.watch.action = message
                    posted[message] = self.pp.irecv(buffer, message.sender, self._tag(message))
                case WaitReceive(message):
                    self.pp.watch.action = message
                    self.arrays[_key(message)] = posted.pop(message).wait()
                case Send(message):
                    array = self.arrays.pop(_key(message))
                    self.pp.watch.action = message
                    sending.append(self.pp.isend(array, message.receiver, self._tag(message)))
                    while sending and sending[0].test():  # so that its array is let go
                        sending.pop(0).wait()
                case Action():
                    self.pp.watch.action = entry
                    start = time.perf_counter()
                    self._act(entry)
                    end = time.perf_counter()
                    self.outcome.spans.append((entry, start, end))
                    self.pp.watch.worked(entry.kind, start, end)
                    self.between()
        self.pp.watch.action = None
        for pending in sending:
            pending.wait()
        return self.outcome

    def _act(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        match action.kind:
            case "F":
                self._forward(stage, micro_batch)
            case "B":
                self._backward(stage, micro_batch, now)
            case "I":
                work = self.waiting[stage, micro_batch] = []
                self._backward(
                    stage,
                    micro_batch,
                    lambda function, *arrays: work.append(partial(function, *arrays)),
                )
            case "W":
                for function in self.waiting.pop((stage, micro_batch)):
                    function()

    def _forward(self, stage: int, micro_batch: int) -> None:
        layers, batch = self.model.stages[stage], self.micro_batches[micro_batch]
        came = ("activation", stage, micro_batch)
        x = batch.tokens if layers.is_first else self.arrays.pop(came)
        y, saved = layers.forward(x, batch.labels)
        if self.keeps:
            self.saved[stage, micro_batch] = saved
        if layers.is_last:
            self.outcome.outputs[micro_batch] = y
        else:
            self.arrays["activation", stage + 1, micro_batch] = y

    def _backward(self, stage: int, micro_batch: int, later: Later) -> None:
        layers = self.model.stages[stage]
        came = ("gradient", stage, micro_batch)
        dy = self.loss_scale if layers.is_last else self.arrays.pop(came)
        dx = layers.backward(dy, self.saved.pop((stage, micro_batch)), later)
        if not layers.is_first:
            self.arrays["gradient", stage - 1, micro_batch] = dx

    def _tag(self, message: Message) -> int:
        """One tag for each message of a step between two ranks, the same ones every step."""
        number = message.micro_batch * self.model.total_stages + message.stage
        return 2 * number + (message.kind == "gradient")


def _key(message: Message) -> tuple[str, int, int]:
    return message.kind, message.stage, message.micro_batch
