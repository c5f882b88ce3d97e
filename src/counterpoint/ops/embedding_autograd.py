"""The backward of embedding bags, as autograd calls it: eager, or of the operator in a graph.

It sends the gradient of own bags to the ranks whose tables they are of, and makes gradients of the
tables and weights, or updates the tables. What needs no gradient runs beside the exchange: entries
are sorted, and gradients are zeroed.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.ops.call import num_dispatch_modes
from counterpoint.ops.embedding_call import Ready
from counterpoint.ops.embedding_gradients import (
    Lookups,
    exchange,
    problem_from,
    table_gradients,
    weight_gradient,
)
from counterpoint.ops.embedding_updates import Update, apply_update, update_beside
from counterpoint.plan.embedding_bag_all_to_all import OP

TRAINED = attrgetter("requires_grad")
# asks for a gradient on behalf of tables of other ranks
with torch.inference_mode(False):
    ANCHOR = torch.empty(0, requires_grad=True)


class Arguments(NamedTuple):
    """The operator's as torch has it, in the order of its schema.

    Args:
        anchor: asks for a gradient on behalf of tables of other ranks; None: nobody does.
        dims: of each rank how many tables, and their columns.
        update: see `Update.kind`; "": the backward returns gradients.
    """

    tables: list[Tensor]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    anchor: Tensor | None
    mean: bool
    last: bool
    sparse: bool
    dims: Sequence[int]
    batch: Sequence[int]
    dtype: torch.dtype
    rank: int
    plan: str
    group_name: str
    update: str
    rates: Tensor | None
    sums: list[Tensor]


class Backward(NamedTuple):
    """What the backward of a call does: gradients, sparse or dense, or an update."""

    sparse: bool
    update: Update | None


class Sent(NamedTuple):
    """What is known of an exchange of gradients: see `Arguments`."""

    dims: Sequence[int]
    batch: Sequence[int]
    rank: int
    group_name: str


class Needed(NamedTuple):
    """Which gradients are asked for."""

    tables: Sequence[bool]
    weights: bool
    anchor: bool


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what `backward` needs."""
    g = Arguments(*inputs)
    ctx.save_for_backward(g.indices, g.offsets, g.weights, g.anchor, g.rates, *g.tables, *g.sums)
    ctx.how = g.mean, g.last, g.sparse, g.update, len(g.tables)
    ctx.sent = Sent(list(g.dims), list(g.batch), g.rank, g.group_name)


def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Gradients of the operator's arguments, by operators of torch's that a graph may hold."""
    need, _, _, need_weights, need_anchor, *_ = ctx.needs_input_grad
    mean, last, sparse, kind, count = ctx.how
    indices, offsets, weights, anchor, rates, *rest = ctx.saved_tensors
    tables, sums = rest[:count], rest[count:]
    pooled = Lookups(tables, indices, offsets, weights, last, mean)
    needed = Needed(need, need_weights, need_anchor)
    if kind:
        dy, dw = _exchanged(dy, ctx.sent, pooled, needed)
        ops: Any = torch.ops.counterpoint
        ops.embedding_bag_update(
            dy, tables, sums, rates, indices, offsets, weights, last, mean, kind
        )
        grads = [None] * count
    else:
        grads, dw, dy = _in_a_graph(dy, ctx.sent, pooled, needed, sparse=sparse)
    nothing = _nothing(dy, anchor, needed)
    return grads, None, None, dw, nothing, *[None] * 11, [None] * len(sums)


def _exchanged(
    dy: Tensor, sent: Sent, pooled: Lookups, needed: Needed
) -> tuple[Tensor, Tensor | None]:
    """The gradient of own tables' columns, and that of weights."""
    ops: Any = torch.ops.counterpoint
    dy = ops.pooled_gradient_all_to_all(dy, *sent)
    if not needed.weights:
        return dy, None
    return dy, ops.embedding_bag_weight_gradient(dy, *pooled[:5])


def _in_a_graph(
    dy: Tensor, sent: Sent, pooled: Lookups, needed: Needed, *, sparse: bool
) -> tuple[list[Tensor | None], Tensor | None, Tensor]:
    """Gradients of tables and weights, and what they are made of."""
    dy, dw = _exchanged(dy, sent, pooled, needed)
    found: list[Tensor] = []
    if any(needed.tables):
        if sparse:
            found = table_gradients(dy, pooled, sparse=True)
        else:
            ops: Any = torch.ops.counterpoint
            found = ops.embedding_bag_table_gradients(dy, *pooled)
    return _asked_for(found, needed), dw, dy


def _asked_for(found: Sequence[Tensor], needed: Needed) -> list[Tensor | None]:
    if not found:
        return [None] * len(needed.tables)
    return [g if n else None for g, n in zip(found, needed.tables, strict=True)]


def _nothing(dy: Tensor, anchor: Tensor, needed: Needed) -> Tensor | None:
    """Nothing of dy, but of it: a compiled graph leaves out what no result hangs on."""
    return dy.flatten()[:0].to(anchor.device, anchor.dtype) if needed.anchor else None


class Eager(torch.autograd.Function):
    """The same without the dispatcher, which takes many tensors longer than the GPU takes some.

    And into the memory of `out`: no operator may return what it did not make. Tables that are not
    trained are none of its inputs: each costs. Values of tables are saved where gradients of
    weights ask for them; those of tables ask for their sizes alone.
    """

    @staticmethod
    def forward(
        ctx: Any, ready: Ready, placed: dict[object, Any], given: tuple[Any, ...], how: Backward,
        weights: Tensor | None, anchor: Tensor, *trained: Tensor,
    ) -> Tensor:  # fmt: skip
        """Pool and exchange."""
        tables, indices, offsets, _, _, last, _, _, _, out, _ = given
        if how.update is not None:
            ctx.step = how.update.steps.count
        y = ready(tables, indices, offsets, weights, last, placed, out)
        saved = tables if weights is not None and how.update is None else ()
        ctx.save_for_backward(indices, offsets, weights, anchor, *saved)
        ctx.tables = None if saved else tuple(tables)
        ctx.trained = list(map(TRAINED, tables))
        rank, group = ready.workspace.rank, ready.workspace.group.group_name
        ctx.how, ctx.lookup = how, (last, ready.mean)
        ctx.sent = Sent(ready.flat, [*ready.problem.rows], rank, group)
        return y

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        """Gradients of weights and trained tables; all ranks take part, whatever they need."""
        need_weights, need_anchor, *asked = ctx.needs_input_grad[4:]
        (dy,), (indices, offsets, weights, anchor) = dys, ctx.saved_tensors[:4]
        tables = ctx.saved_tensors[4:] if ctx.tables is None else ctx.tables
        each = iter(asked)
        needed = Needed([t and next(each) for t in ctx.trained], need_weights, need_anchor)
        pooled = Lookups(tables, indices, offsets, weights, *ctx.lookup)
        sparse, update = ctx.how
        grads: Sequence[Tensor | None] = ()
        if update is not None:
            dw = _updated(ctx.step, update, dy, pooled, ctx.sent, needed)
        # operators refuse a gradient of the gradient
        elif torch.is_grad_enabled() or torch.compiler.is_compiling() or num_dispatch_modes():
            grads, dw, _ = _in_a_graph(dy, ctx.sent, pooled, needed, sparse=sparse)
        else:
            grads, dw = _at_once(dy, pooled, ctx.sent, needed, sparse=sparse)
        own = [g for g, trained in zip(grads, ctx.trained, strict=False) if trained]
        return *[None] * 4, dw, _nothing(dy, anchor, needed), *own


def _at_once(
    dy: Tensor, pooled: Lookups, sent: Sent, needed: Needed, *, sparse: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of tables and weights; the exchange runs beside what does not need it."""
    dims, batch, rank, group_name = sent
    got, wait = exchange(dy, problem_from(dims, batch, dy.dtype), rank, group_name)
    if needed.weights:
        wait()
    dw = weight_gradient(got, pooled) if needed.weights else None
    if not any(needed.tables):
        wait()
        return _asked_for((), needed), dw
    return _asked_for(table_gradients(got, pooled, wait, sparse=sparse), needed), dw


def _updated(
    step: int, update: Update, dy: Tensor, pooled: Lookups, sent: Sent, needed: Needed
) -> Tensor | None:
    """Update the tables; the gradient of weights is of their values before.

    Raises:
        InputError: tables have been updated since the forward.
    """
    steps = update.steps
    if steps.count != step:
        got = f"tables that {steps.count - step} updates have changed since the forward"
        fix = "a fused optimizer cannot add up gradients of several calls"
        raise InputError(OP, "backward", want="one for each forward, before the next one", got=got,
                         fix=fix)  # fmt: skip
    steps.count += 1
    dims, batch, rank, group_name = sent
    if needed.weights:
        dy, dw = _exchanged(dy, sent, pooled, needed)
        apply_update(update, dy.detach(), pooled)
        return dw
    p = problem_from(dims, batch, dy.dtype)
    update_beside(update, dy.detach(), pooled, lambda dy: exchange(dy, p, rank, group_name))
    return None
