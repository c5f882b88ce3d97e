"""Mixtures of experts: all-to-all and the experts' matmuls, one after the other and in one kernel.

Expert counts of a rank are those of 8-way expert parallelism, whatever the number of ranks here.
Uniform: each expert gets as many rows from each rank. Skewed: the experts of rank 0 get 3 times the
mean, and counts are drawn. Counts of ours are on the device only; the libraries' were read before.

    torchrun --nproc-per-node=4 benchmarks/experts.py --out FILE.jsonl

Plans are of copies on copy engines, of uniform routing alone; host-known counts.
"""

import argparse
import faulthandler
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint
from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.timing import captured, relative_error, rotate
from counterpoint.ops.auto import knowledge_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.runtime.fused import FusedMemory, fused_memory
from counterpoint.runtime.launch_experts import (
    AllToAllMatmul,
    MatmulAllToAll,
    Sending,
    Tile,
    sending_of,
    tile_of,
)
from counterpoint.runtime.workspace import Workspace, workspace_of

CALLS = 4  # of one graph
SAMPLE_ROWS = 64
LOOPED = 32  # experts of a rank, up to which a loop of matmuls is an arm


class Model(NamedTuple):
    """Sizes of a model's experts; those of a rank are as on 8 ranks."""

    name: str
    experts: int  # of a rank
    hidden: int
    ffn: int
    top: int


MODELS = (Model("DeepSeek-V3", 32, 7168, 2048, 8), Model("Qwen3-235B", 16, 4096, 1536, 8),
          Model("Mixtral-8x7B", 1, 4096, 14336, 2))  # fmt: skip
TOKENS = (4096, 1024, 256)  # of a rank
ROUTINGS = ("uniform", "skewed")
DIRECTIONS = ("all_to_all_matmul", "matmul_all_to_all")
# plans of copies, of equal counts alone; named by the experts of a rank, "" fits all
PLANS = {
    "": ("grouped",),
    32: ("grouped 16/16", "grouped 8/8/8/8", "grouped 4/4/8/16", "grouped 16/8/4/4"),
    16: ("grouped 8/8", "grouped 4/4/4/4", "grouped 2/2/4/8", "grouped 8/4/2/2"),
}


class Case(NamedTuple):
    """One layer: gate and up are one weight behind the all-to-all, down is before it."""

    op: str
    model: Model
    tokens: int
    routing: str

    @property
    def k(self) -> int:
        """Contracted size."""
        return self.model.hidden if self.op == "all_to_all_matmul" else self.model.ffn

    @property
    def n(self) -> int:
        """Columns of y."""
        return 2 * self.model.ffn if self.op == "all_to_all_matmul" else self.model.hidden

    def counts(self, ranks: int) -> Tensor:
        """[ranks, experts], equal on all ranks; each rank sends tokens * top rows."""
        rows, experts = self.tokens * self.model.top, ranks * self.model.experts
        if self.routing == "uniform":
            return torch.full((ranks, experts), rows // experts, dtype=torch.int64)
        busy = min(3.0, 0.9 * ranks) / ranks
        share = torch.full((ranks,), (1 - busy) / (ranks - 1))
        share[0] = busy
        draw = torch.Generator().manual_seed(self.tokens)
        of_experts = share.repeat_interleave(self.model.experts)
        chosen = torch.multinomial(of_experts.expand(ranks, -1), rows, True, generator=draw)
        return torch.stack([each.bincount(minlength=experts) for each in chosen])


class Layer:
    """The tensors of a case on this rank, and the two libraries' parts."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device) -> None:
        self.case, self.group = case, group
        ranks, rank = group.size(), group.rank()
        self.counts = case.counts(ranks)
        self.experts, self.local = self.counts.shape[1], case.model.experts
        own = self.counts[:, rank * self.local : (rank + 1) * self.local]
        self.sent, self.come = int(self.counts[rank].sum()), int(own.sum())
        owners = self.counts.view(ranks, ranks, self.local).sum(2)
        self.limit = int(max(owners.sum(0).max(), owners.sum(1).max()))
        self.to, self.of = owners[rank].tolist(), owners[:, rank].tolist()
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        # each row, as its owner has it, and each weight by columns, as a Linear stores it
        self.w = normal(self.local, case.n, case.k).transpose(1, 2)
        there = case.op == "all_to_all_matmul"
        self.x = normal(self.sent if there else self.come, case.k)
        rows = [(e, s) for e in range(self.local) for s in range(ranks)]
        starts, place = {}, 0
        for s in range(ranks):
            for e in range(self.local):
                starts[e, s] = place
                place += int(own[s, e])
        order = [torch.arange(starts[r], starts[r] + int(own[r[1], r[0]])) for r in rows]
        # row i of those sorted by expert is row order[i] of those sorted by rank
        self.order = torch.cat(order).to(device)
        self.back = torch.argsort(self.order)
        sums = own.sum(0).cumsum(0)
        self.offs = sums.to(torch.int32).to(device)
        self.edges = [0, *sums.tolist()]
        self.on_device = self.counts.to(torch.int32).to(device)
        self.arrived = normal(self.come, case.k)  # what the library's all-to-all brings
        self.product = normal(self.come, case.n)
        self.sorted = torch.empty_like(self.arrived if there else self.product)
        self.y = normal(self.come if there else self.sent, case.n)

    def exchange(self, source: Tensor, target: Tensor, *, there: bool) -> None:
        """The library's all-to-all, of rows sorted by rank on both sides."""
        sizes = (self.of, self.to) if there else (self.to, self.of)
        dist.all_to_all_single(target, source, *sizes, group=self.group)

    def grouped(self, x: Tensor, _: Tensor) -> None:
        """The library's grouped matmul, which makes its result."""
        self.result = torch._grouped_mm(x, self.w, offs=self.offs)  # pyright: ignore

    def looped(self, x: Tensor, y: Tensor) -> None:
        """A matmul of the library for each expert."""
        for e in range(self.local):
            first, last = self.edges[e : e + 2]
            if first < last:
                torch.mm(x[first:last], self.w[e], out=y[first:last])
        self.result = y


def arms_of(layer: Layer) -> dict[str, Callable[[int], object]]:
    """What the libraries do: parts, the pair, and the pair with rows put where ours puts them."""
    case = layer.case
    there = case.op == "all_to_all_matmul"
    ways: dict[str, Callable[[Tensor, Tensor], None]] = {"grouped": layer.grouped}
    if layer.local <= LOOPED:
        ways["looped"] = layer.looped
    x = layer.arrived if there else layer.x
    arms: dict[str, Callable[[int], object]] = {}
    for name, way in ways.items():

        def multiply(_: int, way: Any = way) -> None:
            way(x, layer.product)

        def pair(_: int, way: Any = way) -> None:
            if there:
                layer.exchange(layer.x, layer.arrived, there=True)
                way(layer.arrived, layer.product)
            else:
                way(layer.x, layer.product)
                layer.exchange(layer.result, layer.y, there=False)

        def in_place(_: int, way: Any = way) -> None:
            if there:
                layer.exchange(layer.x, layer.arrived, there=True)
                torch.index_select(layer.arrived, 0, layer.order, out=layer.sorted)
                way(layer.sorted, layer.product)
            else:
                way(layer.x, layer.product)
                torch.index_select(layer.result, 0, layer.back, out=layer.sorted)
                layer.exchange(layer.sorted, layer.y, there=False)

        arms[f"matmul {name}"] = multiply
        arms[f"pair {name}"] = pair
        arms[f"pair in place {name}"] = in_place
    source, target = (layer.x, layer.arrived) if there else (layer.product, layer.y)
    arms["communication"] = lambda _: layer.exchange(source, target, there=there)
    return arms


def ours(
    layer: Layer, memory: FusedMemory, tile: Tile, way: Sending, over: Tensor
) -> tuple[Callable[[int], object], Tensor]:
    """One kernel, counts on the device; and where its rows are."""
    case = layer.case
    sizes = (layer.experts, layer.limit, case.k, case.n, torch.bfloat16, tile)
    if case.op == "all_to_all_matmul":
        there = AllToAllMatmul(memory, 0, *sizes, way)
        y = torch.full((layer.come, case.n), torch.nan, device=layer.x.device).bfloat16()
        return lambda _: there(layer.x, layer.w, layer.on_device, y), y
    back = MatmulAllToAll(memory, 0, *sizes)
    y = torch.full((layer.sent, case.n), torch.nan, device=layer.x.device).bfloat16()
    return lambda _: back(layer.x, layer.w, layer.on_device, y), y


def planned(layer: Layer, spec: str) -> Callable[[int], Tensor]:
    """An operator by a plan, which makes its result."""
    op = getattr(counterpoint, layer.case.op)
    return lambda _: op(layer.x, layer.w, counts=layer.counts, plan=spec, group=layer.group)


def spec_of(layer: Layer, spec: str, workspace: Workspace) -> str:
    """A spec with the sizes that it leaves out."""
    case, ranks = layer.case, layer.group.size()
    op: Any = case.op
    problem = Problem(op, layer.sent, case.n, case.k, ranks, experts=layer.local)
    return build(problem, spec, knowledge_of(workspace).machine).spec


def wanted(layer: Layer) -> tuple[Tensor, Tensor]:
    """Some rows of the result, and what they are in fp64."""
    arms = arms_of(layer)
    arms["pair in place grouped"](0)
    there = layer.case.op == "all_to_all_matmul"
    got = layer.result if there else layer.y
    rows = torch.randint(0, len(got), (SAMPLE_ROWS,), device=got.device)
    if there:
        experts = torch.bucketize(rows, layer.offs.long(), right=True)
        pairs = zip(rows.tolist(), experts.tolist(), strict=True)
        return rows, torch.stack([layer.sorted[i].double() @ layer.w[e].double() for i, e in pairs])
    return rows, got[rows].double()  # another rank's product: checked against the libraries'


def worst(got: Tensor, want: Tensor, group: dist.ProcessGroup) -> float:
    """The largest relative error of any rank."""
    error = torch.tensor(relative_error(got, want), device=got.device)
    dist.all_reduce(error, op=dist.ReduceOp.MAX, group=group)
    return error.item()


def measure(case: Case, group: dist.ProcessGroup, device: torch.device,
            ways: dict[str, tuple[Tile, Sending]] | None = None, rounds: int = 9,
            ) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one case; each of our arms is checked first."""
    layer = Layer(case, group, device)
    memory = fused_memory(workspace_of(group, device))
    over = torch.zeros(1, dtype=torch.int64).pin_memory()
    if ways is None:
        back = case.op == "matmul_all_to_all"
        tile = tile_of(layer.limit, case.k, case.n, layer.local, back=back)
        ways = {"one kernel": (tile, sending_of(layer.local, group.size()))}
    arms = arms_of(layer)
    rows, want = wanted(layer)
    errors: dict[str, float] = {}
    for name, (tile, way) in ways.items():
        call, y = ours(layer, memory, tile, way, over)
        call(0)
        torch.cuda.synchronize()
        errors[name] = worst(y[rows], want, group)
        if not errors[name] <= 1e-2:
            raise AssertionError(f"{case} {name}: error {errors[name]:.1e} against fp64")
        arms[name] = call
    specs = PLANS[""] + PLANS.get(layer.local, ()) if case.routing == "uniform" else ()
    built: dict[str, str] = {}
    for spec in specs:
        name = f"plan {spec}"
        built[name] = spec_of(layer, spec, workspace_of(group, device))
        call = planned(layer, spec)
        errors[name] = worst(call(0)[rows], want, group)
        if not errors[name] <= 1e-2:
            raise AssertionError(f"{case} {name}: error {errors[name]:.1e} against fp64")
        arms[name] = call
    graphs = {name: captured(call, CALLS) for name, call in arms.items()}
    times = rotate({name: replay for name, (replay, _) in graphs.items()}, group=group,
                   device=device, rounds=rounds, soak_s=0.2)  # fmt: skip
    memory.workspace.check()
    assert not over.any(), "rows beyond the limit"
    facts = {
        "op": case.op, "model": case.model.name, "tokens": case.tokens, "routing": case.routing,
        "n": case.n, "k": case.k, "experts": layer.local, "rows": layer.limit,
        "weight_bytes": 2 * layer.w.numel(),
    }  # fmt: skip
    found = [
        facts | {"arm": name, "median_s": t.median_s / CALLS, "p20_s": t.quantile_s(2) / CALLS,
                 "p80_s": t.quantile_s(8) / CALLS, "skew_s": t.skew_s / CALLS,
                 "error": errors.get(name), "spec": built.get(name), "rounds": len(t.rounds_s)}
        for name, t in times.items()
    ]  # fmt: skip
    del graphs
    torch.cuda.empty_cache()
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """One line: parts, pairs and ours, in microseconds."""
    return ", ".join(f"{row['arm']} {row['median_s'] * 1e6:.0f}" for row in rows)


def main() -> None:
    """Time all cases; rank 0 writes rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose text has this in it")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(280, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        for values in product(DIRECTIONS, MODELS, TOKENS, ROUTINGS):
            case = Case(*values)
            head = f"{case.op} {case.model.name} {case.tokens} {case.routing}"
            if args.only not in head:
                continue
            rows = measure(case, group, device)
            if group.rank() == 0:
                facts = {"table": "experts", "ranks": group.size()} | record.environment()
                record.append(args.out, [row | facts for row in rows])
                print(f"{time.monotonic() - start_s:4.0f} s  {head}: {summary(rows)}", flush=True)


if __name__ == "__main__":
    main()
