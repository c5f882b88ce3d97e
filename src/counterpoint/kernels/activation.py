"""Activations behind a matmul: of its products as they are stored, in fp32, rounded once.

    relu(h) = max(h, 0)    silu(h) = h sigmoid(h)    gelu(h) = h (1 + erf(h / sqrt(2))) / 2
    gelu_tanh: gelu approximated by tanh    gated: activation(h) up, of two products

`activated` is for kernels that hold a tile of products. The kernels here are for products that are
in memory, and for gradients. Experts' gate and up lie side by side, with room for more rows than
come, and the GPU alone knows how many these are: programs share the rows that the counts of this
rank's experts add up to. Rows beyond are neither read nor written: the matmuls before and behind
leave them out in the same way.
"""

import triton
import triton.language as tl

GELU = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TANH = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi): tanh(z) is 2 sigmoid(2 z) - 1
CUBE = tl.constexpr(0.044715)


@triton.jit
def activated(h, NAME: tl.constexpr):
    """The activation of a tile in fp32; NaN stays NaN."""
    if NAME == "relu":
        y = tl.where(h < 0, 0.0, h)
    elif NAME == "silu":
        y = h * tl.sigmoid(h)
    elif NAME == "gelu":
        y = 0.5 * h * (1 + tl.erf(h * GELU))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        y = h * tl.sigmoid(TANH * (h + CUBE * h * h * h))
    return y


@triton.jit
def slope(h, NAME: tl.constexpr):
    """The derivative of `activated`."""
    if NAME == "relu":
        y = tl.where(h > 0, 1.0, tl.where(h <= 0, 0.0, h))
    elif NAME == "silu":
        part = tl.sigmoid(h)
        y = part * (1 + h * (1 - part))
    elif NAME == "gelu":
        y = 0.5 * (1 + tl.erf(h * GELU)) + h * DENSITY * tl.exp(-0.5 * h * h)
    else:
        part = tl.sigmoid(TANH * (h + CUBE * h * h * h))
        y = part * (1 + h * (1 - part) * TANH * (1 + 3 * CUBE * h * h))
    return y


@triton.jit
def rows_here(counts_ptr, E, rank, room, WORLD: tl.constexpr, EXPERTS: tl.constexpr):
    """How many of `room` rows this rank's experts have, of [WORLD, E] counts.

    Args:
        EXPERTS: at least E / WORLD, a power of 2; 0: nobody counts, and there are `room`.
    """
    rows = room
    if EXPERTS > 0:
        local = E // WORLD
        experts = tl.arange(0, EXPERTS)
        found = tl.zeros((EXPERTS,), tl.int32)
        for source in tl.static_range(WORLD):
            at = counts_ptr + source * E + rank * local + experts
            found += tl.load(at, mask=experts < local, other=0).to(tl.int32)
        rows = min(room, tl.sum(found))
    return rows


@triton.jit
def activate(h_ptrs, up_ptrs, y_ptrs, mask, NAME: tl.constexpr, GATED: tl.constexpr):
    y = activated(tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32), NAME)
    if GATED:
        y *= tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def differentiate(
    h_ptrs, up_ptrs, dy_ptrs, dh_ptrs, dup_ptrs, mask, NAME: tl.constexpr, GATED: tl.constexpr
):
    D: tl.constexpr = dh_ptrs.dtype.element_ty
    h = tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    dh = dy * slope(h, NAME)
    if GATED:
        dh *= tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dh_ptrs, dh.to(D), mask=mask)
    if GATED:
        tl.store(dup_ptrs, (dy * activated(h, NAME)).to(D), mask=mask)


@triton.jit(do_not_specialize=["room"])
def activation_kernel(
    h_ptr,  # [N], without gaps as all others; of SIDE [room, 2 N], up behind it in each row
    up_ptr,  # [N], where GATED and not SIDE
    y_ptr,  # [N], it may be h; of SIDE [room, N]
    counts_ptr,  # [WORLD, E] int32 or int64; where EXPERTS > 0
    room,
    N,
    E,
    rank,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has a block of N; of SIDE all programs share the blocks of the rows."""
    if SIDE:
        rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS)
        blocks = tl.cdiv(N, BLOCK)
        for unit in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
            row = (unit // blocks).to(tl.int64)
            cols = unit % blocks * BLOCK + tl.arange(0, BLOCK)
            h_ptrs = h_ptr + row * 2 * N + cols
            activate(h_ptrs, h_ptrs + N, y_ptr + row * N + cols, cols < N, NAME, GATED)
    else:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        activate(h_ptr + offs, up_ptr + offs, y_ptr + offs, offs < N, NAME, GATED)


@triton.jit(do_not_specialize=["room"])
def activation_gradient_kernel(
    h_ptr,  # as above, all of them
    up_ptr,
    dy_ptr,  # as y
    dh_ptr,  # as h
    dup_ptr,  # as up
    counts_ptr,
    room,
    N,
    E,
    rank,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    SIDE: tl.constexpr,
    WORLD: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As above."""
    if SIDE:
        rows = rows_here(counts_ptr, E, rank, room, WORLD, EXPERTS)
        blocks = tl.cdiv(N, BLOCK)
        for unit in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
            row = (unit // blocks).to(tl.int64)
            cols = unit % blocks * BLOCK + tl.arange(0, BLOCK)
            at, to = row * 2 * N + cols, row * N + cols
            differentiate(
                h_ptr + at, h_ptr + at + N, dy_ptr + to, dh_ptr + at, dh_ptr + at + N, cols < N,
                NAME, GATED,
            )  # fmt: skip
    else:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        differentiate(
            h_ptr + offs, up_ptr + offs, dy_ptr + offs, dh_ptr + offs, dup_ptr + offs, offs < N,
            NAME, GATED,
        )  # fmt: skip
