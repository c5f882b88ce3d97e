"""All operators by name, and random tensors for a problem: what is tuned and characterized."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.ops import (
    all_gather_matmul,
    backward,
    experts,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from counterpoint.ops.call import Operator
from counterpoint.ops.embedding_bag_all_to_all import embedding_bag_all_to_all
from counterpoint.problem import Problem

TABLE_BYTES = 2 << 30  # of a rank's tables: no cache holds what is read of them

OPERATORS: dict[str, Operator] = {
    "all_gather_matmul": all_gather_matmul.OPERATOR,
    "matmul_reduce_scatter": matmul_reduce_scatter.OPERATOR,
    "matmul_all_reduce": matmul_all_reduce.OPERATOR,
    "all_to_all_matmul": experts.operator_of("all_to_all_matmul"),
    "matmul_all_to_all": experts.operator_of("matmul_all_to_all"),
    "all_gather_matmul_backward": backward.GATHER,
    "matmul_reduce_scatter_backward": backward.SCATTER,
    "all_gather_matmul_wgrad": backward.WGRADS[True],
}


def operands(problem: Problem, rank: int, device: torch.device) -> list[Tensor | None]:
    """Random normal tensors of `rank` for `problem`, in the order of the operator's inputs.

    Weights are the transposed views that a torch.nn.Linear gives.
    """
    p, dtype = problem, getattr(torch, problem.dtype)

    def normal(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, device=device).to(dtype)

    mine, w = p.rows[rank], normal(p.n, p.k).t()
    bias = normal(1, p.n).view(-1) if p.bias else None
    match p.op:
        case "all_gather_matmul":
            return [normal(mine, p.k), w, bias]
        case "matmul_reduce_scatter" | "matmul_all_reduce":
            return [normal(p.m, p.k), w, bias]
        case "all_to_all_matmul" | "matmul_all_to_all":
            w = torch.randn(p.experts, p.n, p.k, device=device).to(dtype).transpose(1, 2)
            count = p.m // (p.ranks * p.experts)
            where = device if p.counts == "device" else torch.device("cpu")
            counts = torch.full((p.ranks, p.ranks * p.experts), count, device=where)
            aside = [None] * 3 if p.op == "matmul_all_to_all" else []
            return [normal(p.m, p.k), w, counts, *aside]
        case "all_gather_matmul_backward":
            return [normal(p.m, p.n), normal(mine, p.k), w.t()]
        case "matmul_reduce_scatter_backward":
            return [normal(mine, p.n), normal(p.m, p.k), w.t()]
        case "all_gather_matmul_wgrad":
            return [normal(mine, p.k), normal(p.m, p.n)]
        case _:
            raise AssertionError(f"{p.op} is none of OPERATORS")


def rows_of(problem: Problem) -> tuple[int, ...]:
    """Rows of each rank where they differ; of experts, the facts of a call."""
    if problem.experts:
        return experts.example_facts(problem)
    return problem.rows if len(set(problem.rows)) > 1 else ()


def bags_call(
    problem: Problem, rank: int, device: torch.device, plan: str, group: dist.ProcessGroup
) -> Callable[[int], object]:
    """A call of embedding bags on random tables and indices, run once; bags are of one size."""
    p, own = problem, problem.tables[rank]
    count = p.indices[rank] if p.indices else 0
    room = TABLE_BYTES if device.type == "cuda" else 1 << 20
    rows = max(1, min(1 << 20, room // (sum(own) * p.item_bytes or 1)))
    dtype = getattr(torch, p.dtype)
    tables = [torch.empty(rows, d, dtype=dtype, device=device).uniform_(-1, 1) for d in own]
    indices = torch.randint(0, rows, (count,), device=device)
    bags = p.m * len(own)
    offsets = torch.arange(bags + bool(own), device=device) * count // max(bags, 1)

    @torch.no_grad()
    def call(_: int) -> object:
        return embedding_bag_all_to_all(
            tables, indices, offsets, group=group, include_last_offset=bool(own), batch=p.rows,
            dims=p.tables, dtype=dtype, plan=plan,
        )  # fmt: skip

    call(0)
    return call
