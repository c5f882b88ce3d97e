"""The device clock, for waits that give up; inline assembly, as in proxy.py."""

import time

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    def now_ns():
        """Nanoseconds of the host's clock: kernels are interpreted in this process."""
        return tl.full((), time.monotonic_ns(), tl.int64)
else:

    @triton.jit
    def now_ns():
        """Nanoseconds of the GPU's global timer. It ticks coarsely: good for deadlines only."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
