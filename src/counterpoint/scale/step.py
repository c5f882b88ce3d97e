"""A step of one rank of each pipeline stage: layers, pipeline, gradients, optimizer.

The other ranks of a stage do the same at the same time.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.network.fabric import Group
from counterpoint.scale.operators import ITEM_BYTES
from counterpoint.scale.overheads import computed, routed
from counterpoint.scale.parts import Both, Collective, Parts, Sent
from counterpoint.scale.pipeline import Event, Pipeline, Stage, simulate
from counterpoint.scale.replicas import Replicas, Sizes


class Hop(NamedTuple):
    """What one rank of a stage sends to the next stage, for one micro-batch.

    Args:
        num_bytes: that it sends.
        gathered: bytes of what tensor-parallel ranks then gather, if each has only a share.
        seconds: of both.
    """

    num_bytes: float
    gathered: dict[Sent, float]
    seconds: float


class Stages(NamedTuple):
    """What one rank of each pipeline stage does in a step, and when.

    Args:
        pipeline: forwards and backwards.
        replicas_s: exposed seconds of gradients and parameters of each stage, after the pipeline.
        optimizer_s: of each stage, when all stages have their gradients.
        chunks: what the parts of each stage are made of.
        replicas: bytes of each stage's gradients and parameters, after the pipeline.
        hop: from one stage to the next.
    """

    pipeline: Pipeline
    replicas_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]
    chunks: tuple[tuple[Both, ...], ...]
    replicas: tuple[dict[Sent, float], ...]
    hop: Hop

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.optimizer_at_s + max(self.optimizer_s)

    @property
    def optimizer_at_s(self) -> float:
        """When the optimizer begins."""
        return self.pipeline.seconds + max(self.replicas_s)

    def events(self, stage: int) -> Iterator[tuple[Event, float, float]]:
        """What a stage does, and when that starts and ends."""
        yield from self.pipeline.events(stage)
        starts_s = self.pipeline.seconds, self.optimizer_at_s
        if took_s := self.replicas_s[stage]:
            yield Event("data parallel"), starts_s[0], starts_s[0] + took_s
        yield Event("optimizer"), starts_s[1], starts_s[1] + self.optimizer_s[stage]


class Step:
    """One rank of each pipeline stage."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.network = layers, layers.network
        self.model, self.layout = layers.model, layers.layout
        self.replicas = Replicas(layers)

    def run(self) -> tuple[dict[str, float], Stages]:
        """The parts of the busiest stage, and what each stage does when."""
        layout = self.layout
        chunks = [self._chunk(i) for i in range(layout.pp * layout.virtual_stages)]
        ranks = [chunks[i :: layout.pp] for i in range(layout.pp)]
        hop = self._hop()
        sent_s = 0.0 if layout.pp == 1 else hop.seconds
        blocking_s = 0.0 if layout.asynchronous else sent_s
        stages = [self._stage(each, blocking_s) for each in ranks]
        ran = simulate(stages, layout.micro_batches, sent_s - blocking_s)
        most = max(range(layout.pp), key=lambda i: stages[i].busy_s)
        found = Parts()
        for chunk in ranks[most]:
            found += (chunk.forward + chunk.backward) * layout.micro_batches
        replicas_s = tuple(map(self._replicas_s, range(layout.pp), stages))
        optimizer_s = tuple(map(self._optimizer_s, range(layout.pp)))
        found += Parts({
            "sends": 2 * blocking_s * layout.virtual_stages * layout.micro_batches,
            "bubble": ran.seconds - stages[most].busy_s * layout.micro_batches,
            "data parallel": max(replicas_s),
            "optimizer": max(optimizer_s),
        })  # fmt: skip
        replicas = tuple(map(self._replicas, range(layout.pp)))
        of_ranks = tuple(map(tuple, ranks))
        return dict(found), Stages(ran, replicas_s, optimizer_s, of_ranks, replicas, hop)

    def _stage(self, chunks: Sequence[Both], blocking_s: float) -> Stage:
        """Seconds of the parts of one stage; a part sends its result before the next begins."""
        forward_s = tuple(each.forward.seconds + blocking_s for each in chunks)
        weights_s = tuple(each.weights.seconds * self.layers.apart for each in chunks)
        backward_s = tuple(
            each.backward.seconds - apart_s + blocking_s
            for each, apart_s in zip(chunks, weights_s, strict=True)
        )
        return Stage(forward_s, backward_s, weights_s if self.layers.apart else ())

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of layers that there are: True of dense ones, False of those with experts."""
        dense = self.model.num_dense
        return (True,) * (dense > 0) + (False,) * (dense < self.model.layers)

    @cached_property
    def _alone(self) -> dict[bool, Both]:
        """A layer of each kind, whose parameters are there."""
        found: dict[bool, Both] = {}
        for dense in self.kinds:
            layer = self.layers.dense() if dense else self.layers.sparse()
            layer = computed(layer, self.layout)
            found[dense] = layer if dense else routed(self.layers, layer)
        return found

    @cached_property
    def _whole(self) -> dict[bool, Both]:
        """With its parameters gathered, where each layer's are."""
        if not self.replicas.sharded:
            return self._alone
        return {dense: self.replicas.layer(each, self.parameters(dense), experts=not dense)
                for dense, each in self._alone.items()}  # fmt: skip

    def _chunk(self, index: int) -> Both:
        """One part of the model: layers, and on the last one the head."""
        dense, sparse = self._num_layers[index]
        found = Both()
        if dense:
            found += self._whole[True] * dense
        if sparse:
            found += self._whole[False] * sparse
        last = index == self.layout.pp * self.layout.virtual_stages - 1
        if last:
            found += computed(self.layers.head(), self.layout)
        if self.replicas.sharded and index == 0:
            kind = self.kinds[0]
            found += self.replicas.first(self._alone[kind], self.parameters(kind))
        if self.replicas.sharded and last and not (index == 0 and self.model.tied):
            found += self.replicas.logits()
        return found

    @cached_property
    def _num_layers(self) -> list[tuple[int, int]]:
        """Dense and sparse layers of each part; the first and last have fewer, if any has."""
        chunks = self.layout.pp * self.layout.virtual_stages
        most, fewer = -(-self.model.layers // chunks), -self.model.layers % chunks
        # the last part, the first, the one before the last, and so on
        short = {chunks - 1 - i // 2 if i % 2 == 0 else i // 2 for i in range(fewer)}
        left, found = self.model.num_dense, list[tuple[int, int]]()
        for i in range(chunks):
            count = most - (i in short)
            dense = min(left, count)
            found.append((dense, count - dense))
            left -= dense
        return found

    def parameters(self, dense: bool) -> Sizes:
        """Of a layer on one rank: those all have, and those of its experts."""
        model, tp = self.model, self.layout.tp
        shared = sum(k * n for k, n in model.attention_weights)
        shared += model.mlp_parameters(model.ffn if dense else model.shared_ffn)
        experts = 0 if dense else model.experts * model.mlp_parameters(model.expert_ffn)
        return shared / tp, experts / self.layout.ep

    def stage_layers(self, stage: int) -> tuple[int, int]:
        """Dense and sparse layers of a stage, in all of its parts."""
        dense, sparse = zip(*self._num_layers[stage :: self.layout.pp], strict=True)
        return sum(dense), sum(sparse)

    def stage_parameters(self, stage: int) -> Sizes:
        """Of a stage on one rank, likewise."""
        shared = experts = 0.0
        for count, dense in zip(self.stage_layers(stage), (True, False), strict=True):
            if count:
                own, routed = self.parameters(dense)
                shared, experts = shared + count * own, experts + count * routed
        ends = (stage == 0) + (stage == self.layout.pp - 1)
        ends -= self.model.tied and self.layout.pp == 1  # else both stages have it
        return shared + ends * self.model.vocab * self.model.hidden / self.layout.tp, experts

    def _replicas(self, stage: int) -> dict[Sent, float]:
        """Bytes of gradients and parameters, once a step."""
        sharding, parameters = self.layout.data_parallel_sharding, self.stage_parameters(stage)
        kinds: dict[str, tuple[Collective, ...]] = {
            "none": ("all_reduce",), "zero1": ("reduce_scatter", "all_gather"), "fsdp": (),
        }  # fmt: skip
        found: dict[Sent, float] = {}
        for kind in kinds[sharding]:
            found |= self.replicas.moved(kind, parameters)
        return found

    def _replicas_s(self, stage: int, times: Stage) -> float:
        """Exposed seconds of gradients and parameters, once a step."""
        layout, parameters = self.layout, self.stage_parameters(stage)
        if layout.dp * layout.cp == 1 or layout.data_parallel_sharding == "fsdp":
            return 0.0
        gradients = constants.GRADIENT_BYTES.value
        # those of a layer are sums over micro-batches, which the last one ends
        last_s = sum(times.weights_s or times.backward_s)
        if layout.data_parallel_sharding == "none":
            moved = [(sum(
                self.network.all_reduce_s(count * gradients, group)
                for count, group in zip(parameters, self.replicas.groups(), strict=True) if count
            ), last_s)]  # fmt: skip
        else:
            moved_s = self.replicas.moved_s
            moved = [
                (moved_s(parameters, gradients), last_s),
                (
                    self.replicas.moved_s(parameters, constants.PARAMETER_BYTES.value),
                    sum(times.forward_s),
                ),
            ]
        if not layout.asynchronous:
            return sum(seconds for seconds, _ in moved)
        # beside one micro-batch, a layer's at a time: that of the last layer has nothing beside it
        layers = max(self.model.layers // layout.pp, 1)
        return sum(
            self.replicas.beside_s(seconds, min(beside_s, seconds * (1 - 1 / layers)))
            for seconds, beside_s in moved
        )

    def _optimizer_s(self, stage: int) -> float:
        owned = self.layout.data_parallel_sharding != "none"
        each = zip(self.stage_parameters(stage), self.replicas.groups(), strict=True)
        own = sum(count / (group.size if owned else 1) for count, group in each)
        return self.layers.memory_s(constants.OPTIMIZER_BYTES.value * own)

    def _hop(self) -> Hop:
        """What one stage sends to the next; tensor-parallel ranks send a share each."""
        layout = self.layout
        num_bytes = self.layers.tokens * self.model.hidden * ITEM_BYTES
        stride = layout.tp * layout.cp * layout.dp
        seconds = self.network.send_s(num_bytes / layout.tp, stride)
        gathered: dict[Sent, float] = {}
        if not layout.sequence_parallel:
            group = Group(layout.tp, 1)
            gathered[Sent("sends", "all_gather", group)] = num_bytes
            seconds += self.network.all_gather_s(num_bytes, group)
        return Hop(num_bytes / layout.tp, gathered, seconds)
