"""The calls of layers of experts over one group: routes, and both operators by them.

In shapes: T tokens, K experts of each, E experts of all ranks, D features, I hidden, R max_rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.experts import routed_operators
from counterpoint.experts.fused.launch import COMBINE, DISPATCH
from counterpoint.experts.fused.weighted_rows import gathered, weigh
from counterpoint.experts.routes import exchange_routes
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import Found, Sizes
from counterpoint.experts.steps_counted import Here, rows_here
from counterpoint.group.workspace import Workspace
from counterpoint.ops import call
from counterpoint.ops.plans import family_of


class Facts(NamedTuple):
    """What is equal in all calls of an `ExpertLayer`."""

    tokens: int  # of each rank at most; who has fewer has tokens of no expert behind them
    max_rows: int  # by expert, of each rank
    top_k: int
    num_experts: int  # of all ranks
    drops: bool
    plan: str


class Call(NamedTuple):
    """One of both operators: see `routed_operators.operator_of`."""

    op: str
    plan: str
    keep: bool = False
    asks: str = ""
    gated: str = ""


class Needs(NamedTuple):
    """Of what a forward is asked for gradients."""

    route: bool
    x: bool
    gate_up: bool
    down: bool

    @property
    def asks(self) -> str:
        """Of routes."""
        return "weights" if self.route else ""

    def dispatch(self, plan: str) -> Call:
        """That of tokens; without gradients there need be no products."""
        gated = "kept" if self.x or self.gate_up else "alone"
        return Call(DISPATCH, plan, self.gate_up, "x" if self.x else "", gated)

    def combine(self, plan: str) -> Call:
        """That of rows."""
        return Call(COMBINE, plan, asks="some" if any(self) else "")


NOTHING = Needs(False, False, False, False)


class ExpertLayer:
    """The calls of layers of equal sizes over one group.

    Attributes:
        forwards: see expert_forward.py.
    """

    def __init__(self, workspace: Workspace, facts: Facts) -> None:
        self.workspace, self.facts, self.board = workspace, facts, workspace.board
        tokens, max_rows, top_k, every, drops, self.plan = facts
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.sizes = Sizes(tokens, top_k, self.ranks, max_rows)
        self.rows = routed_operators.facts_of(self.sizes, every)
        self.room = exchange_routes.Room(every, max_rows, drops)
        self.none = torch.empty(0, dtype=torch.int64, device=workspace.device)  # rows dropped
        self.forwards: dict[object, Any] = {}

    def find(self, experts: Tensor, weights: Tensor, asks: str) -> tuple[Found, Tensor]:
        """Routes, and how many rows each rank has dropped."""
        whole = self.whole(experts, NONE), self.whole(weights, 0.0)
        return exchange_routes.on_device(self.workspace, *whole, self.room, asks)

    def known(self, of: Call, w: Tensor, dtype: torch.dtype) -> tuple[Any, call.Ready | None]:
        """What such a call is known by, and from the second time on what is ready for it."""
        # kept by the workspace, which forgets what points into memory that has gone
        key = self, of, w.shape, w.stride(), dtype
        return key, self.workspace.known.get(key)

    def run(self, of: Call, tensors: call.Tensors) -> list[Tensor]:
        """One of both operators."""
        x, w = call.present(tensors)[:2]
        key, ready = self.known(of, w, x.dtype)
        if ready is not None:
            return ready(tensors, routed_operators.room_of(of.op, self.sizes))
        operator = routed_operators.operator_of(of.op, *of[2:])
        group = self.workspace.group
        results = routed_operators.run_on_device(
            operator, tensors, of.plan, self.sizes, group.group_name
        )
        spec = "fused" if family_of(of.plan) == "auto" else of.plan
        ready = call.known_call(operator, tensors, spec, self.rows, group)
        if ready is not None:
            self.workspace.know(key, ready)
        return results

    def weighted(self, of: Call, tensors: call.Tensors, weights: Tensor) -> list[Tensor]:
        """A dispatch, with the rows that have come times their weights where they are kept.

        Args:
            weights: fp32 [R].
        """
        x, w, counts, *_ = call.present(tensors)
        _, ready = self.known(of, w, x.dtype)
        if not of.keep or ready is None or not ready.chains:
            y, *rows = self.run(of, tensors)
            return [y, *(weigh(each, weights, None, counts, self.rank)[0] for each in rows)]
        y, rows = (x.new_empty(self.facts.max_rows, n) for n in (w.shape[2], w.shape[1]))
        results = {"y": y, "rows": rows, "row_weights": weights}
        with self.board.whole():
            self.board.note(ready.digest)
            ready.taken.calls += 1
            assert ready.code is not None
            ready.code.run(ready.bound(tensors, results))
        return [y, rows]

    def here(self, counts: Tensor) -> Here:
        """The rows of the experts here."""
        return rows_here(counts, self.rank, self.ranks, self.facts.max_rows)

    def whole(self, of_tokens: Tensor, none: float) -> Tensor:
        """As many as all ranks bring, without gaps."""
        missing = self.facts.tokens - of_tokens.shape[0]
        if missing:
            return F.pad(of_tokens, (0, 0, 0, missing), value=none)
        return of_tokens.contiguous()

    def once(self, rows: Tensor, every: Tensor) -> Tensor:
        """The tokens that have come, of rows [R, D] by expert: what a forward at once keeps.

        A first call goes another way than those behind it. A checkpoint recomputes what the first
        has kept, so it is the same.

        Args:
            every: lists of routes.
        """
        first = self.sizes.lists(every).sums.amin(1)  # of the rows that a token has become
        there = first < len(rows)
        taken = rows.index_select(0, first.clamp(max=max(len(rows) - 1, 0)))
        return taken.where(there[:, None], 0)

    def by_expert(self, received: Tensor, lists: Sequence[Tensor]) -> Tensor:
        """The rows [R, D] of tokens that have come.

        Args:
            lists: counts, firsts and lists of routes: see device_routes.py.
        """
        counts, _, every = lists
        rows, sizes = self.facts.max_rows, self.sizes
        index = sizes.at(every).rows if every.is_cuda else sizes.lists(every).rows
        return gathered(received, index, rows, counts, self.rank)

    def own(self, of_tokens: Tensor, number: int) -> Tensor:
        """Those of this rank, in memory of their own."""
        return of_tokens if number == self.facts.tokens else of_tokens[:number].clone()


def layer_of(workspace: Workspace, facts: Facts) -> ExpertLayer:
    """The calls with these facts."""
    key = ExpertLayer, facts
    found: ExpertLayer | None = workspace.known.get(key)
    if found is None:
        found = ExpertLayer(workspace, facts)
        workspace.know(key, found)
    return found
