"""The backward of embedding bags, as autograd calls it: eager, or of the operator in a graph.

It sends the gradient of own bags to the ranks whose tables they are of, and makes gradients of the
tables and weights, or updates the tables. What needs no gradient runs beside the exchange: entries
are sorted, and gradients are zeroed.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoint.embedding.call import Ready
from counterpoint.embedding.exchange import Sent, exchange
from counterpoint.embedding.gradients import (
    Lookups,
    as_sparse,
    named_sums,
    table_gradients,
    weight_gradient,
)
from counterpoint.embedding.updates import Update, Use, apply_use, refuse_second
from counterpoint.ops.agreement import num_dispatch_modes
from counterpoint.ops.register import its_backward, refuse_double, register

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
    ops: Any = torch.ops.counterpoint
    if kind:
        if type(rates) is not Tensor:  # a graph is traced
            refuse_second(rates)
        done, dw = ops.embedding_bag_update(
            dy, tables, sums, rates, *pooled[1:], kind, *ctx.sent, need_weights
        )
        grads, dw = [None] * count, dw if need_weights else None
    else:
        find = ops.embedding_bag_gradients
        grads, dw, done = _gradients(find, dy, ctx.sent, pooled, needed, sparse=sparse)
    nothing = _nothing(done, anchor, needed)
    return grads, None, None, dw, nothing, *[None] * 11, [None] * len(sums)


def _gradients(
    find: Callable[..., list[Tensor]], dy: Tensor, sent: Sent, pooled: Lookups, needed: Needed,
    *, sparse: bool,
) -> tuple[list[Tensor | None], Tensor | None, Tensor]:  # fmt: skip
    """Gradients of tables and weights, and what is empty and hangs on them.

    Args:
        find: `_found`, or the operator of it.
    """
    kind = ("sparse" if sparse else "dense") if any(needed.tables) else ""
    *found, done = find(dy, *pooled, *sent, kind, needed.weights)
    dw = found.pop() if needed.weights else None
    if kind == "sparse":
        found = list(map(as_sparse, pooled.tables, found[::2], found[1::2]))
    return _asked_for(found, needed), dw, done


def _found(*given: Any) -> list[Tensor]:
    """Gradients of tables, of sparse ones rows and values of each; that of weights; and nothing.

    The exchange runs beside what does not need it, and all ranks take part, whatever they need.
    """
    dy, *lookups = given[:7]
    pooled, sent, (kind, of_weights) = Lookups(*lookups), Sent(*given[7:11]), given[11:]
    slices, found = exchange(dy, sent), list[Tensor]()
    if kind == "dense":
        found += table_gradients(slices, pooled, sparse=False)
    elif kind:
        found += chain.from_iterable(named_sums(slices, pooled))
    if of_weights:
        found.append(weight_gradient(slices, pooled))
    for each in slices:
        each.wait()
    return [*found, dy.new_empty(0)]


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
            ctx.use = Use(how.update.steps)
        y = ready(tables, indices, offsets, weights, last, placed, out, asks=True)
        saved = tables if weights is not None and how.update is None else ()
        ctx.call = ready.board, ready.board.calls
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
        with its_backward(ctx.call):
            if update is not None:
                use, of_weights = ctx.use, need_weights
                dw = apply_use(use, update, dy.detach(), pooled, ctx.sent, of_weights=of_weights)
            else:
                # the operator refuses a gradient of the gradient
                compiles = torch.compiler.is_compiling() or num_dispatch_modes()
                seen = torch.is_grad_enabled() or compiles
                find = torch.ops.counterpoint.embedding_bag_gradients if seen else _found
                grads, dw, _ = _gradients(find, dy, ctx.sent, pooled, needed, sparse=sparse)
        own = [g for g, trained in zip(grads, ctx.trained, strict=False) if trained]
        return *[None] * 4, dw, _nothing(dy, anchor, needed), *own


def _fake(*given: Any) -> list[Tensor]:
    dy, tables, indices, _, weights, *_, kind, of_weights = given
    found: list[Tensor] = []
    if kind == "dense":
        found += [t.new_empty(t.shape) for t in tables]
    for t in tables if kind == "sparse" else ():
        rows = torch.library.get_ctx().new_dynamic_size()
        found += [indices.new_empty(rows, dtype=torch.int64), t.new_empty(rows, t.shape[1])]
    return [*found, *([weights.new_empty(weights.shape)] if of_weights else []), dy.new_empty(0)]


# an operator, so that a compiled backward holds it as one node; its last result is empty
register("embedding_bag_gradients", _found, _fake, refuse_double)
