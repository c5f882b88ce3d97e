"""A layer of experts as one call: eager, by routes that the device alone knows, of one island.

It does what `exchange_routes`, `all_to_all_matmul`, SwiGLU and `matmul_all_to_all` do by routes of
max_rows, and their gradients, without asking again what was known, and without torch's dispatcher
between them. The calls of the group are theirs, in their order: so one rank may come here while
another one goes by the operators, as under a compiler or a mode of torch's. A forward whose calls
are known is launched at once: its memory is made first, and where addresses repeat the host
launches one graph.

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
from counterpoint.runtime import tell_routes
from counterpoint.runtime.counted import Here, rows_here
from counterpoint.runtime.device_routes import Found, Sizes
from counterpoint.runtime.lanes_cuda import profiling
from counterpoint.runtime.launch_collective import replayed
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


class Call(NamedTuple):
    """One of both operators: see `routed_experts.operator_of`."""

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


class Made(NamedTuple):
    """What a forward has made: routes, rows by expert where they are kept, and results.

    Args:
        products, hidden: of gate and up [R, 2 I], perhaps of no columns, and silu(gate) * up.
        calls: of each of the three operators how many calls of the group there had been then.
    """

    found: Found
    products: Tensor
    rows: list[Tensor]
    hidden: Tensor
    y: Tensor
    calls: list[int]


class ExpertLayer:
    """The calls of layers of equal sizes over one group."""

    def __init__(self, workspace: Workspace, facts: Facts) -> None:
        self.workspace, self.facts, self.board = workspace, facts, workspace.board
        tokens, max_rows, top_k, every, drops, self.plan = facts
        self.ranks, self.rank = workspace.group.size(), workspace.rank
        self.sizes = Sizes(tokens, top_k, self.ranks, max_rows)
        self.rows = routed_experts.facts_of(self.sizes, every)
        self.room = exchange_routes.Room(every, max_rows, drops)
        self.none = torch.empty(0, dtype=torch.int64, device=workspace.device)  # rows dropped

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
            return ready(tensors, routed_experts.room_of(of.op, self.sizes))
        operator = routed_experts.operator_of(of.op, *of[2:])
        group = self.workspace.group
        results = routed_experts.run_on_device(
            operator, tensors, of.plan, self.sizes, group.group_name
        )
        spec = "fused" if family_of(of.plan) == "auto" else of.plan
        ready = call.known_call(operator, tensors, spec, self.rows, group)
        if ready is not None:
            self.workspace.know(key, ready)
        return results

    @torch.no_grad()
    def at_once(
        self, x: Tensor, experts: Tensor, weights: Tensor, parameters: tuple[Tensor, Tensor],
        needs: Needs,
    ) -> Made | None:  # fmt: skip
        """A forward whose calls are known and of fused steps; None: it goes call by call.

        Args:
            parameters: gate_up and down.
        """
        facts, board, on_gpu = self.facts, self.board, x.is_cuda
        if facts.drops or not facts.tokens or profiling():
            return None
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return None
        gate_up, down = (w.transpose(1, 2) for w in parameters)
        calls = needs.dispatch(self.plan), needs.combine(self.plan)
        _, dispatch = self.known(calls[0], gate_up, x.dtype)
        _, combine = self.known(calls[1], down, x.dtype)
        if dispatch is None or combine is None or not (dispatch.chains and combine.chains):
            return None
        x, experts = self.whole(x, 0.0), self.whole(experts, NONE)
        weights, every, told = self.whole(weights, 0.0), self.room.num_experts, None
        if on_gpu:
            told = tell_routes.launched(self.workspace, self.sizes, experts, weights, every)
            if told is None:
                return None
        with board.whole():
            if told is None:
                found, _ = self.find(experts, weights, needs.asks)
            else:
                found = told.found
                exchange_routes.begin(self.workspace, experts, self.room, needs.asks)
            numbers, lists, chain = [board.calls], found[1:], list[call.Chained]()
            products, *rows, hidden = dispatch((x, gate_up, *lists), facts.max_rows, chain)
            numbers.append(board.calls)
            if not on_gpu:
                chain[0].launch()
            given = hidden, down, *lists, found.weights, None
            (y,) = combine(given, facts.tokens, chain)
            numbers.append(board.calls)
            if not on_gpu:
                chain[1].launch()
            if told is not None:
                self._launch((calls, gate_up.stride(), down.stride()), told, chain)
        return Made(found, products, rows, hidden, y, numbers)

    def _launch(
        self, known: tuple[object, ...], told: tell_routes.Launched, chain: list[call.Chained]
    ) -> None:  # fmt: skip
        """One after another; as a graph where all addresses have been met before."""

        def enqueue(_: object = None) -> None:
            told.enqueue()
            for launch, _ in chain:
                launch()

        tensors = *told.tensors, *chain[0].operands.values(), *chain[1].operands.values()
        dtypes = told.tensors[0].dtype, told.tensors[1].dtype, chain[0].operands["x"].dtype
        key = self.facts, *known, *dtypes, *map(Tensor.data_ptr, tensors)
        if not replayed(self.workspace, key, enqueue):
            enqueue()

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
            products, *rows, hidden = _dispatched(layer, x, gate_up, lists, needs)
            number = layer.board.calls
        else:
            (_, products, rows, hidden, _, (_, number, _)) = made
        ctx.number = x.shape[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(hidden)
        saved = gate_up if needs[0] else None, rows[0] if rows else None
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
            of_products, of_each, of_down = needs
            counts, dproducts, ddown, deach = lists[0], None, None, None
            plan, given = backward_plan(COMBINE, layer.plan), (layer.whole(dy, 0.0), down, *lists)
            dhidden, *drows = layer.run(Call(DISPATCH, plan, of_down), given)
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
    made = layer.at_once(x, experts, weights, (gate_up, down), needs)
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


def layer_of(workspace: Workspace, facts: Facts) -> ExpertLayer:
    """The calls with these facts."""
    key = ExpertLayer, facts
    found: ExpertLayer | None = workspace.known.get(key)
    if found is None:
        found = ExpertLayer(workspace, facts)
        workspace.know(key, found)
    return found
