"""How many blocks of a kernel an SM holds, and how shared memory that nobody uses lowers that.

Fewer blocks of a compute kernel leave room for a block of a collective: a control over somebody
else's kernel that changes nothing in it. All of this is arithmetic on what a block takes, for an
SM that keeps no shared memory back as L1; how the blocks of a cluster are placed is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from counterpoint.errors import InputError
from counterpoint.gpu.limits import SmLimits

MAX_THREADS = 1024  # of a block, on every GPU here


class Block(Protocol):
    """What a block of a kernel takes, such as a `footprint.Footprint`."""

    @property
    def threads(self) -> int: ...
    @property
    def registers_per_thread(self) -> int: ...
    @property
    def static_shared_bytes(self) -> int: ...
    @property
    def dynamic_shared_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Block described by hand: shared memory as compiled, and as asked for at launch."""

    threads: int
    registers_per_thread: int
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """`blocks` of a kernel are resident on an SM, and `bound_by` allows no more of them.

    `bound_by` is "threads", "warps", "blocks", "registers" or "shared memory"; where several
    allow equally few, the first of these.
    """

    blocks: int
    bound_by: str


@dataclass(frozen=True, slots=True)
class Beside(Occupancy):
    """An Occupancy of what one block of another kernel leaves of the SM; `blocks` may be 0."""


@dataclass(frozen=True, slots=True)
class Window:
    """Shared memory of a block, without the reserve, with which a block of another kernel fits.

    Args:
        low_bytes: Least, static and dynamic together.
        high_bytes: Most; every count between the two will do.
        other_limit: What keeps the two apart even so, named as in `Occupancy`; "" if nothing does.
    """

    low_bytes: int
    high_bytes: int
    other_limit: str


def occupancy(block: Block, limits: SmLimits) -> Occupancy:
    """Return how many blocks of a kernel are resident on an SM that has nothing else to do.

    Shared memory allows floor(SM / roundup(static + dynamic + reserve, granule)). A quarter of
    the SM has registers for floor(its own / roundup(those of a warp, granule)) warps; all four
    times that, divided by the warps of a block, is what registers allow.

    Raises:
        InputError: Not even one block fits: it has too many threads, registers or bytes.

    Source: cuda_occupancy.h of the CUDA toolkit.

    Example:
        >>> occupancy(Kernel(128, 64, 0, 16384), LIMITS["sm_90"])
        Occupancy(blocks=8, bound_by='registers')
    """
    _check("occupancy", "block", block, limits)
    by_shared = _by_shared_memory(block, limits.shared_bytes, limits)
    return Occupancy(*_least(_alone(block, limits) | by_shared))


def feasible(block: Block, limits: SmLimits) -> tuple[int, ...]:
    """Return the blocks per SM that more dynamic shared memory can bring a kernel to.

    From its own occupancy downwards, without those that a granule steps over, or that take more
    bytes than a block may have.

    Raises:
        InputError: Not even one block fits.
    """
    own = occupancy(block, limits).blocks
    return tuple(k for k in range(own, 0, -1) if _span(block, limits, k))


def dynamic_bytes_for(block: Block, limits: SmLimits, blocks: int) -> int:
    """Return the least dynamic shared bytes of a block with which `blocks` are resident, no more.

    The kernel's own where that is so already. Otherwise one byte past what `blocks + 1` may have:
    it takes a whole granule.

    Raises:
        InputError: `blocks` is not among the `feasible`, or not even one block fits.
    """
    _check("dynamic_bytes_for", "block", block, limits)
    span = _span(block, limits, blocks)
    if span is None:
        want = f"one of {', '.join(map(str, feasible(block, limits)))} on {limits.arch}"
        raise InputError("dynamic_bytes_for", "blocks", want=want, got=blocks)
    return span[0] - block.static_shared_bytes


def beside(compute: Block, comm: Block, limits: SmLimits) -> Beside:
    """Return how many blocks of `compute` are resident on an SM next to one block of `comm`.

    Strict about registers: warps are dealt to the quarters in turn, and the fullest quarter of
    every block is taken to be the same one. None fits beside a `comm` that no SM can hold.

    Raises:
        InputError: Not even one block of `compute` fits, or `comm` has no threads.
    """
    _check("beside", "compute", compute, limits)
    rooms = _next_to("beside", compute, comm, limits)
    left_bytes = limits.shared_bytes - _allocated_bytes(comm, limits)
    return Beside(*_least(rooms | _by_shared_memory(compute, left_bytes, limits)))


def window(compute: Block, comm: Block, limits: SmLimits, blocks: int = 1) -> Window | None:
    """Return with how much shared memory `blocks` of `compute`, no more, leave some for a `comm`.

    Within it, and for no other count of bytes from `compute`'s own upwards, exactly `blocks` are
    resident alone and the shared memory of one block of `comm` fits beside theirs. Its least count
    is that of `dynamic_bytes_for`: a kernel that is shaped to `blocks` leaves this room already.

    Returns:
        None if there is no such count.

    Raises:
        InputError: Not even one block of `compute` fits, or `comm` has no threads.
    """
    _check("window", "compute", compute, limits)
    rooms = _next_to("window", compute, comm, limits)
    span = _span(compute, limits, blocks)
    if span is None:
        return None
    left_bytes = limits.shared_bytes - _allocated_bytes(comm, limits)
    low, high = span[0], min(span[1], _most_bytes(left_bytes, blocks, limits))
    if low > high:
        return None
    return Window(low, high, next((name for name in rooms if rooms[name] < blocks), ""))


def _span(block: Block, limits: SmLimits, blocks: int) -> tuple[int, int] | None:
    """Least and most bytes, from `block`'s own upwards, at which exactly `blocks` are resident."""
    others, _ = _least(_alone(block, limits))
    if not 1 <= blocks <= others:
        return None
    low = _used_bytes(block)
    if blocks < others:
        low = max(low, _most_bytes(limits.shared_bytes, blocks + 1, limits) + 1)
    most = _most_bytes(limits.shared_bytes, blocks, limits)
    high = min(most, limits.shared_bytes_per_block)
    return (low, high) if low <= high else None


def _most_bytes(shared_bytes: int, blocks: int, limits: SmLimits) -> int:
    """Most static and dynamic bytes of a block with which `blocks` of them fit `shared_bytes`."""
    granules = shared_bytes // limits.shared_granule_bytes // blocks
    return granules * limits.shared_granule_bytes - limits.shared_reserved_bytes


def _alone(block: Block, limits: SmLimits) -> dict[str, int]:
    """Blocks that an empty SM has room for, by all but shared memory."""
    warps, quarter_registers = _warps(block, limits), limits.registers // limits.quarters
    held = quarter_registers // _warp_registers(block, limits) * limits.quarters
    return {
        "threads": limits.threads // block.threads,
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": held // warps,
    }


def _next_to(op: str, compute: Block, comm: Block, limits: SmLimits) -> dict[str, int]:
    """Blocks of `compute` that one of `comm` leaves room for, by all but shared memory."""
    if comm.threads < 1:
        raise InputError(op, "comm.threads", want="at least 1", got=comm.threads)
    fullest, taken = (
        _in_fullest_quarter(block, limits) * _warp_registers(block, limits)
        for block in (compute, comm)
    )
    left_warps = limits.warps - _warps(comm, limits)
    return {
        "threads": max(0, (limits.threads - comm.threads) // compute.threads),
        "warps": max(0, left_warps // _warps(compute, limits)),
        "blocks": limits.blocks - 1,
        "registers": max(0, (limits.registers // limits.quarters - taken) // fullest),
    }


def _by_shared_memory(block: Block, shared_bytes: int, limits: SmLimits) -> dict[str, int]:
    each = _allocated_bytes(block, limits)
    room = shared_bytes // each if each else limits.blocks  # AMD takes nothing from a block of none
    return {"shared memory": room if shared_bytes >= 0 else 0}


def _least(rooms: Mapping[str, int]) -> tuple[int, str]:
    bound_by = min(rooms, key=rooms.__getitem__)  # the first of equals
    return rooms[bound_by], bound_by


def _warps(block: Block, limits: SmLimits) -> int:
    return -(-block.threads // limits.warp_size)


def _in_fullest_quarter(block: Block, limits: SmLimits) -> int:
    return -(-_warps(block, limits) // limits.quarters)


def _warp_registers(block: Block, limits: SmLimits) -> int:
    # a warp that was compiled to use none has a granule of them all the same
    used = max(1, block.registers_per_thread) * limits.warp_size
    return _round_up(used, limits.register_granule)


def _allocated_bytes(block: Block, limits: SmLimits) -> int:
    taken = _used_bytes(block) + limits.shared_reserved_bytes
    return _round_up(taken, limits.shared_granule_bytes)


def _used_bytes(block: Block) -> int:
    return block.static_shared_bytes + block.dynamic_shared_bytes


def _round_up(count: int, granule: int) -> int:
    return -(-count // granule) * granule


def _check(op: str, arg: str, block: Block, limits: SmLimits) -> None:
    """Refuse a block that no SM takes."""
    if not 1 <= block.threads <= MAX_THREADS:
        raise InputError(op, f"{arg}.threads", want=f"1 to {MAX_THREADS}", got=block.threads)
    warp_registers = limits.registers // limits.quarters // _in_fullest_quarter(block, limits)
    granules = warp_registers // limits.register_granule
    most = granules * limits.register_granule // limits.warp_size
    most, got = min(most, limits.registers_per_thread), block.registers_per_thread
    if not 0 <= got <= most:
        want = f"0 to {most} with {block.threads} threads on {limits.arch}"
        raise InputError(op, f"{arg}.registers_per_thread", want=want, got=got)
    most, got = limits.shared_bytes_per_block, _used_bytes(block)
    if not 0 <= got <= most:
        want = f"of 0 to {most} bytes of shared memory on {limits.arch}"
        raise InputError(op, arg, want=want, got=got)
