"""vLLM's tensor-parallel decoding: matmul + all-reduce of a few rows becomes one operator.

    COUNTERPOINT_VLLM=1 vllm serve MODEL --tensor-parallel-size 2
    llm = LLM(..., tensor_parallel_size=2, compilation_config=compilation_config())

A pass behind vLLM's own, which are all as they were. It leaves graphs in which vLLM's fusion has
joined all-reduces and norms. In others that are compiled for at most 64 rows it gives all-reduces
to the pass of `compile_options`, then to that of vLLM's norms, and gives back what both leave.
"""

import logging
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from counterpoint.adapters.explain import Report
from counterpoint.adapters.graph import rewrite
from counterpoint.adapters.graph.axes import TURNS, VIEWS, Size, value
from counterpoint.adapters.graph.depends_on import library
from counterpoint.adapters.graph.find import Collective, apart
from counterpoint.adapters.graph.rewriter import Rewriter, in_order
from counterpoint.adapters.seams import taken
from counterpoint.adapters.vllm_norms import fused, name_of, normalise
from counterpoint.errors import InputError, UnsupportedError

SEAM = "post_grad_custom_post_pass"
TESTED = "0.33.0"
PASSES = "vllm.compilation.passes.inductor_pass"
STATE = "vllm.distributed.parallel_state"
INVARIANT = "VLLM_BATCH_INVARIANT"
MAX_ROWS = 64
FUSION = "vLLM's own fusion has taken others of its graph"
KINDS = {
    "vllm.all_reduce.default": "all-reduce",
    "vllm.all_gather.default": "all-gather",
    "vllm.reduce_scatter.default": "reduce-scatter",
}
aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
# below vLLM's name, so that its settings of logging hold
logger = logging.getLogger("vllm.counterpoint")


def compilation_config(*, max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """Make what `LLM(compilation_config=...)` takes, for decoding by matmul_all_reduce.

    vLLM then compiles a graph for at most `max_rows` tokens, and one for more. In the first, each
    matmul + all-reduce becomes an operator whose plan is chosen when it runs, and so does
    all-reduce + residual + norm where no such matmul is before it; the second stays as it is.
    Where vLLM's own fusion has joined all-reduces and norms, its graph stays, too: put
    {"fuse_allreduce_rms": False} into "pass_config" to have it off. Each rank logs what was done
    with each collective.

    Args:
        max_rows: tokens of a step of decoding, at most.

    Returns:
        Settings of vLLM, to which further ones can be added.

    Raises:
        InputError: `max_rows` is no positive integer.
        UnsupportedError: vLLM is missing, or has no place for the pass.

    Example:
        >>> llm = LLM(model, tensor_parallel_size=2,
        ...           compilation_config=compilation_config())  # doctest: +SKIP
    """
    if type(max_rows) is not int or max_rows < 1:
        raise InputError("compilation_config", "max_rows", want="a positive integer", got=max_rows)
    (as_pass,) = taken("vllm", TESTED, PASSES, "CallableInductorPass")
    decoding = DecodePass(max_rows)
    return {
        "compile_ranges_endpoints": [max_rows],
        "inductor_compile_config": {SEAM: as_pass(decoding, decoding.uuid())},
    }


class DecodePass:
    """What `compilation_config` hands to vLLM.

    Args:
        max_rows: see there.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        self.reports: list[Report] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph of inference in place.

        Raises:
            UnsupportedError: vLLM has moved, or the model adds a bias on one rank alone.
        """
        found: list[Collective] = []
        groups: dict[str, dist.ProcessGroup] = {}
        theirs = [_left(node) for node in graph.nodes if fused(node)]
        for node in graph.nodes:
            kind = KINDS.get(str(node.target))
            if kind is None:
                continue
            name = cast(str, node.kwargs.get("group_name", node.args[-1]))
            groups[name] = _group(name)
            given = cast(fx.Node, node.args[0])
            one = Collective(node, node, given, kind, groups[name].size(), name)
            one.reason = FUSION if theirs else self._refused(one, graph) or apart(groups[name])
            found.append(one)
        report = Report.of([*theirs, *_rewritten(graph, found, groups)])
        self.reports.append(report)
        if report.found:
            logger.info("counterpoint: %s", report)

    def uuid(self) -> str:
        """What vLLM's cache of compiled graphs knows this pass by.

        It is asked before there are ranks. vLLM keeps a cache for each rank and each number of
        them, and what its graphs hold of a group is compared when they run.
        """
        return f"{library()} {self.max_rows}"

    def _refused(self, one: Collective, graph: fx.Graph) -> str:
        """Why an all-reduce is none of decoding; "": it is."""
        if os.environ.get(INVARIANT, "0") != "0":
            return f"{INVARIANT} is set, and plans differ from size to size"
        if one.kind != "all-reduce":
            return "decoding has no operator for it"
        summed = one.given
        while summed.target in VIEWS or summed.target in TURNS:
            summed = cast(fx.Node, summed.args[0])
        if "val" not in summed.meta:  # a pass of vLLM's has made it
            return "its sizes are not known"
        rows = value(summed).shape[0]
        most = _upper_bound(rows, graph)
        if most is None or most > self.max_rows:
            return f"its {rows} rows are not known to be at most {self.max_rows}"
        if _has_bias(summed):
            raise UnsupportedError(
                f"vLLM adds the bias of {summed} on rank 0 alone, whose graph is then another "
                "one than those of the other ranks; leave compilation_config() and "
                "COUNTERPOINT_VLLM out for this model"
            )
        return ""


def _left(node: fx.Node) -> Collective:
    """An operator of vLLM's fusion, as one that is left."""
    given = cast(fx.Node, node.kwargs.get("allreduce_in") or node.all_input_nodes[0])
    what = f"vLLM's {name_of(node).split('.')[1]} has it, with the norm"
    return Collective(node, node, given, "all-reduce", 0, "", what)


def _group(name: str) -> dist.ProcessGroup:
    """The group of torch's behind one of vLLM's."""
    (coordinators,) = taken("vllm", TESTED, STATE, "_groups")
    return coordinators[name]().device_group


def _upper_bound(size: Size, graph: fx.Graph) -> int | None:
    """What a size is at most in the range that vLLM compiles a graph for; None: not known."""
    if isinstance(size, int):
        return size
    (context,) = taken("vllm", TESTED, PASSES, "_pass_context")
    symbols = free_symbols([n.meta["val"] for n in graph.nodes if n.op == "placeholder"])
    expression = size.node.expr
    # vLLM's range is that of the tokens, of which a graph of one symbol has the number
    if context is None or len(symbols) != 1 or not expression.free_symbols <= symbols:
        return None
    ranges = {symbol: ValueRanges(1, context.compile_range.end) for symbol in symbols}
    return int(bound_sympy(expression, ranges).upper)


def _has_bias(node: fx.Node) -> bool:
    """Whether this adds a vector to a matmul."""
    added = node.args[:2] if node.target is aten.add.Tensor else node.args[:1]
    if node.target not in (aten.add.Tensor, aten.addmm.default):
        return False
    return any(isinstance(n, fx.Node) and value(n).dim() == 1 for n in added)


def _rewritten(
    graph: fx.Graph, found: list[Collective], groups: dict[str, dist.ProcessGroup]
) -> list[Collective]:
    """Give to the pass of torch's graphs what nothing speaks against, and take back the rest."""
    to = Rewriter(graph, {})
    lent: dict[fx.Node, Collective] = {}
    for one in found:
        if not one.reason:
            with to.before([one.node]):
                name = groups[one.group].group_name
                sent = to.emit(c10d.all_reduce.default, one.given, "sum", name)
                one.node.replace_all_uses_with(to.emit(c10d.wait_tensor.default, sent))
            graph.erase_node(one.node)
            lent[sent] = one
    by_name: dict[str, dist.ProcessGroup] = {group.group_name: group for group in groups.values()}
    left: list[Collective] = []
    for made in rewrite.rewrite(graph, by_name, merge_reductions=False):
        one = lent.get(made.node)
        if one is None:
            continue
        found[found.index(one)] = made
        if not made.operator:
            with graph.inserting_before(made.wait):
                back = graph.call_function(one.node.target, (made.node.args[0], one.group))  # type: ignore[arg-type]
            back.meta = one.node.meta
            made.wait.replace_all_uses_with(back)
            graph.erase_node(made.wait)
            graph.erase_node(made.node)
            made.node, made.wait, made.given = back, back, cast(fx.Node, back.args[0])
            left.append(made)
    _normalised(graph, left)
    return found


def _normalised(graph: fx.Graph, left: list[Collective]) -> None:
    """Give to operators with a norm what no matmul stands before."""
    to = Rewriter(graph, {})
    for one in left:
        to.attempt(one, lambda one=one, before=one.reason: normalise(to, one, before))
    to.erase()
    in_order(graph)
    graph.lint()
