"""What ranks with the same parameters send each other: gradients and parameters; and FSDP2.

By FSDP2 the parameters of a layer are gathered before it and its gradients scattered after it, one
layer ahead of computation, with copies that computation waits for.
"""

from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.network.fabric import Group
from counterpoint.scale.parts import Both, Collective, Parts, Sent

Sizes = tuple[float, float]  # parameters of a rank: those all have, and those of its experts


class Replicas:
    """Ranks of data and context parallelism."""

    def __init__(self, layers: Layers) -> None:
        self.layers, self.layout, self.network = layers, layers.layout, layers.network

    @property
    def sharded(self) -> bool:
        """Whether each layer's parameters are gathered, and its gradients scattered."""
        return self.layout.data_parallel_sharding == "fsdp" and self.groups()[0].size > 1

    def groups(self) -> tuple[Group, Group]:
        """Ranks with the same parameters: of those that all have, and of experts."""
        layout = self.layout
        copies = layout.dp * layout.cp
        return Group(copies, layout.tp), Group(copies // layout.ep, layout.tp * layout.ep)

    def moved_s(self, parameters: Sizes, item_bytes: float) -> float:
        """Seconds to gather parameters, or to reduce-scatter their gradients."""
        return sum(
            self.network.all_gather_s(count * item_bytes, group)
            for count, group in zip(parameters, self.groups(), strict=True)
            if count
        )

    def moved(self, kind: Collective, parameters: Sizes) -> dict[Sent, float]:
        """Bytes of parameters that are gathered, or of gradients that are reduced."""
        item_bytes = constants.GRADIENT_BYTES.value
        if kind == "all_gather":
            item_bytes = constants.PARAMETER_BYTES.value
        found = Parts()
        for count, group in zip(parameters, self.groups(), strict=True):
            found += Parts(sent={Sent("data parallel", kind, group): count * item_bytes})
        return found.sent

    def beside_s(self, moved_s: float, hidden_s: float) -> float:
        """What a collective costs that is hidden in part: computation beside it is slower."""
        return moved_s - hidden_s * (1 - constants.BESIDE.value)

    def _gathered(self, parameters: Sizes) -> tuple[float, float, float, float]:
        """Seconds of a group of FSDP2: a gather, a scatter, and the copies that follow each."""
        gather_s = self.moved_s(parameters, constants.PARAMETER_BYTES.value)
        scatter_s = self.moved_s(parameters, constants.GRADIENT_BYTES.value)
        shared = [(n, group.size) for n, group in zip(parameters, self.groups(), strict=True)
                  if group.size > 1]  # fmt: skip
        shard, whole = sum(n / size for n, size in shared), sum(n for n, _ in shared)
        gather_s += self.layers.memory_s(constants.FSDP_CAST_BYTES.value * shard)
        copied_s, packed_s = (
            self.layers.memory_s(each.value * whole)
            for each in (constants.FSDP_COPIED_BYTES, constants.FSDP_PACKED_BYTES)
        )
        return gather_s, scatter_s, copied_s, packed_s

    def layer(self, layer: Both, parameters: Sizes, *, experts: bool) -> Both:
        """With its parameters gathered and its gradients scattered."""
        gather_s, scatter_s, copied_s, packed_s = self._gathered(parameters)
        gathers = self.moved("all_gather", parameters)
        both = gathers | self.moved("reduce_scatter", parameters)

        def exposed(
            beside: Parts, moved_s: float, copies_s: float, sent: dict[Sent, float]
        ) -> Parts:
            # one layer ahead of the computation; both share a communicator
            hidden_s = min(beside.seconds, moved_s) if self.layout.asynchronous else 0.0
            return Parts(
                {"data parallel": self.beside_s(moved_s, hidden_s), "FSDP copies": copies_s}, sent
            )

        found = layer + Both(
            exposed(layer.forward, gather_s, copied_s, gathers),
            exposed(layer.backward, gather_s + scatter_s, copied_s + packed_s, both),
        )
        return found + Both(backward=Parts({"host": self._host_s(found.seconds, experts=experts)}))

    def _host_s(self, seconds: float, *, experts: bool) -> float:
        """What the host needs beyond a layer's seconds: it launches ahead, if it does not wait."""
        call_s = self.layers.alone.costs.host_call_s
        calls_s = constants.FSDP_CALLS.value * call_s
        experts_s = experts * constants.FSDP_EXPERT_CALLS.value * call_s
        if self.layers.hosts_wait and self.layout.ep > 1:
            return max(calls_s - seconds, 0.0) + experts_s
        return max(calls_s + experts_s - seconds, 0.0)

    def first(self, layer: Both, parameters: Sizes) -> Both:
        """The embedding, and what of the first layer lies beside no other.

        Its gather begins a micro-batch after that of the embedding, and both scatters end it.
        """
        hidden, moved = self._hidden, self._gathered(parameters)
        before_s = hidden * min(layer.forward.seconds, moved[0])
        after_s = hidden * min(layer.backward.seconds, moved[1])
        found = Both(Parts({"data parallel": before_s}), Parts({"data parallel": after_s}))
        return self._end(1.0) + found

    def logits(self) -> Both:
        """Their weights: as a layer's, but gathered once."""
        return self._end(1 - self._hidden)

    @property
    def _hidden(self) -> float:
        """Of a collective's time, what computation beside it can save."""
        return (1 - constants.BESIDE.value) * self.layout.asynchronous

    def _end(self, exposed: float) -> Both:
        """Rows of all words, of which so much of the collectives' time is exposed."""
        model = self.layers.model
        end = model.vocab * model.hidden / self.layout.tp, 0.0
        gather_s, scatter_s, copied_s, packed_s = self._gathered(end)
        copies, data = "FSDP copies", "data parallel"
        return Both(
            Parts({data: exposed * gather_s, copies: copied_s}, self.moved("all_gather", end)),
            Parts({data: exposed * scatter_s, copies: packed_s}, self.moved("reduce_scatter", end)),
        )
