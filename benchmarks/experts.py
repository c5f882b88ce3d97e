"""Mixtures of experts: all-to-all and the experts' matmuls, by the libraries and by ours.

A rank has the experts of a model that one of the GPUs here holds, or one of --shards GPUs.
Uniform: each expert gets as many rows from each rank. Skewed: the experts of rank 0 get 3 times the
mean, and counts are drawn. "One kernel" has its counts on the device, as it must in a graph; those
of the libraries and of plans are on the host, which has waited for them before. What auto would
take where counts are host-known is predicted.

Parts: the grouped matmul and a loop of matmuls, the library's all-to-all, and "pair", the two one
after the other. "In place" is the pair with a pass that puts rows where ours puts them; ", sum"
with the weighted sum of a token's rows behind it, where rows come back."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

import counterpoint as cp
from benchmarks.choice import candidates, choice_of
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.expert_tensors import MODELS, Layer, case_of, hbm_bytes_per_s
from benchmarks.experts_routed import ROUTED, Routed
from benchmarks.layouts import layouts
from benchmarks.pictures import dots, place, shown, speedups
from benchmarks.rows import Row, Timed, by_cut, gpus_of, held, taken
from benchmarks.tables import measured, us
from counterpoint.machine_of import shipped
from counterpoint.measure.timing import relative_error
from counterpoint.problem import Problem

NAMES = {"all_to_all_matmul": "to the experts", "matmul_all_to_all": "back"}
TITLES = {"all_to_all_matmul": "all-to-all, then matmul",
          "matmul_all_to_all": "matmul, then all-to-all"}  # fmt: skip
TOKENS = (4096, 1024, 256)  # of a rank
LAID_OUT = ROUTED[1:]  # by the host, anew in each call


def cases(shards: int) -> list[Case]:
    """Both directions of all models, with uniform and with skewed counts."""
    every = product(NAMES, MODELS, TOKENS, ("uniform", "skewed"))
    return [case_of(*each, shards) for each in every]


def by_libraries(layer: Layer) -> dict[str, Call | str]:
    """What the libraries do, each way that they multiply."""
    calls: dict[str, Call | str] = {}
    rows = layer.arrived if layer.dispatches else layer.x
    for name, multiply in (("looped", layer.looped), ("grouped", layer.grouped)):

        def pair(_: int, multiply: Callable[[Tensor], Tensor] = multiply) -> Tensor:
            if layer.dispatches:
                return multiply(layer.exchange(layer.x, layer.arrived))
            return layer.exchange(multiply(layer.x), layer.y)

        def in_place(_: int, multiply: Callable[[Tensor], Tensor] = multiply) -> Tensor:
            if layer.dispatches:
                arrived = layer.exchange(layer.x, layer.arrived)
                return multiply(torch.index_select(arrived, 0, layer.order, out=layer.sorted))
            back = torch.index_select(multiply(layer.x), 0, layer.back, out=layer.sorted)
            return layer.exchange(back, layer.y)

        calls |= {f"matmul {name}": lambda _, multiply=multiply: multiply(rows),
                  f"pair {name}": pair, f"in place {name}": in_place}  # fmt: skip
        if not layer.dispatches:
            calls[f"in place {name}, sum"] = lambda i, run=in_place: layer.summed(run(i))
        if not layer.bench.on_gpu and name == "grouped":
            calls |= {
                arm: "the library's grouped matmul needs GPUs" for arm in calls if name in arm
            }
    source, target = (layer.x, layer.arrived) if layer.dispatches else (layer.product, layer.y)
    return calls | {"communication": lambda _: layer.exchange(source, target)}


def problem_of(layer: Layer) -> Problem | None:
    """The problem of equal counts; others are known at run time."""
    case = layer.case
    if case["routing"] != "uniform":
        return None
    return Problem(case["op"], layer.sent, case["n"], case["k"], layer.bench.ranks,
                   experts=layer.local)  # fmt: skip


def arms(case: Case, bench: Bench, *, routes: bool = False) -> Arms:
    """All arms of one layer; those by routes if asked for, where counts are equal."""
    layer = Layer(case, bench)
    op: Callable[..., Tensor] = getattr(cp, case["op"])

    def one_kernel(_: int, **more: Any) -> Tensor:
        return op(layer.given, layer.w, counts=layer.on_device, max_rows=layer.limit,
                  group=bench.group, **more)  # fmt: skip

    def on_host(plan: str) -> Call:
        return lambda _: op(layer.x, layer.w, counts=layer.counts, plan=plan, group=bench.group)

    calls = by_libraries(layer) | {"one kernel": one_kernel}
    if not bench.on_gpu:
        calls["one kernel"] = "counts on the device need GPUs"
    elif not layer.dispatches:
        calls["one kernel, sum"] = partial(one_kernel, sum_of=(layer.index, layer.weights))
    problem, about, facts = problem_of(layer), dict[str, Row](), dict[str, Any]()
    if problem is not None:
        specs = [spec for spec in candidates(problem, bench) if "fused" not in spec]
        calls |= {f"plan {spec}": on_host(spec) for spec in specs}
        if choice := choice_of(problem, bench):
            about = {f"plan {c.spec}": {"predicted_s": c.seconds} for c in choice.table
                     if c.spec in specs}  # fmt: skip
            facts = {"pick": choice.spec, "bounds_s": [choice.compute_s, choice.comm_s]}
    want = layer.exact()
    of_tokens = layer.summed(want) if not layer.dispatches else want
    by_routes = want
    if routes and case["routing"] == "uniform":
        routed = Routed(layer)
        calls, by_routes = calls | routed.calls(), routed.exact()

    def check(name: str, got: Tensor) -> list[float]:
        exact = by_routes if name in ROUTED else of_tokens if name.endswith("sum") else want
        return [relative_error(got[: len(exact)], exact) if len(exact) else 0.0]

    parts = [name for name in calls if name.startswith(("matmul", "pair", "communication"))]
    return Arms(calls, check, baseline="in place looped", parts=parts, waits=LAID_OUT, floor=4e-3,
                outputs=(layer.y, layer.product, layer.sorted), about=about,
                nan_bytes=4 * layer.limit * max(case["n"], case["k"]),
                facts=facts | {"rows": layer.limit})  # fmt: skip


# ---- what is said of the rows

NOTE = "Times are microseconds in CUDA graphs. Each case is one rotation."


class Said:
    """One case of a table."""

    def __init__(self, case: Timed) -> None:
        self.case, self.head, self.s = case, case.head, case.s
        self.combines = self.head["op"] == "matmul_all_to_all"
        self.matmul_s = self.least("matmul ")
        self.pair_s = self.least("pair ")
        # of one expert rows lie as they have to
        several = self.head["experts"] > 1
        self.in_place_s = self.least("in place", without=",") if several else self.pair_s
        self.longer_s = max(self.matmul_s, self.s("communication"))
        self.ours_s = self.s("one kernel")
        self.planned_s = self.planned("grouped ring")

    def least(self, start: str, end: str = "", without: str = "\0") -> float:
        """Seconds of the fastest arm of such a name; inf where there is none."""
        return min((row["median_s"] for arm, row in self.case.graph.items()
                    if arm.startswith(start) and arm.endswith(end) and without not in arm),
                   default=torch.inf)  # fmt: skip

    def planned(self, spec: str) -> float:
        """Seconds of a plan, which older rows name by its family; inf where there is none."""
        names = (f"plan {spec}", f"plan {spec.partition(' ')[0]}")
        return next((self.s(name) for name in names if name in self.case.graph), torch.inf)

    @property
    def auto(self) -> tuple[str, float]:
        """What auto takes of equal counts, by the predictions of this version, and its time."""
        if self.head["routing"] != "uniform":
            return "", torch.nan
        h = self.head
        machine = shipped(h["gpu"], h["ranks"])
        problem = Problem(h["op"], h["rows"], h["n"], h["k"], h["ranks"], experts=h["experts"])
        spec = cp.choose(problem, machine).spec
        if "fused" in spec:
            return "one kernel", self.ours_s
        return spec, self.in_place_s if spec == "serial" else self.planned(spec)


def said(rows: Sequence[Row]) -> list[Said]:
    """The cases of rows."""
    some = [row for row in rows if row["table"] == "experts"]
    return [Said(case) for case in taken(some, "op", "model", "tokens", "routing")]


def _us(seconds: float) -> str:
    return us(seconds, 0) if seconds < torch.inf else "-"


def times(cases: Sequence[Said]) -> str:
    """One direction on one machine."""
    head = ["model, tokens of a rank", "matmul", "all-to-all", "weights once", "pair", "in place",
            "longer part", "one kernel", "pair / one kernel", "in place / one kernel", "hidden",
            "plan", "auto"]  # fmt: skip
    if cases[0].combines:
        head += ["in place, sum", "one kernel, sum", "in place / one kernel, sum"]
    lines: list[tuple[list[str], list[Row]]] = []
    for c in cases:
        h, (pick, auto_s) = c.head, c.auto
        share = (c.in_place_s - c.ours_s) / (c.in_place_s - c.longer_s)
        line = [f"{h['model']}, {h['tokens']}, {h['routing']}", _us(c.matmul_s),
                _us(c.s("communication")), _us(h["weight_bytes"] / hbm_bytes_per_s(h)),
                _us(c.pair_s), _us(c.in_place_s), _us(c.longer_s), _us(c.ours_s),
                f"{c.pair_s / c.ours_s:.2f}", f"{c.in_place_s / c.ours_s:.2f}", f"{share:.0%}",
                _us(c.planned_s), f"{_us(auto_s)} {pick}".strip()]  # fmt: skip
        if c.combines:
            theirs, ours = c.least("in place", ", sum"), c.s("one kernel, sum")
            line += [_us(theirs), _us(ours), f"{theirs / ours:.2f}"]
        lines.append((line, c.case.rows))
    return measured(head, lines, NOTE)


def means(cases: Sequence[Said]) -> str:
    """Speedups by the number of tokens."""
    texts: list[str] = []
    for tokens in dict.fromkeys(c.head["tokens"] for c in cases):
        some = [c for c in cases if c.head["tokens"] == tokens]
        aim = " (aim, of 8 GPUs: 1.25)" if tokens == 4096 else ""
        texts.append(
            f"{tokens} tokens {geometric_mean(c.pair_s / c.ours_s for c in some):.2f}{aim}"
        )
    longer = geometric_mean(c.pair_s / c.longer_s for c in cases)
    return (
        f"{auto_means(cases)} With counts on the device, by tokens: {', '.join(texts)}. The pair "
        f"takes {longer:.2f} times as long as the longer part alone."
    )


def auto_means(cases: Sequence[Said]) -> str:
    """The pair over what auto takes, of counts on the device and of host-known ones."""
    device = [c.pair_s / c.ours_s for c in cases]
    # what auto takes now may be newer than the rows
    host = [c.pair_s / c.auto[1] for c in cases if c.auto[0] and c.auto[1] < torch.inf]
    return (
        "Geometric means of pair / auto: "
        f"{geometric_mean(device):.2f} with counts on the device, where auto is one kernel "
        f"({len(device)} cases, {min(device):.2f} to {max(device):.2f}, slower in "
        f"{sum(r < 1 for r in device)}); {geometric_mean(host):.2f} with equal counts that the "
        f"host knows ({len(host)} cases, {min(host):.2f} to {max(host):.2f})."
    )


def experts_section(found: Mapping[int, list[Row]]) -> str:
    """Both directions on each machine."""
    parts = [shown("experts", "Speedup of expert layers, by model, tokens and routing")]
    for rows in by_cut(found):
        for op, name in NAMES.items():
            if some := [c for c in said(rows) if c.head["op"] == op]:
                where = f"{gpus_of(rows)}{held(rows)}, rows {name}"
                parts.append(f"{where}:\n\n{times(some)}\n\n{means(some)}")
    return "\n\n".join(parts)


def routed_section(found: Mapping[int, list[Row]]) -> str:
    """By routes: both directions of uniform cases, beside the grouped matmul alone."""
    host = f"{ROUTED[1]}, single call"
    head = ["GPUs, direction, model, tokens of a rank", "matmul grouped", "one kernel", ROUTED[0],
            host, "by routes / matmul grouped"]  # fmt: skip
    lines: list[tuple[Sequence[str], Sequence[Row]]] = []
    for rows in by_cut(found):
        lines += [_routed_line(c) for c in said(rows) if ROUTED[0] in c.case]
    note = (
        "Times are microseconds in CUDA graphs. By routes, a token goes once to each rank that has "
        "some of its experts. *One kernel* sends it once for each expert. Rows back include their "
        f"sums. Routes are known before: their exchange is not in these times. Of *{host}* the "
        "host lays out each call, so it is in no graph."
    )
    return measured(head, lines, note)


def _routed_line(c: Said) -> tuple[Sequence[str], Sequence[Row]]:
    h, direction = c.head, "back" if c.combines else "to the experts"
    one = "one kernel, sum" if c.combines else "one kernel"
    times = [us(c.s(arm), 0) for arm in ("matmul grouped", one, ROUTED[0])]
    times.append(us(c.case.eager[ROUTED[1]]["median_s"], 0))
    ratio = f"{c.s(ROUTED[0]) / c.s('matmul grouped'):.2f}"
    where = f"{gpus_of(c.case.rows)}, {direction}"
    return [f"{where}, {h['model']}, {h['tokens']}", *times, ratio], c.case.rows


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Speedups over the libraries with rows in place, of the most GPUs."""
    ranks, rows = next(iter(found.items()))
    panels: dict[str, dict[str, dict[str, float]]] = {}
    marks: dict[str, dict[str, float]] = {}
    every = said(rows)
    for c in every:
        title = TITLES[c.head["op"]]
        label = f"{c.head['model']}, {c.head['tokens']} tokens, {c.head['routing']}"
        kinds = {"serial, rows not sorted": c.pair_s, "counterpoint, counts on the GPU": c.ours_s,
                 "counterpoint, counts on the host": c.auto[1]}  # fmt: skip
        panels.setdefault(title, {})[label] = {
            kind: c.in_place_s / t for kind, t in kinds.items() if t < torch.inf
        }
        marks.setdefault(title, {})[label] = c.in_place_s / c.longer_s
    each = [c.in_place_s / c.ours_s for c in every]
    dots(
        panels, images / "experts.svg", marks=marks, source=place(rows),
        title=f"Experts on {ranks} GPUs: {geometric_mean(each):.2f}x in the mean, "
              f"{min(each):.2f}x to {max(each):.2f}x",
        axis=speedups("serial: NCCL and grouped matmul, rows sorted"),
        mark="the longer part alone (an estimate, not a bound)",
    )  # fmt: skip


EXPERTS = Benchmark(
    "experts", cases, partial(arms, routes=True), calls=4, soak_s=0.2, pictures=pictures,
    eager=("in place looped", "one kernel", "plan grouped ring", *ROUTED),
    short=lambda case: case["model"] == "Qwen3-235B" and case["tokens"] == 1024, cut=True,
    moved=lambda case, ranks: 2 * case["tokens"] * case["top"] * (
        case["k"] if case["op"] == "all_to_all_matmul" else case["n"]) * (ranks - 1) // ranks,
    sections=(
        Section("docs/results/experts.md", "experts", experts_section),
        Section("docs/results/experts.md", "experts-routes", routed_section),
        Section("docs/experts.md", "layouts", layouts),
    ),
)  # fmt: skip
