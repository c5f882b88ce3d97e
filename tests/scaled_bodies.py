"""fp8 operands with scales, and what operators make of them: on CPU ranks and on GPUs alike.

Results are measured against fp64 of the same quantised operands, and against the unsharded matmul
of these: one call of the library for all that ranks do together.
Legend: K and N of one rank, `rows` per rank; w is stored as [N, K], as weights are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_bodies import device, world
from torch import Tensor
from torch.nn.functional import pad

import counterpoint as cp
from counterpoint.run.scaled import dequantised, multiply_of

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
KINDS = ("tensor", "row", "block")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NUM_ROUNDS = 3
BAR = {AG: 1.05, RS: 1.5, AR: 1.5}  # of the unsharded matmul's error; partial results are bf16


class Case(NamedTuple):
    """One op of one plan. `rows` is of x's dim 0 on each rank, of all ranks together for sums."""

    op: str
    kind: str
    plan: str
    rows: tuple[int, ...]
    k: int = 256
    n: int = 48
    bias: bool = False
    inner: tuple[int, ...] = ()
    x_dtype: torch.dtype = E4M3

    @property
    def even(self) -> bool:
        return len(set(self.rows)) == 1


class Operands(NamedTuple):
    x: cp.Scaled
    w: cp.Scaled
    bias: Tensor | None


def quantised(t: Tensor, kind: str, dtype: torch.dtype = E4M3) -> Any:
    """x [..., K] with scales of its rows or of 1x128, or one."""
    top = torch.finfo(dtype).max
    if kind == "block":
        blocks = t.unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1).clamp(min=1e-12) / top
        return cp.Scaled((blocks / scale[..., None]).flatten(-2).to(dtype), scale)
    least = t.new_full((1,), 1e-12)
    largest = t.abs().amax(-1, keepdim=True).maximum(least)
    if kind == "tensor":
        largest = torch.cat([largest.flatten(), least]).amax()
    scale = largest / top
    return cp.Scaled((t / scale).to(dtype), scale)


def quantised_weight(w: Tensor, kind: str) -> cp.Scaled:
    """w [N, K] as [K, N], with scales of its columns, of 128x128, or one."""
    if kind != "block":
        data, scale = quantised(w, kind)
        return cp.Scaled(data.t(), scale.t() if kind == "row" else scale)
    n, k = w.shape
    blocks = pad(w, (0, 0, 0, -n % 128)).view(-1, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(E4M3).max
    data = (blocks / scale[:, None, :, None]).view(-1, k)[:n].to(E4M3)
    return cp.Scaled(data.contiguous().t(), scale.t())


def operands(case: Case, ranks: int, seed: int, dev: torch.device) -> list[Operands]:
    """The arguments of all ranks: random, rows of very different sizes."""
    found: list[tuple[Tensor, Tensor]] = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        rows = case.rows[rank] if case.op == AG else sum(case.rows)
        x = torch.randn(rows, *case.inner, case.k, generator=generator)
        x = x * torch.rand(*x.shape[:-1], 1, generator=generator).exp2().pow(4)
        found.append((x, torch.randn(case.n, case.k, generator=generator) * (1 + rank)))
    bias = torch.randn(case.n, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return [
        Operands(
            cp.Scaled(*(t.to(dev) for t in quantised(x, case.kind, case.x_dtype))),
            cp.Scaled(*(_moved(t, dev) for t in quantised_weight(w, case.kind))),
            bias.to(dev) if case.bias else None,
        )
        for x, w in found
    ]


def _moved(t: Tensor, dev: torch.device) -> Tensor:
    return t.to(dev) if t.dim() < 2 else t.t().to(dev).t()


def exact(operand: cp.Scaled) -> Tensor:
    """What stands there, in fp64."""
    data, scale = operand
    flat = data.flatten(0, -2)
    scale = scale.view(1, 1) if scale.dim() < 2 else scale.flatten(0, -2)
    return dequantised(flat, scale, torch.float64).view(data.shape)


def call(case: Case, given: Operands) -> Tensor:
    """The op under test."""
    rows = {} if case.even or case.op == AR else {"rows": case.rows}
    op = getattr(cp, case.op)
    return op(given.x, given.w, bias=given.bias, plan=case.plan, **rows)


def unsharded(kind: str, x: cp.Scaled, w: cp.Scaled, bias: Tensor | None) -> Tensor:
    """One matmul of the library."""
    flat = x.data.flatten(0, -2)
    of_x, of_w = (s.view(1, 1) if s.dim() < 2 else s.flatten(0, -2) for s in (x.scale, w.scale))
    y = torch.empty(len(flat), w.data.shape[1], dtype=torch.bfloat16, device=flat.device)
    if len(flat):
        multiply_of("unsharded", kind, flat.device)(flat, w.data, of_x, of_w, bias, y)
    return y.view(*x.data.shape[:-1], -1)


def off(case: Case, seed: int = 0, run: Callable[[Case, Operands], Tensor] = call) -> list[str]:
    """What is wrong with repeated calls, with changing inputs."""
    group, dev = world(), device()
    rank, ranks = group.rank(), group.size()
    problems: list[str] = []
    squares = torch.zeros(2, dtype=torch.float64, device=dev)
    for turn in (*range(NUM_ROUNDS), 0):
        everyone = operands(case, ranks, seed + turn, dev)
        mine = everyone[rank]
        y = run(case, mine)
        if case.op == AG:
            whole = _gathered([each.x for each in everyone])
            kind, w = case.kind, mine.w
            if kind == "tensor":
                kind, w = "row", w._replace(scale=w.scale.expand(1, w.data.shape[1]))
            want, plain = exact(whole) @ exact(w), unsharded(kind, whole, w, mine.bias)
        else:
            parts = [unsharded(case.kind, each.x, each.w, None).double() for each in everyone]
            want = torch.stack([exact(each.x) @ exact(each.w) for each in everyone]).sum(0)
            plain = torch.stack(parts).sum(0)
            if mine.bias is not None:
                plain = plain + mine.bias
            starts = [sum(case.rows[:r]) for r in range(ranks + 1)]
            own = slice(None) if case.op == AR else slice(starts[rank], starts[rank + 1])
            # rounded once, as the unsharded one would be
            want, plain = want[own], plain[own].bfloat16()
        want = want if mine.bias is None else want + mine.bias.double()
        if y.dtype != torch.bfloat16 or y.shape != want.shape or not y.isfinite().all():
            problems.append(f"returned {y.dtype} {tuple(y.shape)}, or what is not finite")
            continue
        squares += torch.stack([(t.double() - want).square().sum() for t in (y, plain)])
    dist.all_reduce(squares, group=group)
    ours, plainly = squares.sqrt().tolist()
    if not ours <= BAR[case.op] * plainly:
        problems.append(f"error {ours:.4g} against fp64, of the unsharded matmul {plainly:.4g}")
    return [f"{case}: {problem}" for problem in problems]


def _gathered(shards: Sequence[cp.Scaled]) -> cp.Scaled:
    """Of all ranks, where one scale of a rank is that of each of its rows."""
    scales = [each.scale if each.scale.dim() else each.scale.expand(*each.data.shape[:-1], 1)
              for each in shards]  # fmt: skip
    scale = torch.cat(scales)
    data = torch.cat([each.data.view(torch.uint8) for each in shards])
    return cp.Scaled(data.view(shards[0].data.dtype), scale)
