"""Data parallelism and its memory: ZeRO stages 0 to 3 (Rajbhandari et al. 2020, arXiv 1910.02054).

Every replica computes gradients of its share of the batch; their average over dp updates the
weights. What each rank keeps of that, for P parameters in float32 (bytes), and what it sends:

    stage   weights   gradients   moments   sends per step (bytes of P: 4 P)
    0         4 P        4 P        8 P     all-reduce              2 (dp-1)/dp 4P
    1         4 P        4 P        8 P/dp  reduce-scatter, gather  2 (dp-1)/dp 4P
    2         4 P        4 P/dp     8 P/dp  the same
    3         4 P/dp     4 P/dp     8 P/dp  the same, gather again  3 (dp-1)/dp 4P

P is what this rank holds of the model: on a mesh with pp and tp only its share. ZeRO cuts the state
of data parallelism, and every rank computes with whole layers; tensor parallelism cuts the
computation.

Stage 3 gathers a layer's weights before its first forward of the step and frees them after its
last; and once more for backward, also where a schedule began that before the last forward. So it
sends no more with more micro-batches, and with one of them it holds one layer at a time; with m of
them a rank's weights are whole from the first forward to the last (`peak_parameters`).

A bucket's all-reduce or reduce-scatter starts with its last gradient of the last micro-batch, and
goes on while backward does: whenever a gradient arrives, and between two actions of the pipeline,
the algorithms under way are resumed if their messages are there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpiparallel.backend import kernels, xp
from mpiparallel.comm import ring
from mpiparallel.comm.allreduce import allreduce_steps
from mpiparallel.comm.group import Group
from mpiparallel.comm.ring import Steps
from mpiparallel.data_parallel.buckets import Bucket, Segment, group_by_size
from mpiparallel.model import GPT
from mpiparallel.parameter import Parameter


class Reduction:
    """One bucket's sum over dp under way: its steps, the messages they wait for, the time taken."""

    def __init__(self, bucket: Bucket, steps: Steps):
        self.bucket, self.steps = bucket, steps
        self.needed: Any = ()
        self.started = time.perf_counter()
        self.seconds = 0.0  # from the start to the end
        self.done = False

    def advance(self) -> None:
        """Go on as far as the messages that have arrived allow; do not wait."""
        while not self.done and all(pending.test() for pending in self.needed):
            self._resume()

    def complete(self) -> None:
        """Go on to the end, waiting."""
        while not self.done:
            self._resume()

    def _resume(self) -> None:
        try:
            self.needed = next(self.steps)
        except StopIteration:
            self.done = True
            self.seconds = time.perf_counter() - self.started


@dataclass(eq=False)
class Shard:
    """This rank's part of one parameter, flat: what an optimizer takes for a parameter."""

    owner: DataParallel
    bucket: Bucket
    segment: Segment

    @property
    def parameter(self) -> Parameter:
        """The parameter that it is a part of."""
        return self.segment.parameter

    @property
    def data(self):
        """Its weights, (n,)."""
        return self.segment.of(self.owner.weight_shards[self.bucket])

    @property
    def grad(self):
        """Its averaged gradients, (n,)."""
        return self.segment.of(self.owner.gradient_shards[self.bucket])

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.parameter.decays


class DataParallel:
    """A rank's buckets, and what is done with them in a step. All ranks of dp call alike.

    stage : of ZeRO, 0 to 3. algorithm : of the all-reduce of stage 0. overlap : whether sums start
    while backward goes on; the results are the same to the bit.
    """

    def __init__(
        self,
        model: GPT,
        dp: Group,
        *,
        stage: int,
        algorithm: str,
        bucket_bytes: float,
        overlap: bool,
    ):
        self.model, self.dp, self.stage = model, dp, stage
        self.algorithm, self.overlap = algorithm, overlap
        self.exposed = self.hidden = 0.0  # seconds of communication since the start
        uses = Counter(p.name for layer in model.layers for p in layer.parameters)
        backward = [list(reversed(layer.parameters)) for layer in reversed(model.layers)]
        parts, part = (dp.size, dp.rank) if stage else (1, 0)
        self.buckets = [
            Bucket(parameters, parts, part, sum(uses[p.name] for p in parameters))
            for parameters in group_by_size(backward, 0 if stage == 3 else bucket_bytes)
        ]
        self.bucket_of = {p.name: bucket for bucket in self.buckets for p in bucket.parameters}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.on_gradient = self._arrived
        # By bucket: the averaged gradients of the shard, and in stage 3 the weights of the shard.
        self.gradient_shards: dict[Bucket, Any] = {}
        self.weight_shards: dict[Bucket, Any] = {}
        # Stage 3: how many forwards, "F", and backwards of this step are still to use a bucket.
        self._uses_left: Counter[tuple[Bucket, str]] = Counter()
        for bucket in self.buckets:
            if stage == 3:
                self.weight_shards[bucket] = bucket.weights[bucket.shard].copy()
                self._free(bucket)
            else:
                self.weight_shards[bucket] = bucket.weights[bucket.shard]
        if stage == 3:
            for own in model.stages.values():
                own.hold = self.hold
        self._under_way: list[Reduction] = []
        # The most bytes of weights that were held at once.
        self.peak_parameters = self.bytes_held()["parameters"]

    # ---- gradients ----

    def start_step(self, micro_batches: int) -> None:
        """Forget the gradients of the step before; expect those of so many micro-batches."""
        self._due = {bucket: bucket.arrivals * micro_batches for bucket in self.buckets}
        self._uses_left.clear()
        for layer in self.model.layers:
            for bucket in self._buckets_of(layer):
                for direction in "FB":
                    self._uses_left[bucket, direction] += micro_batches
        self._under_way = []
        for bucket in self.buckets:
            if self.stage >= 2:
                self.gradient_shards.pop(bucket, None)
            bucket.make_gradients()
            for parameter in bucket.parameters:
                parameter.zero_grad()

    def _arrived(self, parameter: Parameter) -> None:
        bucket = self.bucket_of[parameter.name]
        self._due[bucket] -= 1
        if self._due[bucket] == 0 and self.overlap:
            self._under_way.append(Reduction(bucket, self._sum(bucket)))
        self.advance()

    def advance(self) -> None:
        """Resume the sums under way whose messages have arrived. Never waits."""
        for reduction in self._under_way:
            reduction.advance()

    def _sum(self, bucket: Bucket) -> Steps:
        if self.stage:
            self.dp.ledger.add(self.dp.axis, "reduce_scatter", calls=1)
            return ring.reduce_scatter_steps(self.dp, bucket.gradients, tag=self.dp.next_tag())
        return allreduce_steps(self.dp, bucket.gradients, self.algorithm)

    def finish_gradients(self) -> None:
        """Complete all sums, and average: afterwards `gradient_shards` holds the shards."""
        began = time.perf_counter()
        if not self.overlap:
            for bucket in self.buckets:
                self._under_way.append(Reduction(bucket, self._sum(bucket)))
                self._under_way[-1].complete()
        for reduction in self._under_way:
            reduction.complete()
        exposed = time.perf_counter() - began
        self.exposed += exposed
        self.hidden += max(0.0, sum(r.seconds for r in self._under_way) - exposed)
        for bucket in self.buckets:
            shard = bucket.gradients[bucket.shard]
            if self.stage >= 2:
                shard = shard.copy()
                bucket.drop_gradients()
            shard /= self.dp.size
            self.gradient_shards[bucket] = shard

    def square_sum(self, pp_rank: int) -> float:
        """This rank's part of the squared global norm: summed over all ranks it counts every
        entry of every gradient once. In float64, no message."""
        if not self.stage and self.dp.rank:
            return 0.0  # every replica holds the same: one of them counts
        return float(
            sum(
                kernels.square_sum(segment.of(self.gradient_shards[bucket]))
                for bucket in self.buckets
                for segment in bucket.segments
                if segment.parameter.counts_on(pp_rank)
            )
        )

    def tied_gradients(self) -> Iterator[tuple[Parameter, Any]]:
        """(parameter, shard) of what other pipeline ranks hold as well."""
        for bucket in self.buckets:
            if len(bucket.parameters[0].holders) > 1:
                yield bucket.parameters[0], self.gradient_shards[bucket]

    # ---- weights ----

    def shards(self) -> list[Shard]:
        """What this rank's optimizer updates: a segment per parameter that its shards touch."""
        return [Shard(self, bucket, s) for bucket in self.buckets for s in bucket.segments]

    def publish_weights(self) -> None:
        """After the optimizer has updated the shards: in stages 1 and 2 every rank gathers the
        others', in stage 0 it has updated all itself, in stage 3 it gathers when it needs them."""
        if self.stage in (1, 2):
            for bucket in self.buckets:
                self._gather(bucket)

    @contextmanager
    def hold(self, layer: Any, direction: str) -> Iterator[None]:
        """Stage 3: the weights of a layer are whole inside, and free again after the step's last
        forward ("F") or backward ("B") that uses them. Outside of a step every use is the last."""
        buckets = self._buckets_of(layer)
        for bucket in buckets:
            if bucket.weights is None:
                bucket.weights = xp.empty(bucket.length, bucket.dtype)
                bucket.weights[bucket.shard] = self.weight_shards[bucket]
                self._gather(bucket)
                bucket.show_weights()
        self.peak_parameters = max(self.peak_parameters, self.bytes_held()["parameters"])
        yield
        for bucket in buckets:
            self._uses_left[bucket, direction] -= 1
            if self._uses_left[bucket, direction] <= 0:
                self._free(bucket)

    def _buckets_of(self, layer: Any) -> list[Bucket]:
        """The buckets of a layer's parameters, each once; frozen parameters are in none."""
        found = (self.bucket_of.get(parameter.name) for parameter in layer.parameters)
        return list(dict.fromkeys(bucket for bucket in found if bucket))

    def _gather(self, bucket: Bucket) -> None:
        self.dp.ledger.add(self.dp.axis, "allgather", calls=1)
        ring.run(ring.allgather_steps(self.dp, bucket.weights, tag=self.dp.next_tag()))

    def _free(self, bucket: Bucket) -> None:
        bucket.weights = None
        bucket.show_weights()

    # ---- memory ----

    def bytes_held(self) -> dict[str, int]:
        """Bytes of weights and gradients that this rank keeps between two steps."""
        frozen = sum(p.data.nbytes for p in self.model.parameters if p.frozen)
        whole = sum(b.weights.nbytes for b in self.buckets if b.weights is not None)
        shards = sum(s.nbytes for s in self.weight_shards.values()) if self.stage == 3 else 0
        full = sum(b.gradients.nbytes for b in self.buckets if b.gradients is not None)
        kept = sum(s.nbytes for s in self.gradient_shards.values()) if self.stage >= 2 else 0
        return {"parameters": frozen + whole + shards, "gradients": full + kept}
