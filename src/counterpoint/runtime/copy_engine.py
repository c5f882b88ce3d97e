"""Copy steps on the copy engine: what is copied where, as addresses, ready to be enqueued."""

from collections.abc import Callable, Sequence

from torch import Tensor

from counterpoint.plan.bind import BoundStep, Box
from counterpoint.problem import ITEM_BYTES
from counterpoint.runtime import driver
from counterpoint.runtime.driver import Copy
from counterpoint.runtime.workspace import Operands, Places

Address = Callable[[Operands], int]
Enqueue = Callable[[Operands, int, bool], None]  # operands, stream handle, capturing


def copies(bound: BoundStep, places: Places, posts: Sequence[Copy]) -> Enqueue:
    """Enqueue all parts of a copy step, and behind them its signals.

    Parts are one batch where that can be, and so ready together: signals follow the last of them.
    A signal is a copy of the epoch word into a peer's pad. 4xH200, 2026-11: it adds 1 us to a
    4 MiB push, a kernel in its place 8 to 9 us.
    """
    parts = [_part(part.reads[0], part.write, places) for part in bound.parts]

    def enqueue(operands: Operands, stream: int, capturing: bool) -> None:
        ready = [Copy(t(operands), tp, s(operands), sp, w, h) for t, tp, s, sp, w, h in parts]
        driver.copies_async(ready, stream, capturing=capturing)
        driver.copies_async(posts, stream, capturing=capturing)

    return enqueue


def _part(source: Box, target: Box, places: Places) -> tuple[Address, int, Address, int, int, int]:
    """Target address and pitch, source address and pitch, width and height in bytes and rows."""
    item_bytes = ITEM_BYTES[places.plan.buffer(source.buffer).dtype]
    rows, cols = source.shape
    read, read_pitch, read_dense = _side(source, places, item_bytes)
    write, write_pitch, write_dense = _side(target, places, item_bytes)
    if (read_dense and write_dense) or rows == 1:
        width = rows * cols * item_bytes
        return write, width, read, width, width, 1
    return write, write_pitch, read, read_pitch, cols * item_bytes, rows


def _side(box: Box, places: Places, item_bytes: int) -> tuple[Address, int, bool]:
    """Address, pitch, and whether the rows of the box follow one another without a gap."""
    fixed = places.fixed(box)
    width = places.plan.buffer(box.buffer).shape[1]
    pitch = width * item_bytes
    dense = box.c1 - box.c0 == width
    if fixed is not None:
        address = _pointer(fixed)
        return (lambda _: address), pitch, dense
    offset = box.r0 * pitch + box.c0 * item_bytes  # operands that copies read are contiguous
    return (lambda operands: operands[box.buffer].data_ptr() + offset), pitch, dense


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
