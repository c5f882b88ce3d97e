"""A layer of experts as torch's own operators have it, and as ours: steps.py says what each way
is."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint.nn as cnn
from benchmarks import titan
from benchmarks.declare import Arms, Bench, Call
from benchmarks.expert_tensors import Model
from benchmarks.experts_in_torch import Batch, batch_of, grouped, in_torch, own_of, splits_of
from counterpoint.measure.timing import relative_error

SETS = 3  # of tokens, experts and gradients, in rotation
ROOM = 1.25  # rows that a rank has room for, of the mean, where the host knows no counts
BOTH = "forward + backward"
WAITING = ("torch", "torchtitan", "serial")  # ways whose host waits for counts
ROOMY = "default"  # waits where memory is short


class Way(NamedTuple):
    """A layer, and its weights: gate and up as one or as two, then down."""

    run: Callable[[Batch], Tensor]
    weights: Sequence[Tensor]


def weights_of(model: Model, dtype: torch.dtype, bench: Bench) -> tuple[Tensor, Tensor]:
    """Gate and up in one, [experts of this rank, 2 ffn, hidden], and down."""

    def weight(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(bench.normal(*shape, scale=shape[-1] ** -0.5, dtype=dtype))

    down = (model.experts, model.hidden, model.ffn)
    return weight(model.experts, 2 * model.ffn, model.hidden), weight(*down)


def ours(model: Model, weights: Sequence[Tensor], bench: Bench, **options: Any) -> Way:
    """Our module, on weights that are there.

    Args:
        options: of `ExpertParallelMLP`.
    """
    layer = cnn.ExpertParallelMLP(model.hidden, model.ffn, bench.ranks * model.experts,
                                  group=bench.group, device="meta", dtype=weights[0].dtype,
                                  **options)  # fmt: skip
    layer.gate_up, layer.down = weights  # type: ignore[assignment]
    return Way(lambda b: layer(b.x, b.experts, b.weights), weights)


def by_torch(weights: Sequence[Tensor], bench: Bench, *, known: bool) -> Way:
    """The usual layer of torch's operators, on the same weights."""
    gate_up, down = weights
    run = partial(in_torch, gate_up=gate_up, down=down, group=bench.group, known=known)
    return Way(run, weights)


def room_of(model: Model, tokens: int, ranks: int) -> int:
    """A quarter more than the mean; at most what can come, of experts that differ."""
    most = ranks * tokens * min(model.experts, model.top)
    return min(int(ROOM * tokens * model.top), most)


def ways_of(
    model: Model, tokens: int, weights: Sequence[Tensor], bench: Bench
) -> dict[str, Way]:  # fmt: skip
    """The layer each way, on equal weights."""
    room = room_of(model, tokens, bench.ranks)
    options: dict[str, dict[str, Any]] = {
        "fused": {"max_rows": room}, ROOMY: {}, "serial": {"plan": "serial"}
    }  # fmt: skip
    ways = {name: ours(model, weights, bench, **more) for name, more in options.items()}
    ways["torch"] = by_torch(weights, bench, known=False)
    ways["torch, counts"] = by_torch(weights, bench, known=True)
    halves = (half.detach().clone() for half in weights[0].chunk(2, 1))
    split = [*(torch.nn.Parameter(half) for half in halves), weights[1]]

    def titans(b: Batch) -> Tensor:
        return titan.layer(b.x, b.experts, b.weights, *split, bench.group)

    ways["torchtitan"] = Way(titans, split)
    return ways


def forward(batches: Sequence[Batch], way: Way) -> Call:
    """The result alone."""
    return torch.no_grad()(lambda i: way.run(batches[i % len(batches)]))


def forward_backward(batches: Sequence[Batch], way: Way) -> Call:
    """The result, and gradients of tokens, of their experts' weights, and of the layer's."""

    def both(i: int) -> tuple[Tensor, ...]:
        b = batches[i % len(batches)]
        b = b._replace(x=b.x.detach().requires_grad_(), weights=b.weights.detach().requires_grad_())
        y = way.run(b)
        return y.detach(), *torch.autograd.grad(y, (b.x, b.weights, *way.weights), b.dy)

    return both


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """Of the result and each gradient; that of gate and up may be in halves."""
    if len(got) > len(want):
        got = (*got[:3], torch.cat(tuple(got[3:5]), 1), got[5])
    return [relative_error(a, b) for a, b in zip(got, want, strict=True)]


def experts_arms(model: Model, tokens: int, dtype: torch.dtype, bench: Bench) -> Arms:
    """Results and gradients of all ways, and both sides alone."""
    batches = [batch_of(tokens, model, dtype, bench) for _ in range(SETS)]
    weights = weights_of(model, dtype, bench)
    calls: dict[str, Call] = {}
    for name, way in ways_of(model, tokens, weights, bench).items():
        calls[f"forward, by {name}"] = forward(batches, way)
        calls[f"{BOTH}, by {name}"] = forward_backward(batches, way)
    want = exact(batches[0], weights, bench)
    alone = sides(batches[0], *weights, bench)
    calls |= alone
    rows = [int(own_of(b.known, bench.group).sum()) for b in batches]

    def of(*ways: str) -> list[str]:
        return [name for name in calls if name.partition(", by ")[2] in ways]

    def check(name: str, got: Any) -> list[float]:
        forwards = name.startswith("forward, ")
        return [relative_error(got, want[0])] if forwards else errors(got, want)

    return Arms(calls, check, baseline=f"{BOTH}, by torch", limit=0.05,
                against={name: "forward, by torch" for name in calls
                         if name.startswith("forward, ")},
                nan_bytes=8 << 30, sets=SETS, waits=of(*WAITING), peers=of(ROOMY), parts=[*alone],
                pool=torch.cuda.graph_pool_handle() if bench.on_gpu else None,
                facts={"tokens": tokens, "rows": rows, "sets": SETS})  # fmt: skip


def exact(b: Batch, weights: Sequence[Tensor], bench: Bench) -> tuple[Tensor, ...]:
    """Result and gradients by `in_torch` in fp64: what is off there is off from the module too."""
    leaves = [t.detach().double().requires_grad_() for t in (b.x, b.weights, *weights)]
    b = b._replace(x=leaves[0], weights=leaves[1], dy=b.dy.double())
    y = in_torch(b, leaves[2], leaves[3], bench.group, known=True)
    return y.detach(), *torch.autograd.grad(y, leaves, b.dy)


def sides(b: Batch, gate_up: Tensor, down: Tensor, bench: Bench) -> dict[str, Call]:
    """The grouped matmuls alone, and the all-to-alls alone, of a forward and of both."""
    each, dtype = own_of(b.counts, bench.group).sum(0), b.x.dtype
    come, sent = splits_of(b.known, bench.group)
    out = bench.normal(sum(sent), gate_up.shape[2], dtype=dtype)
    rows = bench.normal(sum(come), gate_up.shape[2], dtype=dtype)
    wide = bench.normal(sum(come), gate_up.shape[1], dtype=dtype)
    narrow = wide[:, : down.shape[2]].contiguous()
    leaves = [t.detach().requires_grad_() for t in (rows, narrow, gate_up, down)]

    def matmuls(_: int, *, backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            first = grouped(leaves[0], leaves[2].transpose(1, 2), each)
            second = grouped(leaves[1], leaves[3].transpose(1, 2), each)
        if backward:
            torch.autograd.grad((first, second), leaves, (wide, rows))

    @torch.no_grad()
    def exchanges(_: int, *, times: int) -> None:
        for _ in range(times):
            dist.all_to_all_single(rows, out, come, sent, group=bench.group)
            dist.all_to_all_single(out, rows, sent, come, group=bench.group)

    return {
        "matmuls, by forward": partial(matmuls, backward=False),
        f"matmuls, by {BOTH}": partial(matmuls, backward=True),
        "exchanges, by forward": partial(exchanges, times=1),
        f"exchanges, by {BOTH}": partial(exchanges, times=2),
    }
