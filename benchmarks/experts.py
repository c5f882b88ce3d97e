"""Mixtures of experts: all-to-all and the experts' matmuls, one after the other and in one kernel.

Expert counts of a rank are those of 8-way expert parallelism, whatever the number of ranks here.
Uniform: each expert gets as many rows from each rank. Skewed: the experts of rank 0 get 3 times the
mean, and counts are drawn. Counts of ours are on the device; the libraries' are on the host, which
has waited for them before.

Arms: the grouped matmul and a loop of matmuls, the library's all-to-all, the two one after the
other ("pair"), the pair with a pass that puts rows where ours puts them ("in place"), and that with
the weighted sum of a token's rows behind it, where rows come back.

    torchrun --nproc-per-node=4 benchmarks/experts.py --out FILE.jsonl --soak 100000

Plans are of copies on copy engines, of uniform routing alone; host-known counts.
"""

import argparse
import faulthandler
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts_ablation import Other, ablations, by_hand
from experts_layer import DIRECTIONS, MODELS, ROUTINGS, TOKENS, Case, Layer
from experts_soak import soak
from torch import Tensor

import counterpoint as cp
from counterpoint.cli.launch import nccl_group
from counterpoint.measure import record
from counterpoint.measure.timing import captured, nan_behind, relative_error, rotate
from counterpoint.model.experts import predict
from counterpoint.ops.auto import knowledge_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.runtime.workspace import Workspace, workspace_of

CALLS, ROUNDS = 4, 9  # of one graph, and how often it is replayed
SAMPLE_ROWS = 64
LOOPED = 32  # experts of a rank, up to which a loop of matmuls is an arm


# plans of copies, of equal counts alone; named by the experts of a rank, "" fits all
PLANS = {
    "": ("grouped",),
    32: ("grouped 16/16", "grouped 8/8/8/8", "grouped 4/4/8/16", "grouped 16/8/4/4"),
    16: ("grouped 8/8", "grouped 4/4/4/4", "grouped 2/2/4/8", "grouped 8/4/2/2"),
}


def arms_of(layer: Layer) -> dict[str, Callable[[int], object]]:
    """What the libraries do."""
    there = layer.there
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

        def summed(_: int, in_place: Any = in_place) -> Tensor:
            in_place(_)
            rows = layer.y.index_select(0, layer.index.view(-1)).view(*layer.index.shape, -1)
            return torch.bmm(layer.weights.bfloat16()[:, None], rows)[:, 0]

        arms |= {f"matmul {name}": multiply, f"pair {name}": pair, f"in place {name}": in_place}
        if not there:
            arms[f"in place {name}, sum"] = summed
    source, target = (layer.x, layer.arrived) if there else (layer.product, layer.y)
    arms["communication"] = lambda _: layer.exchange(source, target, there=there)
    return arms


def ours(layer: Layer, group: dist.ProcessGroup) -> dict[str, Callable[[int], Tensor]]:
    """The operator, counts on the device."""
    more: Any = {"counts": layer.on_device, "max_rows": layer.limit, "group": group}
    op: Callable[..., Tensor] = cp.all_to_all_matmul if layer.there else cp.matmul_all_to_all

    def run(_: int, **sums: Any) -> Tensor:
        return op(layer.given, layer.w, **more, **sums)

    found: dict[str, Callable[[int], Tensor]] = {"one kernel": run}
    if not layer.there:
        found["one kernel, sum"] = partial(run, sum_of=(layer.index, layer.weights))
    return found


def planned(layer: Layer, spec: str) -> Callable[[int], Tensor]:
    """An operator by a plan, which makes its result."""
    op = getattr(cp, layer.case.op)
    return lambda _: op(layer.x, layer.w, counts=layer.counts, plan=spec, group=layer.group)


def spec_of(layer: Layer, spec: str, workspace: Workspace) -> str:
    """A spec with the sizes that it leaves out."""
    case, ranks = layer.case, layer.group.size()
    op: Any = case.op
    problem = Problem(op, layer.sent, case.n, case.k, ranks, experts=layer.local)
    return build(problem, spec, knowledge_of(workspace).machine).spec


def wanted(layer: Layer) -> tuple[Tensor, Tensor]:
    """Some rows of the result, and what they are: in fp64, or another rank's by the library."""
    arms_of(layer)["in place grouped"](0)
    got = layer.result if layer.there else layer.y
    rows = torch.randint(0, len(got), (SAMPLE_ROWS,), device=got.device)
    if not layer.there:
        return rows, got[rows].double()
    experts = torch.bucketize(rows, layer.offs.long(), right=True)
    pairs = zip(rows.tolist(), experts.tolist(), strict=True)
    return rows, torch.stack([layer.sorted[i].double() @ layer.w[e].double() for i, e in pairs])


def measure(
    case: Case, group: dist.ProcessGroup, device: torch.device,
    ways: dict[str, Other] | None = None, rounds: int = ROUNDS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one case; each of our arms is checked first.

    Args:
        ways: ablations, timed too.
    """
    layer = Layer(case, group, device)
    mine: dict[str, Callable[[int], Tensor]] = dict(ours(layer, group))
    for name, other in (ways or {}).items():
        mine[name] = by_hand(layer, group, device, other)
    specs = PLANS[""] + PLANS.get(layer.local, ()) if case.routing == "uniform" else ()
    built = {f"plan {spec}": spec_of(layer, spec, workspace_of(group, device)) for spec in specs}
    mine |= {name: planned(layer, name.removeprefix("plan ")) for name in built}
    rows, want = wanted(layer)
    errors = {name: torch.zeros((), device=device) for name in mine}
    for name, call in mine.items():
        nan_behind(device, 4 * layer.limit * max(case.n, case.k))
        got = call(0)
        if name.endswith("sum"):
            exact = layer.y[layer.index[:SAMPLE_ROWS]].double()
            exact = (layer.weights[:SAMPLE_ROWS, :, None].double() * exact).sum(1)
            errors[name] += relative_error(got[:SAMPLE_ROWS], exact)
        else:
            errors[name] += relative_error(got[rows], want)
        dist.all_reduce(errors[name], op=dist.ReduceOp.MAX, group=group)
        if not errors[name] <= 1e-2:
            raise AssertionError(f"{case} {name}: error {errors[name].item():.1e}")
    graphs = {n: captured(call, CALLS) for n, call in (arms_of(layer) | mine).items()}
    times = rotate({name: replay for name, (replay, _) in graphs.items()}, group=group,
                   device=device, rounds=rounds, soak_s=0.2)  # fmt: skip
    cp.check(group)
    machine = knowledge_of(workspace_of(group, device)).machine
    assert machine is not None
    guess = predict(layer.busiest, case.k, case.n, layer.local, "bfloat16", group.size(), machine,
                    back=not layer.there)  # fmt: skip
    facts = {
        "op": case.op, "model": case.model.name, "tokens": case.tokens, "routing": case.routing,
        "n": case.n, "k": case.k, "experts": layer.local, "rows": layer.limit,
        "weight_bytes": 2 * layer.w.numel(), "sm_clock_mhz": record.sm_clock_mhz(),
        "predicted": {"serial_s": guess.serial_s, "fused_s": guess.fused_s},
    }  # fmt: skip
    found = [
        facts | {"arm": name, "median_s": t.median_s / CALLS, "p20_s": t.quantile_s(2) / CALLS,
                 "p80_s": t.quantile_s(8) / CALLS, "skew_s": t.skew_s / CALLS,
                 "error": errors[name].item() if name in errors else None,
                 "spec": built.get(name), "rounds": len(t.rounds_s)}
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
    parser.add_argument("--soak", type=int, default=0, help="calls of each under random delays")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(300, exit=True)
    start_s = time.monotonic()
    with nccl_group() as (group, device):
        for op in DIRECTIONS if args.soak else ():
            row = soak(args.soak, op, group, device)
            if group.rank() == 0:
                record.append(args.out, [row])
                print(f"{time.monotonic() - start_s:4.0f} s  soak of {op}: {row['calls']} calls, "
                      f"{row['wrong']} wrong", flush=True)  # fmt: skip
        for values in product(DIRECTIONS, MODELS, TOKENS, ROUTINGS):
            case = Case(*values)
            if args.only not in case.text:
                continue
            rows = measure(case, group, device, ablations(case, group.size()))
            if group.rank() == 0:
                facts = {"table": "experts", "ranks": group.size()} | record.environment()
                record.append(args.out, [row | facts for row in rows])
                text = f"{case.text}: {summary(rows)}"
                print(f"{time.monotonic() - start_s:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
