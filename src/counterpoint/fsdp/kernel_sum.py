"""out = (parts[0] + parts[1] + ...) * scale, in fp32 and in rank order.

The parts are gradients that ranks have pushed.

Each rank says beside its part which parameters' gradients are in it. Where two ranks say different
things the sum would be of other things than the user means: it is NaN, and the host is told.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["group", "scale", "rank"])
def sum_kernel(
    parts_ptr,  # [RANKS, stride], of the gradients' dtype: what each rank pushed
    out_ptr,  # [n], of the shards' dtype
    n,
    stride,
    scale,  # torch divides on a GPU by the inverse, too
    masks_ptr,  # [RANKS, WORDS] int32: which gradients each rank has pushed, a bit a parameter
    rank,
    fault_ptr,  # [2 + WORDS] int32, pinned host memory: 1 + group, the other rank, bits that differ
    group,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    words = tl.arange(0, WORDS)
    mine = tl.load(masks_ptr + rank * WORDS + words)
    poison = 0.0
    for r in tl.static_range(RANKS):
        other = mine ^ tl.load(masks_ptr + r * WORDS + words)
        if tl.max((other != 0).to(tl.int32)) > 0:
            poison = float("nan")
            if tl.program_id(0) == 0:
                tl.store(fault_ptr + 2 + words, other)
                tl.store(fault_ptr + 1, r)
                tl.store(fault_ptr, group + 1)

    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    part = tl.cast(stride, tl.int64)  # RANKS of them are more than 2**31
    for r in tl.static_range(RANKS):
        total += tl.load(parts_ptr + r * part + at, mask=inside, other=0.0).to(tl.float32)
    total = total * scale + poison
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
