"""Two kernels whose blocks write down which SM they ran on and when, and what these stamps say of
the blocks that were resident side by side.

One is a matmul with a persistent grid. The other one is an all-gather that stores to its peers; it
has few registers, and as many blocks as it is launched with.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from counterpoint.device import barrier, end_of_call, next_epoch, peer_ptr, put
from counterpoint.kernels.clock import now_ns

WORDS = 3  # int64 of a block: SM, nanoseconds at its start and at its end

if triton.knobs.runtime.interpret:

    @triton.jit
    def sm_id():
        """The host is one SM."""
        return 0
else:

    @triton.jit
    def sm_id():
        """The number of the SM that this block runs on, to its end."""
        return tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def stamp(stamps_ptr, start_ns):
    """Write down this block's SM, start and end; call it last.

    Args:
        stamps_ptr: [programs, WORDS] int64.
        start_ns: `now_ns()` of its start.
    """
    tl.debug_barrier()  # its other warps have ended, too
    own_ptr = stamps_ptr + tl.program_id(0) * 3
    tl.store(own_ptr, sm_id())
    tl.store(own_ptr + 1, start_ns)
    tl.store(own_ptr + 2, now_ns())


@triton.jit
def stamped_matmul_kernel(
    x_ptr,  # [M, K]
    w_ptr,  # [K, N]
    y_ptr,  # [M, N]
    stamps_ptr,  # [programs, 3] int64
    M,
    N,
    K,  # a multiple of BLOCK_K; M and N of their tiles
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    start_ns = now_ns()
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        offs_m = (tile % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        offs_n = (tile // num_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
        w_ptrs = w_ptr + offs_k[:, None] * N + offs_n[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, K, BLOCK_K):
            acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * N
        y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty))
    stamp(stamps_ptr, start_ns)


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def stamped_gather_kernel(
    source_ptr,  # [numel]
    outs_ptr,  # [WORLD] int64: where each rank's [WORLD, numel] begins
    stamps_ptr,  # [programs, 3] int64
    numel,
    bases_ptr,
    half_bytes,
    flags_at,
    state_ptr,
    fault_ptr,
    rank,
    tag,
    timeout_ns,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start_ns = now_ns()
    DTYPE: tl.constexpr = source_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = next_epoch(tl.load(state_ptr))
    for block in range(program, tl.cdiv(numel, BLOCK), programs):
        offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = offs < numel
        values = tl.load(source_ptr + offs, live)
        for step in range(WORLD):  # the own part last
            to = (rank + 1 + step) % WORLD
            place = tl.cast(rank, tl.int64) * numel + offs
            put(peer_ptr(outs_ptr, to, 0, DTYPE) + place, values, live)
    flags = (epoch & 1).to(tl.int64) * half_bytes + flags_at + program * WORLD * 4
    # pairs with the same block's barrier on each rank: what it has stored here is there
    late = barrier(bases_ptr, flags, rank, epoch, state_ptr + 2, timeout_ns, WORLD)
    ranks = tl.arange(0, WORLD)
    end_of_call(late.to(tl.int32), ranks, programs, state_ptr, fault_ptr, tag)
    stamp(stamps_ptr, start_ns)


class Stay(NamedTuple):
    """A block: its SM, and from when to when it was there."""

    sm: int
    start_ns: int
    end_ns: int


class Together(NamedTuple):
    """What stamps of two kernels say.

    Args:
        pairs: a block of one and a block of the other, on one SM at one time.
        blocks: of the other kernel, that had any block of the first one beside them.
        share: of the time of the other kernel's blocks, in which they had.
    """

    pairs: int
    blocks: int
    share: float


def stays(stamps: Tensor) -> list[Stay]:
    """The blocks of a kernel that have run.

    Args:
        stamps: int64 [programs, WORDS], zero before.
    """
    return [stay for stay in map(Stay._make, stamps.tolist()) if stay.end_ns]


def together(one: Iterable[Stay], other: Sequence[Stay]) -> Together:
    """Which blocks of `other` were resident on an SM beside blocks of `one`, and for how long."""
    on: dict[int, list[Stay]] = {}
    for stay in sorted(one, key=lambda stay: stay.start_ns):
        on.setdefault(stay.sm, []).append(stay)
    pairs = blocks = shared_ns = 0
    for stay in other:
        spans = [
            (max(stay.start_ns, each.start_ns), min(stay.end_ns, each.end_ns))
            for each in on.get(stay.sm, ())
        ]
        spans = [(start, end) for start, end in spans if start < end]
        pairs += len(spans)
        blocks += bool(spans)
        reached = stay.start_ns
        for start, end in spans:  # by their starts: what two of them cover counts once
            shared_ns += max(0, end - max(start, reached))
            reached = max(reached, end)
    whole_ns = sum(stay.end_ns - stay.start_ns for stay in other)
    return Together(pairs, blocks, shared_ns / whole_ns if whole_ns else 0.0)
