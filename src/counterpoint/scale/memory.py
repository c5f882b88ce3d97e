"""Bytes of the fullest GPU of a training step, by what holds them, and what to change.

Counted from the tensors that eager PyTorch keeps for its backward, in bf16, with flash attention or
with its scores. The moment is the largest one: all layers' activations are there, and beside them
the loss, or what the backward of one layer takes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_args

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import MAX_GPUS, Layout, Recompute
from counterpoint.scale.models import Model
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.recommenders.dlrm import Dlrm
from counterpoint.scale.step import Step

BF16, FP32 = 2, 4
MOMENTS = 8  # bytes a parameter of Adam in fp32
AGAIN = get_args(Recompute)  # from none to all
MOST_CHANGES = 3
CLOSE = 0.07  # of a GPU: no nearer to published peaks is what is counted here


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest GPU.

    Args:
        parts: by what holds them: "weights", "gradients", "optimizer", "gathered", "activations",
            "loss", "keys and values".
        capacity_bytes: of the GPU. The datasheet's GB are read as 1e9 bytes. What an H100 has above
            (5.5 GB) is left to the driver, to CUDA's context and to NCCL.
        changes: what to change so that it fits; none where it does.
    """

    parts: Mapping[str, float]
    capacity_bytes: float
    changes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """In all."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether a GPU holds them."""
        return self.num_bytes <= self.capacity_bytes

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {"bytes": self.num_bytes, "parts": dict(self.parts), "fits": self.fits,
                "capacity_bytes": self.capacity_bytes, "changes": list(self.changes)}  # fmt: skip

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda each: -each[1])
        held = ", ".join(f"{name} {num / 1e9:.1f}" for name, num in largest if num >= 5e7)
        total, capacity = self.num_bytes / 1e9, self.capacity_bytes / 1e9
        said = f"{total:,.1f} GB on the fullest GPU, of {capacity:,.0f}: {held}"
        if abs(self.num_bytes / self.capacity_bytes - 1) < CLOSE:
            said += f"; within {CLOSE:.0%} of the GPU's, so try it"
        verdict = "memory fits" if self.fits else "DOES NOT FIT"
        return "\n".join([f"{verdict}: {said}", *(f"  instead: {each}" for each in self.changes)])


def training(model: Model, layout: Layout, machine: Machine, fabric: Fabric) -> Memory:
    """What a step takes, and what to change where that is too much.

    Args:
        model: sizes of a transformer.
        layout: that it fits.
        machine: of one node.
        fabric: between nodes.
    """
    found = _of(model, layout, machine, fabric)
    if found.fits:
        return found
    changes: list[list[str]] = []
    for words, other in _others(model, layout, machine):
        more = any({*fewer} <= {*words} for fewer in changes)
        if not more and _of(model, other, machine, fabric).fits:
            changes.append(words)
        if len(changes) == MOST_CHANGES:
            break
    said = tuple(map(", ".join, changes))
    return replace(found, changes=said or ("a smaller model, or GPUs with more memory",))


def _of(model: Model, layout: Layout, machine: Machine, fabric: Fabric) -> Memory:
    step = Step(Layers(model, layout, Network(machine, fabric), "none"))
    # the first of those that have as many layers holds the most micro-batches; the last the loss
    first = {step.stage_layers(stage): stage for stage in reversed(range(layout.pp))}
    stages = {*first.values(), layout.pp - 1}
    parts = max((stage_bytes(step, stage) for stage in stages), key=lambda each: sum(each.values()))
    return Memory(parts, machine.device.hbm_bytes)


def recommender(model: Dlrm, layout: Layout, machine: Machine) -> Memory:
    """What a step of a recommender takes: bf16 tables with a row-wise sum, shared out evenly."""
    samples, (bottom, top) = layout.micro_batch, model.mlps
    numbers = sum(wide for _, wide in (*bottom, *top)) + model.width + 2 * model.columns
    numbers += sum(sum(each) for each in model.cross_weights)
    parts = {
        "tables": sum(model.rows) * (BF16 * model.dim + FP32) / layout.num_gpus,
        # weights and gradients in fp32, and Adagrad's sum
        "dense layers": 3.0 * FP32 * model.dense_parameters,
        "activations": float(BF16 * samples * numbers),
    }
    found = Memory(parts, machine.device.hbm_bytes)
    if found.fits:
        return found
    left = found.capacity_bytes - parts["dense layers"] - parts["activations"]
    if left <= 0:
        return replace(found, changes=("fewer samples a GPU",))
    gpus = layout.num_gpus
    while parts["tables"] * layout.num_gpus / gpus > left:
        gpus *= 2
    return replace(found, changes=(f"{gpus} GPUs",))


def stage_bytes(step: Step, stage: int) -> dict[str, float]:
    """Bytes of one rank of a pipeline stage."""
    model, layout = step.model, step.layout
    sharded, last = layout.data_parallel_sharding, stage == layout.pp - 1
    counts = step.stage_parameters(stage)
    each = sum(counts)
    shared = sum(n / group.size for n, group in zip(counts, step.replicas.groups(), strict=True))
    found: dict[str, float] = dict.fromkeys(("weights", "gradients", "optimizer", "gathered"), 0.0)
    if sharded == "fsdp":  # all in fp32, a shard each; layers in bf16 while they are used
        found |= {
            "weights": FP32 * shared,
            "gradients": FP32 * shared,
            "optimizer": MOMENTS * shared,
        }
        layer = max(sum(step.parameters(dense)) for dense in step.kinds)
        head = last * model.vocab * model.hidden / layout.tp
        found["gathered"] = BF16 * (2 * layer + head) + (BF16 + FP32) * max(layer, head)
    else:  # bf16 weights, gradients in fp32, and fp32 weights and moments of the optimizer
        owned = each if sharded == "none" else shared
        found |= {"weights": BF16 * each, "gradients": constants.GRADIENT_BYTES.value * each,
                  "optimizer": (FP32 + MOMENTS) * owned}  # fmt: skip
    kept, working = _activations(step, stage)
    tokens, vocab = layout.tokens(model), -(-model.vocab // layout.tp)
    logit = constants.LOSS_MEMORY_BYTES if layout.tp == 1 else constants.SHARED_LOSS_MEMORY_BYTES
    # beside them the hidden state that the ranks gathered, and its gradient
    gathered = 2 * BF16 * model.hidden * (layout.tp > 1)
    logits = last * tokens * (logit.value * vocab + gathered)
    found["activations"] = kept + max(working - logits, 0.0)
    found["loss"] = logits
    return {name: num * constants.RESERVED.value for name, num in found.items()}


def _activations(step: Step, stage: int) -> tuple[float, float]:
    """Bytes that a stage keeps for its backwards, and what the backward of one layer takes."""
    layout = step.layout
    whole = {dense: _layer_bytes(step, dense, "none") for dense in step.kinds}
    kept = {dense: _layer_bytes(step, dense, layout.recompute) for dense in step.kinds}
    counts = zip(step.stage_layers(stage), (True, False), strict=True)
    each = sum(count * kept[dense] for count, dense in counts if count)
    again = max(whole[dense] - kept[dense] for dense in step.kinds)
    keys = 2 * step.layers.keys_bytes * (layout.cp > 1)  # and their gradients, of all ranks
    return each * in_flight(layout, stage), again + max(whole.values()) / 2 + keys


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at most, in the order of `pipeline`."""
    pp, parts = layout.pp, layout.virtual_stages
    most = pp - stage + 0.0
    if layout.schedule == "zero-bubble":
        most = pp
    elif parts > 1:  # some parts are a batch ahead
        most = pp + (pp - 1 - 2 * stage) / parts
    return min(most, layout.micro_batches)


def _layer_bytes(step: Step, dense: bool, recompute: str) -> float:
    """Bytes of a micro-batch that one layer keeps on one rank."""
    model, layout = step.model, step.layout
    tokens, tp = layout.tokens(model), layout.tp
    shared = tp if layout.sequence_parallel else 1  # what lies between matmuls
    hidden, between = model.hidden, BF16 * model.hidden * tokens / shared
    if recompute == "full":
        return between
    kv_heads = max(model.kv_heads, tp)  # ranks that share one have one each
    heads = model.heads * model.key_width + kv_heads * (model.key_width + model.width)
    if model.key_rank:
        heads = 2 * model.heads * model.key_width + model.heads * model.width
        heads += model.query_rank + model.key_rank + model.rope_dim
    out = model.heads * model.width
    statistics = FP32 * model.heads
    if recompute == "selective":
        # torchtitan: results of attention and of every second matmul
        inner = 0 if not dense else model.ffn
        halves = model.heads * model.key_width + kv_heads * model.width + inner + hidden
        rows = BF16 * (out + halves) + statistics
        return between + rows * tokens / tp + _experts_bytes(step, dense) / 2
    scores = 0.0
    if not layout.flash_attention and recompute == "none":
        # arXiv 2205.05198: softmax, its dropout, and the mask of that
        scores = 5 * layout.length(model) * model.heads
    inner = model.ffn if dense else model.shared_ffn
    mlp = BF16 * inner * (4 if model.gated else 2)
    attention = BF16 * (heads + out) + statistics
    # inputs of the two norms, and their results
    return 4 * between + (attention + scores + mlp) * tokens / tp + _experts_bytes(step, dense)


def _experts_bytes(step: Step, dense: bool) -> float:
    """Rows that were sent to a rank's experts, and what is between their matmuls."""
    model, layers = step.model, step.layers
    if dense or not model.experts:
        return 0.0
    rows = layers.between * model.top_k
    return rows * BF16 * (2 * model.hidden + (4 if model.gated else 2) * model.expert_ffn)


def _others(model: Model, layout: Layout, machine: Machine) -> Iterator[tuple[list[str], Layout]]:
    """Layouts that take less, on as many GPUs if they can, and then on twice as many; in words.

    None on GPUs that do not even hold weights, gradients and moments in fp32, an equal share each.
    """
    least = (FP32 + FP32 + MOMENTS) * model.parameters * constants.RESERVED.value
    fsdp = {"data_parallel_sharding": "fsdp"}
    lighter: list[dict[str, Any]] = [
        {}, {"recompute": "selective"}, fsdp, {"recompute": "full"}, {"micro_batch": 1},
        {**fsdp, "recompute": "selective"}, {**fsdp, "recompute": "full"},
        {**fsdp, "recompute": "full", "micro_batch": 1},
        *({**fsdp, "recompute": "full", "cp": layout.cp * times} for times in (2, 4, 8)),
    ]  # fmt: skip
    degrees = _doubled(layout.tp, machine.num_devices)
    known, gpus = {layout}, layout.num_gpus
    while least > gpus * machine.device.hbm_bytes:
        gpus *= 2
    while gpus <= MAX_GPUS:
        for tp, ep, change in product(degrees, _degrees_of_experts(model, gpus), lighter):
            dp = gpus // (tp * int(change.get("cp", layout.cp)) * layout.pp)
            again = str(change.get("recompute", layout.recompute))
            if not dp or ep < layout.ep or AGAIN.index(again) < AGAIN.index(layout.recompute):
                continue
            with suppress(InputError):  # one that the model cannot be cut by
                other = Layout.on(gpus, **{**_fields(layout), "tp": tp, "ep": ep, **change})
                other.fits(model)
                if other not in known:
                    known.add(other)
                    yield _words(layout, other), other
        gpus *= 2


def _doubled(least: int, most: int) -> list[int]:
    """Degrees from the least on, doubled, up to an island."""
    found = [least]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _degrees_of_experts(model: Model, gpus: int) -> list[int]:
    return [ep for ep in _doubled(1, min(model.experts, gpus)) if model.experts % ep == 0] or [1]


def _fields(layout: Layout) -> dict[str, Any]:
    """But for the replicas, which follow from the GPUs."""
    return {field.name: getattr(layout, field.name) for field in fields(layout)
            if field.name != "dp"}  # fmt: skip


def _words(layout: Layout, other: Layout) -> list[str]:
    """What another layout changes, as `scale` has its options."""
    names = {"tp": "tp", "cp": "cp", "ep": "ep", "recompute": "recompute",
             "data_parallel_sharding": "sharding", "micro_batch": "micro-batch"}  # fmt: skip
    changed = [f"{word} {getattr(other, field)}" for field, word in names.items()
               if getattr(other, field) != getattr(layout, field)]  # fmt: skip
    if other.num_gpus != layout.num_gpus:
        changed.insert(0, f"{other.num_gpus} GPUs")
    return changed
