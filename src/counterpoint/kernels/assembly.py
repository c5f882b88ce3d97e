"""What Triton has no word for: the device clock, prefetches. The one file of inline assembly."""

import time

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    def now_ns():
        """Nanoseconds of the host's clock: kernels are interpreted in this process."""
        return tl.full((), time.monotonic_ns(), tl.int64)

    def prefetch(ptrs):
        """Nothing: an interpreter has no cache."""
else:

    @triton.jit
    def now_ns():
        """Nanoseconds of the GPU's global timer. It ticks coarsely: good for deadlines only."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def prefetch(ptrs):
        """Have the cache line of 128 bytes at each pointer brought to L2, and do not wait for it.

        Args:
            ptrs: tensor of pointers, all of them to memory that may be read.
        """
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
