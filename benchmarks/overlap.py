"""Plans of all_gather_matmul and matmul_reduce_scatter against the libraries, at many rows and few.

Parts: compute (the matmul alone), communication (the library's collective alone), copy_engine (the
same bytes as bare copies). Serial is the library's collective and torch.mm(out=), none of our code;
torch_symm_mem is torch's fused operator. The others are ours: auto, every plan that it weighs, and
"plan serial", what our host code costs around the libraries. All start from an ordinary tensor.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean, median

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.choice import candidates, choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section, all_gather
from benchmarks.pictures import Point, bars, in_both, layer_name, place, words
from benchmarks.rows import (
    OF,
    RESULTS,
    Row,
    Timed,
    by_cut,
    cut_for,
    gpus_of,
    held,
    plan_word,
    taken,
)
from benchmarks.tables import (
    INVARIANT,
    Column,
    arm,
    both_modes,
    by_machine,
    measured,
    ms,
    of_most,
    price_note,
    sizes,
    table,
    torch_note,
    us,
)
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.machine_of import SHIPPED, shipped
from counterpoint.measure.canvas import DARK, duration
from counterpoint.measure.draw import draw_timeline
from counterpoint.measure.shapes import SHAPES
from counterpoint.measure.timing import relative_error
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.schedules.finer import NAMES as FINER
from counterpoint.timeline import Timeline

PARTS = ("compute", "communication", "copy_engine")
PEER = "torch_symm_mem"
# arms that are not one of the plans compared
FIXED = (*PARTS, "serial", PEER, "auto", INVARIANT, "plan serial")
TOKENS = (64, 128, 256, 512, 1024)  # of few rows
LAYERS = {"all_gather_matmul": {"70B qkv": (1280, 8192), "70B gate+up": (7168, 8192)},
          "matmul_reduce_scatter": {"70B o": (8192, 1024), "70B down": (8192, 3584)}}  # fmt: skip
ALONE = "the longer of compute and communication alone (an estimate, not a bound)"
# of the pictures of timelines
NAMES = {"all_gather_matmul": "front", "matmul_reduce_scatter": "timeline"}
SHORT = {(m, layer) for m in (2048, 64) for layer in ("70B gate+up", "70B down")}


def case_of(op: str, m: int, n: int, k: int, layer: str = "") -> Case:
    """One shape: M over all ranks, N and K of one rank."""
    return Case(f"{op} {m},{n},{k}", {"op": op, "m": m, "n": n, "k": k, "layer": layer,
                                      "dtype": "bfloat16"})  # fmt: skip


def cut(op: str, m: int, n: int, k: int, layer: str, shards: int) -> Case:
    """A layer whose N and K are those of one of 8 GPUs, as one of so many GPUs holds it."""
    if op == "all_gather_matmul":
        n = cut_for(n, shards)
    else:
        k = cut_for(k, shards)
    made = case_of(op, m, n, k, layer)
    return replace(made, facts={**made.facts, "shards": shards})


def problem_of(facts: Case | Row, ranks: int) -> Problem:
    """The problem of a case, or of a row."""
    return Problem(facts["op"], facts["m"], facts["n"], facts["k"], ranks)


def published(shards: int) -> list[Case]:
    """The layers that we publish, of models that so many GPUs have room for."""
    return [cut(op, *shape, layer, shards) for op, layers in SHAPES.items()
            for layer, shape in layers.items() if shards >= OF or "405B" not in layer]  # fmt: skip


def few_rows(shards: int) -> list[Case]:
    """Layers of Llama-3-70B at few tokens."""
    return [cut(op, m, n, k, layer, shards) for op, layers in LAYERS.items()
            for layer, (n, k) in layers.items() for m in TOKENS]  # fmt: skip


def own(shape: tuple[int, ...], _: int) -> list[Case]:
    """Sizes of one's own, for both operators."""
    m, n, k = shape
    return [case_of(op, m, n, k) for op in ("all_gather_matmul", "matmul_reduce_scatter")]


def arms(case: Case, bench: Bench) -> Arms:
    """All arms of one shape."""
    problem = problem_of(case, bench.ranks)
    m, n, k, gathers = problem.m, problem.n, problem.k, problem.op == "all_gather_matmul"
    weights = [bench.normal(n, k).t() for _ in range(bench.sets(2 * n * k))]
    shard = m // bench.ranks
    x = bench.normal(shard if gathers else m, k)
    full = bench.empty(m, k if gathers else n)
    y = bench.empty(m if gathers else shard, n)

    def communicate(_: int) -> None:
        if gathers:
            all_gather(full, x, group=bench.group)
        else:
            bench.reduce_scatter(y, full)

    def multiply(i: int) -> None:
        left, product = (full, y) if gathers else (x, full)
        torch.mm(left, weights[i % len(weights)], out=product)

    def serial(i: int) -> Tensor:
        for part in (communicate, multiply) if gathers else (multiply, communicate):
            part(i)
        return y

    def ours(plan: str) -> Call:
        op: Callable[..., Tensor] = getattr(cp, problem.op)
        return lambda i: op(x, weights[i % len(weights)], group=bench.group, plan=plan)

    choice, specs = choice_of(problem, bench), candidates(problem, bench)
    calls: dict[str, Call | str] = {
        "compute": multiply, "communication": communicate,
        "copy_engine": bench.pushes(x if gathers else y), "serial": serial,
        PEER: _torch_fused(gathers, x, weights, bench), "plan serial": ours("serial"),
    }  # fmt: skip
    calls |= {plan: ours(plan) for plan in ("auto", INVARIANT, *specs)}
    about: dict[str, Row] = {}
    if choice is not None:
        about = {c.spec: {"predicted_s": c.seconds} for c in choice.table if c.spec in calls}
        tiles = [[*sizes_, *tile] for sizes_, tile in choice.tiles.items()]
        about["auto"] = {"pick": choice.spec, "bounds_s": [choice.compute_s, choice.comm_s],
                         "predicted_s": choice.seconds, "tiles": tiles}  # fmt: skip
    sample = bench.sample(m)
    left = bench.whole(x) if gathers else x
    want = left[sample].double() @ weights[0].double()
    if not gathers:
        bench.summed(want)
        mine = (sample // shard) == bench.rank
        want, sample = want[mine], sample[mine] - bench.rank * shard

    def check(_: str, got: Tensor) -> list[float]:
        return [relative_error(got[sample], want) if len(want) else 0.0]

    return Arms(calls, check, parts=PARTS, outputs=(y,), sets=len(weights), about=about,
                nan_bytes=4 * y.numel())  # fmt: skip


def _torch_fused(gathers: bool, x: Tensor, weights: Sequence[Tensor], bench: Bench) -> Call | str:
    if not bench.on_gpu:
        return "torch's fused operators need GPUs"
    ops, name = torch.ops.symm_mem, bench.group.group_name
    if gathers:
        return lambda i: ops.fused_all_gather_matmul(
            x, [weights[i % len(weights)]], 0, name, return_A=False
        )[1][0]  # fmt: skip
    return lambda i: ops.fused_matmul_reduce_scatter(
        x, weights[i % len(weights)], "sum", 0, name
    )  # fmt: skip


def moved(case: Case, ranks: int) -> int:
    """Bytes that a rank gets."""
    return problem_of(case, ranks).link_bytes


# ---- what is said of the rows


def shapes_of(rows: Sequence[Row]) -> list[Timed]:
    """The cases of rows."""
    return taken(rows, "op", "m", "n", "k")


def longer_s(case: Timed) -> float:
    """The longer of compute and the faster of both transports, each alone."""
    return max(case.s("compute"), case.s(case.fastest(("communication", "copy_engine"))))


def best(case: Timed) -> str:
    """The fastest of our plans."""
    return case.fastest(name for name in case.main if name not in FIXED)


def hidden(case: Timed) -> str:
    """The share of what could be hidden that is, by auto."""
    serial_s, auto_s = case.s("serial"), case.s("auto")
    if case.graph["auto"]["pick"] == "serial":
        return "-"
    share = (serial_s - auto_s) / (serial_s - longer_s(case))
    return f"{share:.0%}" if serial_s > auto_s else "loses"


HEAD = (Column("op", lambda c: c.head["op"]), sizes("m", "n", "k"))


def short_columns(unit: Callable[[float], str]) -> list[Column]:
    """Serial and torch's operator beside ours."""
    return [
        *HEAD, arm("serial", unit), both_modes(PEER, unit, "torch symm_mem"),
        both_modes("auto", unit, bold=True), Column("its plan", lambda c: c.graph["auto"]["pick"]),
        Column("serial / auto", lambda c: f"**{c.s('serial') / c.s('auto'):.2f}**"),
        Column("torch / auto", lambda c: f"**{c.fair(PEER, 'auto'):.2f}**"),
    ]  # fmt: skip


def columns(unit: Callable[[float], str]) -> list[Column]:
    """The parts, and the best plan, too."""
    return [
        *HEAD, arm("compute", unit, "matmul"), arm("communication", unit, "NCCL"),
        *short_columns(unit)[len(HEAD) :],
        Column("hidden", hidden),
        Column("best plan measured", lambda c: f"{unit(c.s(best(c)))} {best(c)}"),
    ]  # fmt: skip


def main_table(rows: list[Row], some: Sequence[Column]) -> str:
    """Every published shape."""
    shapes = shapes_of(rows)
    clocks = sorted(row["sm_clock_mhz"] for row in rows)
    note = (
        f"SM clock {clocks[0]:.0f} to {clocks[-1]:.0f} MHz. M is over all ranks, N and K are of "
        "one rank. Times are milliseconds, medians of the slowest rank, in graphs of several calls "
        "with weights in rotation. All arms ran in one randomised rotation. "
        f"{torch_note(shapes, PEER)}"
        f"{price_note(shapes)}"
    )
    return table(some, shapes, note)


def points(shapes: Sequence[Timed], machine: Machine) -> list[Point]:
    """Predicted by the constants as they are against measured, of serial and every plan."""
    found: list[Point] = []
    for case in shapes:
        for name, row in case.graph.items():
            if name == "serial" or name not in FIXED:
                try:
                    plan = build(problem_of(case.head, case.head["ranks"]), name, machine)
                except InputError:  # the library has it no longer
                    continue
                label = f"{name}, {case.head['m']},{case.head['n']},{case.head['k']}"
                found.append(Point(label, case.head["op"], predicted_s(plan, machine),
                                   row["median_s"]))  # fmt: skip
    return found


def summary(rows: list[Row]) -> str:
    """What the rows say together: against the peer, against the best, of the model."""
    shapes, machine = shapes_of(rows), shipped(rows[0]["gpu"], rows[0]["ranks"])
    assert machine is not None, "the library has measured costs of H200s"
    plain = [{a: c.eager[a]["plain_eager_s"] for a in ("serial", PEER, "auto")} for c in shapes]
    ratios = {
        "serial / auto": [c.s("serial") / c.s("auto") for c in shapes],
        "serial / auto, plain eager": [t["serial"] / t["auto"] for t in plain],
        "torch symm_mem / auto, in the mode in which torch does better": [
            c.fair(PEER, "auto") for c in shapes
        ],
        "torch symm_mem / auto, in a graph": [c.s(PEER) / c.s("auto") for c in shapes],
        "torch symm_mem / auto, eagerly behind a backlog": [
            _eager(c, PEER) / _eager(c, "auto") for c in shapes
        ],
        "torch symm_mem / auto, plain eager": [t[PEER] / t["auto"] for t in plain],
    }
    lines = [f"- {name}: geometric mean {geometric_mean(each):.2f}, least {min(each):.2f}"
             for name, each in ratios.items()]  # fmt: skip
    regret = [c.s("auto") / c.s(best(c)) - 1 for c in shapes]
    found = points(shapes, machine)
    worst = max(found, key=lambda p: abs(p.error))
    return "\n".join([
        *lines,
        f"- auto against the best plan measured beside it: {max(regret):.1%} slower at worst, "
        f"{fmean(regret):.1%} in the mean",
        f"- {len(found)} predictions: median error {median(abs(p.error) for p in found):.1%}, "
        f"worst {worst.error:+.1%} ({worst.label})",
    ])  # fmt: skip


def eager_table(rows: list[Row]) -> str:
    """Single calls: GPU time behind a backlog, with the host's time in it, and the host's alone."""
    lines = [
        ([case.head["op"], sizes("m", "n", "k").cell(case), name, ms(row["median_s"]),
          ms(row["plain_eager_s"]), us(row["host_s"], 0)], [row])
        for case in shapes_of(rows) for name, row in case.eager.items()
    ]  # fmt: skip
    head = ["op", "M, N, K", "arm", "behind a backlog", "plain eager", "host us a call"]
    return measured(head, lines)


def all_results(found: Mapping[int, list[Row]]) -> str:
    """docs/results/tensor_parallel.md."""
    parts: list[str] = []
    for rows in by_cut(found):
        parts += [f"## {gpus_of(rows)}{held(rows)}", main_table(rows, columns(ms)), summary(rows),
                  "Eager, milliseconds:", eager_table(rows)]  # fmt: skip
    return "\n\n".join(parts)


def finer(rows: list[Row]) -> str:
    """The families finer than shards beside the best of the others."""
    shapes = [c for c in shapes_of(rows) if all(f"{family} ring" in c for family in FINER)]

    def of(kind: str) -> Column:
        return Column(kind, lambda c: ms(c.s(c.fastest(a for a in c.main if a.startswith(kind)))))

    some = [*HEAD, arm("serial", ms), of("shard_p2p"), of("graded")]
    some += [arm(f"{family} ring", ms, f"`{family}`") for family in FINER]
    note = "Times are milliseconds in a graph, all of one rotation."
    return table(some, shapes, note)


def few_rows_table(rows: list[Row]) -> str:
    """64 to 1024 tokens."""
    shapes = shapes_of(rows)

    def behind(c: Timed) -> str:
        return f"{_eager(c, 'serial') / _eager(c, 'auto'):.2f}"

    plain = Column("serial / auto, plain eager", lambda c: f"{_plain(c):.2f}")
    some = [column for column in columns(us) if column.head != "hidden"]
    graph, eager = [c.s("serial") / c.s("auto") for c in shapes], [_plain(c) for c in shapes]
    note = (
        f"serial / auto, geometric mean of {len(shapes)} shapes: {geometric_mean(graph):.2f} in a "
        f"graph (least {min(graph):.2f}), {geometric_mean(eager):.2f} plain eager (least "
        f"{min(eager):.2f}). Times are microseconds of a call, with weights in rotation. M is over "
        f"all ranks, N and K are of one rank. {torch_note(shapes, PEER)}{price_note(shapes)}"
    )
    return table([*some, Column("serial / auto behind a backlog", behind), plain], shapes, note)


def _eager(case: Timed, name: str) -> float:
    return case.eager[name]["median_s"]


def _plain(case: Timed) -> float:
    """serial / auto of single calls with the host's time in them."""
    if pair := case.eager["auto"].get("baseline_over_arm"):
        return pair[0] if case.head["table"] == "few rows" else plain_gain(case)
    return plain_gain(case)


def plain_gain(case: Timed) -> float:
    """serial / auto of single calls, the host's time in them."""
    return case.eager["serial"]["plain_eager_s"] / case.eager["auto"]["plain_eager_s"]


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Bars, and timelines, of the most GPUs."""
    rows = by_cut(found)[0]
    shapes = shapes_of(rows)
    mean = geometric_mean(c.s("serial") / c.s("auto") for c in shapes)
    torchs = mean / geometric_mean(c.fair(PEER, "auto") for c in shapes)
    cases: dict[str, dict[str, float]] = {}
    for c in shapes:
        name = words(c.head["layer"].partition(",")[0])
        cases[f"{name}, {c.head['m']} tokens"] = {
            "serial": c.s("serial"),
            "torch's fused operator": c.s("auto") * c.fair(PEER, "auto"),
            "counterpoint": c.s("auto"),
            ALONE: longer_s(c),
        }
    bars(
        cases,
        images / "overlap.svg",
        mark=ALONE,
        title=f"Tensor parallelism: {mean:.2f}x over serial in the mean, torch's fused operators "
        f"{torchs:.2f}x",
        source=f"{place(rows)}{held(rows)}; serial: NCCL + cuBLAS; torch in its better mode",
    )
    for path in sorted(RESULTS.glob("timeline-*.json")):
        measured = Timeline.from_json(plan_word(path.read_text()))
        match = re.fullmatch(r"(\w+) ([\d, ]+): (.+)", measured.title)
        assert match is not None, f"{path}: its title names no plan"
        op, shape, spec = match.groups()
        m, n, k = map(int, shape.split(","))
        (file,) = SHIPPED.glob(f"*-{path.stem.split('-')[1][:-1]}.json")
        there = Machine.from_json(json.dumps(json.loads(file.read_text())["machine"]))
        plan = build(problem_of({"op": op, "m": m, "n": n, "k": k}, there.num_devices), spec, there)
        same = [c for rows in by_cut(found) for c in shapes_of(rows)
                if c.head["ranks"] == there.num_devices
                and c.head["op"] == op and [c.head[i] for i in "mnk"] == [m, n, k]]  # fmt: skip
        if same:
            _timelines(plan, measured, same[0].s("serial"), there, images / f"{NAMES[op]}.svg")


def _timelines(
    plan: Plan, measured: Timeline, serial_s: float, machine: Machine, path: Path
) -> None:
    """Serial above a plan that overlaps, and what was measured of both."""
    p = plan.problem
    serial = estimate(build(p, "serial", machine), machine)
    ours, layer = estimate(plan, machine), layer_name(p.m, p.n, p.k)
    ratio = f"{serial_s / measured.duration_s:.2f}x"
    top = f"serial, predicted (measured: {duration(serial_s)})"
    predicted = f"counterpoint, predicted: {serial.duration_s / ours.duration_s:.2f}x"
    panels = [
        replace(timeline, title="", source=source)
        for timeline, source in ((ours, predicted), (measured, f"counterpoint, measured: {ratio}"))
    ]
    title = (
        f"{layer}, one of 8 GPUs' part, on {p.ranks} H200s: {ratio}, as copies run beside matmuls"
    )
    in_both(path, lambda path, theme: draw_timeline(
        replace(serial, title=title, source=top), path, beside=panels, ranks=[0], width_in=9,
        dark=theme is DARK,
    ))  # fmt: skip


COMMON = {
    "arms": arms,
    "moved": moved,
    "own": own,
    "eager": ("serial", PEER, "auto", "plan serial"),
    "short": lambda case: (case["m"], case["layer"].partition(",")[0]) in SHORT,
    "cut": True,
}
OVERLAP = Benchmark(
    "overlap", published, unit="ms", soak_s=0.7, pictures=pictures,
    sections=(
        Section("docs/results/tensor_parallel.md", "results", all_results),
        Section("docs/results/losses.md", "finer", of_most(finer)),
    ), **COMMON,
)  # fmt: skip
FEW_ROWS = Benchmark(
    "few_rows", few_rows, rounds=25, soak_s=0.1,
    sections=(
        Section("docs/results/tensor_parallel.md", "few-rows", by_machine(few_rows_table)),
    ), **COMMON,
)  # fmt: skip
