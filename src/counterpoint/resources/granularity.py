"""A matmul in several launches, so that its blocks leave the SMs more often.

A persistent matmul's blocks stay to its end, and only then can a collective start; of a matmul in
four launches they leave four times. Every mm and addmm that a call makes is cut, by
TorchDispatchMode: the call stays as it is. The cuts are at whole tiles, where the last wave of each
launch is fullest.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.errors import InputError
from counterpoint.resources.controls import MAX_CHUNKS, Along

TILE = (128, 256)  # of the matmul library's large kernels on sm_90
NUM_SMS = 132


def cuts(
    extent: int, chunks: int, *, tile: int, tiles_across: int, num_sms: int = NUM_SMS
) -> tuple[int, ...]:
    """Where to cut a dim: the borders of the chunks, from 0 to `extent`.

    Each border is a multiple of `tile`, within half a chunk of an equal division; of those, the one
    after which the chunk fills its waves best, then the nearest.

    Args:
        extent: of the dim.
        chunks: at most; fewer where there are not as many tiles.
        tile: extent of a tile along this dim.
        tiles_across: tiles along the other dim.
        num_sms: tiles of a wave.

    Returns:
        Ascending, one more than there are chunks.

    Raises:
        InputError: a number is below 1, or there are more than 16 chunks.
    """
    numbers = {"extent": extent, "tile": tile, "tiles_across": tiles_across, "num_sms": num_sms}
    for name, number in numbers.items():
        if number < 1:
            raise InputError("cuts", name, want=">= 1", got=number)
    if not 1 <= chunks <= MAX_CHUNKS:
        raise InputError("cuts", "chunks", want=f"from 1 to {MAX_CHUNKS}", got=chunks)
    num_tiles = ceil(extent / tile)
    chunks = min(chunks, num_tiles)
    borders = [0]
    for i in range(1, chunks):
        equal, reach = num_tiles * i / chunks, num_tiles / chunks / 2
        least = borders[-1] + 1
        most = num_tiles - (chunks - i)  # a tile for each chunk that is left
        near = [
            t for t in range(least, most + 1) if abs(t - equal) <= reach
        ] or [min(max(round(equal), least), most)]  # fmt: skip

        def idle(t: int, start: int = borders[-1]) -> float:
            work = (t - start) * tiles_across
            return ceil(work / num_sms) * num_sms / work

        borders.append(min(near, key=lambda t: (round(idle(t), 6), abs(t - equal))))
    return tuple(min(border * tile, extent) for border in (*borders, num_tiles))


class Cut(TorchDispatchMode):
    """While it is entered, mm and addmm of 2-D tensors run as several launches.

    The same products are summed; a smaller launch may be another kernel of the library, which may
    round in another order.

    Args:
        chunks: launches of each, at most; 1 only counts them.
        along: "m": rows of the result; "n": its columns.
        num_sms: of the GPU.

    Raises:
        InputError: `along` is neither.
    """

    def __init__(self, chunks: int, along: Along = "m", num_sms: int = NUM_SMS) -> None:
        super().__init__()
        if along not in ("m", "n"):
            raise InputError("Cut", "along", want="'m' or 'n'", got=repr(along))
        self.chunks, self.along, self.num_sms = chunks, along, num_sms
        self.num_matmuls = 0  # that have been seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cut a matmul; pass everything else on."""
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.mm.out):
            operands = args[:2]
        elif func in (aten.addmm.default, aten.addmm.out):
            operands = args[1:3]
        else:
            return func(*args, **kwargs)
        self.num_matmuls += 1
        if self.chunks == 1:
            return func(*args, **kwargs)
        return self._cut(func, args, kwargs, *operands)

    def _cut(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], x: Tensor,
        w: Tensor,
    ) -> Tensor:  # fmt: skip
        (m, _), (_, n) = x.shape, w.shape
        rest = {name: value for name, value in kwargs.items() if name != "out"}
        out = kwargs.get("out")
        if m * n == 0 or (out is not None and out.shape != (m, n)):
            return func(*args, **kwargs)
        if out is None:
            out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        by_rows = self.along == "m"
        # a tile may lie either way; its longer side along the other dim leaves more cuts
        tile, across = min(TILE), ceil((n if by_rows else m) / max(TILE))
        borders = cuts(
            m if by_rows else n, self.chunks, tile=tile, tiles_across=across, num_sms=self.num_sms
        )
        with_bias = len(args) > 2
        for start, stop in zip(borders, borders[1:], strict=False):
            rows, cols = (slice(start, stop), slice(None))[:: 1 if by_rows else -1]
            part = (x[rows], w[:, cols])
            if with_bias:
                bias = args[0]
                # a vector stays one: the library adds it in the epilogue
                mine = bias.expand(m, n)[rows, cols] if bias.dim() > 1 else bias.expand(n)[cols]
                torch.addmm(mine, *part, out=out[rows, cols], **rest)
            else:
                torch.mm(*part, out=out[rows, cols], **rest)
        return out
