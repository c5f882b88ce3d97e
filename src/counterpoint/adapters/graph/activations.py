"""Activations behind what was gathered and multiplied, in inference: the operator applies them.

Of one weight's product, or of gate and up: two weights, or the halves of one. Where a gradient is
asked for, it needs the products, and where they are read elsewhere, others do; an activation then
stays apart. So it does where that is predicted to be faster.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from counterpoint.adapters.graph.axes import (
    CONVERT,
    SPLIT,
    VIEWS,
    Axes,
    Axis,
    Dims,
    NotFollowedError,
    Size,
    name_of,
    regrouped,
    same,
    step,
    value,
    whole,
)
from counterpoint.adapters.graph.find import Gather, Use
from counterpoint.adapters.graph.forms import Form, Match, matches
from counterpoint.adapters.graph.operands import (
    alike,
    own_part,
    plan_of,
    ranks_first,
    right_operand,
    row_bias,
    where_of,
)
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.choose.by_model import by_model
from counterpoint.choose.known import released
from counterpoint.gpu.device_limits import refused_on
from counterpoint.machine import Machine
from counterpoint.problem import GATED, Problem
from counterpoint.run.activated import FUNCTIONS
from counterpoint.tensor_parallel import all_gather_matmul

aten: Any = torch.ops.aten
ops: Any = torch.ops.counterpoint
PARTS = (operator.getitem, SPLIT, aten.split_with_sizes.default, aten.slice.Tensor)
# other ways to write them
WAYS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    *FUNCTIONS.items(),
    ("silu", lambda h: h * torch.sigmoid(h)),
    ("gelu_tanh", lambda h: 0.5 * h * (
        1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0)))
    )),
)  # fmt: skip


class Factor(NamedTuple):
    """A product, or one half of its columns, that an activation reads.

    Args:
        use: the matmul.
        half: 0 or 1; None: all of it.
        columns: their axes.
        dims: of what is read.
        path: from what is read to the product.
    """

    use: Use
    half: int | None
    columns: Axes
    dims: Dims
    path: list[fx.Node]


class Activated(NamedTuple):
    """An activation of products.

    Args:
        name: as the operator has it.
        match: where it stands.
        factors: of one product, or gate and up.
    """

    name: str
    match: Match
    factors: list[Factor]


def applied(to: Rewriter, one: Gather, uses: list[Use]) -> str:
    """Let one operator gather, multiply and apply the activation behind; what it is called.

    "": there is none that it can apply, or `one.apart` says why it does not.
    """
    found = None if uses[0].turned or not alike(uses) else _found(uses)
    if found is None:
        return ""
    if why := _misfit(to, one, uses, found):
        one.apart = f"{found.name} stays apart, {why}"
        return ""
    first, (name, (result, *_), factors) = uses[0], found
    with to.before([*(use.node for use in uses), result]):
        x = own_part(to, one, first.rows, first.inner)
        weights = [_weight(to, factor) for factor in factors]
        where = (plan_of(to, result), *where_of(one)[1:])
        op = ops.all_gather_matmul_activated.default
        y = to.emit(op, x, weights, first.bias, name, *where)
        of = all_gather_matmul.operator_of_activated(name, len(weights))
        one.note(of, x, *weights, first.bias)
        now = [*ranks_first(first.rows, one.across), *factors[0].columns]
        y = to.arranged(y, now, factors[0].dims)
        to.replace(result, y)
    return "all_gather_matmul" + " of 2 weights" * (len(uses) > 1) + f" with {name}"


def _found(uses: Sequence[Use]) -> Activated | None:
    """The activation of what these matmuls compute."""
    columns: list[Axis] = []  # of each product; those of as many are one
    for n in (value(use.node).shape[1] for use in uses):
        columns.append(next((axis for axis in columns if same(axis.size, n)), None) or Axis(n))
    names, forms = zip(*_forms(), strict=True)
    starts, dtype = [use.node for use in uses], value(uses[0].node).dtype
    for i, match in matches(forms, starts, dtype, (*VIEWS, *PARTS)):
        try:
            factors = [_factor(node, uses, columns) for node in match.given]
        except NotFollowedError:
            continue
        halves = {factor.half for factor in factors}
        num_products = len({factor.use for factor in factors})
        of_products = halves == {None} and num_products == len(factors)
        of_halves = halves == {0, 1} and num_products == 1
        dims = [_flat(factor.dims) for factor in factors]
        if (of_products or of_halves) and dims[0] == dims[-1]:
            return Activated(names[i], match, factors)
    return None


@cache
def _forms() -> list[tuple[str, Form]]:
    """Each activation by its name, gated and not."""
    found: list[tuple[str, Form]] = []
    for name, way in WAYS:
        found.append((name, Form(way, (2, 3))))
        found.append((name + GATED, Form(_gated(way), (2, 3), (2, 3))))
    return found


def _gated(way: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda h, up: way(h) * up


def _factor(node: fx.Node, uses: Sequence[Use], columns: Sequence[Axis]) -> Factor:
    """What an activation reads, followed to the product that it is.

    Args:
        columns: the axis of the columns of each product; gate and up have one.

    Raises:
        NotFollowedError: it is something else.
    """
    path = [node]
    while not (of := [i for i, use in enumerate(uses) if use.node is path[-1]]):
        if path[-1].target not in (*VIEWS, *PARTS):
            raise NotFollowedError("it is no product")
        path.append(cast(fx.Node, path[-1].args[0]))
    use, own = uses[of[0]], [columns[of[0]]]
    dims, half = [use.rows, own], None
    for part in reversed(path[:-1]):
        if part.target in VIEWS:
            dims = step(part, dims) or []
        elif half is not None:
            raise NotFollowedError("it is a part of a part")
        elif isinstance(value(part), Tensor):
            half, inner = _half(part, dims[-1], own)
            dims, own = [*dims[:-1], inner], inner
    return Factor(use, half, own, dims, path)


def _half(node: fx.Node, last: Axes, columns: Axes) -> tuple[int, Axes]:
    """Which half of the columns of a product this is, and their axes.

    Raises:
        NotFollowedError: it is another part.
    """
    given, which = cast(fx.Node, node.args[0]), None
    if node.target is operator.getitem:
        split, index = given, node.args[1]
        given = cast(fx.Node, split.args[0])
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        parts = cast(Sequence[Tensor], split.meta["val"])
        which = index if len(parts) == 2 else None
    else:
        _, dim, start, _, by = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
        begins = (i for i in (0, 1) if same(i * value(node).shape[-1], cast(Size, start or 0)))
        which = next(begins, None) if by == 1 else None
    size, num_dims = value(node).shape[-1], value(node).dim()
    outer, inner = regrouped([last], [2, size])
    is_half = same(2 * size, value(given).shape[-1]) and cast(int, dim) % num_dims == num_dims - 1
    if which not in (0, 1) or not is_half or outer != whole(columns)[:1]:
        raise NotFollowedError("it is no half of a product's columns")
    return cast(int, which), inner


def _flat(dims: Dims) -> Dims:
    return [whole(axes) for axes in dims]


def _weight(to: Rewriter, factor: Factor) -> fx.Node:
    """The weight of a product, or of a half of it."""
    w = right_operand(to, factor.use)
    if factor.half is None:
        return w
    size = value(w).shape[1] // 2
    return to.emit(aten.slice.Tensor, w, 1, factor.half * size, (factor.half + 1) * size)


def _misfit(to: Rewriter, one: Gather, uses: Sequence[Use], found: Activated) -> str:
    """Why an activation stays apart; "": it does not."""
    result, inside = found.match.result, found.match.inside
    gated = found.name.endswith(GATED)
    if to.backward:
        return "as a gradient needs its products"
    if {use.node for use in uses} != {factor.use.node for factor in found.factors}:
        return "as other matmuls share its gather"
    within = {*inside, result, *(node for factor in found.factors for node in factor.path)}
    for node in within - {result}:
        for user in node.users.keys() - within:
            return f"as {name_of(user)} reads its products, too"
    if any(use.bias is not None and (gated or row_bias(use) is None) for use in uses):
        return "as its products have a bias"
    if more := next(_joined(result), None):
        return f"as torch joins it with {name_of(more)}"
    device = value(result).device
    if device.type == "cuda" and (lacks := refused_on(device)):
        return f"as {lacks}"
    return dearer(_problems(one, uses, found.name), _machine(device, one.ranks))


def _joined(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node and is computed from each number by itself, as a compiler joins them."""
    for user in node.users:
        if user.target in VIEWS:
            yield from _joined(user)
        elif user.target is CONVERT or torch.Tag.pointwise in getattr(user.target, "tags", ()):
            yield user


def _problems(one: Gather, uses: Sequence[Use], name: str) -> tuple[Problem, Problem] | None:
    """What is computed without the activation, and with it; None: sizes are not known."""
    first = uses[0]
    (m, _), k = value(first.node).shape, value(first.other).shape[0]
    sizes = [value(use.node).shape[1] for use in uses]
    if not all(isinstance(n, int) for n in (m, k, *sizes)):
        return None
    dtype = str(one.dtype).removeprefix("torch.")
    plain = Problem(
        all_gather_matmul.OP, m, sum(sizes), k, one.ranks, dtype,  # type: ignore[arg-type]
        splits=tuple(sizes) if len(sizes) > 1 else (), bias=first.bias is not None,
    )  # fmt: skip
    return plain, replace(plain, activation=name)  # type: ignore[arg-type]


def _machine(device: torch.device, ranks: int) -> Machine | None:
    """What every rank knows of these GPUs without asking the others."""
    if device.type != "cuda":
        return None
    return released(torch.cuda.get_device_name(device), ranks)


@cache
def dearer(problems: tuple[Problem, Problem] | None, machine: Machine | None) -> str:
    """Why products and a kernel behind them are taken to be faster; "": they are not.

    Where nothing is known, it is the operator that decides when it runs.
    """
    if problems is None or machine is None:
        return ""
    plain, activated = problems
    num_bytes = (plain.n + activated.y_columns) * plain.m * plain.item_bytes
    apart_s = by_model(plain, machine).seconds + machine.costs.memory_s(num_bytes)
    together_s = by_model(activated, machine).seconds
    if together_s <= apart_s:
        return ""
    return f"predicted to take {apart_s * 1e6:.1f} us, not {together_s * 1e6:.1f}"
