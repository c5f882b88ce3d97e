"""A layer of experts as one call: eager, by routes that the device alone knows, of one island.

It does what `exchange_routes`, `all_to_all_matmul`, SwiGLU and `matmul_all_to_all` do by routes of
max_rows, and their gradients, without asking again what was known, and without torch's dispatcher
between them. The calls of the group are theirs, in their order: so one rank may come here while
another one goes by the operators, as under a compiler or a mode of torch's.

In shapes: T tokens, K experts of each, E experts of all ranks, D features, I hidden, R max_rows.
"""

from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.ops import activations, call, exchange_routes, routed_experts, router
from counterpoint.ops.expert_gradients import gradient_of
from counterpoint.ops.fused_experts import COMBINE, DISPATCH
from counterpoint.ops.plans import backward_plan, family_of
from counterpoint.ops.register import its_backward, refuse_double
from counterpoint.ops.weighted_rows import weigh
from counterpoint.runtime.counted import Here, rows_here
from counterpoint.runtime.device_routes import Sizes
from counterpoint.runtime.routes import NONE
from counterpoint.runtime.workspace import Workspace

Grads = tuple[Tensor | None, ...]


class Facts(NamedTuple):
    """What is equal in all calls of an `ExpertLayer`."""

    tokens: int  # of each rank at most; who has fewer has tokens of no expert behind them
    max_rows: int  # by expert, of each rank
    top_k: int
    num_experts: int  # of all ranks
    drops: bool
    plan: str


class Route(NamedTuple):
    """How tokens find their experts: logits, or else experts and weights."""

    logits: Tensor | None  # [T, E]
    experts: Tensor | None  # [T, K]
    weights: Tensor | None  # [T, K]
    renormalize: bool


class Needs(NamedTuple):
    """Of what gradients are asked for: equal on all ranks."""

    x: bool
    route: bool  # logits, or weights
    gate_up: bool
    down: bool

    @property
    def products(self) -> bool:
        return self.x or self.gate_up


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    gate_up: Tensor  # [E_local, 2 I, D]
    down: Tensor  # [E_local, D, I]
    counts: Tensor  # see device_routes.py; so the next three
    firsts: Tensor
    lists: Tensor
    each: Tensor
    rows: Tensor | None  # [R, D], that came to the experts here
    products: Tensor  # [R, 2 I]
    hidden: Tensor  # [R, I]
    logits: Tensor | None  # [T, E]
    experts: Tensor  # [T, K], chosen by them
    weights: Tensor  # [T, K], by logits fp32

    @property
    def routes(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.counts, self.firsts, self.lists


class ExpertLayer:
    """The calls of layers of equal sizes over one group."""

    def __init__(self, workspace: Workspace, facts: Facts) -> None:
        self.workspace, self.facts, self.board = workspace, facts, workspace.board
        tokens, max_rows, top_k, every, drops, self.plan = facts
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.sizes = Sizes(tokens, top_k, self.ranks, max_rows)
        self.rows = routed_experts.facts_of(self.sizes, every)
        self.room = exchange_routes.Room(every, max_rows, drops)

    def forward(
        self, x: Tensor, route: Route, gate_up: Tensor, down: Tensor, needs: Needs
    ) -> tuple[Tensor, Tensor, Kept, tuple[int, ...]]:
        """y [T, D], how many rows were dropped, what a backward needs, and the calls' numbers."""
        logits, experts, weights, renormalize = route
        if logits is not None:
            weights, experts = router.chosen(logits, self.facts.top_k, renormalize)
        assert experts is not None and weights is not None
        asks = "weights" if needs.route else ""
        whole = self._whole(experts, NONE), self._whole(weights, 0.0)
        found, dropped = exchange_routes.on_device(self.workspace, *whole, self.room, asks)
        calls = [self.board.calls]
        each, routes = found.weights, (found.counts, found.firsts, found.lists)
        operands = self._whole(x, 0.0), gate_up.transpose(1, 2), *routes
        asks = "x" if needs.x else ""
        products, *rows = self._run(DISPATCH, operands, self.plan, needs.gate_up, asks)
        calls.append(self.board.calls)
        hidden = activations.activated_by(
            products, None, activations.SWIGLU, found.counts, self.rank
        )
        asks = "some" if any(needs) else ""
        operands = hidden, down.transpose(1, 2), *routes, each, None
        (y,) = self._run(COMBINE, operands, self.plan, False, asks)
        calls.append(self.board.calls)
        kept = Kept(gate_up, down, *routes, each, rows[0] if rows else None, products, hidden,
                    logits, experts, weights)  # fmt: skip
        return y, dropped, kept, tuple(calls)

    def backward(
        self, dy: Tensor, kept: Kept, needs: Needs, calls: tuple[int, ...], renormalize: bool
    ) -> Grads:
        """Of x [T, D], of logits or weights, of gate_up and of down."""
        of_routes, of_dispatch, of_combine = ((self.board, number) for number in calls)
        dx = droute = dgate_up = None
        own = kept.weights.shape[0]
        here = None
        if needs.down or needs.gate_up:
            here = rows_here(kept.counts, self.rank, self.ranks, self.facts.max_rows)
        with its_backward(of_combine):
            dhidden, deach, ddown = self._back_combine(dy, kept, needs, here)
        if needs.products:
            (dproducts,) = activations.gradients_by(
                dhidden, kept.products, None, activations.SWIGLU, kept.counts, self.rank
            )
            del dhidden
            with its_backward(of_dispatch):
                dx, dgate_up = self._back_dispatch(dproducts, kept, needs, here)
        if needs.route:
            with its_backward(of_routes):
                droute = exchange_routes.back_on_device(
                    self.workspace, kept.lists, deach, self.sizes
                )
            droute = droute[:own]
            if kept.logits is not None:
                droute = router.chosen_gradient(
                    droute, kept.weights, kept.experts, kept.logits, renormalize
                )
        return None if dx is None else dx[:own], droute, dgate_up, ddown

    def _back_combine(
        self, dy: Tensor, kept: Kept, needs: Needs, here: Here | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of what is between the matmuls [R, I], of the weights of rows [R], and of down."""
        operands = self._whole(dy, 0.0), kept.down, *kept.routes
        plan, ddown = backward_plan(COMBINE, self.plan), None
        dhidden, *drows = self._run(DISPATCH, operands, plan, needs.down, "")
        deach = kept.each
        if needs.products or needs.route:
            dhidden, deach = weigh(dhidden, deach, kept.hidden, kept.counts, self.rank)
        if here is not None and needs.down:
            weighted, _ = weigh(drows[0], kept.each, None, kept.counts, self.rank)
            ddown = gradient_of(weighted, kept.hidden, here)
        return dhidden, deach, ddown

    def _back_dispatch(
        self, dproducts: Tensor, kept: Kept, needs: Needs, here: Here | None
    ) -> Grads:
        """Of x [T, D], and of gate_up."""
        dx = dgate_up = None
        if needs.x:
            operands = dproducts, kept.gate_up, *kept.routes, None, None
            (dx,) = self._run(COMBINE, operands, backward_plan(DISPATCH, self.plan), False, "")
        if here is not None and kept.rows is not None:
            dgate_up = gradient_of(dproducts, kept.rows, here)
        return dx, dgate_up

    def _run(
        self, op: str, tensors: call.Tensors, plan: str, keep: bool, asks: str
    ) -> list[Tensor]:
        """One of both operators; from the second time on as it is known."""
        x, w = call.present(tensors)[:2]
        # kept by the workspace, which forgets what points into memory that has gone
        key = self, op, plan, keep, asks, w.shape, w.stride(), x.dtype
        ready: call.Ready | None = self.workspace.known.get(key)
        if ready is not None:
            return ready(tensors, routed_experts.room_of(op, self.sizes))
        operator, group = routed_experts.operator_of(op, keep, asks), self.workspace.group
        results = routed_experts.run_on_device(
            operator, tensors, plan, self.sizes, group.group_name
        )
        spec = "fused" if family_of(plan) == "auto" else plan
        ready = call.known_call(operator, tensors, spec, self.rows, group)
        if ready is not None:
            self.workspace.know(key, ready)
        return results

    def _whole(self, of_tokens: Tensor, none: float) -> Tensor:
        """As many as all ranks bring, without gaps."""
        missing = self.facts.tokens - of_tokens.shape[0]
        if missing:
            return F.pad(of_tokens, (0, 0, 0, missing), value=none)
        return of_tokens.contiguous()


class _Through(torch.autograd.Function):
    """A call of which gradients are asked for."""

    @staticmethod
    def forward(
        ctx: Any, of: tuple[ExpertLayer, Needs, bool], x: Tensor, logits: Tensor | None,
        experts: Tensor | None, weights: Tensor | None, gate_up: Tensor, down: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        layer, needs, renormalize = of
        route = Route(logits, experts, weights, renormalize)
        y, dropped, kept, calls = layer.forward(x, route, gate_up, down, needs)
        ctx.given = layer, needs, calls, renormalize
        ctx.dtype = None if weights is None else weights.dtype
        ctx.mark_non_differentiable(dropped)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        return y, dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, saved = grads[0], ctx.saved_tensors
        if dy is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            dx, droute, dgate_up, ddown = _Gradient.apply(ctx.given, dy, *saved)  # type: ignore[misc]
        else:
            dx, droute, dgate_up, ddown = _gradient(ctx.given, dy, saved)
        if ctx.dtype is None:
            return None, dx, droute, None, None, dgate_up, ddown
        droute = None if droute is None else droute.to(ctx.dtype)
        return None, dx, None, None, droute, dgate_up, ddown


class _Gradient(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, given: Any, dy: Tensor, *saved: Any) -> Grads:
        return _gradient(given, dy, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        refuse_double(ctx)


def _gradient(given: Any, dy: Tensor, saved: tuple[Any, ...]) -> Grads:
    layer, needs, calls, renormalize = given
    return layer.backward(dy, Kept(*saved), needs, calls, renormalize)


def through(
    layer: ExpertLayer, x: Tensor, route: Route, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens x [T, D] through their experts, [T, D], and how many rows were dropped."""
    logits, experts, weights, renormalize = route
    number = x.shape[0]
    if torch.is_grad_enabled():
        of_route = weights if logits is None else logits
        assert of_route is not None
        needs = Needs(*(t.requires_grad for t in (x, of_route, gate_up, down)))
        if any(needs):
            given = x, logits, experts, weights, gate_up, down
            of = layer, needs, renormalize
            y, dropped = _Through.apply(of, *given)  # type: ignore[misc]
            return (y if y.shape[0] == number else y[:number]), dropped
    y, dropped, *_ = layer.forward(x, route, gate_up, down, Needs(False, False, False, False))
    return (y if y.shape[0] == number else y[:number]), dropped


def layer_of(workspace: Workspace, facts: Facts) -> ExpertLayer:
    """The calls with these facts, made anew where the memory of the workspace has moved."""
    key = ExpertLayer, facts
    found: ExpertLayer | None = workspace.known.get(key)
    if found is None:
        found = ExpertLayer(workspace, facts)
        workspace.know(key, found)
    return found
