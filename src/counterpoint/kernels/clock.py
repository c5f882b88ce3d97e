"""The device clock, for waits that give up. The one file with inline assembly."""

import triton
import triton.language as tl


@triton.jit
def now_ns():
    """Nanoseconds of the GPU's global timer. It ticks coarsely: good for deadlines only."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
