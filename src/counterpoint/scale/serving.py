"""Serving with tensor parallelism in one node: time to the first token, time of a token, memory.

One forward pass, as a captured graph: no host time. Matmuls and their all-reduces are priced as
in training; what lies between is priced by the bytes that it reads and writes.
"""

from bisect import bisect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of
from counterpoint.ranges import whole
from counterpoint.scale import constants
from counterpoint.scale.layer import Layers
from counterpoint.scale.layout import Layout
from counterpoint.scale.memory import BF16, Memory
from counterpoint.scale.models import Model, model_of
from counterpoint.scale.network.fabric import Fabric, Group, Network
from counterpoint.scale.operators import OVERLAPS, Overlap
from counterpoint.scale.parts import Parts

Attention = Literal["paged", "sdpa"]
MAX_TOKENS, MAX_SEQUENCES = 2**24, 2**16
COMMUNICATION = "tensor parallel"


@dataclass(frozen=True, slots=True)
class Serving:
    """Predicted times and memory of one model on the GPUs of a node.

    Args:
        model: what is served.
        tp: tensor-parallel ranks.
        sequences: that get a token together.
        length: tokens of a prompt, and of the context of each sequence.
        machine: the name of the GPUs' machine.
        overlap: how matmuls and their all-reduces were priced: "none", "ours" or "ideal".
        first: seconds to the first token of one prompt, by what they are spent on.
        token: seconds of one token of each sequence, likewise.
        memory: of a GPU, with keys and values of all sequences.
        most_sequences: of that length that a GPU has memory for.
    """

    model: Model
    tp: int
    sequences: int
    length: int
    machine: str
    overlap: Overlap
    first: Mapping[str, float]
    token: Mapping[str, float]
    memory: Memory = field(repr=False)
    most_sequences: int

    @property
    def first_s(self) -> float:
        """Seconds to the first token of one prompt."""
        return sum(self.first.values())

    @property
    def token_s(self) -> float:
        """Seconds of one token of each sequence."""
        return sum(self.token.values())

    @property
    def title(self) -> str:
        """What is predicted, in one line."""
        many = f"{self.sequences} sequence{'s' * (self.sequences > 1)} of {self.length} tokens"
        gpus = f"{self.tp} GPU{'s' * (self.tp > 1)}"
        return f"serving {self.model.name} on {gpus} ({self.machine}): {many}, bf16"


def serve(
    model: Model | str,
    machine: MachineLike = "h100-8",
    *,
    tp: int = 1,
    sequences: int = 1,
    length: int = 2048,
    overlap: Overlap = "none",
    attention: Attention = "paged",
) -> Serving:
    """Predict serving of a transformer in bf16: prefill of a prompt, and decode steps.

    Experts are cut by tensor parallelism, as all else. The host costs nothing, as in a CUDA graph;
    nothing waits in a queue.

    Args:
        model: sizes, a name, or the path of a Hugging Face `config.json`, as `predict` takes them.
        machine: of one node (NVLink island), given as to `choose`.
        tp: tensor-parallel ranks, at most those of the node.
        sequences: that get a token together, 1 to 65,536.
        length: tokens of a prompt, and of the context of each sequence.
        overlap: "none": a matmul, then NCCL's all-reduce; "ours": what `choose` takes; "ideal": the
            longer of a matmul and its all-reduce. Sums of experts and the gather of logits stay.
        attention: "paged": one kernel that skips what is masked and reads keys and values as they
            are kept, as engines have it; "sdpa": as transformers calls torch's, with a mask that is
            given, and keys and values repeated for each head.

    Raises:
        InputError: no such model, machine, mode or attention, or the model cannot be cut so.

    Example:
        >>> one, two = (serve("llama3-8b", "h200-8", tp=tp).token_s for tp in (1, 2))
        >>> 1.4 < one / two < 2
        True
    """
    known = model_of("serve", model)
    if not isinstance(known, Model):
        raise InputError("serve", "model", want="a transformer", got=known.name)
    where = machine_of("serve", machine)
    whole("serve", "tp", tp, 1, where.num_devices)
    whole("serve", "sequences", sequences, 1, MAX_SEQUENCES)
    whole("serve", "length", length, 1, MAX_TOKENS)
    if overlap not in OVERLAPS:
        raise InputError("serve", "overlap", want=f"one of {', '.join(OVERLAPS)}", got=overlap)
    if attention not in get_args(Attention):
        want = f"one of {', '.join(get_args(Attention))}"
        raise InputError("serve", "attention", want=want, got=attention)
    network, repeats = Network(where, Fabric()), attention == "sdpa"
    layout = Layout(tp=tp, sequence_parallel=False, sequence=length)
    layout.fits(known)
    # of a decode step: one token of each sequence
    step = replace(layout, micro_batch=sequences, sequence=1)
    first = _Forward(Layers(known, layout, network, overlap), length, repeats, prefill=True)
    token = _Forward(Layers(known, step, network, overlap), length, repeats, prefill=False)
    return Serving(
        known, tp, sequences, length, where.name, overlap, first.parts, token.parts,
        token.memory(), token.most_sequences,
    )  # fmt: skip


class _Forward:
    """One forward pass of one rank."""

    def __init__(self, layers: Layers, length: int, repeats: bool, *, prefill: bool) -> None:
        self.layers, self.model, self.length = layers, layers.model, length
        self.tp, self.network = layers.layout.tp, layers.network
        self.sequences = layers.layout.micro_batch
        self.prefill, self.repeats = prefill, repeats

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are spent on."""
        model, layers = self.model, self.layers
        dense, found = model.num_dense, Parts()
        if dense:
            found += (self._layer(layers.mlp(model.ffn).forward)) * dense
        if dense < model.layers:
            mlp = self._experts()
            found += self._layer(mlp) * (model.layers - dense)
        return dict(found + self._head())

    def _layer(self, mlp: Parts) -> Parts:
        """Projections, attention, the MLP given, and what is between them."""
        model, layers, tokens = self.model, self.layers, self.layers.tokens
        # two additions with their norm: read 2 + 2, write 2 + 2
        between_s = 2 * layers.memory_s(4 * BF16 * tokens * model.hidden)
        heads = (model.heads + model.kv_heads) * model.key_width / self.tp
        # positions: read and write queries and keys; and what is kept of the token
        between_s += layers.memory_s(2 * BF16 * tokens * heads)
        between_s += layers.memory_s(2 * tokens * self._kept_bytes)
        attention_s = self._prefill_s() if self.prefill else self._decode_s()
        found = layers.projections().forward + mlp
        return found + Parts({"memory": between_s, "attention": attention_s})

    @cached_property
    def _kept_bytes(self) -> float:
        """Of keys and values of one token in one layer, on one rank."""
        model = self.model
        if model.key_rank:  # what keys and values are made of is kept, on every rank
            return BF16 * (model.key_rank + model.rope_dim)
        heads = max(model.kv_heads / self.tp, 1)
        return BF16 * heads * (model.key_width + model.width)

    def _attended(self) -> float:
        """Tokens that the next token attends to; mean of the layers."""
        model = self.model
        share = model.windowed / model.layers
        near = min(model.window, self.length) if model.windowed else 0
        return (1 - share) * self.length + share * near

    def _prefill_s(self) -> float:
        """Half of the scores are masked, and left out where the kernel knows."""
        model, layers = self.model, self.layers
        share, pairs = constants.FLASH_SHARE, model.attended(self.length) / 2
        if self.repeats:
            share, pairs = constants.SDPA_SHARE, float(self.length) ** 2
        flop = 2 * pairs * model.heads / self.tp * (model.key_width + model.width)
        rate = share.value * layers.alone.device.bf16_flop_per_s
        return layers.memory_s(0) + flop / rate

    def _decode_s(self) -> float:
        """Reads keys and values of all that came before, in parts that a second kernel adds."""
        model, memory_s = self.model, self.layers.memory_s
        if not self.repeats or model.key_rank:
            read = self.sequences * self._attended() * self._kept_bytes
            return memory_s(read) + memory_s(0)
        kept = self.sequences * self.length * self._kept_bytes
        repeated = kept * max(model.heads // max(model.kv_heads, self.tp), 1)
        return 2 * memory_s((kept + repeated) / 2) + memory_s(repeated) + memory_s(0)

    def _experts(self) -> Parts:
        """Grouped matmuls of the experts that tokens go to, each cut over the ranks."""
        model, layers, tokens = self.model, self.layers, self.layers.tokens
        rows = tokens * model.top_k
        # experts that at least one token goes to, routing being random
        used = model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)
        each, used = rows / used, round(used)
        inner, shared = model.expert_ffn / self.tp, model.shared_ffn / self.tp
        wide = (1 + model.gated) * inner
        seconds = layers.matmul_s(each, wide, model.hidden, used)
        seconds += layers.matmul_s(each, model.hidden, inner, used)
        if shared:  # its result is summed with theirs
            seconds += layers.matmul_s(tokens, (1 + model.gated) * shared, model.hidden)
            seconds += layers.matmul_s(tokens, model.hidden, shared)
        moved_s = layers.memory_s(BF16 * rows * (wide + inner))
        moved_s += layers.memory_s(constants.ROUTED_BYTES.value * rows * model.hidden)
        num_bytes = BF16 * tokens * model.hidden
        sum_s = self.network.all_reduce_s(num_bytes, Group(self.tp, 1)) if self.tp > 1 else 0.0
        return Parts({"experts": seconds, "memory": moved_s, COMMUNICATION: sum_s})

    def _head(self) -> Parts:
        """Logits of the last token of each sequence, from all ranks."""
        model, layers = self.model, self.layers
        vocab = -(-model.vocab // self.tp)
        found = Parts({"matmuls": layers.matmul_s(self.sequences, vocab, model.hidden)})
        if self.tp > 1:
            num_bytes = BF16 * self.sequences * model.vocab
            gather_s = self.network.all_gather_s(num_bytes, Group(self.tp, 1))
            found += Parts({COMMUNICATION: gather_s})
        return found

    @property
    def _weights_bytes(self) -> float:
        """Of one rank; what is not cut among them included."""
        model, tp = self.model, self.tp
        whole = (model.query_rank + model.key_rank + model.rope_dim) * (1 - 1 / tp)
        if not model.key_rank:  # ranks that share a head of keys have one each
            whole = 2 * model.width * (max(model.kv_heads / tp, 1) - model.kv_heads / tp)
        return BF16 * (model.parameters / tp + model.layers * model.hidden * whole)

    def _held(self, sequences: int) -> dict[str, float]:
        """Weights, keys and values of all sequences, and what one forward pass takes."""
        model, tokens = self.model, max(self.length, sequences)
        inner = max(model.ffn, model.top_k * model.expert_ffn) / self.tp
        kept = sequences * self._attended() * self._kept_bytes * model.layers
        forward = BF16 * tokens * (4 * model.hidden + (2 + model.gated) * inner)
        return {"weights": self._weights_bytes, "keys and values": kept, "activations": forward}

    @property
    def _capacity_bytes(self) -> float:
        return self.network.machine.device.hbm_bytes

    def memory(self) -> Memory:
        """Of one rank; and what to serve with instead."""
        found = Memory(self._held(self.sequences), self._capacity_bytes)
        return found if found.fits else replace(found, changes=self._changes())

    def _changes(self) -> tuple[str, ...]:
        found = [f"{self.most_sequences} sequences at a time"] * (self.most_sequences > 0)
        tp, layout = 2 * self.tp, self.layers.layout
        while tp <= self.network.machine.num_devices:
            with suppress(InputError):  # what the model cannot be cut by
                other = replace(layout, tp=tp)
                other.fits(self.model)
                layers = replace(self.layers, layout=other)
                if _Forward(layers, self.length, self.repeats, prefill=False).memory().fits:
                    found.append(f"tp {tp}")
                    break
            tp *= 2
        if not found and self._weights_bytes < self._capacity_bytes:
            found.append("shorter sequences")
        return tuple(found) or ("quantized weights, or GPUs with more memory",)

    @cached_property
    def most_sequences(self) -> int:
        """Of that length that there is memory for."""
        counts = range(1, MAX_SEQUENCES + 1)
        return bisect(counts, self._capacity_bytes, key=lambda n: sum(self._held(n).values()))
