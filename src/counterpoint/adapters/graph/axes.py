"""What views and copies do to the dims of a tensor, followed through a graph.

The dims of a value are products of axes: [16, 64] after a view of [2, 8, 64] is [(a b), c] with
a = 2 and b = 8. A view regroups axes, a permutation moves them, and split + cat moves the outermost
axis of one dim to the front of another. So it is known where the axis of the ranks went, whatever
chain of such operators stands between a collective and a matmul.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

import torch
from torch import SymInt, Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = int | SymInt
aten: Any = torch.ops.aten

VIEWS = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.clone.default, aten.detach.default,
)  # fmt: skip
SPLIT = aten.split.Tensor
CONVERT: Any = torch.ops.prims.convert_element_type.default
TURNS = (aten.permute.default, aten.t.default, aten.transpose.int)


class NotFollowedError(Exception):
    """A graph has something that this file cannot follow; the text says what."""


def why(error: Exception) -> str:
    """Why a match was given up; an error that is not foreseen is told by its first line."""
    if isinstance(error, NotFollowedError):
        return str(error)
    first = (str(error).strip() or "no text").splitlines()[0]
    return f"an error of the pass, {type(error).__name__}: {first}"


class Axis:
    """One axis, or the two that it was found to be a product of."""

    def __init__(self, size: Size) -> None:
        known = size.node.maybe_as_int() if isinstance(size, SymInt) else size
        self.size: Size = size if known is None else known
        self.parts: tuple[Axis, Axis] | None = None

    def cut(self, outer: Size) -> "tuple[Axis, Axis]":
        """Make it a product of an axis of that size and the rest."""
        self.parts = Axis(outer), Axis(self.size // outer)
        return self.parts


Axes = list[Axis]
Dims = list[Axes]  # of each dim its axes, the outermost first; none of size 1


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal."""
    return statically_known_true(a == b)


def divides(a: Size, b: Size) -> bool:
    """Whether b is known to be a multiple of a."""
    quotient: Any = b // a if not same(a, 0) else 0
    return statically_known_true(quotient * a == b)


def whole(axes: Sequence[Axis]) -> Axes:
    """The axes as they are cut by now."""
    found: Axes = []
    for axis in axes:
        found += whole(axis.parts) if axis.parts else [axis]
    return found


def value(node: fx.Node) -> Tensor:
    """The tensor without values that a node stands for."""
    return cast(Tensor, node.meta["val"])


def dims_of(node: fx.Node) -> Dims:
    """New axes, one for each dim of the node."""
    return [[] if same(n, 1) else [Axis(n)] for n in value(node).shape]


def regrouped(dims: Dims, shape: Sequence[Size]) -> Dims:
    """The dims of a view of that shape.

    Raises:
        NotFollowedError: sizes that are not known to divide one another.
    """
    left = whole([axis for axes in dims for axis in axes])
    found: Dims = []
    for size in shape:
        group: Axes = []
        while not same(size, 1):
            if not left:
                raise NotFollowedError(f"a view to {tuple(shape)}")
            axis = left.pop(0)
            if same(axis.size, size):
                size = 1
            elif divides(axis.size, size):
                size = size // axis.size
            elif divides(size, axis.size):
                axis, rest = axis.cut(size)
                left.insert(0, rest)
                size = 1
            else:
                raise NotFollowedError(f"a view to {tuple(shape)}")
            group.append(axis)
        found.append(group)
    return found


def turned(node: fx.Node, dims: Dims) -> Dims:
    """The dims behind a permutation."""
    count = len(dims)
    if node.target is aten.permute.default:
        order = [int(i) % count for i in cast(Sequence[int], node.args[1])]
    else:
        a, b = (int(cast(int, i)) % count for i in node.args[1:]) if len(node.args) > 1 else (0, 1)
        order = list(range(count))
        order[a], order[b] = order[b], order[a]
    return [dims[i] for i in order]


class Parts(NamedTuple):
    """A tensor in parts along one dim.

    Args:
        given: the tensor.
        dim: that is parted.
        sizes: of the parts.
        readers: that part it.
    """

    given: fx.Node
    dim: int
    sizes: Sequence[Size]
    readers: frozenset[fx.Node]


def parts_of(cat: fx.Node) -> Parts | None:
    """The parts, all of one tensor and in order, that this node puts together; else None."""
    if cat.target is not aten.cat.default:
        return None
    parts = cast(Sequence[fx.Node], cat.args[0])
    if not parts or any(p.op != "call_function" or len(p.users) != 1 for p in parts):
        return None
    sizes = [value(p).shape for p in parts]
    if all(p.target is aten.slice.Tensor and not p.kwargs for p in parts):
        found = _slices(parts)
    else:
        split = parts[0].args[0]
        if not isinstance(split, fx.Node) or split.target is not SPLIT:
            return None
        count = len(cast(Sequence[object], split.meta["val"]))
        is_part = [p.args == (split, i) for i, p in enumerate(parts)]
        if len(parts) != count or not all(is_part) or len(split.users) != count:
            return None
        of = cast(fx.Node, split.args[0])
        at = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        found = of, int(cast(int, at)), frozenset({split})
    if found is None:
        return None
    given, at, readers = found
    at %= value(given).dim()
    return Parts(given, at, [size[at] for size in sizes], readers)


def _slices(parts: Sequence[fx.Node]) -> tuple[fx.Node, int, frozenset[fx.Node]] | None:
    """What is sliced without gaps, along which dim, and the slices; else None."""
    calls: list[list[Any]] = [[*p.args, *(0, 0, None, 1)[len(p.args) - 1 :]] for p in parts]
    (given, at, *_), end = calls[0], 0
    for of, dim, start, stop, step in calls:
        if of is not given or dim != at or step != 1 or (start or 0) != end:
            return None
        end = stop
    size = value(given).shape[at]
    all_of_it = end is None or (isinstance(end, int) and statically_known_true(end >= size))
    return (given, at, frozenset(parts)) if all_of_it else None


def put_together(cat: fx.Node, parts: Parts, dims: Dims) -> Dims:
    """The dims behind the cat of parts, of those before.

    Raises:
        NotFollowedError: the parts are not of one size.
    """
    at, sizes = parts.dim, parts.sizes
    to = int(cast(int, cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0))) % len(dims)
    if not all(same(size, sizes[0]) for size in sizes):
        raise NotFollowedError("a split into unequal parts")
    outer, *inner = regrouped([dims[at]], [len(sizes), sizes[0]])
    found = list(dims)
    found[at] = inner[0]
    found[to] = [*outer, *found[to]]
    return found


def step(node: fx.Node, dims: Dims) -> Dims | None:
    """The dims of a node, of those of its input; None: it is neither a view nor a permutation.

    Raises:
        NotFollowedError: it is one, of sizes that cannot be followed.
    """
    if node.target in TURNS:
        return turned(node, dims)
    return regrouped(dims, value(node).shape) if node.target in VIEWS else None


Casts = tuple[torch.dtype, ...]  # of a tensor, one after another; the last is what it is in


class Leaf(NamedTuple):
    """A node that is no view, at the end of a chain of views and casts.

    Args:
        node: it.
        read: what it gets.
        dims: of that.
        casts: on the way, from the dtype of the first on.
    """

    node: fx.Node
    read: fx.Node
    dims: Dims
    casts: Casts


def cast_to(casts: Casts, dtype: torch.dtype) -> Casts:
    """The casts with one more; what keeps every value and is cast again needs no cast."""
    found = [*casts]
    while len(found) > 1 and _keeps(found[-2], found[-1]):
        found.pop()
    return tuple(found if found[-1] == dtype else [*found, dtype])


def _keeps(before: torch.dtype, behind: torch.dtype) -> bool:
    """Whether a cast keeps every value."""
    wide = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    known = before in wide and behind in wide
    return known and torch.promote_types(before, behind) == behind


def leaves(node: fx.Node, dims: Dims, casts: Casts) -> list[Leaf]:
    """All that read a node, whatever views and casts stand between.

    Args:
        casts: that have made it.

    Raises:
        NotFollowedError: a view that cannot be followed.
    """
    found: list[Leaf] = []
    passed = set[fx.Node]()
    for user in list(node.users):
        if user in passed:
            continue
        cats = {u for part in user.users for u in (part.users if user.target is SPLIT else [part])}
        cat = cats.pop() if len(cats) == 1 else None
        parts = parts_of(cat) if cat else None
        if cat and parts and user in parts.readers:
            passed |= parts.readers
            found += leaves(cat, put_together(cat, parts, dims), casts)
        elif user.target is CONVERT:
            found += leaves(user, dims, cast_to(casts, value(user).dtype))
        elif (behind := step(user, dims)) is not None:
            found += leaves(user, behind, casts)
        else:
            found.append(Leaf(user, node, dims, casts))
    return found


class Term:
    """A node, its own dims, and those of the views of it that are a term of a sum."""

    def __init__(self, node: fx.Node, own: Dims, dims: Dims) -> None:
        self.node, self.own, self.dims = node, own, dims


def terms(node: fx.Node, is_source: Callable[[fx.Node], bool]) -> list[Term]:
    """The nodes whose sum, in whatever views, a node is.

    Raises:
        NotFollowedError: something else is in it, or a part of it is read elsewhere, too.
    """
    if is_source(node):
        own = dims_of(node)
        return [Term(node, own, own)]
    parts = parts_of(node)
    if parts is not None or node.target in VIEWS or node.target in TURNS:
        before = parts.given if parts else cast(fx.Node, node.args[0])
        _read_once(parts.readers if parts else {node}, before)
        found = terms(before, is_source)
        for term in found:
            behind = put_together(node, parts, term.dims) if parts else step(node, term.dims)
            assert behind is not None
            term.dims = behind
        return found
    summands = node.args
    if node.target is aten.add.Tensor and not node.kwargs and isinstance(summands[1], fx.Node):
        found: list[Term] = []
        for summand in cast(Sequence[fx.Node], summands):
            if not _same_shape(summand, node):
                raise NotFollowedError("a sum of several shapes")
            _read_once({node}, summand)
            found += terms(summand, is_source)
        return found
    if node.target is CONVERT:
        terms(cast(fx.Node, node.args[0]), is_source)  # where there is no matmul, that is why
        raise NotFollowedError("it reduces in another dtype than its matmul's")
    near = any(is_source(_viewed(given)) for given in node.all_input_nodes)
    name = name_of(node)
    if name.endswith("mm"):
        raise NotFollowedError(f"there is no operator for {name}")
    raise NotFollowedError(f"{'' if near else 'no matmul, but '}{name} stands before it")


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in VIEWS or node.target in TURNS:
        node = cast(fx.Node, node.args[0])
    return node


def _read_once(readers: AbstractSet[fx.Node], node: fx.Node) -> None:
    if set(node.users) != readers:
        raise NotFollowedError("its matmul's result is read elsewhere, too")


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    of_a, of_b = value(a).shape, value(b).shape
    return len(of_a) == len(of_b) and all(map(same, of_a, of_b))


def name_of(node: fx.Node) -> str:
    """What a node does, for people."""
    if node.op == "placeholder":
        return "an input of the graph"
    if node.op == "output":
        return "a result of the graph"
    target: Any = node.target
    return str(getattr(target, "_overloadpacket", target)).removeprefix("aten.")
