"""A recommender's step each way, and its parts: steps.py says what each way is."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import counterpoint.nn as cnn
from benchmarks import dlrm
from benchmarks.declare import Arms, Bench, Call
from benchmarks.steps_experts import BOTH, SETS
from counterpoint.measure.timing import relative_error

STEP, IN_BACKWARD = "step", "step, fused update"
EXACT = 2**-9  # a relative error as small as that is of rounding to bf16 alone


def dlrm_tables(s: dlrm.Sizes, dtype: torch.dtype, bench: Bench, arms: int) -> dict[str, Any]:
    """The tables of this rank each way, with equal weights, the same at each call.

    Args:
        arms: that have graphs of these tables.
    """
    torch.manual_seed(bench.rank)
    owners, _ = dlrm.balanced(s.model.pooling, bench.ranks)
    rows = [(n, s.model.dim) for n in s.model.rows]
    plans = ("fused" if bench.on_gpu else "auto", "serial")
    bags, serial = (
        cnn.ShardedEmbeddingBags(rows, owners=owners, plan=plan, device=bench.device, dtype=dtype)
        for plan in plans
    )
    for weight, other in zip(bags.weights, serial.weights, strict=True):
        nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)
        other.data.copy_(weight.data)
    captured = arms * SETS * bench.on_gpu
    return {
        "fused": dlrm.InOneCall(s, bags, bench.device, captured),
        "torch": dlrm.InThree(s, bags, bench.device),
        "lookup": dlrm.InOneCall(s, serial, bench.device, captured),
    }


def trainings(
    s: dlrm.Sizes, dense: dlrm.Dense, dtype: torch.dtype, bench: Bench, *, arms: int = 0,
    in_backward: bool = False,
) -> dict[str, dlrm.Training]:  # fmt: skip
    """Every way, with tables and dense layers of its own.

    Args:
        dense: is copied.
        arms: that have graphs of each way.
        in_backward: tables are updated there, by row-wise Adagrad.
    """
    tables = dlrm_tables(s, dtype, bench, arms)
    if in_backward:
        tables["torch"].fuse_optimizer(row_wise(s))
        for way in ("fused", "lookup"):
            tables[way].bags.fuse_optimizer(row_wise(s))
    return {
        way: dlrm.Training(s, each, copy.deepcopy(dense), dtype, in_backward=in_backward)
        for way, each in tables.items()
    }


def row_wise(s: dlrm.Sizes) -> cnn.RowWiseAdagrad:
    """The update of tables in the backward."""
    return cnn.RowWiseAdagrad(s.table_lr, eps=dlrm.EPS)


def dlrm_arms(
    s: dlrm.Sizes, dtype: torch.dtype, bench: Bench, named: str = "uniform"
) -> Arms:  # fmt: skip
    """A model each way, with equal weights.

    Args:
        s: sizes.
        dtype: of tables, and of activations by autocast.
        bench: this rank.
        named: how rows are drawn, "uniform" or "zipf".
    """
    torch.manual_seed(0)
    dense = dlrm.Dense(s).to(bench.device)
    ways = trainings(s, dense, dtype, bench, arms=2)  # tables, and forward
    steps = {STEP: trainings(s, dense, dtype, bench),
             IN_BACKWARD: trainings(s, dense, dtype, bench, arms=1, in_backward=True)}  # fmt: skip
    torch_s = ways["torch"].tables
    own = ways["fused"].tables.bags.own
    batches = [dlrm.batch_of(s, own, i, bench.device, named) for i in range(SETS)]
    before = by_table(numbers(ways["torch"]), len(own))
    want = exact(s, torch_s, dense, batches[0], dtype)
    with torch.no_grad():
        pooled = torch_s.pooled(batches[0].indices)

    def alone(call: Callable[[Any], Tensor]) -> Call:
        return torch.no_grad()(lambda i: call(batches[i % SETS]))

    calls: dict[str, Call] = {
        "pooling, by torch": alone(lambda b: torch_s.pooled(b.indices)),
        "exchange": alone(lambda _: torch_s.exchanged(pooled)),
    }
    for name, way in ways.items():
        calls |= {
            f"tables, by {name}": alone(lambda b, way=way: way.tables(b.indices)),
            f"forward, by {name}": alone(way.forward),
            f"{BOTH}, by {name}": lambda i, way=way: way.forward_backward(batches[i % SETS]),
        }
    for what, each in steps.items():
        for name, way in each.items():
            calls[f"{what}, by {name}"] = lambda i, way=way: way.step(batches[i % SETS])

    def check(name: str, _: Tensor) -> list[float]:
        # each table by itself: one of few rows is little of the norm of all
        what, _, way = name.partition(", by ")
        if what == BOTH:
            found = by_table([p.grad for p in parameters(ways[way])], len(own))
            errors = [relative_error(a, b) for a, b in zip(found, want[what], strict=True)]
        else:
            after = by_table(numbers(steps[what][way]), len(own))
            errors = [*map(beyond_rounding, after, before, want[what])]
        # ranks have other numbers of tables; what they lack is not off
        return errors[:-1] + [0.0] * (len(s.model.rows) + 1 - len(errors)) + errors[-1:]

    facts = {"batch": s.batch, "dim": s.model.dim, "rows": max(s.model.rows), "named": named,
             "pooled": dlrm.balanced(s.model.pooling, bench.ranks)[1], "bottom": s.model.bottom,
             "cross": s.model.cross, "top": s.model.top, "sets": SETS}  # fmt: skip
    checked, ours = (BOTH, *steps), ("fused", "lookup")
    # the host says where new gradients of tables lie, to kernels that fill those of all tables
    waits = [f"{what}, by {way}" for what in (BOTH, STEP) for way in ours]
    return Arms(calls, check, baseline=f"{BOTH}, by torch", floor=2 * EXACT, limit=0.2, facts=facts,
                parts=[name for name in calls if name.partition(", by ")[0] not in checked],
                against={f"{w}, by {way}": f"{w}, by torch" for w in steps for way in ours},
                # autograd and DDP are torch's
                peers=[*calls], waits=waits, sets=SETS,
                pool=torch.cuda.graph_pool_handle() if bench.on_gpu else None)  # fmt: skip


class Rounded(nn.Module):
    """Tables in fp64, whose pooled rows are what other layers compute with."""

    def __init__(self, tables: dlrm.InThree, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.dtype = copy.deepcopy(tables).double(), dtype

    def forward(self, indices: Tensor) -> Tensor:
        return self.wide(indices).to(self.dtype)


def exact(
    s: dlrm.Sizes, tables: dlrm.InThree, dense: dlrm.Dense, batch: dlrm.Batch, dtype: torch.dtype
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Gradients, and what each kind of step changes, of each table by torch in fp64; of the rest.

    The rest is the same code in all ways, and here: in bf16 it is off by so much that wrong tables
    would not be seen beside it. They are kept in fp32, half as large: those of all three kinds stay
    beside nine models.

    Args:
        tables: of this rank; are copied, as `dense` is.
        dtype: of activations.
    """
    want = dict[str, list[Tensor]]()
    for what in (STEP, IN_BACKWARD):
        rounded = Rounded(tables, dtype)
        if what == IN_BACKWARD:
            rounded.wide.fuse_optimizer(row_wise(s))
        training = dlrm.Training(s, rounded, copy.deepcopy(dense), dtype,
                                 in_backward=what == IN_BACKWARD)  # fmt: skip
        before, own = [*tables.parameters(), *dense.parameters()], len(tables.tables)
        training.forward_backward(batch)
        if what == STEP:
            want[BOTH] = by_table([p.grad.float() for p in parameters(training)], own)
        training.optimizer.step()
        after = zip(parameters(training), before, strict=True)
        want[what] = by_table([(a.detach() - b.detach()).float() for a, b in after], own)
    return want


def by_table(found: list[Any], own: int) -> list[Tensor]:
    """Each of so many tables, and all else as one vector."""
    return [*found[:own], torch.cat([each.flatten() for each in found[own:]])]


def parameters(training: Any) -> list[Tensor]:
    """Own tables, then all others."""
    return [*training.tables.parameters(), *training.dense.parameters()]


def numbers(training: Any) -> list[Tensor]:
    """What they are now."""
    return [p.detach().clone() for p in parameters(training)]


def beyond_rounding(after: Tensor, before: Tensor, want: Tensor) -> float:
    """How far a step is off, relative to it, beyond what rounding the new numbers explains.

    In bf16 a step may be smaller than the distance of two numbers: of a step of 1e-5 from 1e-3 on,
    half is rounding.
    """
    off = (after.double() - before.double() - want).abs()
    off -= after.double().abs() * (torch.finfo(after.dtype).eps / 2)
    return (off.clamp_(min=0).norm() / want.norm()).item()
