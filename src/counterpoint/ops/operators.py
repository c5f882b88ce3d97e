"""All operators by name, and random tensors for a problem: what is tuned and characterized."""

import torch
from torch import Tensor

from counterpoint.ops import all_gather_matmul, backward, matmul_all_reduce, matmul_reduce_scatter
from counterpoint.ops.call import Operator
from counterpoint.problem import Problem

OPERATORS: dict[str, Operator] = {
    "all_gather_matmul": all_gather_matmul.OPERATOR,
    "matmul_reduce_scatter": matmul_reduce_scatter.OPERATOR,
    "matmul_all_reduce": matmul_all_reduce.OPERATOR,
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
        case "all_gather_matmul_backward":
            return [normal(p.m, p.n), normal(mine, p.k), w.t()]
        case "matmul_reduce_scatter_backward":
            return [normal(mine, p.n), normal(p.m, p.k), w.t()]
        case "all_gather_matmul_wgrad":
            return [normal(mine, p.k), normal(p.m, p.n)]
        case _:
            raise AssertionError(f"{p.op} is none of OPERATORS")
