"""Launches of our Triton kernels: signals and the sum that ends a matmul_reduce_scatter."""

from collections.abc import Callable, Sequence
from typing import Any

from counterpoint.errors import UnsupportedError
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.plan.bind import Arrival, BoundStep, Part
from counterpoint.runtime.compute import Action
from counterpoint.runtime.lanes_cuda import CudaLanes
from counterpoint.runtime.workspace import Operands, Places

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
    """The sum kernel. Reads, in order: slots, own partial, bias; each optional.

    Tables hold slot numbers, not addresses: they depend on the plan's form, not on its sizes.
    """
    plan = places.plan
    reads = list(part.reads)
    bias = places.of(reads.pop()) if bound.step.arg("bias") else None
    holds = [plan.buffer(box.buffer).holds for box in reads]
    own = places.fixed(reads.pop()) if reads and holds[-1] != "slots" else None
    slots = [box for box in reads if plan.buffer(box.buffer).holds == "slots"]
    one_buffer = len({box._replace(slot=0) for box in slots}) <= 1
    if len(slots) < len(reads) or not one_buffer:
        form = "slots of one buffer, an own partial and a bias, in this order"
        raise UnsupportedError(f"plan {plan.spec}: on a GPU a reduce reads {form}")
    base = places.fixed(slots[0]._replace(slot=0)) if slots else None
    second = places.fixed(slots[0]._replace(slot=1)) if slots and plan.problem.ranks > 1 else None
    slot_stride = 0
    if base is not None and second is not None:
        slot_stride = (second.data_ptr() - base.data_ptr()) // base.element_size()
    order = lanes.tables.of([box.slot for box in slots])
    rows, cols = part.write.shape
    target = places.of(part.write)
    grid = (rows, -(-cols // REDUCE_BLOCK))

    launch: Any = reduce_kernel  # its constexpr arguments are plain values for the caller

    def run(operands: Operands) -> None:
        out = target(operands)
        launch[grid](
            base if base is not None else out,
            own if own is not None else out,
            bias(operands) if bias else out,
            out, order, len(slots), rows, cols, slot_stride,
            base.stride(0) if base is not None else 0,
            own.stride(0) if own is not None else 0,
            out.stride(0), HAS_OWN=own is not None,
            HAS_BIAS=bias is not None, BLOCK=REDUCE_BLOCK,
        )  # fmt: skip

    return run
