"""Seconds of a whole training step on many GPUs, where they go, and what that stands on.

Ranks that do the same at the same time are folded into one of each pipeline stage: layers and
collectives are closed forms, the order of a pipeline is simulated.
"""

from dataclasses import dataclass, field
from functools import cached_property

from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.ranges import instance
from counterpoint.scale import constants
from counterpoint.scale.fabric import Fabric, Group, Network
from counterpoint.scale.layer import ITEM_BYTES, OVERLAPS, Both, Layers, Overlap, Parts
from counterpoint.scale.layout import Layout
from counterpoint.scale.models import Model, model_of
from counterpoint.scale.pipeline import Stage, makespan_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step, predicted.

    Args:
        model: what is trained.
        layout: how it is laid out.
        machine: the name of the GPUs' machine.
        overlap: how matmuls and the collectives beside them were priced.
        seconds: of the step.
        parts: seconds by what the busiest pipeline stage spends them on; they add up to `seconds`.
        tokens: of the step, over all replicas.
        assumptions: what the numbers stand on, with sources, a line each.
    """

    model: Model
    layout: Layout
    machine: str
    overlap: Overlap
    seconds: float
    parts: dict[str, float]
    tokens: int
    assumptions: tuple[str, ...] = field(repr=False)

    @property
    def flop_per_s(self) -> float:
        """Of one GPU: products of the model alone, nothing that is recomputed."""
        model, layout = self.model, self.layout
        used = model.parameters - model.vocab * model.hidden  # an embedding is looked up
        idle = model.experts - model.top_k
        used -= (model.layers - model.num_dense) * idle * model.mlp_parameters(model.expert_ffn)
        # causal attention, as flash attention computes it
        wide = model.layers * model.heads * (model.key_width + model.width)
        flop = self.tokens * (6 * used + 3 * layout.length(model) * wide)
        return flop / self.seconds / layout.num_gpus

    def explain(self) -> str:
        """The step in words and a table: where time goes, and every assumption with its source."""
        layout = self.layout
        degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "ep")
                   if getattr(layout, name) > 1]  # fmt: skip
        lines = [
            f"{self.model.name} on {layout.num_gpus} GPUs ({self.machine}): "
            f"{', '.join(degrees) or 'one GPU'}, {layout.micro_batches} micro-batches of "
            f"{layout.micro_batch} x {layout.length(self.model)} tokens, "
            f"{layout.virtual_stages} virtual stages",
            f"overlap {self.overlap}: {self.seconds:.3f} s a step, "
            f"{self.tokens / self.seconds:,.0f} tokens/s, "
            f"{self.flop_per_s / 1e12:.0f} Tflop/s a GPU",
            "",
        ]
        lines += [f"{name:18}{seconds:10.4f} s {seconds / self.seconds:6.1%}"
                  for name, seconds in self.parts.items() if seconds]  # fmt: skip
        return "\n".join([*lines, "", "stands on:", *(f"- {each}" for each in self.assumptions)])


def predict(
    model: Model | str,
    layout: Layout,
    fabric: Fabric | None = None,
    machine: MachineLike = "h100-8",
    *,
    overlap: Overlap = "none",
) -> Prediction:
    """Predict one training step: forward, backward, gradients and optimizer.

    Time does not grow with `dp`, and linearly with stages and micro-batches. Memory is not
    checked, and no rank is slower than another.

    Args:
        model: sizes, or a name: llama3-8b, llama3-70b, llama3-405b, gpt3-175b, mixtral-8x7b,
            deepseek-v3, qwen3-235b.
        layout: degrees of parallelism and micro-batches.
        fabric: NICs and levels above; None: 400 Gb/s a GPU, not oversubscribed.
        machine: of one node (NVLink island), given as to `choose`.
        overlap: how tensor-parallel matmuls and experts are priced: "none": by serial plans,
            "ours": by the plans that `choose` takes, "ideal": by the longer of matmuls and
            communication.

    Returns:
        The prediction: `seconds`, `parts`, `assumptions`, `explain()`.

    Raises:
        InputError: no such model, machine or mode, the layout does not fit the model, or a level
            of the fabric is smaller than an island.

    Example:
        >>> layout = Layout.on(16384, tp=8, pp=16, virtual_stages=4, num_micro_batches=16)
        >>> 5 < predict("llama3-405b", layout).seconds < 8
        True
    """
    known = model_of("predict", model)
    instance("predict", "layout", layout, Layout)
    where = machine_of("predict", machine)
    fabric = instance("predict", "fabric", Fabric() if fabric is None else fabric, Fabric)
    if overlap not in OVERLAPS:
        raise InputError("predict", "overlap", want=f"one of {', '.join(OVERLAPS)}", got=overlap)
    layout.fits(known)
    layers = Layers(known, layout, Network(where, fabric), overlap)
    seconds, parts = _Step(layers).run()
    tokens = layout.micro_batch * layout.micro_batches * layout.dp * layout.length(known)
    return Prediction(known, layout, where.name, overlap, seconds, parts, tokens,
                      tuple(_assumptions(layers)))  # fmt: skip


class _Step:
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
        found["sends"] = 2 * blocking_s * layout.virtual_stages * layout.micro_batches
        found["bubble"] = ran_s - busy_s[most] * layout.micro_batches
        found["data parallel"] = max(map(self._replicas_s, range(layout.pp), stages))
        found["optimizer"] = max(map(self._optimizer_s, range(layout.pp)))
        return found.seconds, dict(found)

    @cached_property
    def _dense(self) -> Both:
        return self._sharded(self.layers.dense(), self._parameters(True))

    @cached_property
    def _sparse(self) -> Both:
        return self._sharded(self.layers.sparse(), self._parameters(False))

    def _chunk(self, index: int) -> Both:
        """One part of the model: layers, and on the last one the head."""
        dense, sparse = self._num_layers(index)
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

    def _num_layers(self, index: int) -> tuple[int, int]:
        """Dense and sparse layers of a part; the first and last parts have fewer, if any has."""
        chunks = self.layout.pp * self.layout.virtual_stages
        most, fewer = -(-self.model.layers // chunks), -self.model.layers % chunks
        # the last part, the first, the one before the last, and so on
        short = {chunks - 1 - i // 2 if i % 2 == 0 else i // 2 for i in range(fewer)}
        counts = [most - (i in short) for i in range(chunks)]
        before = sum(counts[:index])
        dense = min(max(self.model.num_dense - before, 0), counts[index])
        return dense, counts[index] - dense

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
            for count, dense in zip(self._num_layers(index), (True, False), strict=True):
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
            found.append(each + Parts({"data parallel": moved_s - hidden_s}))
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
        return sum(max(seconds - beside_s, seconds / layers) for seconds, beside_s in moved)

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


def _assumptions(layers: Layers) -> list[str]:
    """What a prediction stands on."""
    machine, fabric = layers.network.machine, layers.network.fabric
    layout, model = layers.layout, layers.model
    how = "measured" if machine.measured else "derived from the datasheet, as on 4xH200"
    found = [
        f"{model.name}: {model.source}",
        f"matmuls, kernels and collectives of a node: {how} ({machine.name}: {machine.source})",
        f"NIC {fabric.nic_bytes_per_s / 1e9:g} GB/s a GPU: {fabric.source}",
        *(f"past {size} GPUs 1:{factor:g}, given" for size, factor in fabric.levels),
    ]
    found += [f"{name} {each.value:g} {each.unit} ({each.basis}): {each.source}"
              for name, each in constants.CONSTANTS.items()]  # fmt: skip
    if layout.pp > 1:
        found.append(f"virtual stages {layout.virtual_stages}, given: they matter a lot")
    unchecked = {
        "experts": bool(model.experts), "context parallelism": layout.cp > 1,
        "FSDP": layout.data_parallel_sharding == "fsdp", "latent attention": bool(model.query_rank),
        f"{machine.device.name}": machine.device.name not in ("A100 SXM 80GB", "H100 SXM"),
        "plans across islands": layout.tp > machine.num_devices
        or layout.ep * layout.tp > machine.num_devices,
    }  # fmt: skip
    found += [f"not checked against any published step: {name}"
              for name, given in unchecked.items() if given]  # fmt: skip
    return [*found, "not modelled: memory limits, stragglers, failures, input, host time"]
