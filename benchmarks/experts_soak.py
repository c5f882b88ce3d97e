"""Many small calls of the operators of experts under random delays, each compared on the device.

Tables of counts and rows take turns, so that what an earlier call has left behind is not what the
next one has to give. The bits of a first quiet call, compared with fp64, are those of all others.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.timing import captured, relative_error
from counterpoint.resources.order import Delay

LOCAL, K, N, TOP, TOKENS = 4, 256, 512, 2, 48  # experts of a rank; rows of a sum, and sums
SUMMED = 2  # the set whose rows are summed where they come back: each rank gets some
MOST = 24  # rows from a rank to an expert
GRAPHS, EACH = 4, 20  # captured, and calls of one: as long as delays differ, and all sets in turn
EAGER = 0.2  # of the calls
QUEUED = 2000  # calls, until the host waits for the GPU
DELAYS_S = (1e-5, 5e-5, 2e-4)
OFTEN = 0.03  # how often a rank is late before a call, and after it
LIMIT = 4e-3  # error of bf16, rounded once


@dataclass
class Set:
    """One table, this rank's rows for it, and what comes of them."""

    counts: Tensor  # [ranks, E] int32
    x: Tensor  # as many rows on all ranks, those of no table NaN
    rows: int  # of the result
    sums: tuple[Tensor, Tensor] | None  # [TOKENS, TOP] rows of the result, and their weights
    want: Tensor  # bits


def tables(ranks: int) -> list[Tensor]:
    """[ranks, E] each: uneven, with a rank or an expert that has none, even, a busy expert."""
    draw = torch.Generator().manual_seed(ranks)

    def drawn() -> Tensor:
        return torch.randint(0, MOST, (ranks, ranks * LOCAL), generator=draw)

    uneven, silent, idle, busy = (drawn() for _ in range(4))
    silent[-1] = 0
    idle[:, :LOCAL] = 0
    busy[:, 1] = 4 * MOST
    return [uneven, silent, torch.full_like(uneven, MOST // 2), idle, busy]


def exact(counts: Tensor, xs: list[Tensor], ws: list[Tensor], rank: int, *, back: bool) -> Tensor:
    """What `rank` has to get, in fp64; xs and ws of all ranks."""
    ranks, experts = counts.shape
    parts: dict[tuple[int, int], Tensor] = {}
    for r, x in enumerate(xs):
        own = range(r * LOCAL, (r + 1) * LOCAL)
        # by owner each rank has its rows by expert; by expert those of all ranks, rank 0 first
        pairs = [(e, s) for e in own for s in range(ranks)] if back else [
            (e, r) for e in range(experts)]  # fmt: skip
        sizes = [int(counts[s, e]) for e, s in pairs]
        parts |= dict(zip(pairs, x[: sum(sizes)].split(sizes), strict=True))
    wanted = [(e, rank) for e in range(experts)] if back else [
        (e, s) for e in range(rank * LOCAL, (rank + 1) * LOCAL) for s in range(ranks)]  # fmt: skip
    return torch.cat([parts[e, s].double() @ ws[e // LOCAL][e % LOCAL].double()
                      for e, s in wanted])  # fmt: skip


class Soaked:
    """One operator with sets of operands, checked: quiet calls are compared with fp64.

    Raises:
        CounterpointError: one of them is off.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.op, self.group, self.device = op, group, device
        self.back = op == "matmul_all_to_all"
        ranks, rank = group.size(), group.rank()
        found = tables(ranks)
        owners = [counts.view(ranks, ranks, LOCAL).sum(2) for counts in found]
        self.room = int(max(max(o.sum(0).max(), o.sum(1).max()) for o in owners))
        made, chosen = torch.Generator(device), torch.Generator(device).manual_seed(rank)

        def normal(seed: int, *shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=made.manual_seed(seed)).bfloat16()

        ws = [normal(r, LOCAL, K, N) for r in range(ranks)]
        self.w = ws[rank]
        self.sets: list[Set] = []
        for i, (counts, owner) in enumerate(zip(found, owners, strict=True)):
            xs = [normal(1000 * (i + 1) + r, self.room, K) for r in range(ranks)]
            x, given = xs[rank].clone(), int(owner.sum(0 if self.back else 1)[rank])
            x[given:] = torch.nan
            if device.type == "cpu":  # where counts are host-known, and there are no other rows
                x = x[:given]
            want, sums = exact(counts, xs, ws, rank, back=self.back), None
            if self.back and i == SUMMED:
                index = torch.randint(len(want), (TOKENS, TOP), device=device, generator=chosen)
                sums = index, torch.rand(TOKENS, TOP, device=device, generator=chosen)
            each = Set(counts.int().to(device), x, len(want), sums, want)
            self.sets.append(self._quiet(each))

    def call(self, i: int) -> Tensor:
        """Call number i, of what it has to write alone."""
        return self._result(self.sets[i % len(self.sets)])

    def differs(self, i: int) -> Tensor:
        """Whether call number i gives other bits, on the device."""
        return (self.call(i) != self.sets[i % len(self.sets)].want).any()

    def _result(self, each: Set) -> Tensor:
        run: Callable[..., Tensor] = getattr(cp, self.op)
        sums: dict[str, Any] = {"sum_of": each.sums} if each.sums else {}
        y = run(each.x, self.w, counts=each.counts, max_rows=self.room, group=self.group, **sums)
        return y if each.sums else y[: each.rows]

    def _quiet(self, each: Set) -> Set:
        """The same with the bits of a call that nothing delays, if they are right."""
        want = each.want
        if each.sums:
            index, weights = each.sums
            want = (weights[..., None].double() * want[index]).sum(1)
        got = self._result(each).clone()
        # a rank that gets nothing has nothing to compare
        error = relative_error(got, want) if len(want) else 0.0
        worst = torch.tensor([float(not error <= LIMIT)], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        if worst.item():
            raise CounterpointError(f"soak of {self.op}: a quiet call is off by {error:.1e} here")
        each.want = got
        return each


def soak(calls: int, op: str, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """A row: `calls` calls of `op` or somewhat more, a fifth eager, the others replayed."""
    draw, delay, soaked = random.Random(group.rank()), Delay(device), Soaked(op, group, device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def late() -> None:
        if draw.random() < OFTEN:
            delay(draw.choice(DELAYS_S))

    def once(i: int) -> None:
        late()
        different = soaked.differs(i)
        late()
        wrong.add_(different)

    graphs = [captured(once, EACH) for _ in range(GRAPHS)]
    torch.cuda.synchronize(device)
    dist.barrier(group)
    start_s = time.monotonic()
    eager = round(calls * EAGER)
    for i in range(eager):
        once(i)
        if i % QUEUED == 0:
            torch.cuda.synchronize(device)
    replays = -(-(calls - eager) // EACH)
    for i in range(replays):
        late()
        graphs[i % GRAPHS][0]()
        if i % (QUEUED // EACH) == 0:
            torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)
    seconds = time.monotonic() - start_s
    cp.check(group)
    dist.all_reduce(wrong, group=group)
    return {
        "table": "experts soak", "op": op, "calls": eager + replays * EACH, "eager": eager,
        "wrong": int(wrong), "ranks": group.size(), "seconds": seconds,
    } | record.environment()  # fmt: skip
