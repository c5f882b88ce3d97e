"""Device functions of our kernels with a fault planted each: what a test must see."""

import triton
import triton.language as tl

from counterpoint.kernels.peer import EMPTY


@triton.jit
def post_relaxed(flag_ptrs, epoch, mask=None):
    """`post` that publishes nothing of what stands before it."""
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def take_and_leave(word_ptrs, stop_ptr, timeout_ns, mask=None, NUM_WARPS: tl.constexpr = 4):
    """`take_words` that does not empty them: those of an earlier call look like this one's."""
    words = tl.load(word_ptrs, mask=mask, other=0, volatile=True)
    while tl.max((mask & (words == EMPTY)).to(tl.int32)) > 0:
        words = tl.load(word_ptrs, mask=mask, other=0, volatile=True)
    return words, mask & False


@triton.jit
def same_epoch(epoch):
    """`next_epoch` that does not count: flags of the call before look like this one's."""
    return tl.where(epoch == 0, 1, epoch)


@triton.jit
def post_too_few(flag_ptrs, epoch, mask=None):
    """`post` that leaves out its last flag."""
    last = tl.max(flag_ptrs.to(tl.int64), 0)
    tl.atomic_xchg(flag_ptrs, epoch, mask=mask & (flag_ptrs.to(tl.int64) < last), sem="release",
                   scope="sys")  # fmt: skip


@triton.jit
def is_last_relaxed(count_ptr, programs):
    """`is_last` that publishes nothing of what stands before it."""
    return tl.atomic_add(count_ptr, 1, sem="relaxed", scope="gpu") == programs - 1


@triton.jit
def is_last_always(count_ptr, programs):
    """`is_last` by which each program takes itself for the last one."""
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") < programs


@triton.jit
def is_last_when_all_are_there(count_ptr, programs):
    """`is_last` of a kernel whose programs all stay until the last one comes."""
    tl.debug_barrier()
    place = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    seen = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    while seen < programs:
        seen = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    return place == programs - 1
