"""What else could have been taken where experts run in one kernel: the kernels launched by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from counterpoint.plan.expert_tiles import Tile, tile_of
from experts_layer import DIRECTIONS, Case, Layer
from torch import Tensor

from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch_experts import (
    AllToAllMatmul,
    MatmulAllToAll,
    Sending,
    sending_of,
)
from counterpoint.runtime.workspace import workspace_of

ABLATED = tuple(f"{op} DeepSeek-V3 {tokens} uniform" for op in DIRECTIONS for tokens in (4096, 256))
SKEWED = tuple(f"all_to_all_matmul {model} {tokens} skewed"
               for model in ("DeepSeek-V3", "Qwen3-235B") for tokens in (1024, 256))  # fmt: skip


class Other(NamedTuple):
    """What could have been taken instead.

    Args:
        collects: whether a last kernel takes the rows out of the memory that peers write to. Where
            it does not, they stay until the next call but one: no result for a user.
    """

    tile: Tile
    way: Sending
    collects: bool = True


def by_hand(
    layer: Layer, group: dist.ProcessGroup, device: torch.device, other: Other
) -> Callable[[int], Tensor]:
    """The kernels with another tile, or another way to send."""
    memory, case = fused_memory(workspace_of(group, device)), layer.case
    sizes = (memory, 0, layer.experts, layer.limit, case.k, case.n, torch.bfloat16, other.tile)
    if layer.there:
        call: Any = AllToAllMatmul(*sizes, other.way)
    else:
        call = MatmulAllToAll(*sizes)
    y = torch.empty(layer.limit, case.n, device=device, dtype=torch.bfloat16)
    assert memory.tiles.memory is not None
    mine = memory.tiles.memory.local()

    def run(_: int) -> Tensor:
        call(layer.given, layer.w, layer.on_device, len(layer.given), y)
        return y

    def stays(_: int) -> Tensor:
        call(layer.given, layer.w, layer.on_device, len(layer.given))
        if torch.cuda.is_current_stream_capturing():
            return y
        half = (int(memory.state[0]) & 1) * call.half_bytes
        return mine[half : half + y.nbytes].view(y.dtype).view(y.shape)

    return run if other.collects else stays


def ablations(case: Case, ranks: int) -> dict[str, Other]:
    """What else could have been taken: tiles, and how rows are sent, senders and parts."""
    if case.text not in (*ABLATED, *SKEWED):
        return {}
    local, back = case.model.experts, case.op == "matmul_all_to_all"
    rows = int(case.counts(ranks).view(ranks, ranks, local).sum((0, 2)).max())  # as the operator
    tile, way = tile_of(rows, case.k, case.n, local, back=back), sending_of(rows, local, ranks)
    found: dict[str, Other] = {}
    if case.text in SKEWED:
        small = Tile(64, 256, 64, 4, 4)
        found[named(small)] = Other(small, way)
        found |= {"16 senders": Other(tile, replace(way, senders=16))} if way.senders > 16 else {}
    if case.text not in ABLATED:
        return found
    tiles = (Tile(), Tile(stages=3), Tile(128, 128, 64, 4, 4), Tile(64, 256, 64, 4, 4))
    found |= {named(t): Other(t, way) for t in tiles if t != tile}
    if back:
        return found | {"without the last kernel": Other(tile, way, collects=False)}
    found |= {f"{n} senders": Other(tile, replace(way, senders=n)) for n in (8, 16, 24, 32, 48)
              if n != way.senders}  # fmt: skip
    return found | {f"{n} parts": Other(tile, replace(way, parts=n))
                    for n in (way.parts // 2, way.parts * 2)}  # fmt: skip


def named(tile: Tile) -> str:
    """A tile, of a line."""
    return f"tile {tile.block_m}x{tile.block_n}x{tile.stages}"
