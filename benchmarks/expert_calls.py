"""Calls of a whole layer of experts as programs make them, one at a time: by the host's clock.

    default        cnn.ExpertParallelMLP with default arguments
    max_rows       the same with plan="routed" and room that is given: no rank meets another
    torch          all_to_all_single, grouped matmuls, all_to_all_single; its host waits for counts

and of models with experts of all tokens, as a SwiGLU of torch's operators:

    behind         cnn.ExpertParallelMLP, then these, then a sum
    shared         cnn.ExpertParallelMLP(shared=...)

*forward* and *backward* are single calls, the GPU idle before and waited for behind each, with
gradients of tokens and parameters. *graph* is a forward replayed. *host* is what a call takes the
host while the GPU is busy, in launches of torch.mm that are measured beside it. All arms take turns
in each round. TFLOP/s are those of the three matmuls of each token's experts on this rank's share,
twice that backward. Shared experts count with them."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.expert_tensors import Model
from benchmarks.experts_in_torch import Batch, batch_of
from benchmarks.rows import Row, taken
from benchmarks.steps_experts import Way, by_torch, ours, weights_of
from benchmarks.tables import by_machine, measured
from counterpoint.measure.timing import captured, relative_error

QWEN = Model("Qwen3-30B-A3B", 128, 2048, 768, 8)  # experts of all ranks, as of the next
MIXTRAL = Model("Mixtral-8x7B", 8, 4096, 14336, 2)
# a part of the experts that these models have, as many as would be on a rank of 8 or of 2
DEEPSEEK = Model("DeepSeek-V3", 64, 7168, 2048, 8)
LLAMA = Model("Llama 4 Scout", 16, 5120, 8192, 1)
SIZES = (QWEN, 1024, 0), (QWEN, 4096, 0), (QWEN, 8192, 0), (MIXTRAL, 8192, 0)
SHARED = (DEEPSEEK, 1024, 2048), (DEEPSEEK, 4096, 2048), (LLAMA, 4096, 8192)  # tokens; hidden
ROUNDS, SHORT_ROUNDS = 25, 5
WARM = 4  # calls before the first round: one that repeats is one launch by then
MANY = 10  # calls behind one another, of which the host's time is a mean
BUSY_CYCLES = 100_000_000  # of the GPU while the host enqueues
MATRIX = 1024, 4096, 2048  # of torch.mm
PRODUCT = "torch.mm"


class Dense(nn.Module):
    """The experts of all tokens: SwiGLU."""

    def __init__(self, features: int, hidden: int, bench: Bench) -> None:
        super().__init__()
        shapes = (2 * hidden, features), (features, hidden)
        self.gate_up, self.down = (
            nn.Parameter(bench.normal(*shape, scale=shape[1] ** -0.5)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.down)


def case_of(model: Model, tokens: int, shared: int = 0) -> Case:
    """One layer, with the experts of one rank."""
    facts = {**model._asdict(), "model": model.name, "tokens": tokens}
    facts |= {"shared": shared} if shared else {}
    beside = "shared experts, " if shared else ""
    return Case(f"{model.name}, {beside}{tokens} tokens a rank", facts)


def cases(ranks: int) -> list[Case]:
    """The shape that others have published, and one of few large experts."""
    return [
        case_of(model._replace(experts=model.experts // ranks), tokens, shared)
        for model, tokens, shared in SIZES + SHARED if model.experts % ranks == 0
    ]  # fmt: skip


def rows(case: Case, bench: Bench) -> list[Row]:
    """One for each way, and one of torch.mm."""
    model = Model(*(case[name] for name in Model._fields))
    b = batch_of(case["tokens"], model, torch.bfloat16, bench)
    ways = ways_of(case, model, bench)
    want = ways["behind" if "shared" in case.facts else "torch"].run(b).detach()
    errors = {name: relative_error(way.run(b).detach(), want) for name, way in ways.items()}
    calls = {name: Calls(way, b, bench, waits=name == "torch") for name, way in ways.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    m, k, n = MATRIX if bench.on_gpu else (8, 8, 8)  # some CPUs have no 16-bit products
    a, w = bench.normal(m, k), bench.normal(k, n)
    rounds = bench.rounds or (SHORT_ROUNDS if bench.short else ROUNDS)
    products: list[float] = []
    for i in range(rounds):
        turn = i % len(calls)
        for name in [*calls][turn:] + [*calls][:turn]:
            for clock, seconds in calls[name].timed().items():
                found[name].setdefault(clock, []).append(seconds)
        products.append(enqueued_s(lambda: torch.mm(a, w), bench))
    bench.meet()
    for each in calls.values():
        each.graph = None  # before the group may go
    results = [{"arm": PRODUCT, "mode": "calls", "median_s": bench.most([median(products)])[0],
                "rounds": rounds}]  # fmt: skip
    for name, clocks in found.items():
        worst = dict(zip(clocks, bench.most([median(s) for s in clocks.values()]), strict=True))
        seconds = {f"{clock}_s": each for clock, each in worst.items()}
        facts = {"mode": "calls", "rounds": rounds, "error": errors[name]}
        results.append({"arm": name, **facts, "median_s": worst["forward"], **seconds})
    return results


def ways_of(case: Case, model: Model, bench: Bench) -> dict[str, Way]:
    """The arms of a case, on equal weights."""
    weights = weights_of(model, torch.bfloat16, bench)
    if "shared" in case.facts:
        dense = Dense(model.hidden, case["shared"], bench)
        plain = ours(model, weights, bench)
        every, beside = (*weights, *dense.parameters()), ours(model, weights, bench, shared=dense)
        return {"behind": Way(lambda b: plain.run(b) + dense(b.x), every),
                "shared": Way(beside.run, every)}  # fmt: skip
    room = bench.ranks * case["tokens"] * min(model.experts, model.top)
    return {"default": ours(model, weights, bench),
            "max_rows": ours(model, weights, bench, plan="routed", max_rows=room),
            "torch": by_torch(weights, bench, known=False)}  # fmt: skip


class Calls:
    """A layer one way, and its clocks."""

    def __init__(self, way: Way, b: Batch, bench: Bench, *, waits: bool) -> None:
        self.way, self.bench, self.waits, self.graph = way, bench, waits, None
        self.b = b._replace(x=b.x.detach().requires_grad_())
        self.leaves = [self.b.x, *way.weights]
        for _ in range(WARM):
            self.step()
        if bench.on_gpu and not waits:
            with torch.no_grad():
                self.graph = captured(lambda _: way.run(b), 1)[0]
            self.graph()

    def forward(self) -> Tensor:
        return self.way.run(self.b)

    def step(self) -> None:
        torch.autograd.grad(self.forward(), self.leaves, self.b.dy)

    def timed(self) -> dict[str, float]:
        """Seconds of this rank, by clock."""
        y: list[Tensor] = []
        found = {"forward": alone_s(lambda: y.append(self.forward()), self.bench)}
        gradient = alone_s(lambda: torch.autograd.grad(y[0], self.leaves, self.b.dy), self.bench)
        found["backward"] = gradient
        y.clear()
        if self.graph is not None:
            found["graph"] = alone_s(self.graph, self.bench)
        if not self.waits:
            found["host_forward"] = enqueued_s(self.forward, self.bench)
            found["host_both"] = enqueued_s(self.step, self.bench)
        return found


def alone_s(call: Callable[[], object], bench: Bench) -> float:
    """Of one call, which ranks begin together, the GPU idle before and waited for behind it."""
    bench.meet()
    start = time.perf_counter()
    call()
    if bench.on_gpu:
        torch.cuda.synchronize(bench.device)
    return time.perf_counter() - start


def enqueued_s(call: Callable[[], object], bench: Bench) -> float:
    """The host's time of one of several calls behind one another, while the GPU is busy."""
    bench.meet()
    if bench.on_gpu:
        torch.cuda._sleep(BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
    start = time.perf_counter()
    for _ in range(MANY):
        call()
    return (time.perf_counter() - start) / MANY


def table(rows: list[Row]) -> str:
    """TFLOP/s of each way, and the host's time."""
    head = ["model, tokens of a rank", "arm", "forward", "backward", "graph, forward",
            "host, forward", "host, both"]  # fmt: skip
    lines: list[tuple[list[str], list[Row]]] = []
    for case in taken(rows, "model", "tokens"):
        of: Any = case.head
        each = of["top"] * of["ffn"] + of.get("shared", 0)
        flop = 6 * of["tokens"] * of["hidden"] * each
        arms = {row["arm"]: row for row in case.rows}
        product = arms.pop(PRODUCT)
        for name, row in arms.items():
            rates = [
                f"{times * flop / row[clock] / 1e12:.0f}" if clock in row else "-"
                for clock, times in (("forward_s", 1), ("backward_s", 2), ("graph_s", 1))
            ]
            hosts = [f"{row[clock] / product['median_s']:.0f}" if clock in row else "-"
                     for clock in ("host_forward_s", "host_both_s")]  # fmt: skip
            text = f"{of['model']}, {of['tokens']}"
            lines.append(([text, name, *rates, *hosts], [row, product]))
    note = (
        "TFLOP/s of a GPU. *Forward* and *backward* are single calls by the host's clock, *graph* "
        "replays a forward. *Host* is its time of a call while the GPU is busy, in launches of "
        "torch.mm; that of torch's layer waits for counts in each call."
    )
    if any("shared" in row for row in rows):
        note += " *Behind* adds shared experts, *shared* has them; its graph was another way then."
    return measured(head, lines, note)


write: Callable[[Mapping[int, list[Row]]], str] = by_machine(table)
EXPERT_CALLS = Benchmark(
    "expert_calls", cases, rows=rows, unit="ms", host=False,
    short=lambda case: case.name.startswith("Qwen3-30B-A3B, 1024"),
    sections=(Section("docs/results/experts.md", "expert-calls", write),),
)  # fmt: skip
