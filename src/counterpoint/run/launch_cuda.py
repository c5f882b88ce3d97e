"""Launches of our Triton kernels: signals and the sum that ends a matmul_reduce_scatter."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Action, Operands, Places
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.plan.bind import Arrival, BoundStep, Part
from counterpoint.run.lanes_cuda import CudaLanes

MIN_LANES = 32
REDUCE_BLOCK = 1024  # columns of one program: 16 bytes per thread and load in bf16


def signal(
    lanes: CudaLanes, posts: Sequence[Arrival], waits: Sequence[Arrival], tag: int, *, opens: bool
) -> Callable[[int], None]:
    """One warp that posts, then waits, on the stream (a handle) that it is called with.

    All arguments are constants of the step, so the compiled kernel is launched directly: the
    binder of `kernel[grid](...)` takes three times as long on the host.
    """
    num_lanes = MIN_LANES
    while num_lanes < max(len(posts), len(waits)):
        num_lanes *= 2
    timeout_ns = int(lanes.workspace.timeout_s * 1e9)
    arguments = (lanes.posted_words(posts), len(posts), lanes.awaited_words(waits), len(waits),
                 lanes.epoch, lanes.fault, tag, timeout_ns, opens, num_lanes)  # fmt: skip
    compiled: Any = signal_kernel.warmup(*arguments, grid=(1,), num_warps=1)
    launch: Callable[..., None] = compiled[(1, 1, 1)]

    def run(stream: int) -> None:
        launch(*arguments, stream=stream)

    return run


def compile_signals(lanes: CudaLanes) -> None:
    """Compile and load what every plan launches, so that no rank does so while others wait."""
    for opens in (False, True):
        signal(lanes, (), (), 0, opens=opens)


def reduce(lanes: CudaLanes, bound: BoundStep, part: Part, places: Places) -> Action:
    """The sum kernel. Reads slots and an own partial, in any order, then the bias; each optional.

    Tables hold slot numbers, not addresses: they depend on the plan's form, not on its sizes.
    """
    plan = places.plan
    reads = list(part.reads)
    bias = places.of(reads.pop()) if bound.step.arg("bias") else None
    own_boxes = [box for box in reads if plan.buffer(box.buffer).holds != "slots"]
    own = places.fixed(own_boxes[0]) if own_boxes else None
    slots = [box for box in reads if box not in own_boxes]
    one_buffer = len({box._replace(slot=0) for box in slots}) <= 1
    if len(own_boxes) > 1 or not one_buffer:
        form = "slots of one buffer, an own partial and, last, a bias"
        raise UnsupportedError(f"plan {plan.spec}: on a GPU a reduce reads {form}")
    base = places.fixed(slots[0]._replace(slot=0)) if slots else None
    second = places.fixed(slots[0]._replace(slot=1)) if slots and plan.problem.ranks > 1 else None
    slot_stride = 0
    if base is not None and second is not None:
        slot_stride = (second.data_ptr() - base.data_ptr()) // base.element_size()
    order = lanes.tables.of([-1 if box in own_boxes else box.slot for box in reads])
    target = places.of(part.write)

    def run(operands: Operands) -> None:
        given = bias(operands) if bias else None
        _sum(base, own, slot_stride, order, len(reads), given, target(operands))

    return run


def sum_in_order(lanes: CudaLanes, bound: BoundStep, places: Places) -> Action:
    """A reduce-scatter or an all-reduce by the library's all-to-all and the sum kernel.

    The library itself sums in an order that depends on the size. Of an all-reduce each rank sums
    its share of the rows, and the library gathers the sums.
    """
    p, workspace, (part, *_) = places.plan.problem, places.workspace, bound.parts
    source, target = places.of(part.reads[0]), places.of(part.write)
    calls = library_of(workspace, Awaited(p.op, "take part in a sum", bound.step.name))
    rows, order = p.rows[workspace.rank], lanes.tables.of(range(p.ranks))
    gathers = bound.step.arg("collective") == "all_reduce"

    def run(operands: Operands) -> None:
        x, y = source(operands), target(operands)
        slots = x.new_empty(p.ranks * rows, x.shape[1])
        calls.all_to_all(slots, x, (rows,) * p.ranks, p.rows)
        total = x.new_empty(rows, x.shape[1]) if gathers else y
        if rows:
            _sum(slots[:rows], None, slots[:rows].numel(), order, p.ranks, None, total)
        if gathers and p.equal_rows:
            calls.all_gather(y, total)
        elif gathers:
            calls.gather_rows(y, total, p.row_starts)

    return run


def _sum(
    slots: Tensor | None, own: Tensor | None, stride_slot: int, order: Tensor, num_sources: int,
    bias: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Launch the sum kernel; the first slot stands for all."""
    rows, cols = out.shape
    launch: Any = reduce_kernel  # its constexpr arguments are plain values for the caller
    launch[(rows, -(-cols // REDUCE_BLOCK))](
        out if slots is None else slots, out if own is None else own, out if bias is None else bias,
        out, order, num_sources, rows, cols, stride_slot,
        0 if slots is None else slots.stride(0), 0 if own is None else own.stride(0), out.stride(0),
        HAS_BIAS=bias is not None, BLOCK=REDUCE_BLOCK,
    )  # fmt: skip
