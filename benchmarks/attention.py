"""Context parallelism: attention to the keys of all ranks, forward, and forward and backward.

    serial         two NCCL all-gathers, of k and of v, then torch's scaled_dot_product_attention by
                   its own choice of kernels; where it is causal, with halves in balance, one call
                   for each half of the queries, by flash attention aligned to the lower right
    serial packed  the same of k and v side by side, which one all-gather takes
    serial cudnn   the same by cuDNN's attention, where nothing is causal
    plan serial    ours: the all-gathers, and cuDNN's attention of blocks, merged
    auto, ...      ours

The gradient of a library's all-gather is its reduce-scatter; those arms keep what was gathered,
ours gather again. One batch, bf16, a head dim of 128. Of all results one key head and its queries
are checked. Beside the time stands what a call takes of memory, results included."""

from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

import counterpoint as cp
from benchmarks.choice import choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table
from counterpoint.measure.timing import relative_error
from counterpoint.plan.families import build
from counterpoint.problem import Problem

BOTH = "forward + backward"
HEADS, DIM = 32, 128
SIZES = ((32, 32768), (8, 8192), (8, 32768), (32, 8192))  # key heads, tokens of all ranks
SPECS = ("shard_p2p ring", "shard_p2p ring chunks=2")
SHORT = "32/8 heads, 8192 tokens, causal, forward + backward"
SERIAL = ("serial", "serial packed", "serial cudnn", "plan serial")
SPREAD = 2.0  # of queries: some keys then count for more than others
EXACT_ROWS = 1024  # of a block of the reference

Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v: [1, rows, heads, head dim]


def case_of(heads: int, kv_heads: int, tokens: int, dim: int, causal: bool, what: str) -> Case:
    """So many query and key heads; tokens of all ranks."""
    mask = "causal" if causal else "full"
    return Case(f"{heads}/{kv_heads} heads, {tokens} tokens, {mask}, {what}",
                {"heads": heads, "kv_heads": kv_heads, "tokens": tokens, "dim": dim,
                 "causal": causal, "what": what, "dtype": "bfloat16"})  # fmt: skip


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [case_of(HEADS, kv_heads, tokens, DIM, causal, what) for what in ("forward", BOTH)
            for kv_heads, tokens in SIZES for causal in (True, False)]  # fmt: skip


def problem_of(case: Case | Row, ranks: int, op: str = "all_gather_attention") -> Problem:
    """The problem of a case."""
    return Problem(op, case["tokens"], case["heads"] * case["dim"], case["kv_heads"] * case["dim"],
                   ranks, head_dim=case["dim"], causal=case["causal"])  # fmt: skip


class Gathered(torch.autograd.Function):
    """The rows of all ranks, by the library; its gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bench: Bench) -> Tensor:
        ctx.bench, ctx.rows = bench, len(x)
        return bench.whole(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        mine = dx.new_empty(ctx.rows, *dx.shape[1:])
        ctx.bench.reduce_scatter(mine, dx.contiguous())
        return mine, None


def by_head(x: Tensor) -> Tensor:
    """[rows, heads, head dim] as torch's attention takes it."""
    return x.transpose(0, 1)[None]


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch's attention; where it is causal the last query attends to all keys."""
    mask = None
    if causal and len(q) == len(k):
        y = scaled_dot_product_attention(
            by_head(q), by_head(k), by_head(v), is_causal=True, enable_gqa=True
        )
        return y[0].transpose(0, 1)
    if causal and q.is_cuda:
        mask = causal_lower_right(len(q), len(k))
    elif causal:
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    y = scaled_dot_product_attention(
        by_head(q), by_head(k), by_head(v), attn_mask=mask, enable_gqa=True
    )
    return y[0].transpose(0, 1)


def in_order(x: Tensor, ranks: int) -> list[Tensor]:
    """Gathered halves of ranks, in the order of the sequence."""
    halves = x.chunk(2 * ranks)
    return [*halves[::2], *halves[1::2][::-1]]


def serial(q: Tensor, k: Tensor, v: Tensor, causal: bool, bench: Bench) -> Tensor:
    """Attention of own queries to all keys, which have been gathered, in the least that it takes.

    Args: q: own rows [rows, heads, head dim]. k, v: of all ranks, in the order of ranks."""
    if not causal:
        return attended(q, k, v, causal=False)
    seen = 2 * bench.ranks - bench.rank  # parts up to the later half of this rank
    early, late = q.chunk(2)
    keys, values = (torch.cat(in_order(x, bench.ranks)[:seen]) for x in (k, v))
    first = (bench.rank + 1) * len(early)
    return torch.cat([attended(early, keys[:first], values[:first], causal=True),
                      attended(late, keys, values, causal=True)])  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """All ways of one case."""
    rows, dim, causal = case["tokens"] // bench.ranks, case["dim"], case["causal"]
    shapes = [(1, rows, case[heads], dim) for heads in ("heads", "kv_heads", "kv_heads", "heads")]
    backward = case["what"] == BOTH
    q, k, v, dy = (bench.normal(*shape, scale=SPREAD if i == 0 else 1.0)
                   for i, shape in enumerate(shapes))  # fmt: skip
    packed = torch.stack([k[0], v[0]], 1)
    for leaf in (q, k, v, packed):
        leaf.requires_grad_(backward)

    def by_library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (Gathered.apply(x[0], bench) for x in (k, v))
        return serial(q[0], keys, values, causal, bench)[None]

    def by_one(q: Tensor, packed: Tensor) -> Tensor:
        both = Gathered.apply(packed, bench)
        return serial(q[0], both[:, 0], both[:, 1], causal, bench)[None]

    def by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return by_library(q, k, v)

    def ours(plan: str) -> Callable[..., Tensor]:
        def way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cp.all_gather_attention(q, k, v, group=bench.group, causal=causal, plan=plan)

        return way

    def call(way: Callable[..., Tensor], *leaves: Tensor) -> Call:
        def run(_: int) -> tuple[Tensor, ...]:
            if not backward:
                return (way(*leaves),)
            y = way(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, dy)

        return run

    calls: dict[str, Call | str] = {
        "serial": call(by_library, q, k, v), "serial packed": call(by_one, q, packed),
    }  # fmt: skip
    if not causal:
        calls["serial cudnn"] = _had(call(by_cudnn, q, k, v), bench)
    calls |= {name: call(ours(name.removeprefix("plan ")), q, k, v)
              for name in ("plan serial", "auto", *SPECS)}  # fmt: skip
    want = wanted((q, k, v), dy, causal, bench)

    def check(name: str, got: tuple[Tensor, ...]) -> list[float]:
        if name == "serial packed" and backward:
            y, dq, dboth = got
            got = y, dq, dboth[None, :, 0], dboth[None, :, 1]
        return [relative_error(last_head(x, case["kv_heads"]), w) for x, w in zip(got, want)]  # noqa: B905 (of a forward y alone)

    gathered_bytes = 2 * 2 * case["tokens"] * case["kv_heads"] * dim
    choice = choice_of(problem_of(case, bench.ranks), bench)
    about: dict[str, dict[str, Any]] = {}
    if choice is not None:
        about["auto"] = {"pick": choice.spec, "predicted_s": choice.seconds}
    for name, way in calls.items():
        if bench.on_gpu and not isinstance(way, str):
            spec = choice.spec if name == "auto" and choice else name.removeprefix("plan ")
            of_plan = 0 if name in SERIAL[:3] else plan_bytes(case, spec, bench.ranks)
            about.setdefault(name, {})["peak_bytes"] = of_plan + peak_bytes(way, bench)
    return Arms(calls, check, about=about, limit=2e-2, floor=4e-3, nan_bytes=4 * q.numel(),
                facts={"gathered_bytes": gathered_bytes})  # fmt: skip


def _had(call: Call, bench: Bench) -> Call | str:
    """A call by cuDNN's attention, if torch has it here for such tensors."""
    if not bench.on_gpu:
        return "cuDNN's attention needs a GPU"
    try:
        call(0)
    except RuntimeError as error:
        return f"on this GPU: {str(error).splitlines()[0]}"
    return call


def plan_bytes(case: Case, spec: str, ranks: int) -> int:
    """Memory of a group for a plan, and for its backward's."""
    ops = ["all_gather_attention"]
    ops += ["all_gather_attention_backward"] if case["what"] == BOTH else []
    return max(build(problem_of(case, ranks, op), spec).workspace_bytes for op in ops)


def peak_bytes(call: Call, bench: Bench) -> int:
    """The most that a call takes beside what there is before it."""
    call(0)
    bench.meet()
    before = torch.cuda.memory_allocated(bench.device)
    torch.cuda.reset_peak_memory_stats(bench.device)
    call(0)
    bench.meet()
    found = torch.cuda.max_memory_allocated(bench.device) - before
    return int(bench.most([float(found)])[0])


def last_head(x: Tensor, kv_heads: int) -> Tensor:
    """The last key head of keys, or its queries: [rows, heads, head dim]."""
    return x[0, :, x.shape[2] - x.shape[2] // kv_heads :]


def wanted(given: Heads, dy: Tensor, causal: bool, bench: Bench) -> list[Tensor]:
    """y, dq, dk and dv of own rows and the last key head, in fp64."""
    kv_heads, ranks = given[1].shape[2], bench.ranks
    shards = (last_head(x.detach(), kv_heads).contiguous() for x in (*given, dy))
    whole = [bench.whole(x).double() for x in shards]
    if causal:
        whole = [torch.cat(in_order(x, ranks)) for x in whole]
    q, k, v, out = whole
    found = [x.unsqueeze(1) if x.dim() == 2 else x for x in exact(q, k[:, 0], v[:, 0], out, causal)]
    if not causal:
        return [x.chunk(ranks)[bench.rank] for x in found]
    mine = bench.rank, 2 * ranks - 1 - bench.rank
    return [torch.cat([x.chunk(2 * ranks)[i] for i in mine]) for x in found]


def exact(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, causal: bool) -> list[Tensor]:
    """y, dq, dk and dv of one key head, [rows, head dim], and its queries; some rows at a time."""
    scale, tokens = q.shape[-1] ** -0.5, len(q)
    y, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    columns = torch.arange(tokens, device=q.device)
    for start in range(0, tokens, EXACT_ROWS):
        some = slice(start, start + EXACT_ROWS)
        queries, out = q[some].transpose(0, 1), dy[some].transpose(0, 1)
        scores = queries @ k.t() * scale
        if causal:
            scores.masked_fill_(columns[None, :] > columns[some, None], float("-inf"))
        weights = scores.softmax(-1)
        result = weights @ v
        dscores = weights * (out @ v.t() - (out * result).sum(-1, keepdim=True)) * scale
        y[some], dq[some] = result.transpose(0, 1), (dscores @ k).transpose(0, 1)
        dk += (dscores.mT @ queries).sum(0)
        dv += (weights.mT @ out).sum(0)
    return [y, dq, dk, dv]


def moved(case: Case, ranks: int) -> int:
    """Bytes that a rank gets of a forward, and again of a backward, which also scatters."""
    times = 3 if case["what"] == BOTH else 1
    return times * problem_of(case, ranks).link_bytes


# ---- what is said of the rows


def fastest_serial(case: Timed) -> str:
    """Of all that overlap nothing."""
    return case.fastest(name for name in SERIAL if name in case)


def _memory(case: Timed) -> str:
    names = fastest_serial(case), "auto"
    found = [case.main[name].get("peak_bytes", 0) for name in names]
    return ", ".join(f"{n / 2**20:.0f}" for n in (*found, case.head["gathered_bytes"]))


COLUMNS = (
    Column("heads, key heads, tokens", lambda c: "{heads}, {kv_heads}, {tokens}".format(**c.head)),
    Column("mask, step", lambda c: f"{'causal' if c.head['causal'] else 'full'}, {c.head['what']}"),
    arm("serial", ms), Column("fastest serial",
                              lambda c: f"{ms(c.s(fastest_serial(c)))} {fastest_serial(c)}"),
    arm("auto", ms, bold=True), Column("its plan", lambda c: c.main["auto"].get("pick", "-")),
    Column("serial / auto", lambda c: f"**{c.s('serial') / c.s('auto'):.2f}**"),
    Column("fastest serial / auto", lambda c: f"{c.s(fastest_serial(c)) / c.s('auto'):.2f}"),
    Column("MiB: fastest serial, auto, gathered k and v", _memory),
)  # fmt: skip


def attention_table(rows: list[Row]) -> str:
    """Every case."""
    found = taken(rows, "heads", "kv_heads", "tokens", "causal", "what")
    mean = geometric_mean(c.s("serial") / c.s("auto") for c in found)
    note = f"Milliseconds of the slowest rank. serial / auto, geometric mean: {mean:.2f}."
    return table(COLUMNS, found, note)


ATTENTION = Benchmark(
    "attention", cases, arms, unit="ms", calls=0, rounds=15, every_eager=True, soak_s=0.5,
    eager=("serial", "serial packed", "plan serial", "auto"), backlog_cycles=10_000_000,
    moved=moved,
    sections=(Section("docs/results/attention.md", "attention", by_machine(attention_table)),),
    short=lambda case: case.name == SHORT,
)  # fmt: skip
