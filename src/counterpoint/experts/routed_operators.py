"""The operators of experts on tokens, by routes; each is the other's gradient.

A dispatch takes tokens to the rows of their experts; a combine takes rows, weighted, to the sums of
their tokens. How rows go: experts/plan_groups.py. Where only the device knows routes, one kernel
takes the call, and those beside it; or else the host reads them, and waits.
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.experts import facts as experts
from counterpoint.experts.check import check_operands
from counterpoint.experts.fused.launch import COMBINE, DISPATCH
from counterpoint.experts.fused.weighted_rows import weighted_rows
from counterpoint.experts.gradients import weight_gradient
from counterpoint.experts.operators import flops_of_combine, flops_of_dispatch
from counterpoint.experts.routes.exchange_routes import Routes
from counterpoint.experts.routes.find import find_routes
from counterpoint.experts.routes.lists import Routes as Found
from counterpoint.experts.routes.lists import blocks_in, most_rows
from counterpoint.experts.routes.on_device import Sizes, on_host
from counterpoint.experts.steps_counted import rows_by_rank
from counterpoint.group.ranks import group_of
from counterpoint.group.workspace import Action, Operands, workspace_of
from counterpoint.ops import call
from counterpoint.ops.activations import SWIGLU
from counterpoint.ops.agreement import Input, refused
from counterpoint.ops.call import Operator, Output, Tensors, Words, present
from counterpoint.ops.check import asked_of, autocast
from counterpoint.ops.plans import backward_plan, family_of, of_islands, plan_key
from counterpoint.ops.register import register
from counterpoint.plan.steps import COUNTS, Plan
from counterpoint.problem import Problem
from counterpoint.run import activated
from counterpoint.run.execute import Code
from counterpoint.tensor_parallel.backward import dtype_of

OPS: Any = torch.ops.counterpoint


Asked = tuple[int | None, str | Path | Plan]  # max_rows and plan, as users give them


def dispatch(
    x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup, return_rows: bool
) -> Any:
    """The products of the rows that come to this rank's experts; with return_rows these, too.

    Raises:
        InputError: an argument is wrong.
        PlanError: the plan is a Plan that is wrong.
    """
    x, w, spec = _checked(DISPATCH, x, w, routes, asked, group)
    keep = return_rows or (torch.is_grad_enabled() and w.requires_grad)
    where = spec, group.group_name, group.size()
    counts, numbers, lists, weights, _, top, _ = routes
    both = OPS.all_to_all_matmul_routed(
        x, w, counts, numbers, lists, weights.shape[0], keep, top, *where, asked_of(x=x)
    )
    return both if return_rows else both[0]


def combine(
    x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup, sum_of: object
) -> Tensor:
    """The weighted sums of this rank's tokens.

    Raises:
        InputError: an argument is wrong.
        PlanError: the plan is a Plan that is wrong.
    """
    given = {"sum_of": None if sum_of is None else "some"}
    x, w, spec = _checked(COMBINE, x, w, routes, asked, group, **given)
    *operands, tokens, top, _ = routes
    where = spec, group.group_name, group.size()
    asks = "some" if asked_of(x=x, w=w, weights=routes.weights) else ""
    return OPS.matmul_all_to_all_routed(x, w, *operands, None, tokens, top, *where, asks)


def _checked(
    op: str, x: Tensor, w: Tensor, routes: Routes, asked: Asked, group: dist.ProcessGroup,
    **also: object,
) -> tuple[Tensor, Tensor, str]:  # fmt: skip
    max_rows, plan = asked
    try:
        for name, given in {"max_rows": max_rows, **also}.items():
            if given is not None:
                raise InputError(op, name, want="left out with routes", got=given)
        x, w = autocast(x, w)  # type: ignore[assignment]
        check_operands(op, x, w)
        ranks, every = routes.counts.shape
        here = ranks, every, routes.lists.device
        if here != (group.size(), group.size() * w.shape[0], x.device):
            want = f"routes of {every} experts on {ranks} ranks, on {routes.lists.device}"
            got = f"w of {w.shape[0]} on each of {group.size()}, on {x.device}"
            raise InputError(op, "counts", want=want, got=got)
        has = routes.tokens if op == DISPATCH else routes.weights.shape[0]
        if routes.top_k and x.shape[0] != has:
            raise InputError(op, "x", want=f"[{has}, K], as the routes say", got=tuple(x.shape))
        return x, w, plan_key(op, plan)
    except CounterpointError as error:
        raise refused(error, group, x) from None


@cache
def operator_of(op: str, keep: bool, asks: str = "", gated: str = "") -> Operator:
    """
    Args:
        gated: of a dispatch: "kept" or "alone", with the result `hidden`, silu(gate) * up of the
            halves of y, which are kept or not.
    """
    experts.operator_of(op)  # the first of an operator is what is sampled
    aside = (("weights", "plain"), ("add", "rows")) if op == COMBINE else ()
    inputs = (
        Input("x", "rows", fact="columns"), Input("w", "given"), Input("counts", "plain", fact=""),
        Input("routes", "plain", fact=""), Input("lists", "plain", fact=""),
        *(Input(name, form, fact="") for name, form in aside),  # type: ignore[arg-type]
    )  # fmt: skip
    return Operator(
        op, inputs, partial(_problem, op), partial(_outputs, keep, gated), _words,
        ends=_gates if gated else None, compares=(("requires_grad", asks or "nothing"),),
    )  # fmt: skip


def _problem(op: str, tensors: Tensors, rows: Sequence[int], ranks: int) -> Problem:
    x, w, *_ = present(tensors)
    local, k, n = w.shape
    m, top_k, *sizes = rows
    top_k = min(top_k, local * ranks)  # of more, some are equal
    counts, dtype = "device_routed" if sizes else "routed", dtype_of(x)
    return Problem(op, m, n, k, ranks, dtype, experts=local, counts=counts, top_k=top_k)


def _outputs(
    keep: bool, gated: str, tensors: Tensors, rows: Sequence[int], ranks: int, rank: int
) -> tuple[Output, ...]:
    k, n = present(tensors)[1].shape[1:]
    y, kept = Output("y", (-1, n), spare=gated == "alone"), Output("rows", (-1, k))
    hidden = Output("hidden", (-1, n // 2))
    return (y, *([kept] if keep else []), *([hidden] if gated else []))


def _gates(code: Code | None) -> Action | None:
    """What fills `hidden` behind a plan; a fused step has."""
    if code is None or any(step.kind == "fused" for step in code.program.plan.steps):
        return None
    rank = code.program.rank

    def run(operands: Operands) -> None:
        y, counts = operands["y"], operands[COUNTS]
        known = counts if counts.device == y.device else None
        activated.into(SWIGLU, y, None, operands["hidden"], known, rank)

    return run


def _words(tensors: Tensors, rows: Sequence[int], rank: int) -> Words:
    x, w, *_ = present(tensors)
    facts = {"w.shape": str(tuple(w.shape)), "x.dtype": str(x.dtype), "rows": str(rows[0])}
    names = ("top_k", "tokens", "max_rows")
    return facts | {name: str(n) for name, n in zip(names, rows[1:], strict=False)}, None


def facts_of(sizes: Sizes, num_experts: int) -> tuple[int, int, int, int]:
    """Those of a call whose routes the device alone knows."""
    m = experts.most(max(sizes.max_rows, sizes.back), num_experts)
    return m, sizes.top, sizes.tokens, sizes.max_rows


def room_of(op: str, sizes: Sizes) -> int:
    """Rows of its results."""
    return sizes.max_rows if op == DISPATCH else sizes.tokens


def run_on_device(
    operator: Operator, tensors: Tensors, plan: str, sizes: Sizes, group_name: str
) -> list[Tensor]:
    """A call whose routes the host does not read, if one kernel takes it; else it waits for them.

    Of several islands that is the plan "islands", and else ranks tell each other their routes anew.

    Raises:
        InputError: the plan is another one, or a CUDA graph is being captured, and the host would
            have to read them, or it has, and more rows come to a rank than there is room for.
    """
    x, w, counts, firsts, lists, *rest = tensors
    _, top, ranks, max_rows, _ = sizes
    assert x is not None and w is not None and counts is not None and lists is not None
    assert firsts is not None, "all of them are there"
    workspace = workspace_of(group_of(group_name), x.device)
    sizes = sizes._replace(islands=workspace.islands.number)
    facts, given = facts_of(sizes, counts.shape[1]), call.Given(room_of(operator.op, sizes))
    problem = of_islands(_problem(operator.op, tensors, facts, ranks), workspace)
    family, own = family_of(plan), "fused" if sizes.islands == 1 else "islands"
    if family not in ("auto", own, "serial"):
        want = f"auto, {own} or serial with routes of max_rows"
        raise InputError(operator.op, "plan", want=want, got=repr(plan))
    if family == own:
        return call.run(operator, tensors, plan, facts, group_name, given)
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if family == "auto" and problem.operation.without_serial(problem)[0] == own:
        try:
            return call.run(operator, tensors, own, facts, group_name, given)
        except UnsupportedError:  # on all ranks alike, but for captures
            if capturing:
                raise
    if capturing:
        want = f"{own}, which takes 16-bit numbers on islands of a power of 2 of ranks, in a graph"
        raise InputError(operator.op, "plan", want=want, got="serial, which the host lays out")
    counts = counts.cpu()
    each = rows_by_rank(counts, True).tolist()
    if max(each) > max_rows:  # the table is equal on all ranks
        want = f">= {max(each)}, what rank {each.index(max(each))} gets"
        raise InputError(operator.op, "max_rows", want=want, got=max_rows)
    if sizes.islands == 1:
        found = on_host(workspace.rank, firsts, lists, sizes)
        tensors = (x, w, counts, found.blocks.packed(), found.lists, *rest)
        return call.run(operator, tensors, "serial", facts[:2], group_name, given)
    ids = sizes.lists(lists).experts
    known = find_routes(workspace, ids, torch.zeros(ids.shape, device=ids.device), len(counts[0]))
    rows = experts.most(most_rows(blocks_in(known[2]), counts), counts.shape[1])
    return call.run(operator, (x, w, *known[1:], *rest), plan, (rows, top), group_name, given)


def _run(
    operator: Operator, tensors: Tensors, plan: str, group_name: str, sizes: Sizes
) -> list[Tensor]:
    """Run a call as torch's dispatcher has it.

    Raises:
        InputError: x does not fit the routes, or a CUDA graph is being captured.
    """
    if sizes.top:
        return run_on_device(operator, tensors, plan, sizes, group_name)
    op = operator.op
    x, _, counts, numbers, lists, *_ = present(tensors)
    routes = Found(blocks_in(numbers), lists)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # the host lays out each call
        want = "a table on the GPU, beside max_rows, while a graph is captured"
        raise InputError(op, "counts", want=want, got="routes")
    has, room = routes.blocks.tokens, len(routes.list("rows"))
    if op == COMBINE:
        has, room = room, has
    wrong = None
    if x.shape[0] != has:
        want = f"[{has}, K], as the routes of rank {routes.blocks.rank} say"
        wrong = InputError(op, "x", want=want, got=tuple(x.shape))
    rows = experts.most(most_rows(routes.blocks, counts), counts.shape[1])
    given = call.Given(room, wrong)
    return call.run(operator, tensors, plan, (rows, routes.blocks.top), group_name, given)


def _dispatch(*given: Any) -> tuple[Tensor, Tensor]:
    tensors, (rows, keep, top, plan, group_name, ranks, *asks) = given[:5], given[5:]
    operator, sizes = operator_of(DISPATCH, keep, *asks), Sizes(len(tensors[0]), top, ranks, rows)
    y, *kept = _run(operator, tuple(tensors), plan, group_name, sizes)
    return y, kept[0] if keep else y.new_empty(0, tensors[0].shape[1])


def _fake_dispatch(
    x: Tensor, w: Tensor, counts: Tensor, routes: Tensor, lists: Tensor, rows: int, keep: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(rows, w.shape[2]), x.new_empty(rows if keep else 0, x.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, counts, routes, lists, _, keep, ctx.top, *ctx.where, _ = inputs
    ctx.save_for_backward(w, counts, routes, lists, output[1] if keep else None)
    ctx.tokens = x.shape[0]
    if not keep:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_dispatch(
    ctx: Any, dy: Tensor | None, drows: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx: the sums of the gradients of a token's rows; dw: of the rows that came here."""
    w, counts, routes, lists, rows = ctx.saved_tensors
    plan, *group = ctx.where
    none = (None,) * 10
    if dy is None and drows is None:
        return None, None, *none
    if dy is None:
        assert drows is not None
        dy = drows.new_zeros(drows.shape[0], w.shape[2])
    dy, dx, dw = dy.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        operands = (dy, w.transpose(1, 2), counts, routes, lists, None, drows)
        where = backward_plan(DISPATCH, plan), *group
        dx = OPS.matmul_all_to_all_routed(*operands, ctx.tokens, ctx.top, *where)
    if ctx.needs_input_grad[1]:
        dw = weight_gradient(rows, dy, counts, w, *group)
    return dx, dw, *none


def _combine(*given: Any) -> Tensor:
    tensors, (tokens, top, plan, group_name, ranks, *asks) = given[:7], given[7:]
    operator, sizes = operator_of(COMBINE, False, *asks), Sizes(tokens, top, ranks, len(tensors[0]))
    return _run(operator, tuple(tensors), plan, group_name, sizes)[0]


def _fake_combine(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(rest[5], w.shape[2])


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *saved, _, _, ctx.top, plan, group_name, ranks, _ = inputs
    ctx.save_for_backward(*saved)
    ctx.where = plan, group_name, ranks


def _backward_combine(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Of rows, weights of experts and of rows: a token's gradient goes to all of its rows.

    That of a row's weight is its product times dy, which is x times what the row gets.
    """
    x, w, counts, routes, lists, weights = ctx.saved_tensors
    plan, *group = ctx.where
    need_x, need_w, need_weights = (ctx.needs_input_grad[i] for i in (0, 1, 5))
    dw, dweights = None, None
    operands = (dy.contiguous(), w.transpose(1, 2), counts, routes, lists, x.shape[0])
    where = backward_plan(COMBINE, plan), *group
    dx, rows = OPS.all_to_all_matmul_routed(*operands, need_w, ctx.top, *where)
    if weights is not None and (need_x or need_weights):
        dx, dweights = weighted_rows(dx, weights, x, counts, group[0])
    if weights is not None and need_w:
        rows, _ = weighted_rows(rows, weights, None, counts, group[0])
    if need_w:
        dw = weight_gradient(x, rows, counts, w, *group)
    return dx if need_x else None, dw, None, None, None, dweights, *(None,) * 7


# rows: of y. keep: the rows that came here are the second result. top: experts of a token, where
# the device alone knows the routes; else 0
register(
    "all_to_all_matmul_routed",
    _dispatch,
    _fake_dispatch,
    _backward_dispatch,
    _save_dispatch,
    flops=flops_of_dispatch,
)
# weights: of rows; None is 1. add: to the products, row by row. tokens: rows of y
register(
    "matmul_all_to_all_routed",
    _combine,
    _fake_combine,
    _backward_combine,
    _save_combine,
    flops=flops_of_combine,
)
