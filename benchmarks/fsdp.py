"""Whole training steps of Llama-8B blocks under FSDP2: as torch runs them, and overlapped.

    as is           FSDP2: bf16 computation over fp32 masters, fp32 reduction, NCCL
    compute         the same blocks without FSDP2: the bound
    ours            the same model, after cp.overlap(model, trial_steps=0, memory="kept"): as "auto"
                    is where there is room; in a case "ring" memory="ring"
    ZeRO-2          as is, with reshard_after_forward=False
    two groups      as is, with a communicator for gathers and one for reduce-scatters
    zero-CTA        as is, with NCCL's gathers by copy engines, in memory that is registered with it
    two buffers     as is, with two reduce-scatters on their way at a time; since torch 2.13

All arms of a case share one model and one shuffled rotation: in each round an arm is set up, runs a
step that is not timed, then STEPS steps between two device events. A row has each round's time of
the slowest rank. Before the first step of any other arm, "compute" is timed and both ways are
predicted from it: `Overlapped.predict`."""

import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import counterpoint as cp
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table

AS_IS, COMPUTE, OURS = "as is", "compute", "ours"
ZERO2, TWO_GROUPS, ZERO_CTA, BUFFERS = "ZeRO-2", "two groups", "zero-CTA", "two buffers"
TORCHS = (AS_IS, ZERO2, TWO_GROUPS, ZERO_CTA, BUFFERS)
LAYERS = 6
STEPS, ROUNDS = 2, 15
WIDTHS = {"8B": (4096, 14336, 32, 8), "toy": (64, 160, 4, 2)}


def case_of(
    form: str, tokens: int, *, width: str = "8B", adamw: bool = False, memory: str = "kept"
) -> Case:
    """A step of one sequence of `tokens` on each rank."""
    name = f"{form}{', AdamW' * adamw} {tokens}{', toy' * (width == 'toy')}"
    return Case(f"{name}{', ring' * (memory == 'ring')}",
                {"form": form, "tokens": tokens, "adamw": adamw, "width": width,
                 "layers": LAYERS, "memory": memory})  # fmt: skip


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [
        case_of("eager", 4096), case_of("eager", 8192), case_of("eager", 1024),
        case_of("eager", 4096, adamw=True), case_of("compiled", 4096),
        case_of("eager", 4096, memory="ring"),
        *(case_of("eager", tokens, adamw=True) for tokens in (2048, 8192)),
    ]  # fmt: skip


class Layer(nn.Module):
    """A layer of Llama with grouped queries, without rotary embeddings."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = width = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = (
            nn.Linear(dim, n * width, bias=False) for n in (heads, kv_heads, kv_heads)
        )
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, tokens, dim], and as much."""
        b, t, dim = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(b, t, -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, dim))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def layers_of(case: Case, bench: Bench, dtype: torch.dtype) -> nn.Sequential:
    """Layers with the same weights on all ranks."""
    torch.manual_seed(0)
    with bench.device:
        model = nn.Sequential(*(Layer(*WIDTHS[case["width"]]) for _ in range(case["layers"])))
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    model.to(dtype)
    if case["form"] == "compiled":
        for layer in model:
            layer.compile()
    return model


class InGroup:
    """FSDP2's own collectives in another communicator, on that one's stream."""

    def __init__(self, theirs: Any, group: dist.ProcessGroup, call: Callable[..., Any]) -> None:
        self._theirs, self._group, self._call = theirs, group, call

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """As FSDP2 does."""
        return self._theirs.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *op: Any, **kwargs: Any
    ) -> Any:
        """Runs it, and lets the current stream wait."""
        op = op or ((kwargs["op"],) if "op" in kwargs else ())
        self._call(output_tensor, input_tensor, *op, group=self._group, async_op=True).wait()


class ByCopyEngines:
    """FSDP2's all-gather in a communicator that gives it no SM; in memory that NCCL knows."""

    def __init__(self, bench: Bench) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        self._group = dist.new_group([*range(bench.ranks)], pg_options=options)
        dist.all_reduce(torch.ones(1, device=bench.device), group=self._group)
        self._nccl = self._group._get_backend(bench.device)
        self._pool = torch.cuda.MemPool(self._nccl.mem_allocator)
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> Tensor:
        """One of two buffers, by turns: the other may be read still."""
        key = size[0], dtype
        if key not in self._free:
            with torch.cuda.use_mem_pool(self._pool):
                made = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
            if not self._free:
                self._nccl.register_mem_pool(self._pool, symm=True)
            self._free[key] = made
        self._free[key].reverse()
        return self._free[key][0]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Runs it."""
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=self._group, async_op=async_op
        )


# how it is set up and ended, and its step
Arm = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Tensor]]


class Lab:
    """One FSDP2 model, the same layers without it, and how each arm is set up."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.case, self.bench = case, bench
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = DeviceMesh.from_group(bench.group, bench.device.type)
        self.model = layers_of(case, bench, torch.float32)
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.plain = layers_of(case, bench, torch.bfloat16)
        self.blocks = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        dim = WIDTHS[case["width"]][0]
        self.x = bench.normal(1, case["tokens"], dim).requires_grad_()
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        if not bench.on_gpu:  # gloo has no average
            for block in self.blocks:
                block.set_force_sum_reduction_for_comms(True)
        self.overlapped: cp.Overlapped | None = None
        self.groups: list[dist.ProcessGroup] = []
        self.zero: ByCopyEngines | None = None

    def step(self, model: nn.Module | None = None, *, optimizes: bool = True) -> Tensor:
        """Forward, backward, and where asked for the optimizer."""
        model = model or self.model
        loss = model(self.x).float().square().mean()
        loss.backward()
        if self.case["adamw"] and optimizes:
            if id(model) not in self.optimizers:
                of = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
                self.optimizers[id(model)] = of
            self.optimizers[id(model)].step()
        for p in model.parameters():
            p.grad = None
        self.x.grad = None
        return loss.detach()

    def predicted(self) -> dict[str, float]:
        """Milliseconds of a step as it is, and of ours, before either has run; and of what."""
        alone, host = self._plain_ms(optimizes=False)
        if self.case["adamw"]:  # over shards, whose elements have twice the bytes
            alone += (self._plain_ms(optimizes=True)[0] - alone) * 2 / self.bench.ranks
        alone, host = self.bench.most([alone, host])
        overlapped = cp.overlap(self.model, memory=self.case["memory"])
        try:
            found = overlapped.predict(alone, host_ms=host)
        except cp.UnsupportedError:  # of this machine nothing is known
            return {}
        finally:
            overlapped.off()
        self.bench.say(f"{self.case.name}: {found}")
        return {AS_IS: found.as_is_s * 1e3, OURS: found.ours_s * 1e3, "computation": alone}

    def _plain_ms(self, *, optimizes: bool) -> tuple[float, float]:
        """A step without FSDP2, and until the host has launched it: medians."""
        times, step = [], partial(self.step, self.plain, optimizes=optimizes)
        for _ in range(8):
            start = time.perf_counter()
            step()
            host = (time.perf_counter() - start) * 1e3
            times.append((timed_ms(step, self.bench), host))
        ms, hosts = zip(*times[2:], strict=True)
        return median(ms), median(hosts)

    def overlap(self) -> None:
        """Overlap from now on."""
        if self.overlapped is None:
            self.overlapped = cp.overlap(self.model, trial_steps=0, memory=self.case["memory"])
        self.overlapped.switch(ours=True)

    def end(self) -> None:
        """All goes torch's way."""
        if self.overlapped is not None:
            self.overlapped.switch(ours=False)

    def keep(self, on: bool) -> None:
        """ZeRO-2: parameters stay gathered for the backward."""
        for layer in self.model:
            layer.set_reshard_after_forward(not on)  # type: ignore[operator]

    def apart(self, on: bool) -> None:
        """Gathers and reduce-scatters in communicators of their own."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as theirs

        if not self.groups:
            self.groups = [dist.new_group([*range(self.bench.ranks)]) for _ in range(2)]
        gather, scatter = theirs.DefaultAllGather(), theirs.DefaultReduceScatter()
        if on:
            gather = InGroup(gather, self.groups[0], dist.all_gather_into_tensor)
            scatter = InGroup(scatter, self.groups[1], dist.reduce_scatter_tensor)
        for block in self.blocks:
            block.set_custom_all_gather(gather)
            block.set_custom_reduce_scatter(scatter)

    def by_copy_engines(self, on: bool) -> None:
        """NCCL's gathers take no SM."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as theirs

        if self.zero is None:
            self.zero = ByCopyEngines(self.bench)
        for block in self.blocks:
            block.set_custom_all_gather(self.zero if on else theirs.DefaultAllGather())

    def two_buffers(self, on: bool) -> None:
        """Two reduce-scatters may be on their way."""
        self.model.set_reduce_scatter_max_input_buffers(2 if on else 1)  # type: ignore[operator]

    def setting(self, set_to: Callable[[bool], None]) -> Arm:
        """An arm of torch's own way with one of its settings."""
        return partial(set_to, True), partial(set_to, False), self.step

    def arms(self) -> dict[str, Arm]:
        """Of each arm: how it is set up and ended, and its step."""
        nothing = lambda: None  # noqa: E731
        found = {
            AS_IS: (nothing, nothing, self.step),
            COMPUTE: (nothing, nothing, lambda: self.step(self.plain)),
            OURS: (self.overlap, self.end, self.step),
            ZERO2: self.setting(self.keep),
        }
        if self.bench.on_gpu:
            found[TWO_GROUPS] = self.setting(self.apart)
            found[ZERO_CTA] = self.setting(self.by_copy_engines)
        if hasattr(self.model, "set_reduce_scatter_max_input_buffers"):
            found[BUFFERS] = self.setting(self.two_buffers)
        return found


def gradients(lab: Lab) -> tuple[float, list[Tensor]]:
    """The loss of one step, and this rank's gradients."""
    loss = lab.model(lab.x).float().square().mean()
    loss.backward()
    found = [p.grad.to_local().clone() for p in lab.model.parameters()]  # type: ignore[union-attr]
    for p in lab.model.parameters():
        p.grad = None
    lab.x.grad = None
    return loss.item(), found


def peak_of(lab: Lab) -> int:
    """Bytes of a step, symmetric memory included."""
    if not lab.bench.on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    lab.step()
    sizes = lab.overlapped.num_bytes() if lab.overlapped else {}
    gathered = sizes.get("gathered", 0) * (lab.case["memory"] == "ring")
    symmetric = sizes.get("published", 0) + sizes.get("inboxes", 0) + gathered
    return torch.cuda.max_memory_allocated() + symmetric


def differences(lab: Lab) -> tuple[dict[str, float], dict[str, int]]:
    """Of gradients: ours from torch's, and torch's from its own again; relative to the largest.

    And the most memory of a step: torch's before anything is overlapped, then ours.
    """
    peak_of(lab)  # states of an optimizer are there then
    peak = {AS_IS: peak_of(lab)}
    (loss, want), (_, again) = gradients(lab), gradients(lab)
    lab.overlap()
    gradients(lab)
    ours, got = gradients(lab)

    def off(a: Sequence[Tensor]) -> float:
        return max(
            float((x - y).abs().max() / y.abs().max().clamp_min(1e-12))
            for x, y in zip(a, want, strict=True)
        )  # fmt: skip

    found = lab.bench.most([off(got), off(again), abs(ours - loss) / abs(loss)])
    want.clear()
    del again, got  # nor are they counted
    peak[OURS] = peak_of(lab)
    lab.end()
    return dict(zip(("gradients_off", "torchs_own_off", "loss_off"), found, strict=True)), peak


def rows(case: Case, bench: Bench) -> list[Row]:
    """Times of all arms of a model, and how far gradients are off."""
    torch._dynamo.reset()
    lab = Lab(case, bench)
    predicted = lab.predicted()
    facts: Row
    facts, peak = differences(lab)
    if max(facts["gradients_off"] / max(facts["torchs_own_off"], 1e-3), facts["loss_off"]) > 10:
        raise AssertionError(f"gradients are wrong: {facts}")
    slowest = rotated(lab.arms(), case, bench)
    del lab
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return [
        {
            "arm": name, "mode": "eager", "median_s": median(of) / 1e3,
            "rounds_ms": [round(t, 3) for t in of], "peak_bytes": peak.get(name, 0),
            "predicted_ms": round(predicted.get(name, 0.0), 3),
            "predicted_of_ms": round(predicted.get("computation", 0.0), 3),
            "baseline_over_arm": median(a / b for a, b in zip(slowest[AS_IS], of, strict=True)),
            **facts,
        }
        for name, of in slowest.items()
    ]  # fmt: skip


def rotated(arms: Mapping[str, Arm], case: Case, bench: Bench) -> dict[str, list[float]]:
    """Milliseconds of each round of each arm, of the slowest rank."""
    times: dict[str, list[float]] = {}
    for name, (begin, end, step) in arms.items():
        begin()
        step(), step()
        end()
        times[name] = []
        bench.say(f"{case.name}: {name} runs")
    shuffled = random.Random(7)
    for _ in range(bench.rounds or (5 if bench.short else ROUNDS)):
        order = [*arms]
        shuffled.shuffle(order)
        for name in order:
            begin, end, step = arms[name]
            begin()
            step()
            times[name].append(timed_ms(step, bench))
            end()
    every = bench.gathered(times)
    return {n: [max(each) for each in zip(*(e[n] for e in every), strict=True)] for n in times}


def timed_ms(step: Callable[[], Tensor], bench: Bench) -> float:
    """Of a step, between device events; ranks begin together."""
    bench.meet()
    if not bench.on_gpu:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - start) * 1e3 / STEPS
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(STEPS):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / STEPS


def _speedup(case: Timed) -> str:
    return f"**{case.main[OURS]['baseline_over_arm']:.2f}**"


def _best(case: Timed) -> str:
    best = min((name for name in case.main if name in TORCHS), key=case.s)
    return f"{case.s(best) / case.s(OURS):.2f} ({best})"


def _recovered(case: Timed) -> str:
    if case.head["adamw"]:
        return "-"  # without FSDP2 each rank updates all weights: no bound
    exposed = case.s(AS_IS) - case.s(COMPUTE)
    return f"{(case.s(AS_IS) - case.s(OURS)) / exposed:.0%}"


def _peak(case: Timed) -> str:
    peaks = (case.main[name]["peak_bytes"] / 2**30 for name in (AS_IS, OURS))
    return ", ".join(f"{peak:.1f}" if peak else "-" for peak in peaks)


def _predicted(case: Timed) -> str:
    """Of as is and ours, and how far from what was measured."""
    told: list[str] = []
    for name in (AS_IS, OURS):
        ms = case.main[name].get("predicted_ms")
        told.append(f"{ms:.1f} ({ms / case.s(name) / 1e3 - 1:+.0%})" if ms else "-")
    return ", ".join(told)


COLUMNS = (
    Column("step, tokens a rank", lambda c: str(c.head["case"])),
    arm(AS_IS, ms), arm(COMPUTE, ms), arm(OURS, ms),
    Column("speedup", _speedup), Column("over torch's best setting", _best),
    Column("exposed time recovered", _recovered), Column("predicted as is, ours", _predicted),
    Column("peak GiB as is, ours", _peak),
)  # fmt: skip


def fsdp_table(rows: list[Row]) -> str:
    """Training steps, as they are called."""
    return table(COLUMNS, taken(rows, "case"))


FSDP = Benchmark(
    "fsdp", cases, rows=rows, unit="ms", short=lambda case: case.name == "eager 4096",
    own=lambda shape, _: [case_of("eager", *shape)],
    sections=(Section("docs/fsdp.md", "fsdp", by_machine(fsdp_table)),),
)  # fmt: skip
