"""What a layer of experts does between its matmuls and exchanges, on one GPU: compute alone.

SwiGLU: torch's own over all rows that there is room for, as it is and compiled to one kernel, and
ours over those that there are. Room is 1.25 times the rows, or "most", for all tokens of all ranks.
Routing: from logits to each token's experts and weights, the rows of each expert, and where each
row lies; torch's topk, softmax and sort, as many layers have them, and ours.
Routes: where rows go, from the experts and weights of all ranks, by torch and by kernels; without
the gather of these lists.
Kernels are counted by torch's profiler."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.expert_tensors import MODELS, Model
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import measured, us
from counterpoint.experts.routes.launch import tell_into as tell_by_kernel
from counterpoint.experts.routes.on_device import Found, Sizes, found_by
from counterpoint.experts.routes.router import choose_experts, order_by_expert
from counterpoint.experts.routes.tell import found_by_kernels, tell_into
from counterpoint.measure.timing import relative_error
from counterpoint.ops.activations import swiglu

TOKENS = (256, 4096)  # of a rank
ROOMS = (("1.25", 4), ("most", 2), ("most", 4))  # and ranks that share the experts
ROOM = 1.25  # of the rows
ON_8 = 8  # ranks on which a rank has Model.experts
BOTH = "forward + backward"


def case_of(kind: str, model: Model, tokens: int, of: int = 1, room: str = "") -> Case:
    """One layer.

    Args:
        kind: "swiglu", "routing" or "routes".
        of: ranks that share the experts.
        room: "1.25" or "most", of swiglu.
    """
    name = f"{kind} {model.name} {tokens}" + (f" of {of}" if of > 1 else "")
    name += f", room {room}" if room else ""
    return Case(name, {
        "kind": kind, "model": model.name, "tokens": tokens, "of": of, "room": room,
        "n": model.ffn, "experts": ON_8 * model.experts, "top": model.top,
    })  # fmt: skip


def cases(_: int) -> list[Case]:
    """All models, with SwiGLU for both kinds of room, and routing."""
    found = [case_of("routing", *each) for each in product(MODELS, TOKENS)]
    found += [case_of("routes", *each) for each in product(MODELS, TOKENS, (2, 8))]
    every = product(MODELS, TOKENS, ROOMS)
    return found + [
        case_of("swiglu", model, tokens, of, room) for model, tokens, (room, of) in every
    ]


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one case."""
    return {"swiglu": _swiglu, "routing": _routing, "routes": _routes}[case["kind"]](case, bench)


def gated(x: Tensor) -> Tensor:
    """SwiGLU by torch."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _swiglu(case: Case, bench: Bench) -> Arms:
    rows, of = case["tokens"] * case["top"], case["of"]
    local = case["experts"] // of
    most = of * case["tokens"] * min(local, case["top"])
    room = most if case["room"] == "most" else int(ROOM * rows)
    counts = torch.full((of, case["experts"]), rows // of // local, dtype=torch.int32)
    rows = int(counts[:, :local].sum())  # uniform
    counts = counts.to(bench.device)
    x = bench.normal(room, 2 * case["n"]).requires_grad_()
    dy = bench.normal(room, case["n"])

    def ours(x: Tensor) -> Tensor:
        return swiglu(x, counts, 0)

    ways = {"torch": gated, "ours": ours}
    if bench.on_gpu and case["room"] == "1.25":
        torch.compiler.reset()  # else it would be compiled for any sizes, and slower
        ways["compiled"] = torch.compile(gated, dynamic=False)

    @torch.no_grad()
    def forward(_: int, way: Callable[[Tensor], Tensor]) -> Tensor:
        return way(x)

    def both(_: int, way: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(way(x), x, dy)[0]

    calls: dict[str, Call | str] = {name: partial(forward, way=way) for name, way in ways.items()}
    calls |= {f"{name}, {BOTH}": partial(both, way=way) for name, way in ways.items()}
    exact = x.detach()[:rows].double().requires_grad_()
    want = gated(exact)
    (dwant,) = torch.autograd.grad(want, exact, dy[:rows].double())

    def check(name: str, got: Tensor) -> list[float]:
        return [relative_error(got[:rows], dwant if BOTH in name else want.detach())]

    return Arms(calls, check, baseline="torch", floor=4e-3, facts={"rows": rows, "rows_room": room},
                nan_bytes=4 * room * case["n"])  # fmt: skip


def by_torch(logits: Tensor, top: int) -> tuple[Tensor, ...]:
    """Weights, rows of each expert, places of a token's rows, and tokens of rows, by torch."""
    largest, experts = logits.float().topk(top)
    weights, every = largest.softmax(-1), logits.shape[1]
    ids, order = experts.flatten().sort(stable=True)
    starts = torch.arange(every + 1, device=ids.device, dtype=ids.dtype)
    counts = torch.searchsorted(ids, starts).diff()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return weights, counts, places.view(experts.shape), order // top


def _ours(logits: Tensor, top: int) -> tuple[Tensor, ...]:
    weights, experts = choose_experts(logits, top, True)
    return weights, *order_by_expert(experts, logits.shape[1])


def _routing(case: Case, bench: Bench) -> Arms:
    tokens, every, top = case["tokens"], case["experts"], case["top"]
    # no two logits of a token are equal
    logits = torch.rand(tokens, every, device=bench.device, generator=bench.draw).argsort(1) / 16
    logits = logits.requires_grad_()
    dweights = bench.normal(tokens, top, dtype=torch.float32)
    ways: dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
        "torch": by_torch, "ours": _ours
    }  # fmt: skip

    @torch.no_grad()
    def forward(_: int, way: Callable[[Tensor, int], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return way(logits, top)

    def both(_: int, way: Callable[[Tensor, int], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(logits, top)[0], logits, dweights)

    calls: dict[str, Call | str] = {name: partial(forward, way=way) for name, way in ways.items()}
    calls |= {f"{name}, {BOTH}": partial(both, way=way) for name, way in ways.items()}
    exact = logits.detach().double().requires_grad_()
    weights = exact.topk(top)[0].softmax(-1)
    (dlogits,) = torch.autograd.grad(weights, exact, dweights.double())
    lists = forward(0, by_torch)[1:]

    def check(name: str, got: tuple[Tensor, ...]) -> list[float]:
        if BOTH in name:
            return [relative_error(got[0], dlogits)]
        same = all(torch.equal(g.long(), w) for g, w in zip(got[1:], lists, strict=True))
        return [relative_error(got[0], weights.detach()) if same else torch.inf]

    return Arms(calls, check, baseline="torch", floor=1e-5, about=_kernels(calls, bench))


def _routes(case: Case, bench: Bench) -> Arms:
    """Of rank 0; without an exchange, so ranks other than this one need not be there."""
    tokens, every, top, of = case["tokens"], case["experts"], case["top"], case["of"]
    sizes = Sizes(tokens, top, of, int(ROOM * tokens * top))
    drawn = torch.rand(of * tokens, every, device=bench.device, generator=bench.draw)
    experts = drawn.topk(top).indices.int()
    weights = bench.normal(of * tokens, top, dtype=torch.float32)

    def found(_: int, tell: Any, find: Callable[[Tensor], Found]) -> Found:
        told = experts.new_empty(of * tokens, 2 * top)
        tell(told, experts, weights, every)
        return find(told)

    def by_torch(told: Tensor) -> Found:
        each = told[:, top:].contiguous().view(torch.float32)
        return found_by(0, sizes, told[:, :top].long(), each, every)

    def by_kernels(told: Tensor) -> Found:
        return found_by_kernels(0, sizes, told, every)

    calls: dict[str, Call | str] = {
        "torch": partial(found, tell=tell_into, find=by_torch),
        "ours": partial(found, tell=tell_by_kernel, find=by_kernels)
        if bench.on_gpu else "these kernels want a GPU",
    }  # fmt: skip
    want = found(0, tell_into, by_torch)

    def check(_: str, got: Found) -> list[float]:
        return [0.0 if all(map(torch.equal, got, want)) else torch.inf]

    return Arms(calls, check, baseline="torch", floor=0.0, about=_kernels(calls, bench))


def _kernels(calls: Mapping[str, Call | str], bench: Bench) -> dict[str, Row]:
    """How many kernels, copies and fills a call of each arm has on the GPU."""
    found: dict[str, Row] = {}
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    for name, call in calls.items():
        if bench.on_gpu and not isinstance(call, str):
            call(0)
            bench.meet()
            with torch.profiler.profile(activities=kinds) as profiler:
                call(0)
                torch.cuda.synchronize(bench.device)
            events: Any = profiler.events()
            found[name] = {"kernels": sum(event.device_type.name == "CUDA" for event in events)}
    return found


NOTE = (
    "Times are microseconds in CUDA graphs, of the forward, and of both forward and backward. Each "
    "case is one rotation."
)


def table_of(kind: str, found: Mapping[int, list[Row]]) -> str:
    """One kind of case: times, and speedups over the faster of torch's."""
    rows = [row for row in next(iter(found.values())) if row["kind"] == kind]
    routing = kind == "routing"
    more = ["kernels, torch", "kernels, ours"] if routing else ["experts of", "room"]
    ways = ("torch", "ours") if routing else ("torch", "compiled", "ours")
    head = ["model, tokens of a rank", *more, *ways, "speedup",
            *(f"{way}, both" for way in ways), "speedup, both"]  # fmt: skip
    lines: list[tuple[list[str], list[Row]]] = []
    ratios: list[list[float]] = [[], []]
    for case in taken(rows, "model", "tokens", "of", "room"):
        h, cells = case.head, list[str]()
        for behind, each in zip(("", f", {BOTH}"), ratios, strict=True):
            names = [f"{way}{behind}" for way in ways]
            *theirs, ours = (case.s(name) if name in case else torch.inf for name in names)
            each.append(min(theirs) / ours)
            said = ["-" if t == torch.inf else us(t) for t in (*theirs, ours)]
            cells += [*said, f"{each[-1]:.2f}"]
        about = [f"{h['of']} ranks", h["room"]]
        if routing:
            about = [_counted(case, way) for way in ("torch", "ours")]
        lines.append(([f"{h['model']}, {h['tokens']}", *about, *cells], case.rows))
    means = [f"{geometric_mean(each):.2f}x" for each in ratios]
    text = f"The mean speedup is {means[0]}, and {means[1]} with the backward."
    return f"{measured(head, lines, NOTE)}\n\n{text}"


def table_of_routes(found: Mapping[int, list[Row]]) -> str:
    """Times of routes, and speedups."""
    rows = [row for row in next(iter(found.values())) if row["kind"] == "routes"]
    kernels = [f"kernels, {way}" for way in ("torch", "ours")]
    head = ["model, tokens of a rank", "experts of", *kernels, "torch", "ours", "speedup"]
    lines: list[tuple[list[str], list[Row]]] = []
    ratios: list[float] = []
    for case in taken(rows, "model", "tokens", "of"):
        h, times = case.head, [case.s(way) for way in ("torch", "ours")]
        kernels = [str(case.graph[way]["kernels"]) for way in ("torch", "ours")]
        ratios.append(times[0] / times[1])
        cells = [*kernels, *map(us, times), f"{ratios[-1]:.2f}"]
        lines.append(([f"{h['model']}, {h['tokens']}", f"{h['of']} ranks", *cells], case.rows))
    text = f"The mean speedup is {geometric_mean(ratios):.2f}x."
    note = "Times are microseconds in CUDA graphs, without the gather. Each case is one rotation."
    return f"{measured(head, lines, note)}\n\n{text}"


def _counted(case: Timed, way: str) -> str:
    """Kernels of the forward, and of both."""
    return ", ".join(str(case.graph[f"{way}{b}"]["kernels"]) for b in ("", f", {BOTH}"))


TABLES: dict[str, Callable[[Mapping[int, list[Row]]], str]] = {
    "swiglu": partial(table_of, "swiglu"), "routing": partial(table_of, "routing"),
    "routes": table_of_routes,
}  # fmt: skip
EXPERT_LAYER = Benchmark(
    "expert_layer", cases, arms, ranks=1, calls=8, soak_s=0.05,
    short=lambda case: case["model"] == "Qwen3-235B" and case["tokens"] == 256 and case["of"] < 4,
    sections=tuple(
        Section("docs/results/experts.md", f"expert-layer-{kind}", table)
        for kind, table in TABLES.items()
    ),
)  # fmt: skip
