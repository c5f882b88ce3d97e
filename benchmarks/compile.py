"""Unmodified models under torch.compile: plain, with torch's own passes, and with ours.

    compile              torch.compile
    overlap scheduling   the same with torch's pass that moves collectives beside computation
    async TP             the same with torch's pass that cuts matmuls and gathers to overlap them
    one-shot             in place of async TP where there are all-reduces alone: torch's all-reduce
                         of few bytes in one kernel
    counterpoint         torch.compile(model, options=cp.compile_options())

Models are of benchmarks/blocks.py, and all arms have the same weights. Training is a forward and a
backward with sequence parallelism, without an optimizer. Inference is one layer with all-reduces:
a prefill, and a decode of one token per sequence. Each arm is compiled with empty caches, its
result and gradients are compared with eager fp32 (fp64 on CPUs), and all are timed in one
rotation."""

import copy
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import counterpoint as cp
from benchmarks import blocks
from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.pictures import DARK, Theme, in_both, place, shown
from benchmarks.rows import Row, Timed, gpus_of, taken
from benchmarks.tables import measured, ms
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.canvas import duration
from counterpoint.measure.draw import draw_timeline
from counterpoint.measure.profile import profile
from counterpoint.measure.timing import captured, relative_error
from counterpoint.run.replay import SEEN_BEFORE
from counterpoint.timeline import Span, Timeline

PLAIN, SCHEDULED, ASYNC, ONE_SHOT = "compile", "overlap scheduling", "async TP", "one-shot"
OURS = "counterpoint"
TORCH = (SCHEDULED, ASYNC, ONE_SHOT)
OPTIONS: dict[str, Mapping[str, Any]] = {
    PLAIN: {},
    SCHEDULED: {"aten_distributed_optimizations.enable_overlap_scheduling": True},
    ASYNC: {"_micro_pipeline_tp": True},
    ONE_SHOT: {"_collective.auto_select": True},
}
COUNT = "post_grad_custom_post_pass"  # torch runs it behind its passes that fuse
TRAIN, PREFILL, DECODE = "train", "prefill", "decode"
MODELS = {TRAIN: "llama", PREFILL: f"llama{blocks.TP}", DECODE: blocks.DECODE}
TOKENS = 8192  # of all ranks
CONTEXT = 1024  # tokens before the one that a decode computes
LAYERS = 4
DECODE_ROWS = (1, 8, 32, 64)
DECODES = 8  # of one CUDA graph
LIMIT = 0.2  # of plain compile; the gradients of attention weights are differences of near numbers


def case_of(step: str, width: str, batch: int, *, layers: int = 1, sequence: int = TOKENS) -> Case:
    """One model at one size: `batch` sequences of `sequence` tokens."""
    what = f"{layers} layer{'s' * (layers > 1)}, batch {batch}"
    return Case(f"{step} {width}, {what}", {
        "step": step, "width": width, "batch": batch, "layers": layers, "sequence": sequence,
    })  # fmt: skip


def cases(_: int) -> list[Case]:
    """Those that we publish; the first is also the picture's."""
    return [
        case_of(TRAIN, "8B", 1),
        *(case_of(TRAIN, width, batch, layers=LAYERS) for width in ("8B", "70B")
          for batch in (1, 4)),
        case_of(PREFILL, "8B", 1),
        *(case_of(DECODE, width, rows, sequence=CONTEXT) for width in ("8B", "70B")
          for rows in DECODE_ROWS),
    ]  # fmt: skip


class Count(CustomGraphPass):
    """Counts the collectives that torch's and our passes have left, and those they have fused."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()

    def __deepcopy__(self, _: object) -> "Count":
        return self  # torch may copy its options

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            namespace = getattr(node.target, "namespace", "")
            if namespace == "_c10d_functional" and "wait_tensor" not in node.target.name():
                self.left[node.target.name().partition("::")[2]] += 1
            elif namespace in ("symm_mem", "counterpoint"):
                self.fused[node.target.name().partition("::")[2]] += 1

    def uuid(self) -> None:
        """None: a graph from a cache would not be counted."""


class Subject:
    """What all arms of a case compile: one model, its input, and what its backward begins with."""

    def __init__(self, case: Case, bench: Bench, dtype: torch.dtype) -> None:
        self.bench, self.trains = bench, case["step"] == TRAIN
        self.mesh = DeviceMesh.from_group(bench.group, bench.device.type)
        sizes = blocks.Sizes(blocks.WIDTHS[case["width"]], case["layers"], case["batch"],
                             case["sequence"])  # fmt: skip
        self.model, x = blocks.made(MODELS[case["step"]], sizes, self.mesh, dtype=dtype)
        self.model.requires_grad_(self.trains)
        self.x = x.requires_grad_(self.trains)
        self.dy = bench.normal(*x.shape, dtype=dtype) if self.trains else x

    def step(self, model: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        """The result; when training, then the gradients of the input and of each weight."""
        return self._step(model, self.model, self.x, self.dy)

    def _step(
        self, call: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor, dy: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if not self.trains:
            with torch.no_grad():
                return (call(x),)
        y = call(x)
        return y.detach(), *torch.autograd.grad(y, [x, *owner.parameters()], dy)

    def wanted(self) -> list[Tensor]:
        """The same by eager torch in fp32, or in fp64 on CPUs; sequences one after another."""
        exact = torch.float32 if self.bench.on_gpu else torch.float64
        model = copy.deepcopy(self.model).to(exact)
        if not self.trains:
            return [local(t) for t in self._step(model, model, self.x.to(exact), self.dy)]
        ys: list[Tensor] = []
        dxs: list[Tensor] = []
        dws: list[Tensor] = []
        for x, dy in zip(self.x.detach().split(1), self.dy.split(1), strict=True):
            leaf = x.to(exact).requires_grad_()
            y, dx, *each = map(local, self._step(model, model, leaf, dy.to(exact)))
            ys.append(y)
            dxs.append(dx)
            dws = [a + b for a, b in zip(dws, each, strict=True)] if dws else each
        return [torch.cat(ys), torch.cat(dxs), *dws]


def local(t: Tensor) -> Tensor:
    """This rank's shard; of a sum that is still to be taken over the ranks, the sum."""
    if not isinstance(t, DTensor):
        return t
    placements = [Replicate() if p.is_partial() else p for p in t.placements]
    return t.redistribute(placements=placements).to_local()


def options_of(arm: str, count: Count, bench: Bench) -> dict[str, Any] | str:
    """What torch.compile takes; a text says why an arm cannot be had here."""
    if arm == OURS:
        return cp.compile_options({COUNT: count})
    known = inductor.get_config_copy()
    for option in OPTIONS[arm]:
        if option not in known:
            return f"torch {torch.__version__} has no option {option}"
    if arm in TORCH and not bench.on_gpu:
        return "torch's passes over collectives need GPUs"
    if arm in (ASYNC, ONE_SHOT):
        symmetric_memory.enable_symm_mem_for_group(bench.group.group_name)
    return {**OPTIONS[arm], COUNT: count}


def compiled(arm: str, subject: Subject) -> tuple[Call | str, dict[str, Any]]:
    """A step, and facts of it; where a pass of torch's fails, what it says in place of the step."""
    count, bench = Count(), subject.bench
    options = options_of(arm, count, bench)
    if isinstance(options, str):
        return options, {}
    model = torch.compile(subject.model, options=options, fullgraph=True)

    def step(_: int) -> tuple[Tensor, ...]:
        return subject.step(model)

    try:
        with fresh_cache():
            bench.meet()
            start_s = time.monotonic()
            step(0)
            bench.meet()
            compile_s = time.monotonic() - start_s
    except RuntimeError as error:
        if arm not in TORCH:
            raise
        return f"it fails to compile: {str(error).splitlines()[0]}", {}
    for _ in range(SEEN_BEFORE + 1):  # as in a loop of steps
        step(0)
    facts = {
        "compile_s": compile_s, "collectives_left": dict(count.left), "fused": dict(count.fused),
        "peak_bytes": peak_bytes(step, bench), "symmetric_bytes": symmetric_bytes(arm, bench),
    }  # fmt: skip
    if arm == OURS:
        facts["explained"] = str(cp.explain(model))
    bench.say(f"{arm}: compiled in {compile_s:.1f} s, left {sum(count.left.values())}")
    return step, facts


def peak_bytes(step: Call, bench: Bench) -> int:
    """Most that torch has allocated during a step, the weights among it; 0 on CPUs."""
    if not bench.on_gpu:
        return 0
    gc.collect()
    torch.cuda.synchronize(bench.device)
    torch.cuda.reset_peak_memory_stats(bench.device)
    step(0)
    torch.cuda.synchronize(bench.device)
    return torch.cuda.max_memory_allocated(bench.device)


def symmetric_bytes(arm: str, bench: Bench) -> int:
    """Memory that peers can write to, which torch's allocator does not count."""
    if arm == OURS:
        return workspace_of(bench.group, bench.device).num_bytes()[0]
    spaces = getattr(symmetric_memory, "_group_name_to_workspace_tensor", {})
    space = spaces.get(bench.group.group_name) if arm == ASYNC else None
    return 0 if space is None else space.nbytes


@cache
def _warm(step: str, bench: Bench) -> None:
    """Have what the first compilation of a process starts: workers, imports, patterns."""
    torch.compiler.reset()
    subject = Subject(case_of(step, "toy", 1, sequence=64), bench, torch.bfloat16)
    with fresh_cache():
        subject.step(torch.compile(subject.model, fullgraph=True))


def arms(case: Case, bench: Bench, dtype: torch.dtype = torch.bfloat16) -> Arms:
    """All arms of one step."""
    if bench.on_gpu:
        _warm(case["step"], bench)
    torch.compiler.reset()
    subject = Subject(case, bench, dtype)
    subject.step(subject.model)  # eager: what all arms need is loaded
    peer = ASYNC if subject.trains else ONE_SHOT
    calls: dict[str, Call | str] = {}
    about: dict[str, dict[str, Any]] = {}
    for arm in (PLAIN, SCHEDULED, peer, OURS):
        calls[arm], about[arm] = compiled(arm, subject)
    if case["layers"] == 1 and subject.trains and bench.on_gpu:
        for arm in (PLAIN, OURS):
            call = calls[arm]
            assert not isinstance(call, str), f"{arm} is never refused"
            about[arm]["timeline"] = seen(call, bench)
    want = subject.wanted()

    def check(_: str, got: tuple[Tensor, ...]) -> list[float]:
        return [relative_error(local(a), b) for a, b in zip(got, want, strict=True)]

    return Arms(
        calls, check, baseline=PLAIN, limit=LIMIT, about=about, nan_bytes=1 << 30,
        sets=DECODES if case["step"] == DECODE else 1, peers=TORCH,
        pool=torch.cuda.graph_pool_handle() if bench.on_gpu else None,
        close=lambda: cp.release(bench.group),
    )  # fmt: skip


# ---- one layer as the profiler saw it

KERNELS = {
    "collective": re.compile(r"nccl|all_reduce|all_gather|reduce_scatter|one_shot|two_shot", re.I),
    "copy": re.compile(r"Memcpy PtoP|Memcpy P2P"),
    "move": re.compile(r"memcpy", re.I),  # on one GPU; in a graph it is a kernel
    "barrier": re.compile(r"barrier|signal|wait_value", re.I),
    "matmul": re.compile(r"gemm|nvjet|cutlass|xmma|splitk", re.I),
    "reduce": re.compile(r"^reduce_kernel"),
}
LANES = {"collective": "collective", "copy": "copy", "move": "copy", "barrier": "signal"}
SAID = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "nvjet": "matmul",
        "flash": "attention", "triton": "other"}  # fmt: skip
WARM, REPLAYS = 20, 11


def kind_of(kernel: str) -> str:
    """What a kernel or a copy that is no step of a plan does, by its name."""
    if kernel.startswith("triton_"):  # torch's, named after all that they are made from
        return "opaque"
    if "matmul" in kernel:  # ours, that communicate and multiply in one
        return "fused"
    return next((kind for kind, name in KERNELS.items() if name.search(kernel)), "opaque")


def told(timeline: Timeline) -> Timeline:
    """A replay, with the kind of each span, on a lane for each thing that a GPU does at a time."""
    spans: list[Span] = []
    for span in timeline.spans:
        kind = kind_of(span.label)
        label = next((said for part, said in SAID.items() if part in span.label), kind)
        spans.append(replace(span, kind=kind, lane=LANES.get(kind, "compute"), label=label))
    return replace(timeline, spans=tuple(spans))


def typical(timeline: Timeline) -> Timeline:
    """Of `REPLAYS` replays of one graph, back to back, the one that took the median time."""
    replays: list[list[Span]] = [[] for _ in range(REPLAYS)]
    for rank in timeline.ranks:
        own = sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.start_s)
        each, rest = divmod(len(own), REPLAYS)
        assert not rest, "all replays launch the same"
        for i, spans in enumerate(replays):
            spans += own[i * each :][:each]
    found = (replace(timeline, spans=tuple(spans)).shifted() for spans in replays)
    return sorted(found, key=lambda one: one.duration_s)[REPLAYS // 2]


def seen(call: Call, bench: Bench) -> str:
    """The timeline of a replay of one call, as JSON.

    Replays before it have brought ranks into step: of a single call, most is waiting for the rank
    that began later.
    """
    replay, _ = captured(call, 1)
    for _ in range(WARM):
        replay()
    bench.meet()
    _, timeline = profile(lambda: [replay() for _ in range(REPLAYS)], group=bench.group)
    return typical(timeline).to_json()


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """One layer, forward and backward, before and after, of the most GPUs."""
    rows = next(iter(found.values()))
    for case in taken(rows, "case"):
        if all("timeline" in case.main.get(arm, {}) for arm in (PLAIN, OURS)):
            plain, ours = (told(Timeline.from_json(case.main[arm]["timeline"]))
                           for arm in (PLAIN, OURS))  # fmt: skip
            what = f"One layer of Llama-3-{case.head['width']} width, forward and backward"
            top = f"torch.compile, on {place(rows)}: {_exposed(plain)}"
            below = f"torch.compile with counterpoint: {_exposed(ours)}"
            before = replace(plain, title=what, source=top)
            after = replace(ours, title="", source=below)
            in_both(images / "compile.svg", partial(_draw, before, after))


def _exposed(timeline: Timeline) -> str:
    """How much of the time rank 0 only communicates."""
    exposed_s = timeline.exposed_s(0)
    return f"{duration(exposed_s)} exposed, {exposed_s / timeline.duration_s:.1%} of the time"


def _draw(plain: Timeline, ours: Timeline, path: Path, theme: Theme) -> None:
    dark = theme is DARK
    draw_timeline(plain, path, beside=[ours], ranks=[0], width_in=9, dark=dark)


# ---- what is said of the rows


def label(case: Timed) -> str:
    """A case in one cell."""
    h = case.head
    if h["step"] == DECODE:
        return f"{h['width']}, {h['batch']} row{'s' * (h['batch'] > 1)}"
    layers = f"{h['layers']} layer{'s' * (h['layers'] > 1)}"
    return f"{h['width']}, {layers}, batch {h['batch']}"


def over(rows: Mapping[str, Row], others: Iterable[str]) -> float | None:
    """Speedup over the fastest of others, of one rotation; None where they or ours are not there.

    Args:
        rows: arm -> row.
        others: names of arms.
    """
    times = [rows[arm]["median_s"] for arm in others if arm in rows]
    return min(times) / rows[OURS]["median_s"] if times and OURS in rows else None


def _cell(number: float | None, digits: int = 2) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


def times_table(rows: Sequence[Row], step: str) -> str:
    """Milliseconds of each arm, as single calls and in a CUDA graph."""
    peer = ASYNC if step == TRAIN else ONE_SHOT
    others = (PLAIN, SCHEDULED, peer)
    head = ["model", *others, f"**{OURS}**", f"{PLAIN} / {OURS}", f"best of torch / {OURS}"]
    lines: list[tuple[list[str], list[Row]]] = []
    found: dict[tuple[str, str], list[float]] = {}
    for case in taken([row for row in rows if row["step"] == step], "case"):
        for mode, arms in case.modes.items():
            ratios = over(arms, (PLAIN,)), over(arms, others)
            times = [ms(arms[a]["median_s"]) if a in arms else "-" for a in (*others, OURS)]
            lines.append(([f"{label(case)}, {mode}", *times, *map(_cell, ratios)],
                          list(arms.values())))  # fmt: skip
            if ratios[1] is not None and case.head["layers"] == (LAYERS if step == TRAIN else 1):
                found.setdefault((case.head["width"], mode), []).append(ratios[1])
    means = ", ".join(f"{width} {geometric_mean(each):.2f} ({mode}, of {len(each)})"
                      for (width, mode), each in found.items())  # fmt: skip
    note = "Times are milliseconds of the slowest rank. All arms ran in one randomised rotation."
    mean = f" Geometric means of the last column: {means}." if means else ""
    return measured(head, lines, note + mean)


def costs_table(rows: Sequence[Row]) -> str:
    """Memory, compile time and collectives that are left, of every arm."""
    head = ["model", "arm", "peak memory [GiB]", "of it symmetric [GiB]", "compile time [s]",
            "collectives left"]  # fmt: skip
    lines: list[tuple[list[str], list[Row]]] = []
    for case in taken(rows, "case"):
        for arm, row in case.main.items():
            left = ", ".join(f"{n} {name.removesuffix('.default')}"
                             for name, n in row["collectives_left"].items())  # fmt: skip
            symmetric = row["symmetric_bytes"]
            lines.append(([
                f"{case.head['step']}: {label(case)}", arm,
                f"{(row['peak_bytes'] + symmetric) / 2**30:.2f}", f"{symmetric / 2**30:.2f}",
                f"{row['compile_s']:.1f}", left or "none",
            ], [row]))  # fmt: skip
    return measured(head, lines, "Weights are part of the peak. Caches of compilers were empty.")


TITLES = {TRAIN: "Training, forward and backward", PREFILL: "Prefill", DECODE: "Decode"}


def section(found: Mapping[int, list[Row]]) -> str:
    """docs/results/compile.md."""
    parts: list[str] = []
    for rows in found.values():
        where = gpus_of(rows)
        for step, title in TITLES.items():
            if text := times_table(rows, step):
                parts += [f"**{title}, {where}**", text]
        parts += [f"**Memory and compile time, {where}**", costs_table(rows)]
    return "\n\n".join(parts)


def picture(found: Mapping[int, list[Row]]) -> str:
    """Where it is, if rows have it."""
    has = any("timeline" in row for row in next(iter(found.values())))
    return shown("compile", "One layer under torch.compile, before and after") if has else ""


COMPILE = Benchmark(
    "compile", cases, arms, unit="ms", calls=1, rounds=11, every_eager=True, soak_s=0.3,
    backlog_cycles=60_000_000, pictures=pictures,
    short=lambda case: case.name in ("train 8B, 1 layer, batch 1", "decode 8B, 1 layer, batch 8"),
    sections=(
        Section("docs/results/compile.md", "compile", section),
        Section("docs/results/compile.md", "compile-picture", picture),
    ),
)  # fmt: skip
