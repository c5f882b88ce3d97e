"""Steps with some mechanisms and without others."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from counterpoint.fsdp.predicted_step import Sizes, predicted_step
from counterpoint.problem import Problem
from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.mechanisms import puts
from counterpoint.scale.mechanisms.fp8 import FP8_CAST_BYTES
from counterpoint.scale.network.fabric import Group, Network
from counterpoint.scale.operators import Placed, pair_s, placed
from counterpoint.scale.parts import Both, Parts
from counterpoint.scale.recommenders.step import DlrmStep
from counterpoint.scale.replicas import Replicas
from counterpoint.scale.step import Step

Name = Literal["tensor parallel", "fp8", "experts", "routes", "attention", "FSDP", "embedding",
               "puts"]  # fmt: skip


@dataclass(frozen=True)
class ChosenLayers(Layers):
    """Layers whose operators have the mechanisms `on`, and are serial without.

    Args:
        on: of these names.
    """

    on: AbstractSet[Name]

    @cached_property
    def routes(self) -> bool:
        """Whether tokens may go to experts by routes."""
        return "routes" in self.on

    @property
    def hosts_wait(self) -> bool:
        """Whether hosts wait for how many rows experts get."""
        return not {"experts", "routes"} & self.on

    def pair_s(self, place: Placed) -> tuple[float, float]:
        """Seconds of an operator with its communication, and of its matmuls alone."""
        name: Name = "experts" if place.problem.experts else "tensor parallel"
        if place.problem.counts == "routed":
            name = "routes"
        seconds, compute_s = pair_s(place, "ours" if name in self.on else "none")
        if "puts" in self.on and puts.applies(place):
            seconds = min(seconds, puts.seconds(place, self.network))
        return seconds, compute_s

    def attention_saves_s(self) -> tuple[float, float]:
        """What gathering keys and values beside attention saves, forward and backward."""
        model, layout = self.model, self.layout
        group, length = Group(layout.cp, layout.tp), layout.length(model)
        saved: list[float] = []
        for op in ("all_gather_attention", "all_gather_attention_backward"):
            n, k = (  # heads of a batch are columns
                layout.micro_batch * max(heads // layout.tp, 1) * model.width
                for heads in (model.heads, model.kv_heads)
            )
            problem = Problem(op, m=length, n=n, k=k, ranks=layout.cp, head_dim=model.width,
                              causal=True)  # fmt: skip
            place = placed(problem, self.network, group)
            saved.append(pair_s(place, "none")[0] - pair_s(place, "ours")[0])
        return saved[0], saved[1]

    def _attention(self) -> Both:
        found, name = super()._attention(), "context parallel"
        if "attention" not in self.on:
            return found
        forward, backward = (
            parts + Parts({name: -min(max(saved_s, 0.0), parts[name])})
            for parts, saved_s in zip((found.forward, found.backward), self.attention_saves_s(),
                                      strict=True)
        )  # fmt: skip
        return replace(found, forward=forward, backward=backward)

    def _column(self, n: int) -> Both:
        found, rows, hidden = super()._column(n), self.tokens, self.model.hidden
        if "fp8" not in self.on:
            return found
        forward = self._in_fp8("all_gather_matmul", rows, n, hidden)
        return replace(found, forward=forward)

    def _row(self, k: int) -> Both:
        found, rows, hidden = super()._row(k), self.tokens, self.model.hidden
        if "fp8" not in self.on:
            return found
        return replace(found, forward=self._in_fp8("matmul_reduce_scatter", rows, hidden, k))

    def _in_fp8(self, op: str, m: int, n: int, k: int) -> Parts:
        """A forward whose x and weight are cast by rows; what is gathered is cast already."""
        tp = self.layout.tp
        problem = Problem(op, m=m, n=n, k=k, ranks=tp, scales="row")
        seconds, compute_s = self.pair_s(placed(problem, self.network, Group(tp, 1)))
        own = m * k / tp if op == "all_gather_matmul" else m * k
        cast_s = sum(self.memory_s(FP8_CAST_BYTES.value * each) for each in (own, n * k))
        parts = {"matmuls": compute_s, "memory": cast_s, "tensor parallel": seconds - compute_s}
        return Parts(parts)


class ChosenStep(Step):
    """A step of such layers; with "FSDP" of what `cp.overlap` saves, where shards are of a node."""

    def __init__(self, layers: ChosenLayers) -> None:
        super().__init__(layers)
        if "FSDP" in layers.on and within_a_node(self.layout, self.network):
            self.replicas = OverlappedReplicas(layers)


class OverlappedReplicas(Replicas):
    """Ranks whose gathers and scatters go by `cp.overlap`, less what its own predictor says."""

    def layer(self, layer: Both, parameters: tuple[float, float], *, experts: bool) -> Both:
        """With its parameters gathered and its gradients scattered."""
        found, (shared, of_experts) = super().layer(layer, parameters, experts=experts), parameters
        if self.layout.ep == 1:  # else their shards are of fewer ranks
            shared += of_experts
        count = max(self.layers.model.layers // self.layout.pp, 1)
        sizes = Sizes(round(shared), round(shared), int(constants.PARAMETER_BYTES.value))
        told = predicted_step([sizes] * count, self.groups()[0].size,
                              self.network.machine.costs, count * layer.seconds)  # fmt: skip
        names, both = ("data parallel", "FSDP copies"), (found.forward, found.backward)
        spent_s = sum(parts.get(name, 0.0) for parts in both for name in names)
        share = min(max(told.as_is_s - told.ours_s, 0.0) / count / spent_s, 1.0) if spent_s else 0.0
        saved = (Parts({name: -share * parts.get(name, 0.0) for name in names}) for parts in both)
        return found + Both(*saved)


def within_a_node(layout: Layout, network: Network) -> bool:
    """Whether FSDP2's shards lie on ranks of one node, and on several ranks."""
    group = Group(layout.dp * layout.cp, layout.tp)
    sharded = layout.data_parallel_sharding == "fsdp" and group.size > 1
    return sharded and network.near(group) == group.size


@dataclass(frozen=True)
class ChosenDlrm(DlrmStep):
    """A DLRM's step whose pooling and all-to-all have the mechanisms `on`.

    Args:
        on: of the same names.
    """

    on: AbstractSet[Name] = frozenset()

    def embedding(self) -> Parts:
        """Pooling and its all-to-all, forward."""
        both_s, lookup_s = pair_s(self.place, "ours" if "embedding" in self.on else "none")
        if "puts" in self.on and puts.applies(self.place):
            both_s = min(both_s, puts.seconds(self.place, self.network))
        return Parts({"embedding": lookup_s, "all-to-all": both_s - lookup_s})
