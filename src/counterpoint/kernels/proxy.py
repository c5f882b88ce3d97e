"""A fence between what a peer's threads have stored and what TMA reads: inline assembly."""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    @triton.jit
    def through_tma():
        """Nothing: the interpreter has one way to memory."""
        return 0
else:

    @triton.jit
    def through_tma():
        """Let TMA loads that follow see what this block has acquired; after a barrier."""
        return tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
