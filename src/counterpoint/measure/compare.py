"""Plans against the serial way, on GPUs: checked against fp64 first, then timed in one rotation.

Arms: compute (the matmul alone), communication (NCCL's collective alone), copy_engine (the same
bytes as bare DMA copies), serial (matmul and NCCL, none of our code, preallocated tensors),
torch_symm_mem (torch's fused op), and our plans, which start from an ordinary tensor. As graphs of
several calls with weights in rotation, and eager beside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.choose.by_model import by_model
from counterpoint.choose.choice import Choice
from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.profile import profile
from counterpoint.measure.timing import (
    BACKLOG_CYCLES,
    Arm,
    Times,
    captured,
    host_s,
    relative_error,
    rotate,
)
from counterpoint.model.estimate import predicted_s
from counterpoint.ops.all_gather_matmul import all_gather_matmul
from counterpoint.ops.auto import knowledge_of, known_tiles
from counterpoint.ops.matmul_reduce_scatter import matmul_reduce_scatter
from counterpoint.plan.families import build
from counterpoint.problem import ITEM_BYTES
from counterpoint.runtime import compute
from counterpoint.runtime.driver import Copy, copy_async
from counterpoint.runtime.symmetric import allocate
from counterpoint.runtime.workspace import workspace_of
from counterpoint.timeline import Timeline

L2_ROTATIONS = 4  # weights in rotation cover this many times the L2
MIN_CALLS = 8  # of one graph
SAMPLE_ROWS = 64  # rows of the result that are compared with fp64
TORCH_SYMM_MEM = "torch_symm_mem"
AUTO = "auto"
OUR_SERIAL = "plan serial"  # the serial way as a plan of ours, eager: what our host code costs
# of M up to this, serial and auto are timed once more, in pairs: it is there that they are close
PAIRED_M = 2048
PAIRED_ROUNDS = 200
# arms that are not one of the plans compared
FIXED = ("compute", "communication", "copy_engine", "serial", TORCH_SYMM_MEM, AUTO)


@dataclass(frozen=True)
class Case:
    """One shape to compare at: M over all ranks, N and K of one rank."""

    op: str
    m: int
    n: int
    k: int
    layer: str = ""
    dtype: str = "bfloat16"


@dataclass
class Inputs:
    """Tensors of one rank; random, and different on each."""

    x: Tensor  # all_gather_matmul: [M / ranks, K]; matmul_reduce_scatter: [M, K]
    weights: list[Tensor]  # each [K, N], the transposed view that a Linear gives
    full: Tensor  # where the serial way gathers, or computes its partial result
    y: Tensor  # the result of the serial way
    sample: Tensor = field(init=False)  # rows of y that are checked

    def weight(self, i: int) -> Tensor:
        """The weight of call i."""
        return self.weights[i % len(self.weights)]


def compare(
    case: Case,
    specs: Sequence[str],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int = 9,
    soak_s: float = 0.7,
    eager: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Check and time `specs` and the arms they are compared with; all ranks call this.

    Args:
        eager: eager calls too, and at few rows pairs of serial and auto.

    Returns:
        Rows for `record.append`, equal on all ranks; times in seconds for one call.

    Raises:
        CounterpointError: a plan computed something else than fp64 says; nothing was timed.
    """
    ranks = dist.get_world_size(group)
    inputs = _inputs(case, group, device)
    calls = {name: _serial(case, inputs, group, name) for name in ("compute", "communication")}
    calls["copy_engine"] = _copy_engine(inputs, case.op == "all_gather_matmul", group, device)
    calls["serial"] = _serial(case, inputs, group, "serial")
    calls |= {spec: _ours(case, inputs, group, spec) for spec in (AUTO, *specs)}
    errors = _errors(case, inputs, group, {k: calls[k] for k in ("serial", AUTO, *specs)})
    peer = _torch_symm_mem(case, inputs, group)
    num_calls = max(MIN_CALLS, len(inputs.weights))

    progress("capturing")
    graphs: dict[str, Arm] = {}
    kept: list[torch.cuda.CUDAGraph] = []
    for name, call in {**calls, **peer}.items():
        graphs[name], graph = captured(call, num_calls)
        kept.append(graph)
    progress("timing graphs")
    times = rotate(graphs, group=group, device=device, rounds=rounds, soak_s=soak_s)
    clock = record.sm_clock_mhz()
    best = min(specs, key=lambda s: times[s].median_s)
    eager_calls = {name: {**calls, **peer}[name] for name in ("serial", best, AUTO, *peer)}
    eager_calls[OUR_SERIAL] = _ours(case, inputs, group, "serial")
    each: dict[str, Arm] = {name: partial(call, 0) for name, call in eager_calls.items() if eager}
    behind: dict[str, Times] = {}
    plain: dict[str, Times] = {}
    if eager:
        progress("timing eager")
        behind = rotate(each, group=group, device=device, rounds=rounds, soak_s=0.1,
                        backlog_cycles=5_000_000)  # fmt: skip
        plain = rotate(each, group=group, device=device, rounds=rounds, soak_s=0.1,
                       backlog_cycles=1)  # fmt: skip
    hosts = {name: host_s(arm, group=group) for name, arm in each.items()}
    pairs: dict[str, tuple[float, float, float]] = {}
    if eager and case.m <= PAIRED_M:
        progress("timing pairs")
        for mode, arms, cycles in (("graph", graphs, BACKLOG_CYCLES), ("eager", each, 1)):
            two = {name: arms[name] for name in ("serial", AUTO)}
            paired = rotate(two, group=group, device=device, rounds=PAIRED_ROUNDS, soak_s=0.1,
                            backlog_cycles=cycles)  # fmt: skip
            pairs[mode] = paired[AUTO].ratio_of(paired["serial"])
    choice = _choice(case, group, device)
    memory = workspace_of(group, device).num_bytes()
    del graphs, kept

    facts = {
        "table": "overlap", "op": case.op, "layer": case.layer, "m": case.m, "n": case.n,
        "k": case.k, "dtype": case.dtype, "ranks": ranks, "sm_clock_mhz": clock,
        "workspace_bytes": list(memory),
    } | record.environment()  # fmt: skip

    def row(arm: str, mode: str, t: Times, per: int, **more: Any) -> dict[str, Any]:
        return {
            "arm": arm, "mode": mode, "median_s": t.median_s / per, "p20_s": t.quantile_s(2) / per,
            "p80_s": t.quantile_s(8) / per, "skew_s": t.skew_s / per, "rounds": len(t.rounds_s),
            "calls_per_graph": per if mode == "graph" else 0, "error": errors.get(arm),
            "predicted_s": predicted.get(arm),
            **more, **facts,
        }  # fmt: skip

    predicted = {spec: _predicted_s(case, spec, choice) for spec in ("serial", *specs)}
    predicted[AUTO] = predicted.get(choice.spec) or _predicted_s(case, choice.spec, choice)
    rows = [row(arm, "graph", t, num_calls) for arm, t in times.items()]
    for arm in rows:
        if arm["arm"] == AUTO:
            arm |= {"pick": choice.spec, "bounds_s": [choice.compute_s, choice.comm_s]}
            arm |= {"serial_over_auto": pairs.get("graph")}
            # as the matmul library says: what a prediction without this GPU then knows
            arm |= {"tiles": [[*shape, *tile] for shape, tile in choice.tiles.items()]}
    for arm in each:
        more = {"host_s": hosts[arm], "plain_eager_s": plain[arm].median_s}
        if arm == AUTO:
            more |= {"serial_over_auto": pairs.get("eager"), "replayed": choice.spec != "serial"}
        rows.append(row(arm, "eager", behind[arm], 1, **more))
    return rows


def _choice(case: Case, group: dist.ProcessGroup, device: torch.device) -> Choice:
    """What "auto" has chosen here, and with what the model knew."""
    workspace = workspace_of(group, device)
    for key, ready in workspace.code.items():
        if isinstance(key, tuple) and key[:2] == (case.op, AUTO) and ready.code is not None:
            plan = ready.code.program.plan
            p = plan.problem
            if (p.m, p.n, p.k, p.dtype) == (case.m, case.n, case.k, case.dtype):
                machine = knowledge_of(workspace).machine
                assert machine is not None, "auto has chosen without a machine"
                choice = by_model(p, machine, tiles=known_tiles(p, device))
                return replace(choice, spec=plan.spec, table=choice.table)
    raise CounterpointError(f"auto was not called at {case}")


def _predicted_s(case: Case, spec: str, choice: Choice) -> float:
    plan = build(choice.problem, spec, choice.machine)
    return predicted_s(plan, choice.machine, tiles=choice.tiles)


def profile_best(
    case: Case,
    rows: Sequence[dict[str, Any]],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    runs: int = 5,
) -> Timeline:
    """The timeline of one call of the best plan in `rows`, on all ranks: the middle of `runs`."""
    graph = {r["arm"]: r["median_s"] for r in rows if r["mode"] == "graph"}
    best = min((a for a in graph if a not in FIXED), key=graph.__getitem__)
    inputs = _inputs(case, group, device)
    call = _ours(case, inputs, group, best)
    meeting: Any = allocate(1 << 16, group, device)
    busy = torch.randn(8192, 8192, device=device).bfloat16()

    def settled() -> None:
        # the host, slow under a profiler, is ahead of the GPU, whose clocks have settled
        for _ in range(12):
            torch.mm(busy, busy)
        meeting.handle.barrier(channel=0)
        call(0)

    settled()
    title = f"{case.op} {case.m}, {case.n}, {case.k}: {best}"
    timelines = [profile(settled, group=group, title=title)[1] for _ in range(runs)]
    ours = [
        Timeline(tuple(s for s in t.spans if s.kind != "other"), t.title, t.source).shifted()
        for t in timelines
    ]
    return sorted(ours, key=lambda t: t.duration_s)[runs // 2]


def _inputs(case: Case, group: dist.ProcessGroup, device: torch.device) -> Inputs:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(1000 + rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    weight_bytes = case.n * case.k * ITEM_BYTES[case.dtype]
    count = max(1, ceil(L2_ROTATIONS * l2_bytes / weight_bytes))
    weights = [normal(case.n, case.k).t() for _ in range(count)]
    shard = case.m // ranks
    if case.op == "all_gather_matmul":
        x, full = normal(shard, case.k), torch.empty(case.m, case.k, dtype=dtype, device=device)
        y = torch.empty(case.m, case.n, dtype=dtype, device=device)
    else:
        x, full = normal(case.m, case.k), torch.empty(case.m, case.n, dtype=dtype, device=device)
        y = torch.empty(shard, case.n, dtype=dtype, device=device)
    inputs = Inputs(x, weights, full, y)
    # equal on all ranks: in a reduce-scatter all of them contribute to each sampled row
    chosen = torch.Generator().manual_seed(7)
    inputs.sample = torch.randint(0, case.m, (SAMPLE_ROWS,), generator=chosen).to(device)
    return inputs


def _serial(
    case: Case, inputs: Inputs, group: dist.ProcessGroup, part: str
) -> Callable[[int], object]:
    x, full, y = inputs.x, inputs.full, inputs.y
    gathers = case.op == "all_gather_matmul"
    collective = compute.all_gather if gathers else compute.reduce_scatter
    source, target = (x, full) if gathers else (full, y)
    left, product = (full, y) if gathers else (x, full)

    def communicate(_: int) -> None:
        collective(target, source, group=group)

    def multiply(i: int) -> None:
        torch.mm(left, inputs.weight(i), out=product)

    def both(i: int) -> Tensor:
        first, second = (communicate, multiply) if gathers else (multiply, communicate)
        first(i)
        second(i)
        return y

    return {"compute": multiply, "communication": communicate, "serial": both}[part]


def _copy_engine(
    inputs: Inputs, gathers: bool, group: dist.ProcessGroup, device: torch.device
) -> Callable[[int], object]:
    """What a plan copies, and nothing else: a push to each peer, in ring order, no signals."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    piece = inputs.x if gathers else inputs.y  # the shard, or the rows of one owner
    num_bytes = piece.numel() * piece.element_size()
    memory = allocate(num_bytes * ranks, group, device)

    def push(_: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for d in range(1, ranks):
            target = memory.buffer_ptrs[(rank + d) % ranks] + rank * num_bytes
            copy = Copy(target, num_bytes, piece.data_ptr(), num_bytes, num_bytes, 1)
            copy_async(copy, stream)

    return push


def _ours(
    case: Case, inputs: Inputs, group: dist.ProcessGroup, spec: str
) -> Callable[[int], Tensor]:
    op = all_gather_matmul if case.op == "all_gather_matmul" else matmul_reduce_scatter
    return lambda i: op(inputs.x, inputs.weight(i), group=group, plan=spec)


def _torch_symm_mem(
    case: Case, inputs: Inputs, group: dist.ProcessGroup
) -> dict[str, Callable[[int], object]]:
    ops, name = torch.ops.symm_mem, group.group_name
    if case.op == "all_gather_matmul":
        return {TORCH_SYMM_MEM: lambda i: ops.fused_all_gather_matmul(
            inputs.x, [inputs.weight(i)], 0, name, return_A=False)}  # fmt: skip
    return {TORCH_SYMM_MEM: lambda i: ops.fused_matmul_reduce_scatter(
        inputs.x, inputs.weight(i), "sum", 0, name)}  # fmt: skip


def _errors(
    case: Case, inputs: Inputs, group: dist.ProcessGroup, calls: dict[str, Callable[[int], Any]]
) -> dict[str, float]:
    """Errors against fp64 on sampled rows, of the worst rank; raises above twice the serial one."""
    rank, shard = dist.get_rank(group), case.m // dist.get_world_size(group)
    if case.op == "all_gather_matmul":
        compute.all_gather(inputs.full, inputs.x, group=group)
        want = inputs.full[inputs.sample].double() @ inputs.weight(0).double()
        rows = inputs.sample
    else:
        want = inputs.x[inputs.sample].double() @ inputs.weight(0).double()
        dist.all_reduce(want, group=group)
        mine = (inputs.sample // shard) == rank
        want, rows = want[mine], inputs.sample[mine] - rank * shard
    errors: dict[str, float] = {}
    for name, call in calls.items():
        inputs.y.fill_(torch.nan)
        error = torch.tensor(
            relative_error(call(0)[rows], want) if len(rows) else 0.0, device=rows.device
        )
        dist.all_reduce(error, op=dist.ReduceOp.MAX, group=group)
        errors[name] = error.item()
        if not errors[name] <= 2 * errors["serial"]:
            raise CounterpointError(
                f"{case.op} {name} at {case.m},{case.n},{case.k}: error {errors[name]:.2e} against "
                f"fp64, the serial way has {errors['serial']:.2e}"
            )
    return errors
