"""The ways that a call of a layer of experts can go, and which one it goes.

As one call where nothing watches and the device alone knows the routes: see experts/layer.py.
Else by the operators: by routes, or by rows of tokens that are sorted by expert, of which the
ranks tell each other how many there are.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.experts import calls as expert_calls
from counterpoint.experts import check as experts_check
from counterpoint.experts import layer as expert_layer
from counterpoint.experts.all_to_all_matmul import all_to_all_matmul
from counterpoint.experts.facts import one_kernel
from counterpoint.experts.fused.sums import sum_of_tokens
from counterpoint.experts.layer import Route
from counterpoint.experts.matmul_all_to_all import matmul_all_to_all
from counterpoint.experts.routes.exchange_counts import exchange_counts
from counterpoint.experts.routes.exchange_routes import exchange_routes, num_islands
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.room_for_rows import OP, Layer, Room, room_for
from counterpoint.experts.routes.router import choose_experts, order_by_expert
from counterpoint.gpu.device_limits import refused_in
from counterpoint.group.workspace import workspace_of
from counterpoint.ops.activations import swiglu
from counterpoint.ops.check import autocast, is_fake
from counterpoint.ops.plans import family_of, plan_key

Parameters = tuple[Tensor, Tensor]  # gate_up [E_local, 2 I, D] and down [E_local, D, I]


class Experts(NamedTuple):
    """A layer without its parameters, as `ExpertParallelMLP` has it."""

    features: int
    hidden: int
    num_experts: int
    top_k: int
    group: dist.ProcessGroup
    max_rows: int | None
    capacity: str
    plan: Any
    fits: dict[tuple[Layer, int], bool]  # see `room_for`


class _Spread(torch.autograd.Function):
    """A row for each expert of a token; its gradient is their sum in fp32, in order of the experts.

    That of torch's index_select adds with atomics, in the dtype of x and in any order.
    """

    @staticmethod
    def forward(x: Tensor, token: Tensor, places: Tensor) -> Tensor:
        return x.index_select(0, token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, places = inputs
        ctx.save_for_backward(places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        (drows,) = grads
        return sum_of_tokens(drows, places), None, None


class Way(NamedTuple):
    """How known calls of a layer go as one call."""

    layer: Layer  # of which ranks tell each other how many tokens they bring,
    max_rows: int | None  # where this is not given
    drops: bool
    plan: str
    casts: bool  # by torch.autocast


def through(
    of: Experts, x: Tensor, route: Route, parameters: Parameters, way: Way | None
) -> tuple[Tensor, Tensor | None]:
    """y as x, and how many rows each rank has dropped.

    Args:
        x: [..., features].
        route: of such tokens.
        way: of calls like this one, which nothing watches; None: it goes by the operators.
    """
    tokens, (logits, experts, weights, renormalize) = x, route
    if x.dim() != 2:
        tokens = x.reshape(-1, of.features)
        logits, experts, weights = (None if t is None else t.reshape(-1, t.shape[-1])
                                    for t in route[:3])  # fmt: skip
    number, layer = tokens.shape[0], _layer(of, tokens) if way is None else way.layer
    if way is not None and way.max_rows is not None:
        room = Room(number, way.max_rows)
    else:
        room = layer and room_for(layer, number, workspace_of(of.group, x.device), of.fits)
    if way is not None and room is not None:
        facts = expert_calls.Facts(*room, of.top_k, of.num_experts, way.drops, way.plan)
        call = expert_calls.layer_of(workspace_of(of.group, x.device), facts)
        given: Any = autocast(tokens, *parameters) if way.casts else (tokens, *parameters)
        route = Route(logits, experts, weights, renormalize)
        y, dropped = expert_layer.through(call, given[0], route, *given[1:])
        return y if x.dim() == 2 else y.view(x.shape), dropped if way.drops else None
    if logits is not None:
        weights, experts = choose_experts(logits, of.top_k, renormalize)
    assert experts is not None and weights is not None
    if room is None and not _by_routes(of, x):
        return _by_counts(of, tokens, experts, weights, parameters).view(x.shape), None
    y, dropped = _by_operators(of, tokens, experts, weights, parameters, room)
    return y.view(x.shape), dropped


def way_of(of: Experts, x: Tensor, parameters: Parameters) -> Way | None:
    """The way of calls that nothing watches; None: by the operators, which refuse what is wrong.

    It does not change from a first call to those behind it: a checkpoint makes both of one.
    """
    layer, casts = _layer(of, x), torch.is_autocast_enabled(x.device.type)
    local = of.num_experts // of.group.size()
    shapes = (local, 2 * of.hidden, of.features), (local, of.features, of.hidden)
    for w, shape in zip(parameters, shapes, strict=True):
        if w.shape != shape or w.device != x.device or not (casts or w.dtype == x.dtype):
            return None
    if workspace_of(of.group, x.device).islands.number > 1:
        return None
    if layer is None:
        if of.max_rows is None or of.plan == "serial" or not _by_routes(of, x):
            return None
        layer = _facts(of, x)
    plan = "fused" if of.plan == "fused" else "auto"
    return Way(layer, of.max_rows, of.capacity == "drop", plan, casts)


def _facts(of: Experts, x: Tensor) -> Layer:
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return Layer(of.features, of.hidden, of.num_experts, of.top_k, dtype)


def _layer(of: Experts, x: Tensor) -> Layer | None:
    """A layer that has room for all rows of a call, and does not wait; None: another way is gone.

    That is where `max_rows` is given, a plan is named that the host lays out, or no one kernel
    takes the call; and in a compiled graph, whose sizes are its own.
    """
    if of.max_rows is not None or torch.compiler.is_compiling() or is_fake(x):
        return None
    plan, ranks = plan_key("all_to_all_matmul", of.plan), of.group.size()
    if plan not in ("auto", "fused", "routed") or ranks == 1:
        return None
    layer, workspace = _facts(of, x), workspace_of(of.group, x.device)
    if not _one_kernel(layer, ranks) or workspace.islands.number > 1 or refused_in(workspace):
        return None
    return layer


@lru_cache(maxsize=1024)
def _one_kernel(layer: Layer, ranks: int) -> bool:
    """Whether one kernel takes each of both matmuls."""
    sizes = {"all_to_all_matmul": (2 * layer.hidden, layer.features),
             "matmul_all_to_all": (layer.features, layer.hidden)}  # fmt: skip
    local = layer.experts // ranks
    return all(one_kernel(op, "auto", layer.dtype, *nk, local, ranks) for op, nk in sizes.items())


def _by_routes(of: Experts, x: Tensor) -> bool:
    """Whether a token goes itself, by routes: asked for, or where there are several islands."""
    family = family_of(plan_key("all_to_all_matmul", of.plan))
    if of.group.size() == 1:
        return False
    if of.capacity == "drop":
        return True
    if family not in ("auto", "islands"):
        return family == "routed"
    traced = not torch.compiler.is_compiling() and is_fake(x)
    return not traced and num_islands(of.group.group_name, str(x.device)) > 1


def _by_operators(
    of: Experts, tokens: Tensor, experts: Tensor, weights: Tensor, parameters: Parameters,
    room: Room | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """By routes; who has fewer tokens than others has some of no expert behind them."""
    number, max_rows = len(tokens), of.max_rows
    if room is not None:
        max_rows = room.rows
        if room.tokens > number:
            behind = (0, 0, 0, room.tokens - number)
            tokens, experts = F.pad(tokens, behind), F.pad(experts, behind, value=NONE)
            weights = F.pad(weights, behind)
    routes = exchange_routes(
        experts, weights, num_experts=of.num_experts, group=of.group, max_rows=max_rows,
        capacity=of.capacity,
    )  # fmt: skip
    plan = of.plan if max_rows is None or of.plan in ("fused", "serial") else "auto"
    gate_up, down = (w.transpose(1, 2) for w in parameters)
    products = all_to_all_matmul(tokens, gate_up, counts=routes, group=of.group, plan=plan)
    hidden = swiglu(products, routes.counts, of.group.rank())
    y = matmul_all_to_all(hidden, down, counts=routes, group=of.group, plan=plan)
    return y[:number] if len(y) > number else y, routes.dropped


def _by_counts(
    of: Experts, tokens: Tensor, experts: Tensor, weights: Tensor, parameters: Parameters
) -> Tensor:
    """By rows of tokens, sorted by expert."""
    if of.max_rows is None and tokens.is_cuda and torch.cuda.is_current_stream_capturing():
        want = "given in a CUDA graph where the host has to know counts"
        raise InputError(OP, "max_rows", want=want, got=None)
    own, places, token = order_by_expert(experts, of.num_experts)
    counts = exchange_counts(own, group=of.group)
    counts = counts.cpu() if of.max_rows is None else counts
    gate_up, down = (w.transpose(1, 2) for w in parameters)
    rows: Tensor = _Spread.apply(tokens, token, places)  # type: ignore[assignment]
    options: dict[str, Any] = {"counts": counts, "group": of.group, "plan": of.plan}
    products = all_to_all_matmul(rows, gate_up, max_rows=of.max_rows, **options)
    hidden = swiglu(products, counts, of.group.rank())
    max_rows = None if experts_check.host_known(counts) else len(rows)
    sum_of = places, weights
    return matmul_all_to_all(hidden, down, max_rows=max_rows, sum_of=sum_of, **options)
