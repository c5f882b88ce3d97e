"""Gradients of the operators against fp64, on CPU ranks and on GPUs alike.

Any rank can make the operands of any other from their seed, so each computes what it must get.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rank_bodies import Case, Operands, call, device, exact, operands, world
from torch import Tensor

import counterpoint as cp

NUM_ROUNDS = 3


@dataclass(frozen=True)
class GradCase:
    """A forward case, and whose gradients are asked for."""

    forward: Case
    needs: tuple[bool, bool] = (True, True)  # of x and of w

    def __str__(self) -> str:
        return f"{self.forward} needs {self.needs}"


class Grads(list[Tensor | None]):
    """Of x, w and bias."""


def outer(case: Case, rank: int, seed: int, dev: torch.device) -> Tensor:
    """The gradient that arrives at y of `rank`; of matmul_all_reduce that of all ranks."""
    rows = case.rows[rank] if case.op == "matmul_reduce_scatter" else sum(case.rows)
    alike = case.op == "matmul_all_reduce"
    generator = torch.Generator().manual_seed(7_000_000 + 1000 * seed + (0 if alike else rank))
    values = torch.randn(rows, *case.inner, case.n, generator=generator)
    return values.to(case.dtype).to(dev)


def wanted(
    case: Case, rank: int, everyone: Sequence[Operands], dys: Sequence[Tensor], dtype: torch.dtype
) -> Grads:
    """By plain torch in `dtype`, each product and each sum rounded to it."""

    def flat(x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).to(dtype)

    mine = everyone[rank]
    if case.op == "all_gather_matmul":
        inner = 1
        for size in case.inner:
            inner *= size
        start, stop = case.starts[rank] * inner, case.starts[rank + 1] * inner
        parts = [flat(dy) @ o.w.to(dtype).t() for dy, o in zip(dys, everyone, strict=True)]
        dx = sum(parts[1:], parts[0])[start:stop]
        dw = torch.cat([flat(o.x) for o in everyone]).t() @ flat(dys[rank])
    else:
        alike = case.op == "matmul_all_reduce"
        whole = flat(dys[rank]) if alike else torch.cat([flat(dy) for dy in dys])
        dx = whole @ mine.w.to(dtype).t()
        dw = flat(mine.x).t() @ whole
    db = flat(dys[rank]).sum(0) if mine.bias is not None else None
    return Grads([dx.view(mine.x.shape), dw, db])


def wrong_grads(case: GradCase, group: dist.ProcessGroup | None = None) -> list[str]:
    """What is wrong with y or a gradient; empty if nothing is."""
    group = world(group)
    rank, ranks, dev = group.rank(), group.size(), device()
    forward = case.forward
    problems: list[str] = []
    for seed in range(NUM_ROUNDS):
        everyone = [operands(forward, r, seed, dev) for r in range(ranks)]
        dys = [outer(forward, r, seed, dev) for r in range(ranks)]
        mine = Operands(*(t.detach().clone() if t is not None else None for t in everyone[rank]))  # type: ignore[arg-type]
        if forward.layout == "transposed":
            mine = mine._replace(w=everyone[rank].w.t().contiguous().t())
        mine.x.requires_grad_(case.needs[0])
        mine.w.requires_grad_(case.needs[1])
        if mine.bias is not None:
            mine.bias.requires_grad_()
        y = call(forward, mine, group)
        want_y = exact(forward, rank, everyone)
        y.backward(dys[rank])
        got = [mine.x.grad, mine.w.grad, mine.bias.grad if mine.bias is not None else None]
        want = wanted(forward, rank, everyone, dys, torch.float64)
        plain = wanted(forward, rank, everyone, dys, forward.dtype)
        if not y.requires_grad or error(y, want_y) > 0.05:
            problems.append(f"{case} round {seed}: y is off by {error(y, want_y):.1e}")
        asked = (*case.needs, True)
        for name, g, w, p, needed in zip(("x", "w", "bias"), got, want, plain, asked, strict=True):
            if w is None or not needed:
                if g is not None:
                    problems.append(f"{case} round {seed}: {name} has a gradient")
                continue
            if g is None:
                problems.append(f"{case} round {seed}: {name} has no gradient")
                continue
            assert p is not None
            # of sums that happen to be exact in plain torch, one rounding is allowed
            bound = max(2 * error(p, w), torch.finfo(forward.dtype).eps)
            if g.shape != w.shape or not error(g, w) <= bound:
                problems.append(
                    f"{case} round {seed}: d{name} {tuple(g.shape)} is off by {error(g, w):.1e}, "
                    f"bound {bound:.1e}"
                )
    return problems


def error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, 0 where both are nothing."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.norm()
    difference = (got - want).norm()
    return float(difference / scale) if scale else float(difference)


def wrong_grad_cases(rank: int, world_size: int, cases: list[GradCase]) -> list[str]:
    """All cases, one after another."""
    return [problem for case in cases for problem in wrong_grads(case)]


def several_weights(
    rank: int, world_size: int, plan: str, rows: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """A list of weights: results and gradients are those of one weight at a time."""
    dev = device()
    base = Case("all_gather_matmul", plan, rows, 24, 8, dtype)
    counts = None if base.even else rows
    problems: list[str] = []
    # in each round other gradients: both, and each alone
    for seed, (of_x, of_w) in enumerate(((True, True), (True, False), (False, True))):
        everyone = [operands(base, r, seed, dev) for r in range(world_size)]
        x = everyone[rank].x.detach().requires_grad_(of_x)
        weights = [
            operands(replace(base, n=n), rank, 50 + seed + n, dev).w.detach().requires_grad_(of_w)
            for n in (8, 1, 5)
        ]
        ys = cp.all_gather_matmul(x, weights, plan=plan, rows=counts)
        dys = [torch.randn_like(y) for y in ys]
        torch.autograd.backward(ys, dys)
        got = [x.grad, *(w.grad for w in weights)]
        whole = torch.cat([o.x for o in everyone])
        for i, (y, w) in enumerate(zip(ys, weights, strict=True)):
            if error(y, whole.double() @ w.double()) > 8 * torch.finfo(dtype).eps:
                problems.append(f"{plan} round {seed}: y{i} is off")
            dw = whole.double().t() @ dys[i].double()
            grad = got[1 + i]
            if (grad is not None) != of_w:
                problems.append(f"{plan} round {seed}: dw{i} is {grad}")
            elif grad is not None and error(grad, dw) > 8 * torch.finfo(dtype).eps:
                problems.append(f"{plan} round {seed}: dw{i} is off")
        partial = sum(dy.double() @ w.double().t() for dy, w in zip(dys, weights, strict=True))
        assert isinstance(partial, Tensor)
        dist.all_reduce(partial)
        dx = partial[base.starts[rank] : base.starts[rank + 1]]
        if (got[0] is not None) != of_x:
            problems.append(f"{plan} round {seed}: dx is {got[0]}")
        elif got[0] is not None and error(got[0], dx) > 16 * torch.finfo(dtype).eps:
            problems.append(f"{plan} round {seed}: dx is off")
    return problems
