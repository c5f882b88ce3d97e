"""What wins back what a step loses: each remedy's bound, what such bounds brought, and its line.

A bound is what a remedy could save at most. What it brought is the share of such bounds that this
library saved where it was measured, at the most similar size: gains.json, written from committed
rows by `make readme`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from counterpoint.advice.losses import Collective, Losses
from counterpoint.advice.trace import Trace

LEAST = 0.01  # of a step: what saves less at most is not worth a line
SMALL = 2**24  # bytes of a collective that takes its latency, not its bandwidth


@dataclass(frozen=True)
class Gain:
    """What this library saved of a bound, where that was measured.

    Args:
        case, gpu, gpus, date: of the rows.
        size: what is compared: bytes of the collective; of FSDP2 the bound's share of the step.
        share: of the bound, 0 to 1.
    """

    case: str
    gpu: str
    gpus: int
    date: str
    size: float
    share: float


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Args:
        name: what it does.
        why: what the trace shows, in a sentence.
        line: to write, or the setting.
        bound_s: seconds of a step that it saves at most.
        saves_s: what it would save by the most similar measured cases, or by the cost model where
            there is none; None: not known.
        gain: the first of those.
    """

    name: str
    why: str
    line: str
    bound_s: float
    saves_s: float | None = None
    gain: Gain | None = None


@cache
def gains() -> dict[str, tuple[Gain, ...]]:
    """Measured gains, by mechanism."""
    content: Any = json.loads((Path(__file__).parent / "gains.json").read_text())
    return {name: tuple(Gain(**each) for each in found) for name, found in content.items()}


def nearest(mechanism: str, size: float, gpus: int, gpu: str) -> Gain | None:
    """The measured case that is most similar: in size first, then GPUs and their kind.

    Its share is the median of the three most similar ones: each alone has its own chances.
    """
    kind = next((word for word in ("H200", "H100") if word in gpu), "")
    found = gains().get(mechanism, ())

    def far(each: Gain) -> tuple[float, int, bool]:
        factor = abs(math.log2(each.size / size)) if size > 0 else 0.0
        return round(factor, 1), abs(each.gpus - gpus), each.gpu != kind

    near = sorted(found, key=far)[:3]
    return replace(near[0], share=median(each.share for each in near)) if near else None


class _Words(NamedTuple):
    name: str
    why: str
    line: str


_COMPILE = "torch.compile(model, options=counterpoint.compile_options())  # or counterpoint."
# by mechanism; those that gains.json knows first
MECHANISMS = {
    "overlap": _Words(
        "FSDP2 by copy engines, in place",
        "FSDP2's collectives take SMs from computation, and the copies around them take time",
        "counterpoint.overlap(model)  # after fully_shard",
    ),
    "all_gather_matmul": _Words(
        "all-gather together with its matmul",
        "a matmul waits until all that it reads was gathered", f"{_COMPILE}all_gather_matmul",
    ),
    "matmul_reduce_scatter": _Words(
        "reduce-scatter together with its matmul",
        "partial sums are sent after the whole matmul", f"{_COMPILE}matmul_reduce_scatter",
    ),
    "matmul_all_reduce": _Words(
        "all-reduce together with its matmul",
        "partial sums are added over ranks after the whole matmul", f"{_COMPILE}matmul_all_reduce",
    ),
    "tensor parallel": _Words(
        "tensor-parallel collectives together with their matmuls",
        "a matmul and the collective beside it wait for each other",
        "counterpoint.nn.ColumnParallelLinear and RowParallelLinear, or compile_options()",
    ),
    "experts": _Words(
        "experts' all-to-all together with their matmuls",
        "the experts' matmuls wait until all tokens were exchanged",
        'ep_implementation="counterpoint"  # transformers; or counterpoint.nn.ExpertParallelMLP',
    ),
    "embeddings": _Words(
        "embedding bags together with their all-to-all",
        "looked-up rows are exchanged after the whole lookup",
        "counterpoint.nn.ShardedEmbeddingBags",
    ),
    "data parallel": _Words(
        "DDP's buckets", "gradients are summed after the backward that makes them, not beside it",
        "DistributedDataParallel(..., bucket_cap_mb=..., gradient_as_bucket_view=True)",
    ),
    "FSDP1": _Words(
        "FSDP2 in place of FSDP1", "FSDP1's collectives and the copies around them take time",
        "torch.distributed.fsdp.fully_shard, then counterpoint.overlap(model)",
    ),
    "copies": _Words(
        "peer copies that begin earlier", "copy engines move data, and nothing computes meanwhile",
        "prefetch further ahead; for FSDP2 model.set_modules_to_forward_prefetch(...)",
    ),
    "others": _Words(
        "independent work beside {kinds}",
        "nothing computes until it is done, and counterpoint has no operator that takes it",
        "async_op=True, and wait() where the result is read; or a stream of their own",
    ),
}  # fmt: skip


def mechanism(each: Collective, trace: Trace) -> str:
    """What could take a collective, of MECHANISMS."""
    kind, follows_matmul = each.kind, each.before == "matmul"
    if each.group == "FSDP2" and kind in ("all-gather", "reduce-scatter", "all-reduce"):
        return "overlap"
    if kind in ("all-gather", "reduce-scatter") and "FullyShardedDataParallel" in trace.marks:
        return "FSDP1"
    sums = kind == "all-reduce" and "DistributedDataParallel" in trace.marks
    if sums and "tp" not in each.group.lower():
        return "data parallel"
    if kind == "all-gather" and each.after == "matmul":
        return "all_gather_matmul"
    if kind in ("reduce-scatter", "all-reduce") and follows_matmul:
        return f"matmul_{kind.replace('-', '_')}"
    if "embedding" in (each.before, each.after) and kind in ("all-to-all", "send and receive"):
        return "embeddings"
    return {"all-to-all": "experts", "peer copy": "copies"}.get(kind, "others")


def remedies(losses: Losses, trace: Trace, link_bytes_per_s: float = 0.0) -> list[Remedy]:
    """What to do about a step, the best first; none that could save less than 1 % of it.

    Args:
        losses: of the step.
        trace: of the same rank.
        link_bytes_per_s: of the machine; 0: unknown.
    """
    rows: dict[str, list[Collective]] = {}
    for each in losses.collectives:
        rows.setdefault(mechanism(each, trace), []).append(each)
    found = [
        *(_of_collectives(name, taken, losses, trace) for name, taken in rows.items()),
        *_small(losses, link_bytes_per_s), *_of_the_host(losses), *_of_others(losses, rows),
    ]  # fmt: skip
    worth = [each for each in found if each.bound_s >= LEAST * losses.time_s]
    return sorted(
        worth, key=lambda each: -(each.bound_s / 2 if each.saves_s is None else each.saves_s)
    )


def _bound(rows: Iterable[Collective]) -> float:
    """What they expose, less what waits for a late rank."""
    return sum(max(0.0, each.exposed_s - (each.late_s or 0.0)) for each in rows)


def _of_collectives(name: str, rows: Sequence[Collective], losses: Losses, trace: Trace) -> Remedy:
    """What takes these collectives, and what that brought where it was measured."""
    bound_s, size = _bound(rows), max(each.num_bytes for each in rows)
    if name == "overlap":
        bound_s += losses.lost_s - losses.exposed_s - losses.late_s  # copies, and what is slowed
        size = bound_s / losses.time_s
    elif name == "data parallel":  # nothing can hide the last bucket
        last_s = sum(each.time_s / max(1.0, each.calls) for each in rows)
        bound_s = max(0.0, bound_s - last_s)
    ranks = max(each.ranks for each in rows) or trace.world
    gain = nearest(name, size, ranks, trace.gpu)
    words = MECHANISMS[name]
    named = words.name.format(kinds=", ".join(sorted({each.kind for each in rows})))
    saves_s = bound_s * gain.share if gain else None
    return Remedy(named, words.why, words.line, bound_s, saves_s, gain)


def _small(losses: Losses, link_bytes_per_s: float) -> list[Remedy]:
    rows = [
        each for each in losses.collectives
        if 0 < each.num_bytes < SMALL and each.calls >= 8
        and 0 < each.bus_bytes_per_s < 0.5 * link_bytes_per_s
    ]  # fmt: skip
    bound_s = sum(_bound([each]) * (1 - each.bus_bytes_per_s / link_bytes_per_s) for each in rows)
    return [Remedy(
        name="fewer, larger collectives",
        why=f"{sum(each.calls for each in rows):.0f} a step are so small that they take their "
            "latency",
        line="larger buckets, or one collective of several tensors", bound_s=bound_s,
    )] if rows else []  # fmt: skip


def _of_the_host(losses: Losses) -> list[Remedy]:
    idle = losses.idle_s
    return [
        Remedy(
            name="CUDA graphs",
            why="the GPU waits until the host launches its next kernel",
            line='torch.compile(model, mode="reduce-overhead")  # or torch.cuda.graph',
            bound_s=idle["launching"],
        ),
        Remedy(
            name="data in time", why="the host waits for the data loader, and the GPU for the host",
            line="DataLoader(..., num_workers=..., pin_memory=True, persistent_workers=True)",
            bound_s=idle["data"],
        ),
        Remedy(
            name="fewer synchronizations",
            why="the host waited for the GPU, and had nothing launched when that was done",
            line="no .item(), .cpu(), nonzero or print of a tensor within a step",
            bound_s=idle["synchronizing"],
        ),
        Remedy(
            name="host copies beside computation",
            why="copies from or to the host run while nothing computes",
            line="pinned memory, tensor.to(device, non_blocking=True), a batch ahead",
            bound_s=idle["host copies"],
        ),
    ]  # fmt: skip


def _of_others(losses: Losses, rows: Mapping[str, object]) -> list[Remedy]:
    slowed_s = 0.0 if "overlap" in rows else losses.slowed_s
    return [
        Remedy(
            name="equal work for all ranks", why="ranks wait in collectives for the last one",
            line="balance batches, sequence lengths, experts or pipeline stages",
            bound_s=losses.late_s,
        ),
        Remedy(
            name="fewer SMs for collectives",
            why="kernels take longer beside collectives than alone",
            line="counterpoint.resources.tune  # or NCCL_MAX_CTAS, a stream's priority",
            bound_s=slowed_s,
        ),
    ]  # fmt: skip
