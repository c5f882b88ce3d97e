"""Puts operators in the place of collectives and their matmuls, forward and backward at once.

    all-gather + matmuls                        all_gather_matmul, of a list where there are several
    all-gather + matmuls + activation,
    in inference                                all_gather_matmul with it
    all-gather + dgrad + wgrad                  matmul_reduce_scatter_backward
    wgrads of what was gathered, and the
    reduce-scatter of the sum of dgrads         all_gather_matmul_backward: x is gathered again, so
                                                that only this rank's part is kept for it
    wgrads alone                                all_gather_matmul_wgrad
    matmuls + reduce-scatter                    matmul_reduce_scatter, or of the sum of several
    matmuls + all-reduce                        matmul_all_reduce
    all-reduce + residual + norm,
    in inference, without a matmul              all_reduce_rms_norm, all_reduce_layer_norm

What is gathered or scattered along another dim than the first is moved there by views and copies,
which a compiler joins with what stands around them.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import fx

from counterpoint.adapters.graph import gathers, norms, reductions, simplify, strides
from counterpoint.adapters.graph.find import Collective, Gather, Reduction, collectives
from counterpoint.adapters.graph.rewriter import Rewriter, in_order


def rewrite(
    graph: fx.Graph, groups: dict[str, dist.ProcessGroup], *, merge_reductions: bool
) -> list[Collective]:
    """Rewrite a joint graph in place.

    Args:
        groups: whose collectives are looked at, by name.
        merge_reductions: replace sums of all-reduces by all-reduces of sums.

    Returns:
        All its collectives, those that it leaves among them.
    """
    if merge_reductions:
        simplify.merge(graph)
    simplify.flatten(graph)
    found = collectives(graph, groups)
    rewriter = Rewriter(graph, groups)
    for one in found:
        one.backward = one.node in rewriter.backward
    scatters = [one for one in found if isinstance(one, Reduction) and one.kind == "reduce-scatter"]
    for one in found:
        if isinstance(one, Gather) and not one.reason:
            _gather(rewriter, one, scatters)
    for one in found:
        if isinstance(one, Reduction) and not one.reason and not one.operator:
            rewriter.attempt(one, lambda one=one: reductions.reduce(rewriter, one))
    for one in found if not rewriter.backward else ():
        if one.kind == "all-reduce" and one.followed and not one.operator:
            rewriter.attempt(
                one, lambda one=one, before=one.reason: norms.normalise(rewriter, one, before)
            )
    rewriter.erase()
    simplify.straighten(graph)
    rewriter.save_no_copies()
    in_order(graph)
    strides.restore(rewriter)
    graph.lint()
    return found


def _gather(rewriter: Rewriter, one: Gather, scatters: Sequence[Reduction]) -> None:
    """Where an activation cannot be had with the products, they are made without it."""
    rewriter.attempt(one, lambda: gathers.gather(rewriter, one, scatters))
    if one.reason and not rewriter.backward:
        why, one.reason = one.reason, ""
        rewriter.attempt(one, lambda: gathers.gather(rewriter, one, scatters, activate=False))
        one.apart = f"an activation stays apart, {why}" if one.operator else ""
