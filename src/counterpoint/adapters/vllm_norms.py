"""Norms of vLLM's graphs behind an all-reduce, in fp8 too: its operators, of which each is a node.

They are those of its compiler's own language, and of its fusion of norm and fp8. vLLM's fusion of
all-reduce and norm has made other operators before; graphs that hold one are left alone.
"""

import operator
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from counterpoint.adapters.graph.axes import NotFollowedError, same, value
from counterpoint.adapters.graph.find import Collective
from counterpoint.adapters.graph.operands import PLAN
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.norms import all_reduce_norm
from counterpoint.norms.norms import FP8, Norm

ops: Any = torch.ops.counterpoint
FUSED = (
    "fused_allreduce"  # in the name of each operator of vLLM's fusion, by FlashInfer or by AITER
)
Y, H, SCALES = 0, 1, 2  # of what our operator returns
# vLLM's norms, and what of ours stands in the place of each of their results; None: of the only one
NORMS: dict[str, dict[int | None, int]] = {
    "vllm_ir.rms_norm.default": {None: Y},
    "vllm_ir.fused_add_rms_norm.default": {0: Y, 1: H},
    "_C.rms_norm_static_fp8_quant.default": {1: Y},
    "_C.fused_add_rms_norm_static_fp8_quant.default": {1: Y, 2: H},
    "_C.rms_norm_dynamic_per_token_quant.default": {1: Y, 2: SCALES, 3: H},
}


class _Normed(NamedTuple):
    """A norm of vLLM's.

    Args:
        node: of it.
        given: its arguments by name.
        results: what reads them, and the place of each in what our operator returns.
    """

    node: fx.Node
    given: dict[str, Any]
    results: list[tuple[fx.Node, int]]

    @property
    def x(self) -> Any:
        return self.given.get("x", self.given.get("input"))

    @property
    def residual(self) -> fx.Node | None:
        return self.given.get("x_residual", self.given.get("residual"))


def name_of(node: fx.Node) -> str:
    """The operator that a node calls; one that writes is called by one of torch's."""
    inner = node.args and getattr(node.target, "__name__", "").startswith("auto_functionalized")
    return str(node.args[0] if inner else node.target)


def fused(node: fx.Node) -> bool:
    """Whether vLLM's fusion of all-reduce and norm has made it."""
    return node.op == "call_function" and FUSED in name_of(node)


def normalise(to: Rewriter, one: Collective, reason: str) -> None:
    """The sum and vLLM's norm of it by one operator.

    Raises:
        NotFollowedError: there is no such norm; `reason` stays.
    """
    total = one.node
    normed = next(filter(None, map(_normed, total.users)), None)
    if normed is None or not _fits(normed, total):
        raise NotFollowedError(reason)
    residual, weight, scale = normed.residual, normed.given["weight"], normed.given.get("scale")
    fp8 = any(node.meta["val"].dtype == FP8 for node, place in normed.results if place == Y)
    by_row = any(place == SCALES for _, place in normed.results)
    norm = Norm("rms", float(normed.given["epsilon"]), fp8)
    tensors = one.given, residual, weight, None, None if by_row else scale
    with to.before([total, normed.node]):
        made = to.emit(ops.all_reduce_norm.default, *tensors, *norm, PLAN, one.group)
        one.note(all_reduce_norm.operator_of(norm), *tensors)
        for node, place in normed.results:
            to.replace(node, to.emit(operator.getitem, made, place))
        if residual is None and len(total.users) > 1:  # the sum is read elsewhere, too
            to.replace(total, to.emit(operator.getitem, made, H))
    to.check()
    one.operator, one.reason = "all_reduce_rms_norm", ""


def _normed(node: fx.Node) -> _Normed | None:
    """What a norm of vLLM's takes, and what reads its results; None: it is none of these."""
    name = name_of(node)
    if name not in NORMS:
        return None
    given: dict[str, Any] = {}
    if str(node.target) == name:
        given = {argument.name: argument.default_value for argument in _arguments(node)}
        given |= dict(zip(given, node.args, strict=False))
    given |= node.kwargs
    places = NORMS[name]
    if None in places:
        return _Normed(node, given, [(node, places[None])])
    reads = [(user, cast(int, user.args[1])) for user in node.users]
    if any(user.target is not operator.getitem or i not in places for user, i in reads):
        return None
    return _Normed(node, given, [(user, places[i]) for user, i in reads])


def _arguments(node: fx.Node) -> Any:
    return cast(Any, node.target)._schema.arguments


def _fits(normed: _Normed, total: fx.Node) -> bool:
    """Whether it is a norm of whole rows of this sum, by a weight of its dtype."""
    given, residual, x = normed.given, normed.residual, value(total)
    weight, eps = given.get("weight"), given.get("epsilon")
    unknown = [given.get(name) for name in ("variance_size", "scale_ub")]
    if normed.x is not total or unknown != [None, None] or not isinstance(weight, fx.Node):
        return False
    if not isinstance(eps, int | float) or not 0 <= eps < inf or x.dim() < 2:
        return False
    scale, by_row = given.get("scale"), SCALES in NORMS[name_of(normed.node)].values()
    if scale is not None and not by_row and not _is_number(value(scale)):
        return False
    if residual is not None:
        old = value(residual)
        alike = old.dim() == x.dim() and all(map(same, old.shape, x.shape))
        # a sum that is not the norm's alone is not to be had beside that of the residual
        if residual is total or len(total.users) > 1 or old.dtype != x.dtype or not alike:
            return False
    rows = value(weight)
    return rows.dtype == x.dtype and rows.dim() == 1 and bool(same(rows.shape[0], x.shape[-1]))


def _is_number(scale: torch.Tensor) -> bool:
    return scale.dtype == torch.float32 and bool(same(scale.numel(), 1))
