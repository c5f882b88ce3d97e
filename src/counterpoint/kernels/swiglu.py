"""SwiGLU of experts' rows, silu(gate) * up, over the rows that there are.

Results have room for more rows than come, and the GPU alone knows how many these are: programs
share the rows that the counts of this rank's experts add up to. Rows beyond are neither read nor
written: the matmuls before and behind leave them out in the same way.
"""

import triton
import triton.language as tl


@triton.jit
def rows_here(
    counts_ptr, E, rank, room, WORLD: tl.constexpr, EXPERTS: tl.constexpr, COUNTED: tl.constexpr
):
    """How many rows this rank's experts have, of [WORLD, E] counts; all of `room` if not COUNTED.

    Args:
        EXPERTS: at least E / WORLD, a power of 2.
    """
    rows = room
    if COUNTED:
        local = E // WORLD
        experts = tl.arange(0, EXPERTS)
        found = tl.zeros((EXPERTS,), tl.int32)
        for source in tl.static_range(WORLD):
            at = counts_ptr + source * E + rank * local + experts
            found += tl.load(at, mask=experts < local, other=0).to(tl.int32)
        rows = min(room, tl.sum(found))
    return rows


@triton.jit(do_not_specialize=["room"])
def swiglu_kernel(
    gate_up_ptr,  # [room, 2 N]
    counts_ptr,  # [WORLD, E] int32 or int64; of COUNTED
    y_ptr,  # [room, N]
    room,
    E,
    rank,
    N,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """silu(gate) * up, in fp32, rounded once."""
    rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS, COUNTED)
    blocks = tl.cdiv(N, BLOCK_N)
    for unit in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        cols = unit % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        at, live = gate_up_ptr + row * 2 * N + cols, cols < N
        gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(at + N, mask=live, other=0.0).to(tl.float32)
        y = gate / (1 + tl.exp(-gate)) * up
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["room"])
def swiglu_gradient_kernel(
    dy_ptr,  # [room, N]
    gate_up_ptr,  # [room, 2 N]
    counts_ptr,  # as above
    dgate_up_ptr,  # [room, 2 N]
    room,
    E,
    rank,
    N,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients of gate and of up, side by side as they are."""
    D: tl.constexpr = dgate_up_ptr.dtype.element_ty
    rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS, COUNTED)
    blocks = tl.cdiv(N, BLOCK_N)
    for unit in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        cols = unit % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        at, live = row * 2 * N + cols, cols < N
        gate = tl.load(gate_up_ptr + at, mask=live, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + N, mask=live, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
        share = 1 / (1 + tl.exp(-gate))
        dgate = dy * up * share * (1 + gate * (1 - share))
        tl.store(dgate_up_ptr + at, dgate.to(D), mask=live)
        tl.store(dgate_up_ptr + at + N, (dy * gate * share).to(D), mask=live)
