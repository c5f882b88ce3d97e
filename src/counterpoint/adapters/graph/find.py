"""The collectives of a graph that stand beside matmuls, and those that do not, and why.

all-gather       what was gathered is an operand of matmuls: the axis of the ranks is one of the
                 rows of the product ("outer"), or what is summed over ("inner")
reduce-scatter   of a sum of products; the axis of the ranks is one of its rows or columns
all-reduce       of a sum of products
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import SymInt, fx

from counterpoint.adapters.graph.axes import (
    Axes,
    Axis,
    Casts,
    Dims,
    Leaf,
    NotFollowedError,
    Size,
    Term,
    dims_of,
    leaves,
    name_of,
    regrouped,
    same,
    terms,
    value,
    whole,
    why,
)
from counterpoint.adapters.graph.equal import equal_on_ranks, is_replicated
from counterpoint.group.workspace import workspaces_of
from counterpoint.ops.call import Operator
from counterpoint.problem import Problem

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
MATMULS = (aten.mm.default, aten.addmm.default)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS: dict[Any, str] = {
    c10d.all_gather_into_tensor.default: "all-gather",
    c10d.reduce_scatter_tensor.default: "reduce-scatter",
    c10d.all_reduce.default: "all-reduce",
}


@dataclass(eq=False)
class Use:
    """A product one of whose operands was gathered, as if that were the left one.

    Args:
        node: of the matmul.
        other: its other operand.
        turned: what was gathered is the right operand: all of this is of the transposed product.
        rows, inner: axes of what was gathered: rows of the product, and what is summed over.
        bias: added to the product.
    """

    node: fx.Node
    other: fx.Node
    turned: bool
    rows: Axes
    inner: Axes
    bias: fx.Node | None


@dataclass(eq=False)
class Total:
    """A sum of what was gathered over some of its axes.

    Args:
        over: axes that are summed.
        left: those of the result, in order.
    """

    node: fx.Node
    over: Axes
    left: Axes


@dataclass(eq=False)
class Collective:
    """One of a graph.

    Args:
        node: of the collective.
        wait: of its result.
        given: what it takes.
        kind: its name, for people.
        ranks: of its group.
        group: name of it.
        reason: why it is left as it is; "": it is not.
        operator: what has replaced it.
        matmuls: beside it, that are parts of the operator.
        problems: of the operators that have replaced it, where their sizes are known.
        backward: it depends on a gradient.
        followed: nothing but what stands around it speaks against an operator.
        apart: what the operator could do, too, and why it does not.
    """

    node: fx.Node
    wait: fx.Node
    given: fx.Node
    kind: str
    ranks: int
    group: str
    reason: str = ""
    operator: str = ""
    matmuls: list[fx.Node] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    backward: bool = False
    followed: bool = False
    apart: str = ""

    def note(self, operator: Operator, *tensors: fx.Node | None) -> None:
        """Keep what an operator computes in its place, where all sizes are known."""
        given = [None if t is None else value(t) for t in tensors]
        if not any(isinstance(n, SymInt) for t in given if t is not None for n in t.shape):
            self.problems.append(operator.problem(given, (), self.ranks))


@dataclass(eq=False)
class Gather(Collective):
    """An all-gather.

    Args:
        shard: axes of the dims that this rank has.
        across: the axis of the ranks.
        uses: the matmuls that read it.
        totals: its sums over some of its axes.
        casts: of what this rank has, from its dtype to that in which they read it, which is as wide
            as its own at most: it is gathered in that.
        kept: a copy of `given` that is read in its place; None: none is.
    """

    shard: Dims = field(default_factory=list)
    across: Axis = field(default_factory=lambda: Axis(1))
    uses: list[Use] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    casts: Casts = (torch.float32,)
    kept: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which it is gathered."""
        return self.casts[-1]

    def is_outer(self, use: Use) -> bool:
        """Whether the ranks have parts of the rows of the product."""
        return self.across in whole(use.rows)


@dataclass(eq=False)
class Reduction(Collective):
    """A reduce-scatter or an all-reduce of a sum of matmuls.

    Args:
        terms: the matmuls, with their dims in what is reduced.
        across: of each term the axis of the ranks; of an all-reduce none.
        biases: added to the sum of all ranks.
        own_biases: of each rank its own, that are summed with the products.
        average: the sum is divided by the ranks, as data parallelism does.
        shares: summands that are this rank's share of what all ranks have, and their axes of
            the ranks; none of an all-reduce.
    """

    terms: list[Term] = field(default_factory=list)
    across: list[Axis] = field(default_factory=list)
    biases: list[fx.Node] = field(default_factory=list)
    own_biases: list[fx.Node] = field(default_factory=list)
    average: bool = False
    shares: list[tuple[Term, Axis | None]] = field(default_factory=list)


def apart(group: dist.ProcessGroup) -> str:
    """Why a group's collectives are left to torch: it is known to have islands; "": it is not."""
    number = max((w.islands.number for w in workspaces_of(group)), default=1)
    return f"group {group.group_name} spans {number} islands" if number > 1 else ""


def collectives(graph: fx.Graph, groups: dict[str, dist.ProcessGroup]) -> list[Collective]:
    """All collectives of a graph, in its order.

    Args:
        groups: of this process, by name.
    """
    found: list[Collective] = []
    for node in graph.nodes:
        kind = KINDS.get(node.target)
        if kind is None:
            if getattr(node.target, "namespace", "") == "_c10d_functional" and "wait" not in str(
                node.target
            ):
                found.append(_other(node))
            continue
        waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
        name = cast(str, node.args[-1])
        group = groups.get(name)
        one = Collective(node, waits[0] if waits else node, cast(fx.Node, node.args[0]), kind,
                         group.size() if group else 0, name)  # fmt: skip
        try:
            one.reason = apart(group) if group else f"group {name} is not of this process"
            one.reason = one.reason or _refused(one, waits)
            one.followed = not one.reason
            if one.followed:
                one = _gather(one) if kind == "all-gather" else _reduction(one)
        except Exception as error:  # no match may end a user's compile
            one.reason = why(error)
        found.append(one)
    return found


def _other(node: fx.Node) -> Collective:
    given = node.args[0] if isinstance(node.args[0], fx.Node) else node
    kind = name_of(node).removeprefix("_c10d_functional.").replace("_", "-")
    return Collective(node, node, given, kind, 0, "", "there is no operator for it")


def _refused(one: Collective, waits: Sequence[fx.Node]) -> str:
    if one.ranks == 1:
        return "a group of one rank"
    if len(waits) != 1 or len(one.node.users) != 1:
        return "its result is not waited for once"
    if value(one.given).dtype not in DTYPES:
        return f"{_name(value(one.given).dtype)} is no dtype of the operators"
    if one.kind != "all-gather" and one.node.args[1] not in ("sum", "avg"):
        return f"it reduces by {one.node.args[1]}"
    if one.node.args[1] == "avg" and value(one.given).dtype == torch.float16:
        return "the sum that its average is of may be too large for float16"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gather(one: Collective) -> Gather:
    first, *rest = dims_of(one.wait)
    across, rows = _across(first, one.ranks, value(one.given).shape[0])
    gather = Gather(**vars(one), shard=[rows, *rest], across=across)
    own = value(one.given).dtype
    found = leaves(one.wait, [first, *rest], (own,))
    if found and not any(leaf.node.target in MATMULS for leaf in found):
        name = name_of(found[0].node)
        raise NotFollowedError(
            f"there is no operator for {name}" if name.endswith("mm")
            else f"no matmul reads it, but {name}"
        )  # fmt: skip
    casts = {leaf.casts for leaf in found}
    if len(casts) > 1 or any(each[-1].itemsize > own.itemsize for each in casts):
        raise NotFollowedError("it is read in a wider dtype, or in several")
    gather.casts = casts.pop() if casts else (own,)
    if gather.dtype not in DTYPES:
        raise NotFollowedError(f"{_name(gather.dtype)} is no dtype of the operators")
    for leaf in found:
        use = _use(leaf)
        if isinstance(use, Use):
            gather.uses.append(use)
        else:
            gather.totals.append(use)
    if not gather.uses:
        raise NotFollowedError("no matmul reads it")
    return gather


def _use(leaf: Leaf) -> Use | Total:
    node, dims = leaf.node, [whole(axes) for axes in leaf.dims]
    if node.target is aten.sum.dim_IntList and not node.kwargs:
        given = cast(Sequence[int], node.args[1]) or range(len(dims))  # none are all
        over = [int(i) % len(dims) for i in given]
        return Total(
            node, [a for i in over for a in dims[i]],
            [a for i, axes in enumerate(dims) if i not in over for a in axes],
        )  # fmt: skip
    if node.target not in MATMULS or node.kwargs:
        raise NotFollowedError(f"it is also read by {name_of(node)}")
    *bias, a, b = cast(Sequence[fx.Node], node.args)
    if a is b or leaf.read in bias:
        raise NotFollowedError("it is more than one operand of a matmul")
    turned = leaf.read is b
    rows, inner = reversed(dims) if turned else dims
    return Use(node, a if turned else b, turned, rows, inner, bias[0] if bias else None)


def _reduction(one: Collective) -> Reduction:
    if set(one.given.users) != {one.node}:
        raise NotFollowedError("what it reduces is read elsewhere, too")
    found = terms(one.given, lambda node: _is_matmul(node) or _is_share(node, one))
    reduction = Reduction(**vars(one), average=one.node.args[1] == "avg")
    for term in found:
        across = None
        if term.node.target is aten.addmm.default:
            _add_bias(reduction, term.node)
        if one.kind == "reduce-scatter":
            across, own = _across(term.dims[0], one.ranks, value(one.wait).shape[0])
            term.dims = [own, *term.dims[1:]]
        if not _is_matmul(term.node):
            reduction.shares.append((term, across))
            continue
        if value(term.node).dtype != value(one.given).dtype:
            raise NotFollowedError("it reduces in another dtype than its matmul's")
        reduction.terms.append(term)
        if across is not None:
            reduction.across.append(across)
    if not reduction.terms:
        raise NotFollowedError("no matmul stands before it")
    everywhere = reduction.across or [None] * len(reduction.terms)
    forms = {_form(term, across) for term, across in zip(reduction.terms, everywhere, strict=True)}
    if len(forms) > 1:
        raise NotFollowedError("the results of its matmuls lie differently")
    return reduction


def _is_matmul(node: fx.Node) -> bool:
    return node.target in MATMULS and not node.kwargs


def _is_share(node: fx.Node, one: Collective) -> bool:
    """Whether it is an all-reduced tensor divided by the ranks, which a sum over them undoes."""
    if node.target is not aten.div.Tensor or node.args[1] != one.ranks:
        return False
    wait = cast(fx.Node, node.args[0])
    sent = wait.args[0] if wait.target is c10d.wait_tensor.default else None
    return (
        isinstance(sent, fx.Node) and sent.target is c10d.all_reduce.default
        and sent.args[1:] == ("sum", one.group) and one.node.args[1] == "sum"
    )  # fmt: skip


def _across(first: Axes, ranks: int, own: Size) -> tuple[Axis, Axes]:
    """The axis of the ranks, the outermost of the first dim, and the other axes of that dim."""
    across, others = regrouped([first], [ranks, own])
    if len(across) != 1:
        raise NotFollowedError("the ranks are no axis of it")
    return across[0], others


def _form(term: Term, across: Axis | None) -> tuple[object, ...]:
    """Where the axes of the product have gone."""
    own = [whole(axes) for axes in term.own]
    flat = [axis for axes in own for axis in axes]
    return (
        tuple(tuple(str(axis.size) for axis in axes) for axes in own),
        tuple(tuple(flat.index(axis) for axis in whole(axes)) for axes in term.dims),
        None if across is None else flat.index(across),
    )


def _add_bias(one: Reduction, matmul: fx.Node) -> None:
    """Keep a row that is added to a product: one of all ranks, or each rank's own.

    Raises:
        NotFollowedError: it is no row.
    """
    node = cast(fx.Node, matmul.args[0])
    if value(node).dim() != 1 or not same(value(node).shape[0], value(matmul).shape[1]):
        raise NotFollowedError("its matmul's bias is no row")
    if node.target is aten.div.Tensor and not node.kwargs and node.args[1] == one.ranks:
        given = cast(fx.Node, node.args[0])
        is_equal = equal_on_ranks(given, one.group) or is_replicated(node, matmul)
        if is_equal and value(given).dtype == value(node).dtype:
            one.biases.append(given)
            return
    one.own_biases.append(node)
