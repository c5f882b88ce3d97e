"""Copy steps on the copy engine: what is copied where, as addresses, ready to be enqueued."""

from collections.abc import Callable, Sequence

from torch import Tensor

from counterpoint.experts.steps_counted import boxes
from counterpoint.gpu import driver
from counterpoint.gpu.driver import Copy
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box
from counterpoint.plan.launches import Run, runs
from counterpoint.problem import ITEM_BYTES

Address = Callable[[Operands], int]
# target and its pitch, source and its pitch, width and height: of a Copy, in bytes and rows
Strided = tuple[Address, int, Address, int, int, int]
Enqueue = Callable[[Operands, int, bool], None]  # operands, stream handle, capturing

MAX_PITCH_BYTES = (1 << 31) - 1  # what CUDA says of every device


def copies(bound: BoundStep, places: Places, posts: Sequence[Copy]) -> Enqueue:
    """Enqueue all parts of a copy step, and behind them its signals.

    Parts equally far apart are one strided copy. Copies are one batch where that can be, and so
    ready together: signals follow the last of them.
    A signal is a copy of the epoch word into a peer's pad. 4xH200, 2026-11: it adds 1 us to a
    4 MiB push, a kernel in its place 8 to 9 us.
    """
    if bound.step.counted:
        return _counted(bound, places, posts)
    parts = [part for run in runs(bound, places.plan) for part in _of_run(run, places)]

    def enqueue(operands: Operands, stream: int, capturing: bool) -> None:
        ready = [Copy(t(operands), tp, s(operands), sp, w, h) for t, tp, s, sp, w, h in parts]
        driver.copies_async(ready, stream, capturing=capturing)
        driver.copies_async(posts, stream, capturing=capturing)

    return enqueue


def _counted(bound: BoundStep, places: Places, posts: Sequence[Copy]) -> Enqueue:
    """The copies of a step whose rows an operand of a call says."""
    found, item_bytes = boxes(bound, places), places.plan.problem.item_bytes
    bases: dict[tuple[int, str], int] = {}

    def base(box: Box) -> int:
        """Where a buffer of the workspace begins."""
        key, (rows, cols) = (box.rank, box.buffer), places.plan.buffer(box.buffer).shape
        if key not in bases:
            whole = places.fixed(Box(box.rank, box.buffer, 0, 0, rows, 0, cols))
            assert whole is not None, "an operand that a call lacks"
            bases[key] = whole.data_ptr()
        return bases[key]

    def enqueue(operands: Operands, stream: int, capturing: bool) -> None:
        def address(box: Box) -> tuple[int, int]:
            """Where a box begins, and the bytes of a row there; operands have no gaps."""
            own = operands.get(box.buffer)
            start = base(box) if own is None else own.data_ptr()
            width = places.plan.buffer(box.buffer).shape[1]
            return start + (box.r0 * width + box.c0) * item_bytes, width * item_bytes

        ready: list[Copy] = []
        for source, target in found(operands):
            (read, read_pitch), (write, write_pitch) = address(source), address(target)
            rows, width = source.r1 - source.r0, (source.c1 - source.c0) * item_bytes
            if read_pitch == write_pitch == width:
                rows, width = 1, rows * width
            ready.append(Copy(write, write_pitch, read, read_pitch, width, rows))
        driver.copies_async(ready, stream, capturing=capturing)
        driver.copies_async(posts, stream, capturing=capturing)

    return enqueue


def _of_run(run: Run, places: Places) -> list[Strided]:
    """A run as one copy, whose rows are its parts; as its parts where a pitch is too large."""
    part, rows = run.part, run.part.write.shape[0]
    one = _part(part.reads[0], part.write, places)
    if run.times == 1:
        return [one]
    target, _, source, _, width, _ = one
    pitches = [step * (width // rows) for step in (run.write_step, run.read_step)]
    if max(pitches) <= MAX_PITCH_BYTES:
        return [(target, pitches[0], source, pitches[1], width, run.times)]
    return [
        _part(
            _below(part.reads[0], i * run.read_step), _below(part.write, i * run.write_step), places
        )
        for i in range(run.times)
    ]


def _below(box: Box, rows: int) -> Box:
    return box._replace(r0=box.r0 + rows, r1=box.r1 + rows)


def _part(source: Box, target: Box, places: Places) -> Strided:
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
        address, pitch = _pointer(fixed), fixed.stride(0) * item_bytes
        return (lambda _: address), pitch, pitch == (box.c1 - box.c0) * item_bytes
    offset = box.r0 * pitch + box.c0 * item_bytes  # operands that copies read are contiguous
    return (lambda operands: operands[box.buffer].data_ptr() + offset), pitch, dense


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
