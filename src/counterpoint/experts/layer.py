"""A layer of experts as one call: eager, by routes that the device alone knows, of one island.

It does what `exchange_routes`, `all_to_all_matmul`, SwiGLU and `matmul_all_to_all` do by routes of
max_rows, and their gradients, without asking again what was known, and without torch's dispatcher
between them. The calls of the group are theirs, in their order: so one rank may come here while
another one goes by the operators, as under a compiler or a mode of torch's. A forward whose calls
are known is launched at once: see expert_forward.py.

In shapes: T tokens, K experts of each, E experts of all ranks, D features, I hidden, R max_rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from counterpoint.experts.calls import NOTHING, Call, ExpertLayer, Needs
from counterpoint.experts.forward import Made, at_once
from counterpoint.experts.fused.launch import COMBINE, DISPATCH
from counterpoint.experts.fused.weighted_rows import swiglu_back, weigh
from counterpoint.experts.gradients import gradient_of
from counterpoint.experts.routes import exchange_routes, router
from counterpoint.ops.plans import backward_plan
from counterpoint.ops.register import its_backward, refuse_double

Grads = tuple[Tensor | None, ...]
Lists = tuple[Tensor, Tensor, Tensor]  # counts, firsts and lists of routes: see device_routes.py


class Route(NamedTuple):
    """How tokens find their experts: logits, or else experts and weights."""

    logits: Tensor | None  # [T, E]
    experts: Tensor | None  # [T, K]
    weights: Tensor | None  # [T, K]
    renormalize: bool


class _Node(torch.autograd.Function):
    """A call of the group, whose backward ranks tell by its number, and which has no gradient.

    What is saved is read where the operators read it: a checkpoint recomputes there.
    """

    @staticmethod
    def begun(
        ctx: Any, layer: ExpertLayer, number: int, needs: tuple[bool, ...], *saved: Tensor | None
    ) -> None:
        ctx.layer, ctx.needs, ctx.call = layer, needs, (layer.board, number)
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
        ctx: Any, layer: ExpertLayer, made: Made | None, route: Route, logits: Tensor | None,
        experts: Tensor, weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if made is None:
            found, dropped = layer.find(experts, weights, "weights")
            number = layer.board.calls
        else:
            (found, dropped), number = (made.found, layer.none), made.calls[0]
        ctx.of_logits, ctx.renormalize = logits is not None, route.renormalize
        ctx.number, ctx.dtype = experts.shape[0], weights.dtype
        ctx.mark_non_differentiable(*found[1:], dropped)
        of_logits = (experts, weights, logits) if logits is not None else ()
        _Node.begun(ctx, layer, number, (), found.lists, *of_logits)
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
        return None, None, None, *((droute, None, None) if ctx.of_logits else (None, None, droute))


class _Dispatch(_Node):
    """From tokens to the products of gate and up [R, 2 I], and silu(gate) * up of these.

    The gradient is that of the products: `_Combine` has that of both.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, made: Made | None, x: Tensor, gate_up: Tensor, *lists: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[2:4]
        if made is None:
            products, *kept, hidden = _dispatched(layer, x, gate_up, lists, needs)
            rows, number = kept[0] if kept else None, layer.board.calls
            if rows is not None and not layer.facts.drops:
                rows = layer.once(rows, lists[2])
        else:
            (_, rows, products, hidden, _, (_, number, _)) = made
        ctx.number = x.shape[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(hidden)
        saved = gate_up if needs[0] else None, rows if needs[1] else None
        _Node.begun(ctx, layer, number, needs, *saved, *lists)
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
                (dx,) = layer.run(Call(COMBINE, plan), (dy, gate_up, *lists, None, None))
                dx = layer.own(dx, ctx.number)
            if rows is not None:
                if not layer.facts.drops:  # tokens are kept once, if they may go at once
                    rows = layer.by_expert(rows, lists)
                dgate_up = gradient_of(dy, rows, layer.here(lists[0]))
            return dx, dgate_up

        if grads[0] is None:
            return (None,) * 7
        return None, None, *_Node.back(ctx, compute, grads[0].contiguous()), None, None, None


class _Combine(_Node):
    """From silu(gate) * up to the weighted sums of tokens [T, D]."""

    @staticmethod
    def forward(
        ctx: Any, layer: ExpertLayer, made: Made | None, products: Tensor, hidden: Tensor,
        each: Tensor, down: Tensor, *lists: Tensor,
    ) -> Tensor:  # fmt: skip
        of_products, _, of_each, of_down = ctx.needs_input_grad[2:6]
        if made is None:
            y, number = _combined(layer, hidden, each, down, lists, "some"), layer.board.calls
        else:
            y, number = made.y, made.calls[2]
        saved = products if of_products else None, hidden
        needs = of_products, of_each, of_down
        _Node.begun(ctx, layer, number, needs, *saved, each, down, *lists)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def compute(
            layer: ExpertLayer, needs: tuple[bool, bool, bool], dy: Tensor,
            products: Tensor | None, hidden: Tensor, each: Tensor, down: Tensor, *lists: Tensor,
        ) -> Grads:  # fmt: skip
            _, of_each, of_down = needs
            counts, dproducts, ddown, deach = lists[0], None, None, None
            plan, given = backward_plan(COMBINE, layer.plan), (layer.whole(dy, 0.0), down, *lists)
            dhidden, *drows = layer.weighted(Call(DISPATCH, plan, of_down), given, each)
            if products is not None:
                dproducts, deach = swiglu_back(dhidden, each, products, counts, layer.rank)
            elif of_each:
                _, deach = weigh(dhidden, each, hidden, counts, layer.rank)
            if of_down:
                ddown = gradient_of(drows[0], hidden, layer.here(counts))
            return dproducts, deach if of_each else None, ddown

        dproducts, *found = _Node.back(ctx, compute, grads[0].resolve_neg())
        return None, None, dproducts, None, *found, None, None, None


def _dispatched(
    layer: ExpertLayer, x: Tensor, gate_up: Tensor, lists: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """The products, where gate_up needs a gradient the rows that came here, and silu(gate) * up."""
    operands = layer.whole(x, 0.0), gate_up.transpose(1, 2), *lists
    of_x, of_gate_up = needs
    return layer.run(Needs(False, of_x, of_gate_up, False).dispatch(layer.plan), operands)


def _combined(
    layer: ExpertLayer, hidden: Tensor, each: Tensor, down: Tensor, lists: Sequence[Tensor],
    asks: str,
) -> Tensor:  # fmt: skip
    """The sums of tokens."""
    operands = hidden, down.transpose(1, 2), *lists, each, None
    return layer.run(Call(COMBINE, layer.plan, asks=asks), operands)[0]


def through(
    layer: ExpertLayer, x: Tensor, route: Route, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens x [T, D] through their experts, [T, D], and how many rows were dropped.

    Gradients are those of three calls, as the operators have them: so each rank makes the same ones
    in a backward that asks for some of them alone.
    """
    logits, experts, weights, renormalize = route
    if logits is not None:
        weights, experts = router.chosen(logits.detach(), layer.facts.top_k, renormalize)
    assert experts is not None and weights is not None
    of_route = weights if logits is None else logits
    needs = NOTHING
    if torch.is_grad_enabled():
        needs = Needs(*(t.requires_grad for t in (of_route, x, gate_up, down)))
    made = at_once(layer, x, experts, weights, (gate_up, down), needs)
    if needs.route:
        each, *lists, dropped = _Routes.apply(layer, made, route, logits, experts, weights)  # type: ignore[misc]
    elif made is None:
        (each, *lists), dropped = layer.find(experts, weights, "")
    else:
        (each, *lists), dropped = made.found, layer.none
    products: Any
    if needs.x or needs.gate_up:
        products, hidden = _Dispatch.apply(layer, made, x, gate_up, *lists)  # type: ignore[misc]
    elif made is None:
        products, hidden = _dispatched(layer, x, gate_up, lists, (False, False))
    else:
        products, hidden = made.products, made.hidden
    if any(needs):
        y: Any = _Combine.apply(layer, made, products, hidden, each, down, *lists)
    else:
        y = made.y if made else _combined(layer, hidden, each, down, lists, "")
    return (y if y.shape[0] == x.shape[0] else y[: x.shape[0]]), dropped
