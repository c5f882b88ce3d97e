"""Launches of our own collectives, of kernels/collectives.py."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from counterpoint.errors import InputError
from counterpoint.kernels.collectives import collective_kernel
from counterpoint.plan.bind import BoundStep, Part
from counterpoint.runtime import driver
from counterpoint.runtime.compute import Action
from counterpoint.runtime.fused import FusedMemory, fused_memory
from counterpoint.runtime.fused_call import aligned
from counterpoint.runtime.lanes_cuda import raw_stream
from counterpoint.runtime.resident import resident_blocks
from counterpoint.runtime.workspace import Operands, Places

WORD_BYTES = 4
MAX_RANKS = 32  # that the bits of a fault word name
NUM_WARPS = 4
BLOCKS = (256, 512)  # words of a rank's part that a program takes at a time, of 4 ranks
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
DTYPES_OF_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def refusal(part_bytes: int, ranks: int) -> str:
    """Why parts of this size cannot be sent as words, or ''."""
    if ranks & (ranks - 1) or ranks > MAX_RANKS:
        return f"a number of ranks that is a power of 2 up to {MAX_RANKS}"
    return f"parts of a multiple of {WORD_BYTES} bytes" if part_bytes % WORD_BYTES else ""


def block_of(wide: int, ranks: int) -> int:
    """Words of a rank's part that a program takes at a time: as many in all on more ranks."""
    return wide * 4 // max(ranks, 4)


def action(bound: BoundStep, part: Part, places: Places, tag: int) -> Action:
    """An all-gather or reduce-scatter step of a plan whose transport is words."""
    plan, workspace = places.plan, places.workspace
    source, target = places.of(part.reads[0]), places.of(part.write)
    gather = bound.step.arg("collective") == "all_gather"
    rows, cols = part.reads[0].shape if gather else part.write.shape
    dtype = DTYPES_OF_NAMES[plan.problem.dtype]
    call = Collective(
        fused_memory(workspace), tag, rows * cols * dtype.itemsize, scatter=not gather,
        gather=gather, dtype=dtype, name=plan.problem.op,
    )  # fmt: skip

    def run(operands: Operands) -> None:
        x = source(operands)
        call(x if aligned(x) else x.clone(), target(operands))

    return run


class Collective:
    """One collective of one size, compiled; all ranks make and call it in one order.

    Args:
        memory: of the group.
        tag: that a fault word names it by.
        part_bytes: that each rank owns of the whole.
        scatter: sum over the ranks, of [ranks * part].
        gather: everyone gets the parts of all.
        dtype: that is summed.

    Raises:
        InputError: such parts are no words, or memory has to grow while a graph is captured.
        UnsupportedError: no block fits this GPU.
    """

    def __init__(
        self, memory: FusedMemory, tag: int, part_bytes: int, *, scatter: bool, gather: bool,
        dtype: torch.dtype, name: str,
    ) -> None:  # fmt: skip
        workspace = memory.workspace
        ranks, device = workspace.group.size(), workspace.device
        if want := refusal(part_bytes, ranks):
            raise InputError(name, "x", want=want, got=f"{part_bytes} bytes on {ranks} ranks")
        memory.words.reserve((scatter + gather) * ranks * part_bytes)
        words, part = memory.words, part_bytes // WORD_BYTES
        self._device = device
        self._memory = (words.bases, memory.state, memory.fault)
        self._numbers = (part, words.half_bytes, workspace.rank, tag,
                         int(workspace.timeout_s * 1e9))  # fmt: skip
        self._constants = (ranks, scatter, gather, DTYPES[dtype])
        self.block, self.programs = block_of(BLOCKS[-1], ranks), 1
        self._direct: Callable[..., None] | None = None
        if device.type != "cuda":
            return
        capturing = torch.cuda.is_current_stream_capturing()
        with driver.relaxed_capture() if capturing else nullcontext():
            for wide in BLOCKS:
                self.block = block_of(wide, ranks)
                blocks = max(1, -(-part // self.block))
                compiled = self._compiled()
                self.programs = min(blocks, resident_blocks(compiled, device, name))
                self._direct = compiled[(self.programs, 1, 1)]
                if self.programs == blocks:
                    break

    def __call__(self, source: Tensor, target: Tensor) -> None:
        """Run on the current stream; contiguous tensors at multiples of 16 bytes."""
        if self._direct is not None:  # which takes addresses, whatever lies there
            arguments = self._arguments(source, target)
            self._direct(*arguments, stream=raw_stream(self._device.index))
            return
        source, target = (t.view(-1).view(torch.int32) for t in (source, target))
        kernel: Any = collective_kernel
        kernel[(self.programs,)](*self._arguments(source, target), num_warps=NUM_WARPS)

    def _compiled(self) -> Any:
        some = torch.empty(64, dtype=torch.int32, device=self._device)
        kernel: Any = collective_kernel
        return kernel.warmup(*self._arguments(some, some), grid=(1,), num_warps=NUM_WARPS)

    def _arguments(self, source: Tensor, target: Tensor) -> tuple[Any, ...]:
        last = (*self._constants, self.block, NUM_WARPS)
        return source, target, *self._memory, *self._numbers, *last
