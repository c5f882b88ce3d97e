"""Calls of every operator, in several plans, with random operands of each rank and each turn.

Operands are -1, 0 and 1, so that sums of 4 ranks are exact in bf16: all plans of an operator give
the same bits, in every process, wherever operands lie.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from rank_bodies import world
from torch import Tensor

import counterpoint as cp
from counterpoint.nn.replicated import copy_to_group

ROWS, K, N, LOCAL = 4, 64, 32, 2  # rows of a rank, and from a rank to an expert; experts of a rank


class MixedCall(NamedTuple):
    """A call that all ranks make alike; those of equal `op` and `turn` have to give equal bits."""

    op: str
    plan: str
    turn: int
    run: Callable[[], Tensor]

    @property
    def ours(self) -> bool:
        """On GPUs only kernels of this library wait, so a graph may hold it."""
        return self.plan not in ("serial", "auto") and "backward" not in self.op


class _Maker:
    """Operands of one rank for one turn."""

    def __init__(
        self, rank: int, device: torch.device, turn: int, group: dist.ProcessGroup
    ) -> None:
        self.ranks, self.device, self.turn, self.group = group.size(), device, turn, group
        self._own = torch.Generator().manual_seed(1000 * turn + rank)
        self._common = torch.Generator().manual_seed(1000 * turn + 999)

    def integers(self, *shape: int, common: bool = False) -> Tensor:
        draw = self._common if common else self._own
        return torch.randint(-1, 2, shape, generator=draw).to(self.device, torch.bfloat16)

    def call(self, op: str, plan: str, run: Callable[[], Tensor]) -> MixedCall:
        return MixedCall(op, plan, self.turn, run)

    def matmuls(self, op: str, plans: tuple[str, ...]) -> list[MixedCall]:
        run = getattr(cp, op)
        rows = ROWS * self.ranks if op == "matmul_reduce_scatter" else ROWS
        x, w = self.integers(rows, K), self.integers(K, N)
        return [
            self.call(op, plan, lambda plan=plan: run(x, w, plan=plan, group=self.group))
            for plan in plans
        ]

    def gradients(self) -> MixedCall:
        """Of a gather and a matmul: a matmul, and the scatter of its sums."""
        x, w = (self.integers(*shape).requires_grad_() for shape in ((ROWS, K), (K, N)))
        dy = self.integers(ROWS * self.ranks, N)

        def run() -> Tensor:
            y = cp.all_gather_matmul(x, w, plan="graded", group=self.group)
            grads = torch.autograd.grad(y, (x, w), dy)
            return torch.cat([each.flatten() for each in grads])

        return self.call("all_gather_matmul backward", "graded", run)

    def norms(self, plans: tuple[str, ...]) -> list[MixedCall]:
        x, w, weight = self.integers(ROWS, K), self.integers(K, N), self.integers(N, common=True)
        residual = self.integers(ROWS, N, common=True)

        def run(plan: str) -> Tensor:
            return torch.cat(
                cp.matmul_all_reduce_rms_norm(
                    x, w, residual=residual, norm_weight=weight, plan=plan, group=self.group
                )
            )

        def summed(plan: str) -> Tensor:
            given = residual, weight, bias
            return torch.cat(cp.all_reduce_layer_norm(y, *given, plan=plan, group=self.group))

        y, bias = self.integers(ROWS, N), self.integers(N, common=True)
        calls = {"matmul_all_reduce_rms_norm": run, "all_reduce_layer_norm": summed}
        return [
            self.call(op, plan, lambda call=call, plan=plan: call(plan))
            for op, call in calls.items()
            for plan in plans
        ]

    def experts(self, plans: tuple[str, ...]) -> list[MixedCall]:
        rows = ROWS * LOCAL * self.ranks
        counts = torch.full((self.ranks, LOCAL * self.ranks), ROWS)
        x, w = self.integers(rows, K), self.integers(LOCAL, K, N)
        return [
            self.call(
                op.__name__,
                plan,
                lambda op=op, plan=plan: op(x, w, counts=counts, plan=plan, group=self.group),
            )
            for op in (cp.all_to_all_matmul, cp.matmul_all_to_all)
            for plan in plans
        ]

    def routed(self) -> list[MixedCall]:
        """Tokens by routes, there and back; on CPU ranks."""
        every, top_k = LOCAL * self.ranks, 2
        x, up, down = (self.integers(*s) for s in ((ROWS, K), (LOCAL, K, N), (LOCAL, N, K)))
        experts = torch.randint(every, (ROWS, top_k), generator=self._own)

        def run() -> Tensor:
            weights = torch.ones(ROWS, top_k)
            routes = cp.exchange_routes(experts, weights, num_experts=every, group=self.group)
            rows = cp.all_to_all_matmul(x, up, counts=routes, group=self.group)
            return cp.matmul_all_to_all(rows, down, counts=routes, group=self.group)

        return [self.call("experts by routes", "auto", run)] if self.device.type == "cpu" else []

    def bags(self, plans: tuple[str, ...]) -> list[MixedCall]:
        """One table on each rank; a bag of each row, and its two neighbours."""
        num_bags = ROWS * self.ranks
        table = self.integers(11, 16).requires_grad_()
        indices = torch.randint(11, (3 * num_bags,), generator=self._own).to(self.device)
        offsets = torch.arange(0, 3 * num_bags, 3, device=self.device)
        dy = self.integers(ROWS, 16 * self.ranks)

        def pool(plan: str) -> Tensor:
            return cp.embedding_bag_all_to_all(
                [table], indices, offsets, plan=plan, group=self.group
            )

        def forward(plan: str) -> Tensor:
            with torch.no_grad():
                return pool(plan)

        op = "embedding_bag_all_to_all"
        return [
            *(self.call(op, plan, lambda plan=plan: forward(plan)) for plan in plans),
            self.call(f"{op} backward", "serial",
                  lambda: torch.autograd.grad(pool("serial"), table, dy)[0]),
        ]  # fmt: skip

    def small(self) -> list[MixedCall]:
        """What waits in the library alone."""
        counts = torch.randint(9, (LOCAL * self.ranks,), generator=self._own).to(self.device)
        weight, dy = self.integers(N).requires_grad_(), self.integers(N)

        def exchange() -> Tensor:
            return cp.exchange_counts(counts, group=self.group)

        def copied() -> Tensor:
            return torch.autograd.grad(copy_to_group(weight, group=self.group), weight, dy)[0]

        return [
            self.call("exchange_counts", "serial", exchange),
            self.call("copy_to_group", "serial", copied),
        ]


def mixed_calls(
    device: torch.device, *, turns: int = 1, group: dist.ProcessGroup | None = None
) -> list[MixedCall]:
    """The calls of a rank; those of all ranks belong together by their place in the list.

    Args:
        device: of the operands.
        turns: sets of operands.
        group: the default group if None.
    """
    group = world(group)
    rank, ranks = group.rank(), group.size()
    even = ranks in (1, 2, 4, 8)
    direct, fused = ("direct",) if even else (), ("fused",) if even else ()
    found: list[MixedCall] = []
    for turn in range(turns):
        made = _Maker(rank, device, turn, group)
        found += [
            *made.matmuls("all_gather_matmul", ("shard_p2p", "graded ring", *direct, "serial")),
            *made.matmuls("matmul_reduce_scatter", ("graded", "shard_p2p", *direct, "serial")),
            *made.matmuls("matmul_all_reduce", (*fused, "serial", "auto")),
            made.gradients(), *made.norms((*fused, "serial")),
            *made.experts((*fused, "grouped", "serial")), *made.routed(),
            *made.bags(("fused", "serial")),
            *made.small(),
        ]  # fmt: skip
    return found
