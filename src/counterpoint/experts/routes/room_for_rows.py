"""Room for the rows of a layer of experts where nobody has said how many may come: for all.

Ranks bring as many tokens as they like. Their hosts tell each other how many, through memory of the
node or the store, and wait for each other there, but never for a device. All lists are then as long
as the longest, and somewhat longer, so that calls of other lengths find plans that are there.
"""

import os
from functools import lru_cache
from typing import NamedTuple

import torch

from counterpoint.experts.routes.launch import takes
from counterpoint.group.workspace import Workspace
from counterpoint.ops.agreement import captures, tell, tell_number

OP = "ExpertParallelMLP"
LAYERS = 8  # of a model, that keep what they need for their backward at once


class Layer(NamedTuple):
    """What all ranks must have alike of a layer in a call.

    Args:
        features: of a token.
        hidden: of an expert.
        experts: of all ranks.
        top_k: of a token.
        dtype: that is computed in.
    """

    features: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype


class Room(NamedTuple):
    """What a call has room for.

    Args:
        tokens: of each rank.
        rows: by expert, on each rank: as many as can come.
    """

    tokens: int
    rows: int


def room_for(
    layer: Layer, tokens: int, workspace: Workspace, fits: dict[tuple[Layer, int], bool]
) -> Room | None:
    """Room for all rows that can come in a call; None where memory is short of it.

    All ranks find the same. Where a graph is being captured it is taken to fit: a call before has
    had it.

    Args:
        tokens: of this rank.
        fits: what ranks have found together, kept by the layer: what others of a model hold by its
            first call is not free any more.

    Raises:
        InputError: ranks differ in the layer.
        PeerTimeoutError: a rank did not come.
    """
    facts, device, ranks = _facts(layer), workspace.device, workspace.board.ranks
    most = rounded(max(tell_number(OP, facts, workspace, tokens)))
    rows = max(1, ranks * most * min(layer.top_k, layer.experts // ranks))
    key = layer, most
    if key not in fits and not captures(device):
        asks = facts | {"asks for": "memory"}  # who has asked before is told apart
        free_bytes = min(tell(OP, asks, workspace, _free_bytes(device)))
        once = takes(device, layer.experts, layer.top_k)
        fits[key] = num_bytes(layer, rows, ranks * most if once else rows) <= free_bytes
    return Room(most, rows) if fits.get(key, True) else None


@lru_cache(maxsize=1024)
def _facts(layer: Layer) -> dict[str, str]:
    return {"op": OP} | {name: str(value) for name, value in layer._asdict().items()}


def rounded(tokens: int) -> int:
    """As many or somewhat more: a multiple of an eighth to a sixteenth of it."""
    step = 1 << max(tokens.bit_length() - 4, 0)
    return -(-tokens // step) * step


def num_bytes(layer: Layer, rows: int, kept: int) -> int:
    """Memory of a forward and a backward with that many rows by expert, in a model of LAYERS.

    Each layer keeps what has come, tokens or a row for each of their experts (1 features), and of
    rows gate, up and what is between the matmuls (3 hidden). One backward at a time has more beside
    them. Of features: the gradients that come to rows, without and with their weights, or the rows
    themselves (2), and the products before they are summed (1). Of hidden: the gradients of gate
    and up (2), and of what is between, without and with weights (2). Peers write to two halves of
    symmetric memory (2 features), which layers share.

    Args:
        kept: rows or tokens that a layer keeps.
    """
    once = rows * (5 * layer.features + 4 * layer.hidden)
    of_layer = kept * layer.features + rows * 3 * layer.hidden
    return (LAYERS * of_layer + once) * layer.dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    """What a rank can allocate, without waiting for its GPU."""
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
