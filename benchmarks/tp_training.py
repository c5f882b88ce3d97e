"""Training steps of a Llama, sharded and compiled as torchtitan does it.

    compile              each block by torch.compile, the rest eager
    overlap scheduling   the same with torch's pass that moves collectives beside computation
    async TP             the same with torch's pass that cuts matmuls and gathers to overlap them
    counterpoint         the same with options=cp.compile_options()

Tensor parallel with sequence parallelism over all ranks: embedding sharded by its rows, blocks of
benchmarks/blocks.py, final norm by sequence, head by its columns with torch's loss_parallel. A step
is forward, backward and fused AdamW over bf16 parameters. All arms share one model and one shuffled
rotation. The loss and gradients of each are compared with eager fp32 (fp64 on CPUs). It has no
short form."""

import copy
import gc
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import counterpoint as cp
from benchmarks import blocks
from benchmarks.compile import (
    ASYNC,
    OURS,
    PLAIN,
    SCHEDULED,
    TORCH,
    Count,
    local,
    options_of,
    symmetric_bytes,
)
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.fsdp import timed_ms
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table
from counterpoint.measure.timing import relative_error
from counterpoint.run.replay import SEEN_BEFORE

ARMS = (PLAIN, SCHEDULED, ASYNC, OURS)
TORCHS = (PLAIN, SCHEDULED, ASYNC)
LAYERS = 8
VOCABULARY = {"toy": 64, "8B": 128256, "70B": 128256}  # of Llama 3
ROUNDS = 9
WARM = SEEN_BEFORE + 3  # steps of each arm before the first round
RATE = 1e-4
LIMIT = 0.2  # of plain compile, over all gradients
FLOOR = 1e-2  # rounding explains it
LOSS_OFF = 1e-2


def case_of(width: str, sequence: int, layers: int = LAYERS) -> Case:
    """One sequence, of all ranks."""
    facts = {"width": width, "layers": layers, "batch": 1, "sequence": sequence}
    return Case(f"{width}, {layers} layers, {sequence} tokens", facts)


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [
        *(case_of("8B", sequence) for sequence in (8192, 4096, 2048, 16384)),
        *(case_of("70B", sequence, layers=2) for sequence in (8192, 2048)),
    ]


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, sizes: blocks.Sizes, vocabulary: int) -> None:
        super().__init__()
        dim = sizes.width.dim
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = blocks.whole("llama", sizes)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor, each: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Logits, sharded by the vocabulary; `each` block as it is or compiled."""
        # waits: torch differentiates no compiled block of an input that is still on its way
        x = self.embedding(ids).clone()
        for block in each:
            x = block(x)
        return self.head(self.norm(x))


def made(case: Case, bench: Bench, dtype: torch.dtype) -> Llama:
    """With the same random weights for any number of ranks, sharded as torchtitan does."""
    width = case["width"]
    sizes = blocks.Sizes(blocks.WIDTHS[width], case["layers"], case["batch"], case["sequence"])
    mesh = DeviceMesh.from_group(bench.group, bench.device.type)
    torch.manual_seed(0)
    with bench.device:
        model = Llama(sizes, VOCABULARY[width]).to(dtype)
    blocks.shard(model.layers, "llama", mesh)
    return parallelize_module(model, mesh, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    })  # fmt: skip


class Lab:
    """One model, its optimizer, and the compiled blocks of each arm."""

    def __init__(self, case: Case, bench: Bench, dtype: torch.dtype) -> None:
        self.bench, self.model = bench, made(case, bench, dtype)
        self.first = [p.detach().clone() for p in self.model.parameters()]
        shape = 2, case["batch"], case["sequence"]
        same = torch.Generator(bench.device).manual_seed(1)  # on all ranks
        vocabulary = VOCABULARY[case["width"]]
        self.ids, self.labels = torch.randint(
            vocabulary, shape, device=bench.device, generator=same
        )
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True, foreach=False)
        self.ways: dict[str, list[Any]] = {}

    def gradients(self, model: Llama, each: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Forward and backward; the loss."""
        with loss_parallel():
            logits = model(self.ids, each).flatten(0, 1)
            exact = logits.float() if logits.dtype == torch.bfloat16 else logits
            loss = functional.cross_entropy(exact, self.labels.flatten())
            loss.backward()
        return local(loss.detach())

    def step(self, name: str, *, optimizes: bool = True) -> Tensor:
        """A step, or its gradients alone."""
        loss = self.gradients(self.model, self.ways[name])
        if optimizes:
            self.adamw.step()
        self.adamw.zero_grad()
        return loss

    def found(self, model: Llama, each: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """The loss, and this rank's shard of the gradient of each weight."""
        loss = self.gradients(model, each)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(grads) == len(self.first), "each weight has a gradient"
        model.zero_grad()
        return [loss, *map(local, grads)]

    def wanted(self) -> list[Tensor]:
        """The same by eager torch in fp32, or in fp64 on CPUs."""
        exact = copy.deepcopy(self.model).to(torch.float32 if self.bench.on_gpu else torch.float64)
        return self.found(exact, [*exact.layers.blocks])

    def compiled(self, name: str) -> dict[str, Any] | str:
        """Facts of an arm; where torch cannot have it, what it says."""
        count = Count()
        options = options_of(name, count, self.bench)
        if isinstance(options, str):
            return options
        self.ways[name] = [torch.compile(block, options=options, fullgraph=True, dynamic=False)
                           for block in self.model.layers.blocks]  # fmt: skip
        try:
            with fresh_cache():
                self.bench.meet()
                start_s = time.monotonic()
                self.step(name, optimizes=False)
                self.bench.meet()
                compile_s = time.monotonic() - start_s
        except RuntimeError as error:
            if name not in TORCH:
                raise
            del self.ways[name]
            self.adamw.zero_grad()
            return f"it fails to compile: {str(error).splitlines()[0]}"
        self.bench.say(f"{name}: compiled in {compile_s:.1f} s, left {sum(count.left.values())}")
        return {"compile_s": compile_s, "collectives_left": dict(count.left),
                "fused": dict(count.fused)}  # fmt: skip

    def trained(self, name: str) -> tuple[list[float], int]:
        """Losses of the first steps, each arm from the same weights; and most bytes allocated."""
        with torch.no_grad():
            for p, first in zip(self.model.parameters(), self.first, strict=True):
                p.copy_(first)
        self.adamw.state.clear()
        losses = [self.step(name).item() for _ in range(WARM)]
        if not self.bench.on_gpu:
            return losses, 0
        torch.cuda.reset_peak_memory_stats(self.bench.device)
        self.step(name)
        torch.cuda.synchronize(self.bench.device)
        return losses, torch.cuda.max_memory_allocated(self.bench.device)


def checked(lab: Lab, bench: Bench) -> dict[str, list[float]]:
    """Errors of each arm: of the loss, of all gradients together, and of each.

    Raises:
        AssertionError: plain compile is far off, or another arm by more than twice as much.
    """
    want = lab.wanted()
    squares = sum(t.double().square().sum() for t in want[1:])
    errors: dict[str, list[float]] = {}
    for name, each in lab.ways.items():
        got = lab.found(lab.model, each)
        off = sum((a.double() - b.double()).square().sum()
                  for a, b in zip(got[1:], want[1:], strict=True))  # fmt: skip
        one_by_one = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
        every = float((torch.as_tensor(off) / squares).sqrt())
        errors[name] = bench.most([one_by_one[0], every, *one_by_one[1:]])
        bench.say(f"{name}: loss off by {errors[name][0]:.1e}, all gradients by "
                  f"{errors[name][1]:.1e}, the worst by {max(errors[name][2:]):.1e}")  # fmt: skip
        base = errors[PLAIN]
        if max(base[:2]) > LIMIT or any(
            not mine <= max(2 * plain, FLOOR)
            for mine, plain in zip(errors[name], base, strict=True)
        ):
            raise AssertionError(f"{name} is wrong: {errors[name]}, plain {base}")
    return errors


def rotated(lab: Lab, bench: Bench) -> dict[str, list[float]]:
    """Milliseconds of a step of the slowest rank, by arm and round."""
    names = [*lab.ways]
    times = {name: list[float]() for name in names}
    shuffled = random.Random(7)
    for _ in range(bench.rounds or ROUNDS):
        shuffled.shuffle(names)
        for name in names:
            lab.step(name)
            times[name].append(timed_ms(partial(lab.step, name), bench))
    every = bench.gathered(times)
    return {name: [max(each) for each in zip(*(e[name] for e in every), strict=True)]
            for name in times}  # fmt: skip


def rows(case: Case, bench: Bench, dtype: torch.dtype = torch.bfloat16) -> list[Row]:
    """Times of whole steps, by arm."""
    if bench.short:
        bench.say(f"{case.name}: left out of the short form, which is too short for it")
        return []
    torch.compiler.reset()
    lab = Lab(case, bench, dtype)
    bench.say(f"{case.name}: the model is there")
    had = {name: lab.compiled(name) for name in ARMS}
    errors = checked(lab, bench)
    gc.collect()
    found: list[Row] = []
    losses: dict[str, list[float]] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, facts in had.items():
        if isinstance(facts, str):
            bench.say(f"without {name}: {facts}")
            found.append({"arm": name, "mode": "eager", "refused": facts})
            continue
        losses[name], peak = lab.trained(name)
        off = [abs(a - b) / b for a, b in zip(losses[name], losses[PLAIN], strict=True)]
        bench.say(f"{name}: losses {losses[name][0]:.4f} to {losses[name][-1]:.4f}")
        if (worst := max(bench.most(off))) > LOSS_OFF:
            raise AssertionError(f"losses are wrong: {losses}")
        about[name] = facts | {
            "peak_bytes": peak, "symmetric_bytes": symmetric_bytes(name, bench),
            "losses": losses[name], "loss_off": worst,
            "error": errors[name][1], "worst_error": max(errors[name]),
        }  # fmt: skip
    slowest = rotated(lab, bench)
    del lab
    gc.collect()
    torch.compiler.reset()
    cp.release(bench.group)
    for name, times in slowest.items():
        pairs = zip(slowest[PLAIN], times, strict=True)
        found.append(about[name] | {
            "arm": name, "mode": "eager", "median_s": median(times) / 1e3,
            "rounds_ms": [round(t, 3) for t in times],
            "baseline_over_arm": median(plain / mine for plain, mine in pairs),
        })  # fmt: skip
    return found


def _gain(case: Timed) -> str:
    return f"{case.main[OURS]['baseline_over_arm']:.2f}"


def _best(case: Timed) -> str:
    return f"{case.s(case.fastest(TORCHS)) / case.s(OURS):.2f}"


def _peaks(case: Timed) -> str:
    peaks = (case.main[name]["peak_bytes"] + case.main[name]["symmetric_bytes"]
             for name in (PLAIN, OURS))  # fmt: skip
    return ", ".join(f"{peak / 2**30:.1f}" for peak in peaks)


COLUMNS = [
    Column("model, layers", lambda case: f"{case.head['width']}, {case.head['layers']}"),
    Column("tokens of all ranks", lambda case: str(case.head["batch"] * case.head["sequence"])),
    *(arm(name, ms, name) for name in TORCHS),
    arm(OURS, ms, f"**{OURS}**"),
    Column(f"{PLAIN} / {OURS}", _gain),
    Column(f"best of torch / {OURS}", _best),
    Column("peak GiB: compile, ours", _peaks),
]


def write(rows: list[Row]) -> str:
    """Steps by case."""
    note = (
        "Milliseconds of forward, backward and AdamW; medians of the slowest rank's. *compile / "
        "counterpoint* is the median of rounds."
    )
    return table(COLUMNS, taken(rows, "case"), note)


TP_TRAINING = Benchmark(
    "tp_training", cases, rows=rows, short=lambda case: case["sequence"] == 4096, unit="ms",
    host=False,
    sections=(Section("docs/results/compile.md", "tp-training", by_machine(write)),),
)  # fmt: skip
