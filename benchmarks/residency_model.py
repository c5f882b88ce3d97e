"""Which blocks an SM holds while a matmul and a collective share a GPU, and what that costs.

The loop is (matmul i, then a collective on its result), collective i beside matmul i + 1. The
closed form below says which blocks are resident, who retires when and who takes the hole, and from
that the time of the loop over the time of its parts one after the other (TimeRatio).

With C blocks of the collective, o_comm of them on an SM that has nothing else, o_comp blocks of the
matmul on such an SM, b of them beside one of the collective's, and G SMs:

    R(C) = ceil(C / o_comm)                          SMs that the collective takes
    P(C) = o_comp (G - R(C)) + b R(C)                blocks of the matmul that stay resident
    W = ceil(B / (o_comp G))                         waves of a matmul of B blocks alone
    t = compute_s / W                                a wave: as long as its blocks live

Without priority, blocks of the collective wait until the last block of the matmul has been placed:
(W - 1) t, or 0 where the grid leaves them room from the start. With priority they take the next
holes, after some waves t of those blocks that have to retire. Compute then goes on with the P(C)
blocks that are left, until the collective is done.

Source: arXiv 2609.07536 for R(C), P(C), the waves and the choice of the least; arXiv 2606.09200 for
the loop and its arms. The rate of an SM by its resident blocks, and b, are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from counterpoint.gpu.limits import limits_of
from counterpoint.gpu.occupancy import Block, Kernel, beside, dynamic_bytes_for, occupancy
from counterpoint.machine import DeviceSpec

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A matmul and a collective in a loop, on one GPU.

    Args:
        device: The GPU; its SMs, and what each holds.
        compute: A block of the matmul, as it is launched.
        num_blocks: Blocks of the matmul's grid.
        step_bytes: Operands that such a block loads in one step of its loop over K.
        compute_s: Seconds of the matmul alone, as it is launched.
        comm: A block of the collective.
        num_comm_blocks: Blocks of the collective's grid.
        comm_s: Seconds of the collective alone.
        iterations: Of the loop.
    """

    device: DeviceSpec
    compute: Block
    num_blocks: int
    step_bytes: int
    compute_s: float
    comm: Block
    num_comm_blocks: int
    comm_s: float
    iterations: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no arithmetic on footprints says; fitted to measurements.

    Args:
        full_blocks: With `full_bytes`: an SM runs at its full rate from
            full_blocks + full_bytes / step_bytes resident blocks on.
        full_bytes: See there; the operands that must be under way to hide the latency of memory.
        sharpness: How suddenly the rate stops growing there.
        crowding: Share of the rate that is lost for each 64 KiB of operands under way.
        drain_waves: With priority: waves that pass before the collective has its SMs.
    """

    full_blocks: float
    full_bytes: float
    sharpness: float
    crowding: float
    drain_waves: float


@dataclass(frozen=True, slots=True)
class Residency:
    """Who is resident.

    Args:
        compute_blocks: Of the matmul on an SM that has nothing else (o_comp).
        comm_blocks: Of the collective on such an SM (o_comm).
        sms_taken: SMs that have a block of the collective, R(C).
        beside_blocks: Of the matmul on each of these (b).
        left_blocks: Of the matmul on the whole GPU meanwhile, P(C).
    """

    compute_blocks: int
    comm_blocks: int
    sms_taken: int
    beside_blocks: int
    left_blocks: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be controlled.

    Args:
        blocks_per_sm: Of the matmul; None: as many as fit.
        priority: Whether the collective's blocks go first.
    """

    blocks_per_sm: int | None = None
    priority: bool = False


@lru_cache(maxsize=1024)  # a fit asks for each of them thousands of times
def residency(pair: Sharing, blocks_per_sm: int | None = None) -> Residency:
    """Return who is resident while the collective runs.

    Args:
        pair: The loop.
        blocks_per_sm: Of the matmul, by shared memory that it does not use; None: as many as fit.

    Raises:
        InputError: A kernel does not fit an SM, or `blocks_per_sm` cannot be had.
    """
    limits, device = limits_of(pair.device), pair.device
    shaped = pair.compute
    if blocks_per_sm is not None:
        num_bytes = dynamic_bytes_for(shaped, limits, blocks_per_sm)
        shaped = Kernel(shaped.threads, shaped.registers_per_thread, shaped.static_shared_bytes,
                        num_bytes)  # fmt: skip
    own, comm = occupancy(shaped, limits).blocks, occupancy(pair.comm, limits).blocks
    taken = min(device.num_sms, math.ceil(pair.num_comm_blocks / comm))
    room = min(own, beside(shaped, pair.comm, limits).blocks)
    return Residency(own, comm, taken, room, own * (device.num_sms - taken) + room * taken)


def rate(blocks: float, step_bytes: int, constants: Constants) -> float:
    """Return the rate of an SM with so many resident blocks, as a share of what it could have.

    With k resident blocks and n = full_blocks + full_bytes / step_bytes, that is
    ((k / n)^-q + 1)^(-1/q), q the sharpness: proportional to k while latency rules, constant once
    the SM is full. Each 64 KiB under way then cost `crowding` of it.
    """
    if blocks <= 0:
        return 0.0
    share = blocks / (constants.full_blocks + constants.full_bytes / step_bytes)
    held = (share**-constants.sharpness + 1) ** (-1 / constants.sharpness)
    return held * max(0.1, 1 - constants.crowding * blocks * step_bytes / (64 * KIB))


def time_ratio(pair: Sharing, setting: Setting, constants: Constants) -> float:
    """Return the time of the loop over the time of its parts one after the other, as launched.

    TimeRatio = (compute + (n - 1) period + comm) / (n (compute_s + comm_s)) of n iterations.

    Raises:
        InputError: As of `residency`.
    """
    held = residency(pair, setting.blocks_per_sm)
    as_is = held if setting.blocks_per_sm is None else residency(pair)
    compute_s = pair.compute_s * _alone(pair, held, constants) / _alone(pair, as_is, constants)
    period_s = _period_s(pair, held, compute_s, setting.priority, constants)
    total_s = compute_s + (pair.iterations - 1) * period_s + pair.comm_s
    return total_s / (pair.iterations * (pair.compute_s + pair.comm_s))


def best(pair: Sharing, settings: Sequence[Setting], constants: Constants) -> Setting:
    """Return the setting with the least time, the first of equals.

    Raises:
        InputError: As of `residency`.
    """
    return min(settings, key=lambda setting: time_ratio(pair, setting, constants))


def regridded(pair: Sharing, num_blocks: int, constants: Constants) -> Sharing:
    """Return the same matmul, shared by a grid of another size, with its time alone.

    Raises:
        InputError: As of `residency`.
    """
    held, other = residency(pair), replace(pair, num_blocks=num_blocks)
    ratio = _alone(other, residency(other), constants) / _alone(pair, held, constants)
    return replace(other, compute_s=pair.compute_s * ratio)


def _spread(pair: Sharing, held: Residency) -> int:
    """Blocks on the fullest SM: a grid that is smaller than the GPU is spread over it."""
    return min(held.compute_blocks, math.ceil(pair.num_blocks / pair.device.num_sms))


def _alone(pair: Sharing, held: Residency, constants: Constants) -> float:
    """Seconds of the matmul by itself, in a unit of its own: only ratios of these are used."""
    on_sm = _spread(pair, held)
    waves = math.ceil(pair.num_blocks / (on_sm * pair.device.num_sms))
    return waves * on_sm / pair.num_blocks / rate(on_sm, pair.step_bytes, constants)


def _period_s(
    pair: Sharing, held: Residency, compute_s: float, priority: bool, constants: Constants
) -> float:
    """Seconds of one iteration in which the matmul and the collective run side by side."""
    num_sms, on_sm = pair.device.num_sms, _spread(pair, held)
    slots = on_sm * num_sms
    waves = math.ceil(pair.num_blocks / slots)
    wave_s = compute_s / waves
    # SMs without a block of the matmul: of a grid that is smaller than the GPU
    free = max(0, num_sms - pair.num_blocks)
    if free >= held.sms_taken or held.beside_blocks >= on_sm:
        return max(compute_s, pair.comm_s)
    last = pair.num_blocks - (waves - 1) * slots
    # where the last wave leaves SMs free, they are free when it starts
    room = num_sms - math.ceil(last / on_sm) >= held.sms_taken
    starts_s = wave_s * (waves - 1) if room else compute_s
    if not priority:
        return max(compute_s, starts_s + pair.comm_s)
    retiring = (on_sm - held.beside_blocks) / on_sm
    starts_s = min(starts_s, constants.drain_waves * retiring * wave_s)
    full, some = (rate(k, pair.step_bytes, constants) for k in (on_sm, held.beside_blocks))
    # of the matmul's own rate, while the collective is there
    share = (num_sms - held.sms_taken + held.sms_taken * some / full) / num_sms
    left_s = compute_s - starts_s
    if left_s <= share * pair.comm_s:
        left_s /= max(share, 1e-9)
    else:
        left_s += (1 - share) * pair.comm_s
    return max(starts_s + pair.comm_s, starts_s + left_s)
