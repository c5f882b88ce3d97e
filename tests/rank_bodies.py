"""Bodies that each rank runs: one op of one spec against fp64, on CPU ranks and on GPUs alike.

A body takes the rank's place from the group, not from its arguments, and returns what went wrong
instead of raising: ranks then stay in step, and one wrong case does not hide the others.
Legend: K and N of one rank, `rows` per rank, `inner` the dims between of a 3-D activation.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import counterpoint as cp
from counterpoint.plan.steps import Plan
from counterpoint.run import execute, launch

NUM_ROUNDS = 6  # calls of one case on one workspace: reuse and epoch bugs show from the second on
LATE_S = 2e-3


class Watching(TorchDispatchMode):
    """Under which calls go by torch's dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def by_reference() -> Iterator[None]:
    """What stands in for kernels runs, as on a user's CPU ranks; in the pool they are interpreted.

    The interpreter multiplies no bf16.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, execute):
            patch.setattr(module, "INTERPRETED", False)
        yield


def world(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    return group


@dataclass(frozen=True)
class Case:
    """One op, one plan, one shape. `rows` is of x's dim 0; `bits` must come out as they say.

    Of matmul_all_reduce all ranks have all rows, and the same bias.
    """

    op: str
    plan: str | Plan
    rows: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    layout: str = "plain"  # or "transposed", w is a weight.t(); "strided", x and w have gaps
    inner: tuple[int, ...] = ()
    # "exact": those of fp64, rounded once; or of all_gather_matmul, with the matmul "whole" or cut
    # into "shards"
    bits: str = ""
    integers: bool = False  # so small that products, and sums in fp32, are exact

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.rows, initial=0))

    @property
    def even(self) -> bool:
        return len(set(self.rows)) == 1

    def kept_by(self, rank: int) -> slice:
        """The rows of a sum over ranks that `rank` gets."""
        if self.op == "matmul_all_reduce":
            return slice(None)
        return slice(self.starts[rank], self.starts[rank + 1])

    def __str__(self) -> str:
        plan = self.plan if isinstance(self.plan, str) else f"Plan({self.plan.spec})"
        dims = f"rows {self.rows} inner {self.inner} K {self.k} N {self.n}"
        bias = " bias" if self.bias else ""
        return f"{self.op} '{plan}' {dims} {self.dtype} {self.layout}{bias}"


class Operands(NamedTuple):
    x: Tensor
    w: Tensor
    bias: Tensor | None


def operands(case: Case, rank: int, seed: int, dev: torch.device) -> Operands:
    """The arguments of `rank`, which any rank can make: random, of this rank and this seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        if case.integers:
            values = torch.randint(-15, 16, shape, generator=generator).float()
        return values.to(case.dtype).to(dev)

    rows = case.rows[rank] if case.op == "all_gather_matmul" else sum(case.rows)
    x, w = normal(rows, *case.inner, case.k), normal(case.k, case.n)
    if rows > 1:
        x[seed % rows] = 0  # a row of zeros
    if case.layout == "transposed":
        w = w.t().contiguous().t()
    if case.layout == "strided":
        x, w = with_gaps(x), with_gaps(w)
    if case.op == "matmul_all_reduce":
        generator = torch.Generator().manual_seed(1000 * seed)
    return Operands(x, w, normal(case.n, generator=generator) if case.bias else None)


def with_gaps(tensor: Tensor) -> Tensor:
    """Equal values, but each second cell of memory is another's."""
    wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def call(case: Case, given: Operands, group: dist.ProcessGroup | None = None) -> Tensor:
    """The op under test."""
    rows = {} if case.even or case.op == "matmul_all_reduce" else {"rows": case.rows}
    op = getattr(cp, case.op)
    return op(given.x, given.w, bias=given.bias, plan=case.plan, group=group, **rows)


def exact(case: Case, rank: int, everyone: Sequence[Operands], power: int = 1) -> Tensor:
    """What `rank` must get, in fp64: the sums of its terms, or of powers of these."""
    everyone = [Operands(*(t if t is None else t.double() ** power for t in o)) for o in everyone]
    mine = everyone[rank]
    if case.op == "all_gather_matmul":
        want = torch.cat([o.x for o in everyone]) @ mine.w
    else:
        whole = sum(o.x @ o.w for o in everyone)
        assert isinstance(whole, Tensor)
        want = whole[case.kept_by(rank)]
    return want if mine.bias is None else want + mine.bias


def serially(
    case: Case, rank: int, given: Sequence[Sequence[Operands]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Each call by plain torch in the dtype of x: the library's collective, and one matmul."""
    if case.op == "all_gather_matmul":
        # a gather only copies: its result is made from the peers' seeds
        gathered = [torch.cat([o.x for o in everyone]) for everyone in given]
        mine = [everyone[rank] for everyone in given]
        return [plain_matmul(x, o.w, o.bias) for x, o in zip(gathered, mine, strict=True)]
    # the calls' sums in one collective, which adds the ranks in one order for all of them
    sums = torch.stack([plain_matmul(everyone[rank].x, everyone[rank].w, None)
                        for everyone in given])  # fmt: skip
    dist.all_reduce(sums, group=group)
    rows = sums[:, case.kept_by(rank)]
    biases = [everyone[rank].bias for everyone in given]
    return [y if bias is None else y + bias for y, bias in zip(rows, biases, strict=True)]


def plain_matmul(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    y = torch.mm(flat, w) if bias is None else torch.addmm(bias, flat, w)
    return y.view(*x.shape[:-1], w.shape[1])


def in_shards(case: Case, rank: int, everyone: Sequence[Operands]) -> Tensor:
    """all_gather_matmul with one matmul for each shard, as `shard_p2p` cuts it."""
    mine = everyone[rank]
    gathered = torch.cat([o.x for o in everyone])
    y = gathered.new_empty(*gathered.shape[:-1], case.n)
    for r, (start, stop) in enumerate(pairwise(case.starts)):
        # where an operand lies decides its alignment, and that decides the library's kernel
        x = (mine.x.contiguous() if r == rank else gathered[start:stop]).view(-1, case.k)
        out = y[start:stop].view(-1, case.n)
        if mine.bias is None:
            torch.mm(x, mine.w, out=out)
        else:
            torch.addmm(mine.bias, x, mine.w, out=out)
    return y


def wrong(case: Case, group: dist.ProcessGroup | None = None, seed: int = 0) -> list[str]:
    """What is wrong with NUM_ROUNDS calls with changing inputs, and the first one once more."""
    group = world(group)
    rank, ranks, dev = group.rank(), group.size(), device()
    turns = [*range(NUM_ROUNDS), 0]
    given = [[operands(case, r, seed + t, dev) for r in range(ranks)] for t in turns]
    # nothing between the calls that would keep the ranks in step, and now and then a late one
    results: list[Tensor] = []
    for turn, everyone in enumerate(given):
        if (seed + turn) % (2 * ranks) == rank:
            time.sleep(LATE_S)
        results.append(call(case, everyone[rank], group))

    problems: list[str] = []
    squares = torch.zeros(3, dtype=torch.float64, device=dev)
    plains = serially(case, rank, given, group)
    for turn, everyone, y, plain in zip(turns, given, results, plains, strict=True):
        mine, fresh = everyone[rank], operands(case, rank, seed + turn, dev)
        if not all(torch.equal(a, b) for a, b in zip(tensors(mine), tensors(fresh), strict=True)):
            problems.append("wrote to an input")
        want = exact(case, rank, everyone)
        if y.shape != want.shape or y.dtype != case.dtype or not y.is_contiguous():
            problems.append(f"returned {y.dtype} {tuple(y.shape)}, strides {y.stride()}")
            continue
        if not y.isfinite().all():
            problems.append(f"call {turn}: {int((~y.isfinite()).sum())} cells are not finite")
        for i, difference in enumerate((y.double() - want, plain.double() - want)):
            squares[i] += difference.square().sum()
        squares[2] += exact(case, rank, everyone, power=2).sum()
        if case.bits:
            match case.bits:
                case "whole":
                    same = plain
                case "shards":
                    same = in_shards(case, rank, everyone)
                case _:
                    same = want.to(case.dtype)
            if not torch.equal(y, same):
                problems.append(f"call {turn}: not the bits of {case.bits} matmuls")
    if not torch.equal(results[0], results[-1]):
        problems.append("other bits at the second run")
    if case.op == "matmul_all_reduce":
        theirs = [torch.empty_like(results[0]) for _ in range(ranks)]
        dist.all_gather(theirs, results[0], group=group)
        if not all(torch.equal(results[0], other) for other in theirs):
            problems.append("other bits than another rank")
    # over all calls and ranks, and with the rounding of the result that nobody is spared on top:
    # of a result of one cell, either can be lucky. Random terms add up to as much as their squares,
    # and what a few of them cancel was rounded all the same
    dist.all_reduce(squares, group=group)
    ours, plainly, size = squares.sqrt().tolist()
    if not ours <= 2 * plainly + torch.finfo(case.dtype).eps / 2 * size:
        problems.append(f"error {ours:.3g} against fp64, plain torch {plainly:.3g}")
    return [f"rank {rank}, {case}: {problem}" for problem in problems]


def tensors(given: Operands) -> list[Tensor]:
    return [t for t in given if t is not None]


def wrong_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[str]:
    """Every case in turn, on the one workspace of the default group."""
    problems: list[str] = []
    for i, case in enumerate(cases):
        problems += wrong(case, seed=17 * i)
    return problems
