"""How a model and its batch are laid out over GPUs."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from counterpoint.errors import InputError
from counterpoint.ranges import check, whole
from counterpoint.scale.models import Model

Recompute = Literal["none", "attn", "selective", "full"]
Sharding = Literal["none", "zero1", "fsdp"]
Schedule = Literal["1f1b", "zero-bubble"]
ExpertRows = Literal["auto", "torch", "megatron", "fused"]
MAX_GPUS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism, and what each pipeline stage does in a step.

    Ranks are numbered with tensor parallelism innermost, then context, data and pipeline
    parallelism: those of one tensor-parallel group are neighbours.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel replicas.
        ep: ranks that share out the experts, among those of `dp` and `cp`.
        cp: ranks that share out each sequence.
        virtual_stages: parts of the model on each stage (interleaving).
        schedule: of the pipeline: "1f1b", or "zero-bubble": gradients of weights apart from those
            of inputs, in the bubble, with as much memory as 1F1B (ZB-H1 of arXiv 2401.10241).
        micro_batch: sequences of a micro-batch; of a `Dlrm` the samples of one GPU.
        num_micro_batches: of a step and a replica; 0: as many as stages.
        sequence: tokens of a sequence; 0: the model's.
        sequence_parallel: whether the tensor-parallel ranks share out what lies between matmuls.
        recompute: what the backward computes again: nothing, attention ("attn"), every second
            matmul and what is between them ("selective", torchtitan's default: of routed experts
            all but half of the all-to-alls), or all of a layer.
        data_parallel_sharding: "none": gradients are all-reduced; "zero1": reduced, and the
            parameters gathered, once a step; "fsdp": both for each layer and micro-batch.
        flash_attention: one kernel that keeps no scores, which skips masked ones.
        asynchronous: whether gradients and what goes between stages are sent beside computation.
        expert_rows: what puts rows in the order of experts and back: operators of torch as
            torchtitan calls them ("torch") or Megatron-Core does ("megatron"), or fused kernels;
            "auto": torch with FSDP, else Megatron. Experts that this library computes on several
            ranks have fused kernels.

    Raises:
        InputError: a number is of another kind or out of its range, or stages are interleaved with
            schedule "zero-bubble".
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"
    micro_batch: int = 1
    num_micro_batches: int = 0
    sequence: int = 0
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    data_parallel_sharding: Sharding = "zero1"
    flash_attention: bool = True
    asynchronous: bool = True
    expert_rows: ExpertRows = "auto"

    def __post_init__(self) -> None:
        check("Layout", self)
        if self.num_gpus > MAX_GPUS:
            want = f"for at most {MAX_GPUS} GPUs"
            raise InputError("Layout", "tp * cp * pp * dp", want=want, got=self.num_gpus)
        if self.schedule == "zero-bubble" and self.virtual_stages > 1:
            want = "1 with schedule zero-bubble, which has no interleaved form here"
            raise InputError("Layout", "virtual_stages", want=want, got=self.virtual_stages)

    @classmethod
    def on(cls, num_gpus: int, **degrees: Any) -> "Layout":
        """The layout on so many GPUs, `dp` being what the other degrees leave.

        Args:
            num_gpus: in all, 1 to 2**24.
            degrees: any other field of a layout.

        Raises:
            InputError: they do not divide the GPUs, or a field is refused.
        """
        whole("Layout.on", "num_gpus", num_gpus, 1, MAX_GPUS)
        given: dict[str, Any] = {**degrees, "dp": 1}
        one = cls(**given)
        dp, rest = divmod(num_gpus, one.num_gpus)
        if rest or (degrees.get("dp", dp) != dp):
            each = one.num_gpus * degrees.get("dp", 1)
            near = [each * count for count in (num_gpus // each, num_gpus // each + 1) if count]
            got = " x ".join(f"{n} {getattr(one, n)}" for n in ("tp", "cp", "pp"))
            got += f" x dp {degrees['dp']}" if "dp" in degrees else ""
            want = f"such that they multiply to the {num_gpus} GPUs"
            near = [each] if "dp" in degrees else near
            fix = f"take this many GPUs: {' or '.join(map(str, near))}"
            raise InputError("Layout.on", "tp * cp * pp * dp", want=want, got=got, fix=fix)
        return replace(one, dp=dp)

    @property
    def num_gpus(self) -> int:
        """In all."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def rows_by(self) -> ExpertRows:
        """`expert_rows`, and never "auto"."""
        if self.expert_rows != "auto":
            return self.expert_rows
        return "torch" if self.data_parallel_sharding == "fsdp" else "megatron"

    @property
    def micro_batches(self) -> int:
        """Of a step and a replica."""
        return self.num_micro_batches or self.pp

    def tokens(self, model: Model) -> int:
        """Of a micro-batch on one rank, before tensor parallelism."""
        return self.micro_batch * self.length(model) // self.cp

    def length(self, model: Model) -> int:
        """Tokens of one sequence."""
        return self.sequence or model.sequence

    def fits(self, model: Model) -> None:
        """Refuse a layout that the model cannot be cut by.

        Raises:
            InputError: names the field, and the nearest value that fits.
        """
        chunks = self.pp * self.virtual_stages
        if chunks > model.layers:
            most = max(model.layers // self.virtual_stages, 1)
            want = f"at most the {model.layers} layers of {model.name}"
            parts = self.virtual_stages if self.virtual_stages <= model.layers else 1
            fix = f"the nearest that fits: {min(self.pp, most)} * {parts}"
            raise InputError("Layout", "pp * virtual_stages", want=want, got=chunks, fix=fix)
        of = model.name
        self._divides("tp", "heads", model.heads, of)
        if model.kv_heads >= self.tp or self.tp % model.kv_heads:  # else ranks share one
            self._divides("tp", "kv heads", model.kv_heads, of)
        self._divides("tp", "ffn", model.ffn, of)
        self._divides("tp", "ffn of the shared expert", model.shared_ffn, of)
        self._divides("cp", "tokens of a sequence", self.length(model), of)
        if self.sequence_parallel:
            self._divides("tp", "tokens of a micro-batch on one rank", self.tokens(model), of)
        if self.ep > 1 and not model.experts:
            raise InputError("Layout", "ep", want=f"1: {of} has no experts", got=self.ep)
        if self.ep > 1:
            self._divides("ep", "experts", model.experts, of)
            self._divides("ep", "ranks of dp and cp", self.dp * self.cp, of)
        if self.virtual_stages > 1 and self.pp > 1:
            batches = self.micro_batches
            if batches % self.pp:
                near = max(round(batches / self.pp), 1) * self.pp
                want = f"a multiple of the {self.pp} stages, where they are interleaved"
                fix = f"the nearest that fits: {near}"
                raise InputError("Layout", "num_micro_batches", want=want, got=batches, fix=fix)

    def _divides(self, field: str, what: str, size: int, of: str) -> None:
        degree = getattr(self, field)
        if size % degree:
            near = min(divisors(size), key=lambda d: (abs(d - degree), -d))
            want = f"a divisor of the {size} {what} of {of}"
            fix = f"the nearest that fits: {near}"
            raise InputError("Layout", field, want=want, got=degree, fix=fix)


def divisors(size: int) -> list[int]:
    """Of a whole number of at most 2**32."""
    small = [d for d in range(1, min(int(size**0.5), 2**16) + 1) if gcd(d, size) == d]
    return [*small, *(size // d for d in small)]
