"""Nodes of a graph in the place of others: made as a whole or not at all, and put in order.

What would make a circle or read an input that the graph writes is refused, and what an error
stopped is taken back. A new node stands where the last of those that it replaces stood, with their
place in the model and their tags of activation checkpointing.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import SymInt, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from counterpoint.adapters.graph.axes import (
    VIEWS,
    Axis,
    Dims,
    NotFollowedError,
    Size,
    same,
    value,
    whole,
    why,
)
from counterpoint.adapters.graph.find import Collective

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
# what of a node says where it stands in the model and in the step: a new one stands there, too
LEFT = ("val", "tensor_meta", "eager_input_vals", "original_aten")
POLICY = "recompute"  # of activation checkpointing


class Rewriter:
    """Makes nodes of one graph.

    Args:
        groups: by name.
        anchor: before which new nodes stand at first, and whose place in the model they have.
    """

    def __init__(
        self, graph: fx.Graph, groups: dict[str, dist.ProcessGroup], anchor: fx.Node | None = None
    ) -> None:
        self.graph, self.groups = graph, groups
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.backward = depends(graph)
        self.done: dict[fx.Node, fx.Node] = {}  # what was replaced, by what
        self._new: list[fx.Node] = []  # of the rewrite that is being made
        self._replaced: list[tuple[fx.Node, fx.Node]] = []
        self._anchor: fx.Node = anchor or next(iter(graph.nodes))
        self._policies: list[Any] = []
        self._written = _written(graph)
        self._sizes: dict[str, fx.Node] = {}
        self._copies: list[fx.Node] = []

    def before(self, nodes: Sequence[fx.Node]) -> Any:
        """Where new nodes stand from now on: before the last of those that they replace.

        Raises:
            NotFollowedError: one of these was replaced before.
        """
        if any(node in self.done for node in nodes):
            raise NotFollowedError("its matmul is a part of another operator")
        self._anchor = max(nodes, key=self.order.__getitem__)
        self._policies = [node.meta[POLICY] for node in nodes if POLICY in node.meta]
        return self.graph.inserting_before(self._anchor)

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node; its tensors without values are those that `target` makes."""
        args = map_arg(args, self._now)
        given = map_arg(args, _value)
        with _fake_mode(given):
            result = target(*given, **kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self._anchor.meta.items() if k not in LEFT}
        if self._policies:
            node.meta[POLICY] = self._policy(target)
        node.meta["val"] = result
        self._new.append(node)
        return node

    def _policy(self, target: Any) -> CheckpointPolicy:
        """A product is saved if one of what it replaces was; its views and copies never are."""
        heavy = getattr(target, "namespace", "") == "counterpoint" or target is aten.mm.default
        if not heavy and target is not operator.getitem:
            return CheckpointPolicy.PREFER_RECOMPUTE
        saved = CheckpointPolicy.MUST_SAVE
        return saved if saved in self._policies else self._policies[-1]

    def kept(self, node: fx.Node) -> fx.Node | None:
        """A copy, made in the forward, of what may change before the backward; None: it may not.

        The caller of a graph has its inputs and results. Torch sees no change of a DTensor's own
        tensor, nor one through a view that inductor has made.
        """
        results = (n for n in self.graph.output_node().all_input_nodes if n not in self.backward)
        stored = _stored(node)
        if stored.op == "call_function" and stored not in map(_stored, results):
            return None
        copy = self.emit(prims.clone.default, node)  # aten's is taken away by torch
        copy.meta[POLICY] = CheckpointPolicy.MUST_SAVE
        return copy

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let all that reads one node read another one, once the whole rewrite is made."""
        self._replaced.append((old, new))

    def attempt(self, one: Collective, step: Callable[[], None]) -> None:
        """Make a rewrite as a whole, or leave the graph as it is and say why."""
        self._new, self._replaced = [], []
        try:
            step()
            for old, new in self._replaced:
                _check_alike(old, new)
        except Exception as error:  # no match may end a user's compile
            one.reason = why(error)
            one.problems.clear()
            for node in reversed(self._new):
                self.graph.erase_node(node)
            return
        for old, new in self._replaced:
            old.replace_all_uses_with(new)
            self.done[old] = new

    def _now(self, node: fx.Node) -> fx.Node:
        """What stands in the place of a node by now."""
        while node in self.done:
            node = self.done[node]
        return node

    def check(self) -> None:
        """Refuse a rewrite that cannot run in any order, or that may read what was overwritten.

        Raises:
            NotFollowedError: it is one.
        """
        if any(_stored(n) in self._written for node in self._new for n in node.all_input_nodes):
            raise NotFollowedError("it reads an input that the graph writes")
        becomes = dict(self._replaced)
        left, path, seen = list(self._new), set[fx.Node](), set[fx.Node]()
        while left:
            node = left[-1]
            if node in path or node in seen:
                left.pop()
                path.discard(node)
                seen.add(node)
                continue
            path.add(node)
            for before in node.all_input_nodes:
                before = becomes.get(before, before)
                if before in path:
                    raise NotFollowedError("one of its matmuls depends on another")
                if before not in seen:
                    left.append(before)

    def turned(self, node: fx.Node) -> fx.Node:
        """The transposed matrix."""
        if node.target is aten.permute.default and list(cast(Sequence[int], node.args[1])) == [
            1,
            0,
        ]:
            return cast(fx.Node, node.args[0])
        return self.emit(aten.permute.default, node, [1, 0])

    def arranged(self, node: fx.Node, now: Iterable[Axis], dims: Dims) -> fx.Node:
        """A tensor whose axes are `now`, in order, as one of dims of the same axes."""
        flat, wanted = whole([*now]), [whole(axes) for axes in dims]
        order = [flat.index(axis) for axes in wanted for axis in axes]
        assert sorted(order) == list(range(len(flat))), "axes have been lost"
        if order != sorted(order):
            node = self._shaped(node, [[axis] for axis in flat])
            node = self.emit(aten.permute.default, node, order)
        return self._shaped(node, wanted)

    def together(self, nodes: Sequence[fx.Node], dim: int) -> fx.Node:
        """Tensors side by side."""
        return nodes[0] if len(nodes) == 1 else self.emit(aten.cat.default, [*nodes], dim)

    def erase(self) -> None:
        """Take away what was replaced, and what nothing else reads."""
        left = list(self.done)
        while left:
            node = left.pop()
            if node.users or node not in self.order:
                continue
            before = node.all_input_nodes
            del self.order[node]
            self.graph.erase_node(node)
            left += [n for n in before if n.op == "call_function" and _is_pure(n)]

    def _shaped(self, node: fx.Node, dims: Dims) -> fx.Node:
        shape: list[Size] = []
        for axes in dims:
            size: Size = 1
            for axis in axes:
                size = size * axis.size
            shape.append(size)
        old = value(node).shape
        if len(old) == len(shape) and all(map(same, old, shape)):
            return node
        unknown = [i for i, size in enumerate(shape) if isinstance(size, SymInt)]
        sizes: list[Any] = [
            -1 if unknown == [i] else self.size(size) for i, size in enumerate(shape)
        ]
        try:
            return self.emit(aten.view.default, node, sizes)
        except (RuntimeError, ValueError):  # what lies in another order is no view
            copy = self.emit(aten.clone.default, node, memory_format=torch.contiguous_format)
            self._copies.append(copy)
            return self.emit(aten.view.default, copy, sizes)

    def save_no_copies(self) -> None:
        """What was put in order, and a backward computes from, is saved as it was before."""
        backward, results = depends(self.graph), self.graph.output_node().all_input_nodes
        forward = reached((n for n in results if n not in backward), attrgetter("all_input_nodes"))
        for copy in forward.intersection(self._copies):
            for node in reached([copy], lambda n: [u for u in n.users if u.target in VIEWS]):
                if any(n in self.order and n not in forward for n in node.users):
                    copy.meta.setdefault(POLICY, CheckpointPolicy.PREFER_RECOMPUTE)

    def size(self, size: Size) -> int | fx.Node:
        """A size that is known when the graph runs, as a node."""
        if isinstance(size, int):
            return size
        text = str(size)
        if text not in self._sizes:
            for node in self.graph.nodes:  # inputs, and what is computed from those that are sizes
                sizes = [node, *node.all_input_nodes]
                if all(isinstance(each.meta.get("val"), SymInt) for each in sizes):
                    self._sizes.setdefault(str(node.meta["val"]), node)
        if text not in self._sizes:
            raise NotFollowedError(f"a dynamic size {text} that no input has")
        return self._sizes[text]


def _check_alike(old: fx.Node, new: fx.Node) -> None:
    """Refuse to put a tensor in the place of one of other sizes, or of another dtype.

    Raises:
        NotFollowedError: it is one.
    """
    was, now = (node.meta["val"] for node in (old, new))
    if not isinstance(was, torch.Tensor):
        return
    sizes = zip(was.shape, now.shape, strict=False)
    differ = any(statically_known_true(a != b) for a, b in sizes)
    if was.dtype != now.dtype or was.dim() != now.dim() or differ:
        raise NotFollowedError(f"{_form(now)} would stand in the place of {_form(was)}")


def _form(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def depends(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a gradient of the results."""
    tangents = (n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name)
    return reached(tangents, attrgetter("users"))


def reached(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """These nodes, their neighbours, the neighbours of those, and so on."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += neighbours(node)
    return found


def in_order(graph: fx.Graph) -> None:
    """Put each node behind what it reads, and else leave the order."""
    placed, cursor = set[fx.Node](), None
    for root in list(graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            before = [n for n in node.all_input_nodes if n not in placed]
            if before:
                stack += reversed(before)
                continue
            stack.pop()
            if node in placed:
                continue
            placed.add(node)
            if cursor is not None:
                cursor.append(node)
            cursor = node


def _written(graph: fx.Graph) -> set[fx.Node]:
    """What a graph changes in place."""
    found = set[fx.Node]()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            for i, said in enumerate(schema.arguments):
                if said.alias_info and said.alias_info.is_write:
                    given = node.args[i] if i < len(node.args) else node.kwargs.get(said.name)
                    map_arg(given, lambda n: found.add(_stored(n)))
    return found


def _stored(node: fx.Node) -> fx.Node:
    """What may have the storage of a node."""
    while _is_view(node):
        node = cast(fx.Node, node.args[0])
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(cast(fx.Node, node.args[0]))
    return node.target in VIEWS or getattr(node.target, "is_view", False)


def _is_pure(node: fx.Node) -> bool:
    """Whether a node that nobody reads may go."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" or not node.is_impure()


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _fake_mode(given: object) -> Any:
    for node in _tensors(given):
        return cast(Any, node).fake_mode
    raise NotFollowedError("no tensor")


def _tensors(given: object) -> Iterable[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in cast(Sequence[object], given):
            yield from _tensors(each)
