"""A step of one rank of each pipeline stage: layers, pipeline, gradients, optimizer.

The other ranks of a stage do the same at the same time.
"""

from functools import cached_property

from counterpoint.scale import constants
from counterpoint.scale.fabric import Group
from counterpoint.scale.layer import ITEM_BYTES, Both, Layers, Parts
from counterpoint.scale.pipeline import Stage, makespan_s


class Step:
    """One rank of each pipeline stage."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.network = layers, layers.network
        self.model, self.layout = layers.model, layers.layout

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds, and the parts of the busiest stage."""
        layout = self.layout
        chunks = [self._chunk(i) for i in range(layout.pp * layout.virtual_stages)]
        ranks = [chunks[i :: layout.pp] for i in range(layout.pp)]
        sent_s = 0.0 if layout.pp == 1 else self._send_s()
        blocking_s = 0.0 if layout.asynchronous else sent_s
        stages = [
            Stage(
                tuple(c.forward.seconds + blocking_s for c in each),
                tuple(c.backward.seconds + blocking_s for c in each),
            )
            for each in ranks
        ]
        ran_s = makespan_s(stages, layout.micro_batches, sent_s - blocking_s)
        busy_s = [sum(s.forward_s) + sum(s.backward_s) for s in stages]
        most = max(range(layout.pp), key=busy_s.__getitem__)
        found = Parts()
        for chunk in ranks[most]:
            found += (chunk.forward + chunk.backward) * layout.micro_batches
        replicas_s = max(map(self._replicas_s, range(layout.pp), stages))
        optimizer_s = max(map(self._optimizer_s, range(layout.pp)))
        found += Parts({
            "sends": 2 * blocking_s * layout.virtual_stages * layout.micro_batches,
            "bubble": ran_s - busy_s[most] * layout.micro_batches,
            "data parallel": replicas_s,
            "optimizer": optimizer_s,
        })  # fmt: skip
        return ran_s + replicas_s + optimizer_s, dict(found)

    @cached_property
    def _dense(self) -> Both:
        return self._sharded(self.layers.dense(), self._parameters(True))

    @cached_property
    def _sparse(self) -> Both:
        return self._sharded(self.layers.sparse(), self._parameters(False))

    def _chunk(self, index: int) -> Both:
        """One part of the model: layers, and on the last one the head."""
        dense, sparse = self._num_layers[index]
        kinds = [(n, layer) for n, layer in ((dense, "_dense"), (sparse, "_sparse")) if n]
        forward, backward = Parts(), Parts()
        for count, name in kinds:
            each: Both = getattr(self, name)
            forward += each.forward * count
            backward += each.backward * count
        if index == self.layout.pp * self.layout.virtual_stages - 1:
            head = self.layers.head()
            forward, backward = forward + head.forward, backward + head.backward
        return Both(forward, backward)

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

    def _parameters(self, dense: bool) -> tuple[float, float]:
        """Of a layer on one rank: those all have, and those of its experts."""
        model, tp = self.model, self.layout.tp
        shared = sum(k * n for k, n in model.attention_weights)
        shared += model.mlp_parameters(model.ffn if dense else model.shared_ffn)
        experts = 0 if dense else model.experts * model.mlp_parameters(model.expert_ffn)
        return shared / tp, experts / self.layout.ep

    def _stage_parameters(self, stage: int) -> tuple[float, float]:
        """Of a stage on one rank, likewise."""
        shared = experts = 0.0
        for index in range(stage, self.layout.pp * self.layout.virtual_stages, self.layout.pp):
            for count, dense in zip(self._num_layers[index], (True, False), strict=True):
                if count:
                    own, routed = self._parameters(dense)
                    shared, experts = shared + count * own, experts + count * routed
        ends = (stage == 0) + (stage == self.layout.pp - 1)
        return shared + ends * self.model.vocab * self.model.hidden / self.layout.tp, experts

    def _groups(self) -> tuple[Group, Group]:
        """Ranks with the same parameters: of those that all have, and of experts."""
        layout = self.layout
        copies = layout.dp * layout.cp
        return Group(copies, layout.tp), Group(copies // layout.ep, layout.tp * layout.ep)

    def _moved_s(self, parameters: tuple[float, float], item_bytes: float) -> float:
        """Seconds to gather parameters, or to reduce-scatter their gradients."""
        return sum(
            self.network.all_gather_s(count * item_bytes, group)
            for count, group in zip(parameters, self._groups(), strict=True)
            if count
        )

    def _sharded(self, layer: Both, parameters: tuple[float, float]) -> Both:
        """With its parameters gathered and its gradients scattered, where each layer's are."""
        if self.layout.data_parallel_sharding != "fsdp":
            return layer
        gather_s = self._moved_s(parameters, constants.PARAMETER_BYTES.value)
        scatter_s = self._moved_s(parameters, constants.GRADIENT_BYTES.value)
        found: list[Parts] = []
        for each, moved_s in ((layer.forward, gather_s), (layer.backward, gather_s + scatter_s)):
            # one layer ahead of the computation
            hidden_s = min(each.seconds, moved_s) if self.layout.asynchronous else 0.0
            found.append(each + Parts({"data parallel": self._beside_s(moved_s, hidden_s)}))
        return Both(*found)

    def _replicas_s(self, stage: int, times: Stage) -> float:
        """Exposed seconds of gradients and parameters, once a step."""
        layout, parameters = self.layout, self._stage_parameters(stage)
        if layout.dp * layout.cp == 1 or layout.data_parallel_sharding == "fsdp":
            return 0.0
        gradients = constants.GRADIENT_BYTES.value
        if layout.data_parallel_sharding == "none":
            moved = [(sum(
                self.network.all_reduce_s(count * gradients, group)
                for count, group in zip(parameters, self._groups(), strict=True) if count
            ), sum(times.backward_s))]  # fmt: skip
        else:
            moved = [
                (self._moved_s(parameters, gradients), sum(times.backward_s)),
                (self._moved_s(parameters, constants.PARAMETER_BYTES.value), sum(times.forward_s)),
            ]
        if not layout.asynchronous:
            return sum(seconds for seconds, _ in moved)
        # beside one micro-batch, a layer's at a time: that of the last layer has nothing beside it
        layers = max(self.model.layers // layout.pp, 1)
        return sum(
            self._beside_s(seconds, min(beside_s, seconds * (1 - 1 / layers)))
            for seconds, beside_s in moved
        )

    def _beside_s(self, moved_s: float, hidden_s: float) -> float:
        """What a collective costs that is hidden in part: its SMs are taken from computation."""
        taken = constants.COLLECTIVE_SMS.value / self.network.machine.device.num_sms
        return moved_s - hidden_s + hidden_s * min(taken, 1.0)

    def _optimizer_s(self, stage: int) -> float:
        owned = self.layout.data_parallel_sharding != "none"
        counts = [
            count / (group.size if owned else 1)
            for count, group in zip(self._stage_parameters(stage), self._groups(), strict=True)
        ]
        return self.layers.memory_s(constants.OPTIMIZER_BYTES.value * sum(counts))

    def _send_s(self) -> float:
        """What one stage sends to the next; tensor-parallel ranks send a share each."""
        layout = self.layout
        num_bytes = self.layers.tokens * self.model.hidden * ITEM_BYTES
        stride = layout.tp * layout.cp * layout.dp
        seconds = self.network.send_s(num_bytes / layout.tp, stride)
        if not layout.sequence_parallel:
            seconds += self.network.all_gather_s(num_bytes, Group(layout.tp, 1))
        return seconds
