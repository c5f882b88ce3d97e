"""Posting to peers and waiting for them: one warp, one lane per peer, one kernel for all uses.

A post writes the call's epoch into a word of a peer's signal pad; a wait polls words of the own
pad until each has reached it. Epochs are compared by their signed difference, so they may wrap.
The epoch lives in device memory, and the barrier that opens a call advances it: a replayed graph
counts on like an eager call.

A wait that outlasts its bound, or that the host ends because a rank has died, does not trap: it
writes which step and which words are late into pinned host memory and returns. From then on no wait
of this rank waits and no kernel posts, so that the streams drain at once; and the epoch is set far
back, so that what copies still post from it is no signal to anyone: peers give up in their turn.
"""

import triton
import triton.language as tl

from counterpoint.kernels.clock import now_ns
from counterpoint.kernels.peer import ended_by_host

LOOK_EVERY = tl.constexpr(64)  # turns of a wait: the host's word is far away


@triton.jit(do_not_specialize=["num_posts", "num_waits", "step", "timeout_ns"])
def signal_kernel(
    post_ptrs,  # [LANES] int64: addresses of the words to write, on peers' pads
    num_posts,
    wait_ptrs,  # [LANES] int64: addresses of the words to poll, on the own pad
    num_waits,
    epoch_ptr,  # [4] int32: the epoch, whether a wait has given up, address of the host's word
    fault_ptr,  # [1] int64, pinned host memory: 1 + step, and above it the bits of the late words
    step,
    timeout_ns,
    ADVANCE: tl.constexpr,  # this is the barrier that opens the call
    LANES: tl.constexpr,
):
    lanes = tl.arange(0, LANES)
    epoch = tl.load(epoch_ptr)
    works = tl.load(epoch_ptr + 1) == 0
    if ADVANCE:
        epoch += 1
        tl.store(epoch_ptr, epoch, mask=works)

    posting = (lanes < num_posts) & works
    targets = tl.load(post_ptrs + lanes, mask=posting, other=0).to(tl.pointer_type(tl.int32))
    # pairs with the acquire below, on the peers; what it publishes was written by earlier work of
    # this stream. The barrier is for the epoch's own store: one thread writes it, all may post
    tl.debug_barrier()
    tl.atomic_xchg(targets, epoch, mask=posting, sem="release", scope="sys")

    waiting = (lanes < num_waits) & works
    words = tl.load(wait_ptrs + lanes, mask=waiting, other=0).to(tl.pointer_type(tl.int32))
    late = waiting
    start_ns = now_ns()
    spins = 0
    num_late = tl.sum(late.to(tl.int32))
    while num_late > 0:
        # pairs with the release above, on the peers
        seen = tl.atomic_add(words, 0, mask=late, sem="acquire", scope="sys")
        late = late & (seen - epoch < 0)
        num_late = tl.sum(late.to(tl.int32))
        if num_late > 0:
            over = now_ns() - start_ns > timeout_ns
            if spins == LOOK_EVERY - 1:
                over = over | ended_by_host(epoch_ptr + 2)
            spins = (spins + 1) % LOOK_EVERY
            if over:
                tl.store(epoch_ptr + 1, 1)
                tl.store(epoch_ptr, epoch - (1 << 30))
                # one store, so that the host sees both or neither
                bits = tl.sum(tl.where(late, 1 << (lanes % 32), 0).to(tl.int64))
                tl.store(fault_ptr, (bits << 32) | (step + 1))
                num_late = 0
