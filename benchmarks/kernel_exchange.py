"""All-gather and all-to-all as stores to the peers: what copy engines do, by SMs.

The kernel neither waits nor posts: a meeting of all ranks stands before it, and signals behind it.
When to choose it: for chunks too small for a copy engine's start, where SMs are free.
"""

import triton
import triton.language as tl

from counterpoint.kernels.peer import peer_ptr


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(
    source_ptr,  # int32: [part] of an all-gather, [ranks * part] of an all-to-all
    bases_ptr,  # [ranks] int64: where each rank's target begins, [ranks * part] words
    rank,
    ranks,
    part,  # words that go to each rank; 16 divides it where loads and stores are to be wide
    source_stride,  # words from what goes to one rank to what goes to the next: 0 or part
    BLOCK: tl.constexpr,
):
    """Store this rank's part into every rank's target, at the place of this rank.

    A program goes on to the next peer at each block: all links are used at a time, evenly, and
    no two ranks can meet on one of them for long, whoever is late.
    """
    own = tl.cast(rank, tl.int64) * part
    stores = tl.cdiv(part, BLOCK) * ranks
    i = tl.program_id(0)
    while i < stores:
        to = (rank + 1 + i % ranks) % ranks  # the next rank first, the own part last
        offs = (i // ranks) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < part
        words = tl.load(source_ptr + (to.to(tl.int64) * source_stride + offs), mask=mask)
        target = peer_ptr(bases_ptr, to, 0, tl.int32)
        tl.store(target + (own + offs), words, mask=mask)
        i += tl.num_programs(0)
