"""matmul_all_reduce of few rows against the libraries, weights from memory.

Serial is torch.mm and the library's all-reduce; torch's one-shot and two-shot all-reduce stand
behind the same matmul, whose result is in memory that peers reach."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks.choice import choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.pictures import bars, place, shown
from benchmarks.rows import OF, Row, Timed, by_cut, cut_for, held, taken
from benchmarks.tables import (
    INVARIANT,
    Column,
    arm,
    both_modes,
    by_machine,
    measured,
    price_note,
    sizes,
    table,
    torch_note,
    us,
)
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

# columns, and rows as one of 8 GPUs holds them
LAYERS = {"Llama-3-70B down": (8192, 3584), "Llama-3-70B O": (8192, 1024),
          "Llama-3.1-405B down": (16384, 6656), "DeepSeek-V3 dense down": (7168, 2304)}  # fmt: skip
ROWS = (1, 8, 32, 64)  # that means are of
MORE_ROWS = (128, 256, 1024)  # of the first layer
FUSED_ROWS = 256  # the tile of more does not fit
PLANS = ("auto", "direct", "fused", INVARIANT)
ALONE = "the matmul alone, without communication"
TORCH = ("torch one_shot", "torch two_shot")


def case_of(m: int, n: int, k: int, layer: str = "") -> Case:
    """One shape: N and K of one rank."""
    return Case(f"{layer} {m},{n},{k}".strip(), {"m": m, "n": n, "k": k, "layer": layer,
                                                 "weight_bytes": 2 * n * k})  # fmt: skip


def cases(shards: int) -> list[Case]:
    """All layers at few rows, the first one at more; of models that the GPUs have room for."""
    made = [case_of(m, n, cut_for(k, shards), layer)
            for i, (layer, (n, k)) in enumerate(LAYERS.items())
            for m in (*ROWS, *(() if i else MORE_ROWS))
            if shards >= OF or "405B" not in layer]  # fmt: skip
    return [replace(case, facts={**case.facts, "shards": shards}) for case in made]


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of y[m, n] = sum over ranks of x[m, k] w[k, n]."""
    found = forward(*operands(case, bench), PLANS, bench)
    if case["m"] > FUSED_ROWS:
        why = f"one kernel takes {FUSED_ROWS} rows at most"
        found.calls = {**found.calls, "fused": why}
    return found


def operands(case: Case, bench: Bench) -> tuple[Tensor, list[Tensor]]:
    """x, and the weights that take turns."""
    m, n, k = case["m"], case["n"], case["k"]
    weights = [bench.normal(n, k, scale=k**-0.5).t() for _ in range(bench.sets(2 * n * k))]
    return bench.normal(m, k), weights


def forward(x: Tensor, weights: Sequence[Tensor], plans: Sequence[str], bench: Bench) -> Arms:
    """The libraries' arms of the sum over ranks of x w, and ours by each of the plans."""
    (m, k), n = x.shape, weights[0].shape[1]
    y = bench.empty(m, n)

    def multiply(i: int) -> Tensor:
        return torch.mm(x, weights[i % len(weights)], out=y)

    def serial(i: int) -> Tensor:
        dist.all_reduce(multiply(i), group=bench.group)
        return y

    def ours(plan: str) -> Call:
        return lambda i: cp.matmul_all_reduce(
            x, weights[i % len(weights)], group=bench.group, plan=plan
        )

    calls: dict[str, Call | str] = {"serial": serial, "matmul": multiply}
    calls |= _torch(x, weights, bench)
    calls |= {plan: ours(plan) for plan in plans}
    want = bench.summed(x.double() @ weights[0].double())
    choice = choice_of(Problem("matmul_all_reduce", m, n, k, bench.ranks), bench)
    return Arms(
        calls,
        lambda _, got: [relative_error(got, want)],
        parts=("matmul",),
        outputs=(y,),
        nan_bytes=max(1 << 28, 4 * y.numel()),
        sets=len(weights),
        about={"auto": {"pick": choice.spec if choice else ""}},
    )


def _torch(x: Tensor, weights: Sequence[Tensor], bench: Bench) -> dict[str, Call | str]:
    """The matmul into open memory, and torch's all-reduce of it."""
    if not bench.on_gpu:
        return dict.fromkeys(TORCH, "torch's symmetric memory needs GPUs")
    m, n = len(x), weights[0].shape[1]
    own, _ = bench.opened(m * n)
    ops, group = torch.ops.symm_mem, bench.group.group_name

    def behind(op: Callable[..., Tensor]) -> Call:
        def run(i: int) -> Tensor:
            torch.mm(x, weights[i % len(weights)], out=own.view(m, n))
            return op(own, "sum", group).view(m, n)

        return run

    each = (ops.one_shot_all_reduce, ops.two_shot_all_reduce_)
    return {name: behind(op) for name, op in zip(TORCH, each, strict=True)}


# ---- what is said of the rows


def shapes_of(rows: Sequence[Row]) -> list[Timed]:
    """The cases of rows."""
    return taken([row for row in rows if row["table"] == "decode"], "m", "n", "k")


def few_of(rows: Sequence[Row]) -> list[Timed]:
    """The cases that means are of."""
    return [case for case in shapes_of(rows) if case.head["m"] in ROWS]


def over_torch(case: Timed) -> float:
    """The better of torch's over auto, in the mode in which it does better."""
    return min(case.fair(name, "auto") for name in TORCH)


def pick(case: Timed) -> str:
    """What auto took, in two words."""
    text = case.graph["auto"].get("pick") or case.head.get("pick", "")
    return " ".join(text.split()[:3])


COLUMNS = (
    Column("layer", lambda c: c.head["layer"]), sizes("m", "n", "k"), arm("matmul"),
    arm("serial", head="+ NCCL (serial)"), both_modes("torch one_shot", head="+ torch one-shot"),
    both_modes("torch two_shot", head="+ torch two-shot"), arm("direct"), arm("fused"),
    arm("auto", bold=True),
    Column("serial / auto", lambda c: f"{c.s('serial') / c.s('auto'):.2f}"),
    Column("torch / auto", lambda c: f"{over_torch(c):.2f}"),
    Column("its plan", pick),
)  # fmt: skip
NOTE = (
    "Times are microseconds of a call in a graph, with weights in rotation. N and K are of one "
    "rank. All arms ran in one randomised rotation."
)


def summary(rows: list[Row]) -> str:
    """The means over layers and few rows."""
    few = few_of(rows)
    serial = [c.s("serial") / c.s("auto") for c in few]
    peer = [over_torch(c) for c in few]
    return (
        f"Geometric means of {len(few)} shapes of 1 to 64 rows: serial / auto "
        f"{geometric_mean(serial):.2f} ({min(serial):.2f} to {max(serial):.2f}), the better of "
        f"torch's / auto {geometric_mean(peer):.2f} ({min(peer):.2f} to {max(peer):.2f}). "
        f"{torch_note(few, *TORCH)}{price_note(shapes_of(rows))}"
    )


def all_shapes(rows: list[Row]) -> str:
    """Every layer and number of rows."""
    return table(COLUMNS, shapes_of(rows), f"{NOTE} {summary(rows)}")


def eager(rows: list[Row]) -> str:
    """Plain single calls: time with the host in it, and the host's own."""
    lines: list[tuple[list[str], list[Row]]] = []
    for case in shapes_of(rows):
        serial, auto = (case.eager[name] for name in ("serial", "auto"))
        ratio = serial["plain_eager_s"] / auto["plain_eager_s"]
        lines.append(([
            sizes("m", "n", "k").cell(case), us(serial["plain_eager_s"], 0),
            us(auto["plain_eager_s"], 0), f"{ratio:.2f}", us(serial["host_s"], 0),
            us(auto["host_s"], 0),
        ], [serial, auto]))  # fmt: skip
    head = ["M, N, K", "serial", "auto", "serial / auto", "host of serial", "host of auto"]
    note = "Median microseconds of single eager calls; the times of the host are of calls in a row."
    return measured(head, lines, note)


def picture(_: Mapping[int, list[Row]]) -> str:
    """Where it is."""
    return shown("decode", "Speedup of matmul and all-reduce at 1 to 64 tokens, by layer")


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Serial and ours at every shape of few rows, of the most GPUs."""
    rows = by_cut(found)[0]
    few = few_of(rows)
    product = "our matmul" if "our matmul" in few[0] else "matmul"
    mean = geometric_mean(c.s("serial") / c.s("auto") for c in few)
    bars(
        {
            f"{c.head['layer']}, {c.head['m']} token{'s' * (c.head['m'] > 1)}": {
                "serial": c.s("serial"),
                "torch's all-reduce after the matmul": c.s("auto") * over_torch(c),
                "counterpoint": c.s("auto"),
                ALONE: c.s(product),
            }
            for c in few
        },
        images / "decode.svg",
        title=f"Decoding: matmul + all-reduce, {mean:.2f}x over serial in the mean",
        source=f"{place(rows)}{held(rows)}; serial is cuBLAS + NCCL",
        mark=ALONE,
    )


DECODE = Benchmark(
    "decode", cases, arms, rounds=15, soak_s=0.1, eager=("serial", "auto", *TORCH),
    short=lambda case: case["layer"] == "Llama-3-70B down" and case["m"] in (1, 32), cut=True,
    moved=lambda case, ranks: 4 * case["m"] * case["n"] * (ranks - 1) // ranks,
    own=lambda shape, _: [case_of(*shape)],
    sections=(
        Section("docs/results/decode.md", "decode", by_machine(all_shapes)),
        Section("docs/results/decode.md", "decode-eager", by_machine(eager)),
        Section("docs/results/decode.md", "decode-picture", picture),
    ),
    pictures=pictures,
)  # fmt: skip
