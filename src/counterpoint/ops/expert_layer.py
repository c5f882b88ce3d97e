"""A layer of experts as one call: eager, by routes that the device alone knows, of one island.

It does what `exchange_routes`, `all_to_all_matmul`, SwiGLU and `matmul_all_to_all` do by routes of
max_rows, and their gradients, without asking again what was known, and without torch's dispatcher
between them. The calls of the group are theirs, in their order: so one rank may come here while
another one goes by the operators, as under a compiler or a mode of torch's.

In shapes: T tokens, K experts of each, E experts of all ranks, D features, I hidden, R max_rows.
"""

from collections.abc import Callable, Sequence
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
from counterpoint.runtime.device_routes import Found, Sizes
from counterpoint.runtime.routes import NONE
from counterpoint.runtime.workspace import Workspace

Grads = tuple[Tensor | None, ...]
Lists = tuple[Tensor, Tensor, Tensor]  # counts, firsts and lists of routes: see device_routes.py


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


class ExpertLayer:
    """The calls of layers of equal sizes over one group."""

    def __init__(self, workspace: Workspace, facts: Facts) -> None:
        self.workspace, self.facts, self.board = workspace, facts, workspace.board
        tokens, max_rows, top_k, every, drops, self.plan = facts
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.sizes = Sizes(tokens, top_k, self.ranks, max_rows)
        self.rows = routed_experts.facts_of(self.sizes, every)
        self.room = exchange_routes.Room(every, max_rows, drops)

    def find(self, experts: Tensor, weights: Tensor, asks: str) -> tuple[Found, Tensor]:
        """Routes, and how many rows each rank has dropped."""
        whole = self.whole(experts, NONE), self.whole(weights, 0.0)
        return exchange_routes.on_device(self.workspace, *whole, self.room, asks)

    def run(
        self, op: str, tensors: call.Tensors, plan: str, keep: bool = False, asks: str = "",
        gated: str = "",
    ) -> list[Tensor]:  # fmt: skip
        """One of both operators; from the second time on as it is known."""
        x, w = call.present(tensors)[:2]
        # kept by the workspace, which forgets what points into memory that has gone
        key = self, op, plan, keep, asks, gated, w.shape, w.stride(), x.dtype
        ready: call.Ready | None = self.workspace.known.get(key)
        if ready is not None:
            return ready(tensors, routed_experts.room_of(op, self.sizes))
        operator = routed_experts.operator_of(op, keep, asks, gated)
        group = self.workspace.group
        results = routed_experts.run_on_device(
            operator, tensors, plan, self.sizes, group.group_name
        )
        spec = "fused" if family_of(plan) == "auto" else plan
        ready = call.known_call(operator, tensors, spec, self.rows, group)
        if ready is not None:
            self.workspace.know(key, ready)
        return results

    def here(self, counts: Tensor) -> Here:
        """The rows of the experts here."""
        return rows_here(counts, self.rank, self.ranks, self.facts.max_rows)

    def whole(self, of_tokens: Tensor, none: float) -> Tensor:
        """As many as all ranks bring, without gaps."""
        missing = self.facts.tokens - of_tokens.shape[0]
        if missing:
            return F.pad(of_tokens, (0, 0, 0, missing), value=none)
        return of_tokens.contiguous()

    def own(self, of_tokens: Tensor, number: int) -> Tensor:
        """Those of this rank, in memory of their own."""
        return of_tokens if number == self.facts.tokens else of_tokens[:number].clone()


class _Node(torch.autograd.Function):
    """A call of the group, whose backward ranks tell by its number, and which has no gradient.

    What is saved is read where the operators read it: a checkpoint recomputes there.
    """

    @staticmethod
    def begun(ctx: Any, layer: ExpertLayer, needs: tuple[bool, ...], *saved: Tensor | None) -> None:
        ctx.layer, ctx.needs, ctx.call = layer, needs, (layer.board, layer.board.calls)
        ctx.save_for_backward(*saved)

    @staticmethod
    def back(ctx: Any, compute: Callable[..., Grads], dy: Tensor) -> Grads:
        with its_backward(ctx.call):
            given = compute, ctx.layer, ctx.needs, dy, *ctx.saved_tensors
            if torch.is_grad_enabled():
                return _Gradient.apply(*given)  # type: ignore[return-value]
            return compute(*given[1:])


class _Gradient(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Grads], *given: Any) -> Grads:
        return compute(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        refuse_double(ctx)


class _Routes(_Node):
    """From logits, or experts and weights, to routes and the weights of rows by expert."""

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, renormalize: bool, logits: Tensor | None,
        experts: Tensor | None, weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found, dropped, chosen = _found(layer, Route(logits, experts, weights, renormalize), True)
        ctx.of_logits, ctx.renormalize = logits is not None, renormalize
        ctx.number, ctx.dtype = chosen[0].shape[0], chosen[1].dtype
        ctx.mark_non_differentiable(*found[1:], dropped)
        of_logits = (*chosen, logits) if logits is not None else ()
        _Node.begun(ctx, layer, (), found.lists, *of_logits)
        return *found, dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def compute(
            layer: ExpertLayer, _: object, deach: Tensor, lists: Tensor, *chosen: Tensor
        ) -> Grads:
            droute = exchange_routes.back_on_device(layer.workspace, lists, deach, layer.sizes)
            droute = layer.own(droute, ctx.number)
            if chosen:
                experts, weights, logits = chosen
                gradient = router.chosen_gradient
                return (gradient(droute, weights, experts, logits, ctx.renormalize),)
            return (droute.to(ctx.dtype),)

        (droute,) = _Node.back(ctx, compute, grads[0].contiguous())
        return None, None, *((droute, None, None) if ctx.of_logits else (None, None, droute))


class _Dispatch(_Node):
    """From tokens to the products of gate and up [R, 2 I], and silu(gate) * up of these.

    The gradient is that of the products: `_Combine` has that of both.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, x: Tensor, gate_up: Tensor, *lists: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        products, *rows, hidden = _dispatched(layer, x, gate_up, lists, needs)
        ctx.number = x.shape[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(hidden)
        saved = gate_up if needs[0] else None, rows[0] if rows else None
        _Node.begun(ctx, layer, needs, *saved, *lists)
        return products, hidden

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        def compute(
            layer: ExpertLayer, needs: tuple[bool, bool], dy: Tensor, gate_up: Tensor | None,
            rows: Tensor | None, *lists: Tensor,
        ) -> Grads:  # fmt: skip
            dx = dgate_up = None
            if needs[0]:
                plan = backward_plan(DISPATCH, layer.plan)
                (dx,) = layer.run(COMBINE, (dy, gate_up, *lists, None, None), plan)
                dx = layer.own(dx, ctx.number)
            if rows is not None:
                dgate_up = gradient_of(dy, rows, layer.here(lists[0]))
            return dx, dgate_up

        if grads[0] is None:
            return (None,) * 6
        return None, *_Node.back(ctx, compute, grads[0].contiguous()), None, None, None


class _Combine(_Node):
    """From silu(gate) * up to the weighted sums of tokens [T, D]."""

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, products: Tensor, hidden: Tensor, each: Tensor, down: Tensor,
        *lists: Tensor,
    ) -> Tensor:  # fmt: skip
        of_products, _, *others = ctx.needs_input_grad[1:5]
        y = _combined(layer, hidden, each, down, lists, "some")
        saved = products if of_products else None, hidden
        _Node.begun(ctx, layer, (of_products, *others), *saved, each, down, *lists)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def compute(
            layer: ExpertLayer, needs: tuple[bool, bool, bool], dy: Tensor,
            products: Tensor | None, hidden: Tensor, each: Tensor, down: Tensor, *lists: Tensor,
        ) -> Grads:  # fmt: skip
            of_products, of_each, of_down = needs
            counts, dproducts, ddown, deach = lists[0], None, None, None
            plan, given = backward_plan(COMBINE, layer.plan), (layer.whole(dy, 0.0), down, *lists)
            dhidden, *drows = layer.run(DISPATCH, given, plan, of_down)
            if of_products or of_each:
                dhidden, deach = weigh(dhidden, each, hidden, counts, layer.rank)
            if of_down:
                weighted, _ = weigh(drows[0], each, None, counts, layer.rank)
                ddown = gradient_of(weighted, hidden, layer.here(counts))
            if products is not None:
                (dproducts,) = activations.gradients_by(
                    dhidden, products, None, activations.SWIGLU, counts, layer.rank
                )
            return dproducts, deach if of_each else None, ddown

        dproducts, *found = _Node.back(ctx, compute, grads[0].resolve_neg())
        return None, dproducts, None, *found, None, None, None


def _found(layer: ExpertLayer, route: Route, asks: bool) -> tuple[Found, Tensor, Any]:
    """Routes, dropped rows, and the experts and weights that were chosen."""
    logits, experts, weights, renormalize = route
    if logits is not None:
        weights, experts = router.chosen(logits, layer.facts.top_k, renormalize)
    assert experts is not None and weights is not None
    return *layer.find(experts, weights, "weights" if asks else ""), (experts, weights)


def _dispatched(
    layer: ExpertLayer, x: Tensor, gate_up: Tensor, lists: Sequence[Tensor],
    needs: tuple[bool, bool],
) -> list[Tensor]:  # fmt: skip
    """The products, where gate_up needs a gradient the rows that came here, and silu(gate) * up.

    Without gradients there need be no products.
    """
    operands = layer.whole(x, 0.0), gate_up.transpose(1, 2), *lists
    gated = "kept" if any(needs) else "alone"
    return layer.run(DISPATCH, operands, layer.plan, needs[1], "x" if needs[0] else "", gated)


def _combined(
    layer: ExpertLayer, hidden: Tensor, each: Tensor, down: Tensor, lists: Sequence[Tensor],
    asks: str,
) -> Tensor:  # fmt: skip
    """The sums of tokens."""
    operands = hidden, down.transpose(1, 2), *lists, each, None
    return layer.run(COMBINE, operands, layer.plan, False, asks)[0]


def through(
    layer: ExpertLayer, x: Tensor, route: Route, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens x [T, D] through their experts, [T, D], and how many rows were dropped.

    Gradients are those of three calls, as the operators have them: so each rank makes the same ones
    in a backward that asks for some of them alone.
    """
    of_route, grads = (
        route.weights if route.logits is None else route.logits,
        torch.is_grad_enabled(),
    )
    if grads and of_route is not None and of_route.requires_grad:
        each, *lists, dropped = _Routes.apply(layer, route.renormalize, *route[:3])  # type: ignore[misc]
    else:
        (each, *lists), dropped, _ = _found(layer, route, False)
    if grads and (x.requires_grad or gate_up.requires_grad):
        products, hidden = _Dispatch.apply(layer, x, gate_up, *lists)  # type: ignore[misc]
    else:
        products, hidden = _dispatched(layer, x, gate_up, lists, (False, False))
    if grads and any(t.requires_grad for t in (products, each, down)):
        y: Any = _Combine.apply(layer, products, hidden, each, down, *lists)
    else:
        y = _combined(layer, hidden, each, down, lists, "")
    return (y if y.shape[0] == x.shape[0] else y[: x.shape[0]]), dropped


def layer_of(workspace: Workspace, facts: Facts) -> ExpertLayer:
    """The calls with these facts."""
    key = ExpertLayer, facts
    found: ExpertLayer | None = workspace.known.get(key)
    if found is None:
        found = ExpertLayer(workspace, facts)
        workspace.know(key, found)
    return found
