"""The calls of a tensor-parallel step one by one, to see what their kernels take of a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.gpu import driver
from counterpoint.gpu.footprint import Footprint, footprints
from counterpoint.kernels.reduce import reduce_kernel
from counterpoint.kernels.signal import signal_kernel
from counterpoint.run import compute
from counterpoint.run.launch_cuda import MIN_LANES, REDUCE_BLOCK

Shape = tuple[int, int, int]  # M, N, K of the matmul on one GPU
SHAPE: Shape = (8192, 7168, 8192)
ITEM_BYTES = 2  # bf16


def step_footprints(
    shape: Shape, group: dist.ProcessGroup | None = None
) -> list[tuple[str, Footprint]]:
    """Footprints of a bf16 step on the current GPU, each with the name of its call, in order.

    Runs every call once, then captures it. All ranks of `group` call this with equal arguments.

    Args:
        shape: M, N and K of the matmul; the M rows are those of all ranks.
        group: NCCL group whose collectives belong to the step. None: there are none, and the
            kernels of ours are launched as among two ranks.

    Raises:
        UnsupportedError: There is no NVIDIA GPU, or cuda-bindings is not installed.
        CounterpointError: The driver refused a query.
    """
    found: list[tuple[str, Footprint]] = []
    for name, call in _calls(shape, group).items():
        call()  # what is captured must have run before
        torch.cuda.synchronize()
        found += [(name, footprint) for footprint in footprints(call)]
    return found


def fitting_shape(free_bytes: int) -> Shape:
    """The default shape, its rows halved until a step takes no more than half of `free_bytes`."""
    m, n, k = SHAPE
    # two ranks: x, w and y, and beside them half of x and of y
    while m > 1 and ITEM_BYTES * (1.5 * m * (n + k) + n * k) > free_bytes / 2:
        m //= 2
    return m, n, k


def _calls(shape: Shape, group: dist.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    m, n, k = shape
    ranks = group.size() if group else 2
    rows = -(-m // ranks)
    x, w, y = _empty(ranks * rows, k), _empty(k, n), _empty(ranks * rows, n)
    x_shard, y_shard = _empty(rows, k), _empty(rows, n)
    calls: dict[str, Callable[[], object]] = {
        "matmul": lambda: torch.mm(x[:m], w, out=y[:m]),
        "signal": _signal(),
        "reduce": _reduce(y, y_shard, ranks),
        "copy": partial(_copy, x, x_shard),
    }
    if group is not None:
        calls["all-gather"] = partial(compute.all_gather, x, x_shard, group=group)
        calls["reduce-scatter"] = partial(compute.reduce_scatter, y_shard, y, group=group)
    return calls


def _signal() -> Callable[[], object]:
    """Neither posts nor waits: the same code, and no peer needs to be there."""
    words = torch.zeros(2, dtype=torch.int64, device="cuda")
    epoch = torch.zeros(4, dtype=torch.int32, device="cuda")
    fault = torch.zeros(1, dtype=torch.int64).pin_memory()
    launch: Any = signal_kernel  # its constexpr arguments are plain values for the caller
    timeout_ns = 10**9
    arguments = (words, 0, words, 0, epoch, fault, 0, timeout_ns, True, MIN_LANES)
    return lambda: launch[(1,)](*arguments, num_warps=1)


def _reduce(slots: Tensor, out: Tensor, ranks: int) -> Callable[[], object]:
    """The slots of all peers and an own partial, as after the matmul of `ranks` ranks."""
    rows, cols = out.shape
    order = torch.arange(-1, ranks - 1, device=out.device)
    launch: Any = reduce_kernel
    grid = (rows, -(-cols // REDUCE_BLOCK))
    return lambda: launch[grid](
        slots, slots, out, out, order, ranks, rows, cols, rows * cols, cols, cols, cols,
        HAS_BIAS=False, BLOCK=REDUCE_BLOCK,
    )  # fmt: skip


def _copy(target: Tensor, source: Tensor) -> None:
    width = source.numel() * source.element_size()
    copy = driver.Copy(target.data_ptr(), width, source.data_ptr(), width, width, 1)
    driver.copy_async(copy, torch.cuda.current_stream().cuda_stream)


def _empty(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
