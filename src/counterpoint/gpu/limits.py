"""What an SM holds at most, for each architecture, and in which steps it is given out."""

from dataclasses import dataclass

from counterpoint.machine import KIB, DeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SmLimits:
    """What an SM (a CU on AMD) holds at most, and in which steps it is given out.

    Args:
        arch: As compilers name it; of a device, its name.
        threads, warps, blocks: Resident ones; waves and workgroups on AMD.
        registers: 32-bit registers; on AMD vector registers, those for accumulation included.
        register_granule: Registers of a warp are rounded up to a multiple of this.
        quarters: Parts of an SM, with a warp scheduler and an equal part of the registers each.
        shared_bytes: Shared memory (LDS).
        shared_bytes_per_block: Most that one block may use, static and dynamic together.
        shared_reserved_bytes: What the system takes for itself from each block.
        shared_granule_bytes: Shared memory of a block is rounded up to a multiple of this.
        warp_size: Threads of a warp.
        registers_per_thread: Most that an instruction can address.
        source: Where the numbers come from.
    """

    arch: str
    threads: int
    warps: int
    blocks: int
    registers: int
    register_granule: int
    quarters: int = 4
    shared_bytes: int
    shared_bytes_per_block: int
    shared_reserved_bytes: int
    shared_granule_bytes: int
    warp_size: int
    registers_per_thread: int
    source: str


def _nvidia(major: int, minor: int, warps: int, blocks: int, shared_kib: int) -> SmLimits:
    return SmLimits(
        arch=f"sm_{major}{minor}", threads=32 * warps, warps=warps, blocks=blocks,
        registers=65536, register_granule=256, shared_bytes=shared_kib * KIB,
        shared_bytes_per_block=(shared_kib - 1) * KIB, shared_reserved_bytes=KIB,
        shared_granule_bytes=128, warp_size=32, registers_per_thread=255,
        source=f"CUDA C++ Programming Guide, compute capability {major}.{minor}; cuda_occupancy.h",
    )  # fmt: skip


def _amd(arch: str, isa: str) -> SmLimits:
    return SmLimits(
        arch=arch, threads=2048, warps=32, blocks=32, registers=131072, register_granule=512,
        shared_bytes=64 * KIB, shared_bytes_per_block=64 * KIB, shared_reserved_bytes=0,
        shared_granule_bytes=512, warp_size=64, registers_per_thread=512,
        source=f"AMD Instinct {isa} ISA; granules as LLVM's AMDGPU backend has them",
    )  # fmt: skip


LIMITS: dict[str, SmLimits] = {
    limits.arch: limits
    for limits in (
        _nvidia(8, 0, warps=64, blocks=32, shared_kib=164),
        _nvidia(8, 6, warps=48, blocks=16, shared_kib=100),
        _nvidia(8, 9, warps=48, blocks=24, shared_kib=100),
        _nvidia(9, 0, warps=64, blocks=32, shared_kib=228),
        _nvidia(10, 0, warps=64, blocks=32, shared_kib=228),
        _nvidia(10, 3, warps=64, blocks=32, shared_kib=228),
        _amd("gfx90a", "MI200"),
        _amd("gfx942", "MI300"),
    )
}


def limits_of(device: DeviceSpec) -> SmLimits:
    """Return the limits of an SM of `device`, by its own numbers.

    What these do not say, how registers are given out, follows from the size of its warps.
    """
    size = device.warp_size
    return SmLimits(
        arch=device.name, threads=device.max_threads_per_sm, warps=device.max_warps_per_sm,
        blocks=device.max_blocks_per_sm, registers=device.registers_per_sm,
        register_granule=8 * size, shared_bytes=device.shared_bytes_per_sm,
        shared_bytes_per_block=device.shared_bytes_per_block,
        shared_reserved_bytes=device.shared_reserved_bytes_per_block,
        shared_granule_bytes=device.shared_granule_bytes, warp_size=size,
        registers_per_thread=255 if size == 32 else 512, source=device.source,
    )  # fmt: skip
