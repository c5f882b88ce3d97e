"""Compare ways to run an operator of experts at one shape, on GPUs: see compare.py.

All experts get equally many rows from each rank. Arms: compute (the library's grouped matmul or a
matmul for each expert, the faster), communication (its all-to-all), serial (both and the pass that
puts rows in place between them, none of our code), and our ways. One kernel takes its counts from
the device, as it has to in a graph; plans know them on the host, as serial does. As graphs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from counterpoint.choose.by_model import by_model
from counterpoint.errors import CounterpointError
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.compare import SAMPLE_ROWS
from counterpoint.measure.timing import captured, nan_behind, relative_error, rotate
from counterpoint.model.estimate import predicted_s
from counterpoint.ops.all_to_all_matmul import all_to_all_matmul
from counterpoint.ops.experts_serial import grouped
from counterpoint.ops.matmul_all_to_all import matmul_all_to_all
from counterpoint.plan import direct
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.runtime.workspace import workspace_of

CALLS = 4  # of one graph: weights are larger than the L2, or there are several layers' worth
COMPUTE, COMMUNICATION, SERIAL = "compute", "communication", "serial"
PER_EXPERT, GROUPED = "for each expert", "in one kernel"  # what the libraries multiply by


class Layer(NamedTuple):
    """What a row says of a shape.

    Args:
        name: such as "Mixtral-8x7B experts down".
        tokens: of a rank.
    """

    name: str
    tokens: int


class Operands:
    """Tensors of one rank, random and different on each, and what the libraries do with them."""

    def __init__(self, problem: Problem, group: dist.ProcessGroup, device: torch.device) -> None:
        self.problem, self.group = problem, group
        p, self.there = problem, problem.op == "all_to_all_matmul"
        dtype, draw = getattr(torch, p.dtype), torch.Generator(device)
        draw.manual_seed(1000 + group.rank())

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=draw).to(dtype)

        self.x = normal(p.m, p.k)
        self.w = normal(p.experts, p.n, p.k).transpose(1, 2)  # as Linears store them
        self.each = p.m // (p.ranks * p.experts)
        self.counts = torch.full((p.ranks, p.ranks * p.experts), self.each)
        self.on_device = self.counts.to(torch.int32).to(device)
        # rows [rank, expert] of what is sent or comes, and where they lie [expert, rank]
        places = torch.arange(p.m, device=device).view(p.ranks, p.experts, self.each)
        self.order = places.transpose(0, 1).flatten()
        self.back = self.order.argsort()
        ends = torch.arange(1, p.experts + 1, device=device) * (p.m // p.experts)
        self.ends = ends.to(torch.int32)
        moved = p.k if self.there else p.n
        self.arrived, self.sorted = self.x.new_empty(p.m, moved), self.x.new_empty(p.m, moved)
        self.product, self.y = self.x.new_empty(p.m, p.n), self.x.new_empty(p.m, p.n)
        chosen = torch.Generator().manual_seed(7)  # equal on all ranks
        self.sample = torch.randint(0, p.m, (SAMPLE_ROWS,), generator=chosen).to(device)

    def multiply(self, x: Tensor, way: str) -> Tensor:
        """The product of rows that lie by expert."""
        if way == GROUPED:
            return F.grouped_mm(x, self.w, offs=self.ends)
        for e, (rows, y) in enumerate(zip(x.chunk(len(self.w)), self.product.chunk(len(self.w)),
                                          strict=True)):  # fmt: skip
            torch.mm(rows, self.w[e], out=y)
        return self.product

    def serial(self, way: str) -> Tensor:
        """The libraries' result, its rows in place."""
        if self.there:
            dist.all_to_all_single(self.arrived, self.x, group=self.group)
            return self.multiply(self.in_place(self.arrived, self.order), way)
        product = self.multiply(self.x, way)
        dist.all_to_all_single(self.y, self.in_place(product, self.back), group=self.group)
        return self.y

    def in_place(self, rows: Tensor, order: Tensor) -> Tensor:
        """Rows in another order; of one expert they lie so already."""
        if self.problem.experts == 1:
            return rows
        return torch.index_select(rows, 0, order, out=self.sorted)

    def exact(self) -> Tensor:
        """[SAMPLE_ROWS, N]: what rows `sample` of this rank's result have to be, in fp64."""
        p, rank, every = self.problem, self.group.rank(), self.sample
        of_expert, j = p.m // p.experts, every % self.each
        wanted = torch.zeros(p.ranks, len(every), p.k if self.there else p.n, dtype=torch.float64,
                             device=every.device)  # fmt: skip
        if self.there:
            expert, source = every // of_expert, every // self.each % p.ranks
            for r in range(p.ranks):  # what rank r multiplies: the rows that are from here
                rows = self.x[(r * p.experts + expert) * self.each + j].double()
                wanted[r] = torch.where((source == rank)[:, None], rows, 0)
        else:
            owner, expert = every // (p.m // p.ranks), every // self.each % p.experts
            for r in range(p.ranks):  # what rank r gets back: the products that are of here
                rows = self.x[expert * of_expert + r * self.each + j]
                mine = self._products(rows, expert)
                wanted[r] = torch.where((owner == rank)[:, None], mine, 0)
        dist.all_reduce(wanted, group=self.group)
        return self._products(wanted[rank], expert) if self.there else wanted[rank]

    def _products(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Each row times the weight of its expert, in fp64."""
        found = torch.empty(len(rows), self.problem.n, dtype=torch.float64, device=rows.device)
        for e in expert.unique().tolist():
            its = expert == e
            found[its] = rows[its].double() @ self.w[e].double()
        return found


def arms_of(operands: Operands, specs: Sequence[str]) -> dict[str, Callable[[int], Any]]:
    """All that is timed, by name; of compute and serial one for each way of the libraries."""
    o, p = operands, operands.problem
    op: Callable[..., Tensor] = all_to_all_matmul if o.there else matmul_all_to_all
    source, target = (o.x, o.arrived) if o.there else (o.product, o.y)

    def communicate(_: int) -> None:
        dist.all_to_all_single(target, source, group=o.group)

    def multiply(way: str, _: int) -> Tensor:
        return o.multiply(o.arrived if o.there else o.x, way)

    def serial(way: str, _: int) -> Tensor:
        return o.serial(way)

    def ours(spec: str, _: int) -> Tensor:
        if spec == direct.FUSED:
            return op(o.x, o.w, counts=o.on_device, max_rows=p.m, plan="fused", group=o.group)
        return op(o.x, o.w, counts=o.counts, plan=spec, group=o.group)

    arms: dict[str, Callable[[int], Any]] = {COMMUNICATION: communicate}
    for way in (PER_EXPERT, GROUPED) if grouped(o.x, p.k, p.n) else (PER_EXPERT,):
        arms[f"{COMPUTE} {way}"] = partial(multiply, way)
        arms[f"{SERIAL} {way}"] = partial(serial, way)
    return arms | {spec: partial(ours, spec) for spec in specs}


def errors_of(operands: Operands, arms: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Errors against fp64 on sampled rows, of the worst rank, of all that makes the result.

    Raises:
        CounterpointError: a serial one is off by more than its dtype rounds, or another by more
            than twice what serial is.
    """
    o, want = operands, operands.exact()
    o.arrived.normal_()  # what the all-to-all has not brought would show
    serial = [name for name in arms if _arm_of(name) == SERIAL]
    ours = [name for name in arms if _arm_of(name) not in (SERIAL, COMPUTE, COMMUNICATION)]
    errors: dict[str, float] = {}
    for name in (*serial, *ours):
        o.y.fill_(torch.nan)
        o.product.fill_(torch.nan)
        nan_behind(o.x.device, 2 * o.x.element_size() * o.problem.m * max(o.problem.n, o.problem.k))
        error = torch.tensor(relative_error(arms[name](0)[o.sample], want), device=want.device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX, group=o.group)
        errors[name] = error.item()
        limit = torch.finfo(o.x.dtype).eps if name in serial else 2 * errors[serial[0]]
        if not errors[name] <= limit:
            raise CounterpointError(
                f"{o.problem}, {name}: error {errors[name]:.2e} against fp64, the limit is "
                f"{limit:.2e}"
            )
    return errors


def compare_experts(
    problem: Problem, layer: Layer, specs: Sequence[str], machine: Machine, *,
    group: dist.ProcessGroup, device: torch.device, rounds: int = 9, soak_s: float = 0.2,
) -> list[dict[str, Any]]:  # fmt: skip
    """Check and time `specs`, serial and the two sides; all ranks call this.

    Args:
        problem: with experts.
        machine: what predictions and the pick are made with.

    Returns:
        Rows for `record.append`, equal on all ranks; times in seconds for one call.

    Raises:
        CounterpointError: a way computed something else than fp64 says; nothing was timed.
    """
    operands = Operands(problem, group, device)
    arms = arms_of(operands, specs)
    errors = errors_of(operands, arms)
    graphs = {name: captured(call, CALLS) for name, call in arms.items()}
    times = rotate({name: replay for name, (replay, _) in graphs.items()}, group=group,
                   device=device, rounds=rounds, soak_s=soak_s)  # fmt: skip
    memory = workspace_of(group, device).num_bytes()
    del graphs
    return rows_of(problem, layer, times, errors, machine, list(memory))


def rows_of(
    problem: Problem, layer: Layer, times: dict[str, Any], errors: dict[str, float],
    machine: Machine, workspace_bytes: list[int],
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of what was timed: of compute and serial the faster way of the libraries."""
    p, choice = problem, by_model(problem, machine)
    facts = {
        "table": "overlap", "op": p.op, "layer": layer.name, "tokens": layer.tokens, "m": p.m,
        "n": p.n, "k": p.k, "experts": p.experts, "dtype": p.dtype, "ranks": p.ranks,
        "sm_clock_mhz": record.sm_clock_mhz(), "workspace_bytes": workspace_bytes,
        "calls_per_graph": CALLS, "mode": "graph",
    } | record.environment()  # fmt: skip
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(_arm_of(name) for name in times):
        name = min((n for n in times if _arm_of(n) == arm), key=lambda n: times[n].median_s)
        t, more = times[name], dict[str, Any]()
        if arm == SERIAL:
            more |= {"way": name.removeprefix(f"{SERIAL} "), "pick": choice.spec}
            more |= {"bounds_s": [choice.compute_s, choice.comm_s]}
        if arm not in (COMPUTE, COMMUNICATION):
            more |= {"predicted_s": predicted_s(build(p, arm, machine), machine)}
        found.append({
            "arm": arm, "median_s": t.median_s / CALLS, "p20_s": t.quantile_s(2) / CALLS,
            "p80_s": t.quantile_s(8) / CALLS, "skew_s": t.skew_s / CALLS,
            "rounds": len(t.rounds_s), "error": errors.get(name), **more, **facts,
        })  # fmt: skip
    return found


def _arm_of(name: str) -> str:
    """The arm of a way of the libraries, or the name itself."""
    for arm in (COMPUTE, SERIAL):
        if name in (f"{arm} {PER_EXPERT}", f"{arm} {GROUPED}"):
            return arm
    return name
