"""Which rows are dropped where more come to a rank than it takes: those of the least weights.

All ranks know the experts and weights of all tokens then, and each finds the same, on its device.
"""

import torch
from torch import Tensor

from counterpoint.experts.routes.lists import NONE


def drop_least(told: Tensor, ranks: int, num_experts: int, max_rows: int) -> Tensor:
    """Put NONE in place of experts whose rows are dropped; how many that are on each rank.

    A rank keeps the max_rows rows of the greatest weights, and of equal ones those that come first:
    by source rank, by token, by the token's order of experts. NaN is above all.

    Args:
        told: int32 [ranks * tokens, 2 * top], experts and the bits of fp32 weights of all tokens.

    Returns:
        int64 [ranks].
    """
    ids, bits = told.chunk(2, 1)
    named = ids.flatten()
    weights = bits.contiguous().view(torch.float32).flatten() + 0.0  # -0 is as 0
    owner = (named // (num_experts // ranks)).clamp_(max=ranks)
    order = weights.sort(descending=True, stable=True).indices
    owner, by_owner = owner[order].sort(stable=True)
    order = order[by_owner]
    edges = torch.arange(ranks + 1, device=told.device, dtype=owner.dtype)
    starts = torch.searchsorted(owner, edges)  # the last one is of NONE
    place = torch.arange(len(named), device=told.device) - starts[owner]
    gone = (place >= max_rows) & (owner < ranks)
    named = named.scatter(0, order, named[order].masked_fill_(gone, NONE))
    ids.copy_(named.view(ids.shape))
    return (starts.diff() - max_rows).clamp_(min=0)
