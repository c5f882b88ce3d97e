"""Functions of torch as they stand in a graph: what torch's decompositions make of them.

Each is traced once, by the torch that is there, and compared with a graph node by node from its
result on. Factors and summands may be in either order. A change of dtype that a compiler does not
round to is passed over: what inductor joins it computes in fp32 and rounds once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from counterpoint.adapters.graph.axes import CONVERT, value
from counterpoint.adapters.graph.rewriter import reached

aten: Any = torch.ops.aten
EITHER_ORDER = (aten.add.Tensor, aten.mul.Tensor)
REDUCE = (aten.mean.dim, aten.var_mean.correction)
NUMBER = 3 * 2.0**-10  # where a function is traced: any number
# a node of the traced function, or NUMBER: what it is in the graph
Bound = dict[fx.Node | float, Any]


class Match(NamedTuple):
    """A function in a graph.

    Args:
        result: of it.
        given: its tensors, before changes of dtype.
        number: in the place of NUMBER; None: it has none.
        inside: all nodes between those and the result.
        reduced: those of them whose rows are summed.
    """

    result: fx.Node
    given: tuple[fx.Node, ...]
    number: int | float | None
    inside: set[fx.Node]
    reduced: tuple[fx.Node, ...]


class Form:
    """A function of torch, traced.

    Args:
        function: of fp32 tensors on a CPU.
        shapes: of them.
    """

    def __init__(self, function: Callable[..., Tensor], *shapes: Sequence[int]) -> None:
        with tracing(None), unset_fake_temporarily(), FakeTensorMode(), torch.no_grad():
            given = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]
            composed = make_fx(lambda *given: function(*given), select_decomp_table())(*given)
            # parts of it may write in place, which in a graph that is compiled none does
            traced = make_fx(torch.func.functionalize(composed), select_decomp_table())(*given)
        self._module = traced  # it keeps the graph
        nodes = traced.graph.nodes
        self.given = tuple(node for node in nodes if node.op == "placeholder")
        (self.result,) = traced.graph.output_node().all_input_nodes
        self.targets = frozenset(node.target for node in nodes if node.op == "call_function")

    def match(self, node: fx.Node, dtype: torch.dtype) -> Match | None:
        """This function, if its result is that node.

        Args:
            dtype: of the node, and of what it is computed from where that is not fp32.
        """
        if not isinstance(node.meta.get("val"), Tensor) or value(node).dtype != dtype:
            return None
        bound = _compared(self.result, node, dtype, {})
        if bound is None:
            return None
        given = tuple(bound[want] for want in self.given)
        inside = reached([node], lambda n: () if n in given else n.all_input_nodes)
        reduced = (got.args[0] for want, got in bound.items()
                   if isinstance(want, fx.Node) and want.target in REDUCE)  # fmt: skip
        return Match(node, given, bound.get(NUMBER), inside - {node, *given}, tuple(reduced))


def _compared(want: Any, got: Any, dtype: torch.dtype, bound: Bound) -> Bound | None:
    """What is bound where `got` is what `want` says; None: it is not."""
    if isinstance(want, fx.Node):
        want, got = _unchanged(want, dtype), _unchanged(got, dtype)
        if want in bound or not isinstance(got, fx.Node):
            return bound if bound.get(want) is got else None
        if want.op == "placeholder":
            return {**bound, want: got}
        if want.target is not got.target or want.kwargs != got.kwargs:
            return None
        orders = [got.args, got.args[::-1]] if want.target in EITHER_ORDER else [got.args]
        found = (_compared(want.args, args, dtype, bound) for args in orders)
        inner = next((each for each in found if each is not None), None)
        return None if inner is None else {**inner, want: got}
    if isinstance(want, list | tuple):
        if not isinstance(got, list | tuple) or len(want) != len(got):
            return None
        for one, other in zip(want, got, strict=True):
            found = _compared(one, other, dtype, bound)
            if found is None:
                return None
            bound = found
        return bound
    if want == NUMBER and type(got) in (int, float):
        return {**bound, NUMBER: got} if bound.get(NUMBER, got) == got else None
    return bound if type(got) in (type(want), int, float) and want == got else None


def _unchanged(node: Any, dtype: torch.dtype) -> Any:
    """A node before changes to that dtype or to fp32."""
    passed = () if config.emulate_precision_casts else (dtype, torch.float32)
    while isinstance(node, fx.Node) and node.target is CONVERT and node.args[1] in passed:
        node = node.args[0]
    return node


def matches(
    forms: Sequence[Form],
    starts: Iterable[fx.Node],
    dtype: torch.dtype,
    through: Iterable[Any] = (),
) -> Iterator[tuple[int, Match]]:
    """The forms, by number, that stand behind some nodes; those that end last come first.

    Args:
        dtype: of their results.
        through: what may stand between them and the starts.
    """
    targets = {CONVERT, *through}.union(*(form.targets for form in forms))
    near = reached(starts, lambda node: [user for user in node.users if user.target in targets])
    for node in reversed(next(iter(near)).graph.nodes):
        if node in near:
            for i, form in enumerate(forms):
                if (found := form.match(node, dtype)) is not None:
                    yield i, found
