"""Occupancy: figures that are known, and every byte count tried on small and real SMs."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint import presets
from counterpoint.errors import InputError
from counterpoint.gpu.limits import LIMITS, SmLimits, limits_of
from counterpoint.gpu.occupancy import (
    Beside,
    Kernel,
    Occupancy,
    Window,
    beside,
    dynamic_bytes_for,
    feasible,
    occupancy,
    window,
)
from counterpoint.machine import KIB

SM80, SM86, SM90, GFX942 = (LIMITS[arch] for arch in ("sm_80", "sm_86", "sm_90", "gfx942"))
GEMM = Kernel(128, 64, 0, 16384)  # Triton 3.6, 64x64x32, two stages, as compiled for sm_90
RING = Kernel(544, 96, 21568, 82240)  # NCCL's, as launched on H200
SEND_RECV = replace(RING, threads=640)
NVJET = Kernel(384, 168, 0, 213188)  # cuBLAS on H200
# so little memory that each of its byte counts can be tried
SMALL = replace(
    SM90, arch="small", shared_bytes=1536, shared_bytes_per_block=1200, shared_reserved_bytes=48,
    shared_granule_bytes=16,
)  # fmt: skip
COARSE = replace(
    GFX942, arch="coarse", shared_bytes=1024, shared_bytes_per_block=1024, shared_granule_bytes=64
)
TRIED = (SMALL, COARSE)


@st.composite
def kernels(draw: st.DrawFn, limits: SmLimits) -> Kernel:
    """One that fits an SM."""
    threads = draw(st.integers(1, 1024))
    warps = -(-threads // limits.warp_size)
    of_warp = limits.registers // limits.quarters // -(-warps // limits.quarters)
    of_warp -= of_warp % limits.register_granule
    most = min(limits.registers_per_thread, of_warp // limits.warp_size)
    total = draw(st.integers(0, limits.shared_bytes_per_block))
    static = draw(st.integers(0, total))
    return Kernel(threads, draw(st.integers(0, most)), static, total - static)


@st.composite
def cases(draw: st.DrawFn, among: tuple[SmLimits, ...]) -> tuple[Kernel, SmLimits]:
    limits = draw(st.sampled_from(among))
    return draw(kernels(limits)), limits


ANY = cases(tuple(LIMITS.values()))


@pytest.mark.parametrize(
    ("machine", "arch"),
    [("A100", "sm_80"), ("A40", "sm_86"), ("H100", "sm_90"), ("H200", "sm_90"), ("B200", "sm_100"),
     ("MI250X", "gfx90a"), ("MI300X", "gfx942")],
)  # fmt: skip
def test_presets_agree_with_the_table(machine: str, arch: str):
    device = getattr(presets, machine).device
    found, known = asdict(limits_of(device)), asdict(LIMITS[arch])
    assert (found.pop("arch"), known.pop("arch")) == (device.name, arch)
    assert found.pop("source") and known.pop("source")
    assert found == known


def test_the_table():
    """Facts as the programming guide prints them."""
    ada = LIMITS["sm_89"]
    assert (ada.threads, ada.warps, ada.blocks) == (1536, 48, 24)
    assert (ada.shared_bytes, ada.shared_bytes_per_block) == (100 * KIB, 99 * KIB)
    for arch, limits in LIMITS.items():
        assert limits.arch == arch
        assert limits.warps * limits.warp_size == limits.threads
        assert limits.shared_bytes_per_block + limits.shared_reserved_bytes == limits.shared_bytes
        assert limits.shared_bytes % limits.shared_granule_bytes == 0


@pytest.mark.parametrize(
    ("block", "limits", "want"),
    [
        (GEMM, SM90, Occupancy(8, "registers")),
        (GEMM, SM80, Occupancy(8, "registers")),
        (GEMM, SM86, Occupancy(5, "shared memory")),
        (GEMM, GFX942, Occupancy(4, "shared memory")),
        (replace(GEMM, registers_per_thread=65), SM90, Occupancy(7, "registers")),
        (RING, SM90, Occupancy(1, "registers")),
        (SEND_RECV, SM90, Occupancy(1, "registers")),
        (RING, SM80, Occupancy(1, "registers")),
        (NVJET, SM90, Occupancy(1, "registers")),
        (replace(NVJET, registers_per_thread=32), SM90, Occupancy(1, "shared memory")),
        (Kernel(1024, 32), SM90, Occupancy(2, "threads")),
        (Kernel(1024, 32), SM86, Occupancy(1, "threads")),
        (Kernel(33, 16), SM86, Occupancy(16, "blocks")),
        (Kernel(97, 32), SM90, Occupancy(16, "warps")),
        (Kernel(32, 32), SM90, Occupancy(32, "blocks")),
        (Kernel(32, 0), SM90, Occupancy(32, "blocks")),
        (Kernel(1024, 128), GFX942, Occupancy(1, "registers")),
        (Kernel(64, 512), GFX942, Occupancy(4, "registers")),
        # 14 warps of 144 registers would fit the SM, but 3 a quarter
        (Kernel(32, 144), SM90, Occupancy(12, "registers")),
        (Kernel(96, 144), SM90, Occupancy(4, "registers")),
    ],
)  # fmt: skip
def test_known_figures(block: Kernel, limits: SmLimits, want: Occupancy):
    assert occupancy(block, limits) == want


def test_the_occupancies_that_were_measured_can_be_had():
    """8 / 6 / 3 / 2 / 1 blocks of the GEMM, on H200."""
    assert {8, 6, 3, 2, 1} <= set(feasible(GEMM, SM90))
    assert dynamic_bytes_for(GEMM, SM90, 8) == 16384
    assert dynamic_bytes_for(GEMM, SM90, 1) == 114 * KIB - 1024 + 1
    # 1 KiB as the system's and 1 KiB as compiled
    assert dynamic_bytes_for(replace(GEMM, static_shared_bytes=KIB), SM90, 1) == 112 * KIB + 1


def test_what_is_not_feasible():
    # of 128 granules, 17 blocks have 7 each at most, and so would 18
    assert feasible(Kernel(64, 32), GFX942)[:6] == (32, 25, 21, 18, 16, 14)
    # one block would need more than half of the SM, which is more than a block may have
    half = replace(SMALL, shared_bytes_per_block=720)
    assert feasible(Kernel(128, 32), half)[-1] == 2
    assert feasible(Kernel(128, 32), SMALL)[-1] == 1
    assert feasible(NVJET, SM90) == (1,)


def is_exact(block: Kernel, limits: SmLimits, dynamic: int, blocks: int) -> bool:
    return occupancy(replace(block, dynamic_shared_bytes=dynamic), limits).blocks == blocks


@settings(max_examples=60)
@given(cases(TRIED))
def test_every_byte_count(case: tuple[Kernel, SmLimits]):
    block, limits = case
    own, most = block.dynamic_shared_bytes, limits.shared_bytes_per_block
    least: dict[int, int] = {}
    for dynamic in range(own, most - block.static_shared_bytes + 1):
        shaped = replace(block, dynamic_shared_bytes=dynamic)
        least.setdefault(occupancy(shaped, limits).blocks, dynamic)
    assert feasible(block, limits) == tuple(least), "from its own downwards"
    assert {k: dynamic_bytes_for(block, limits, k) for k in least} == least
    for blocks in set(range(-1, max(least) + 2)) - set(least):
        with pytest.raises(InputError, match=r"dynamic_bytes_for: blocks must be one of"):
            dynamic_bytes_for(block, limits, blocks)


@given(ANY)
def test_the_least_bytes_are_exact_on_every_gpu(case: tuple[Kernel, SmLimits]):
    block, limits = case
    own = occupancy(block, limits).blocks
    assert feasible(block, limits)[0] == own
    assert dynamic_bytes_for(block, limits, own) == block.dynamic_shared_bytes
    for blocks in feasible(block, limits)[1:]:
        dynamic = dynamic_bytes_for(block, limits, blocks)
        assert dynamic <= limits.shared_bytes_per_block - block.static_shared_bytes
        assert is_exact(block, limits, dynamic, blocks)
        assert dynamic > block.dynamic_shared_bytes
        assert not is_exact(block, limits, dynamic - 1, blocks)


@given(ANY, st.data())
def test_a_block_that_takes_more_is_resident_no_more_often(
    case: tuple[Kernel, SmLimits], data: st.DataObject
):
    block, limits = case
    more = occupancy(block, limits).blocks
    smaller = Kernel(
        data.draw(st.integers(1, block.threads)),
        data.draw(st.integers(0, block.registers_per_thread)),
        data.draw(st.integers(0, block.static_shared_bytes)),
        data.draw(st.integers(0, block.dynamic_shared_bytes)),
    )
    assert occupancy(smaller, limits).blocks >= more >= 1


@given(ANY)
def test_what_is_resident_fits(case: tuple[Kernel, SmLimits]):
    block, limits = case
    blocks = occupancy(block, limits).blocks
    warps = -(-block.threads // limits.warp_size)
    assert blocks * warps <= limits.warps
    assert blocks * warps * block.registers_per_thread * limits.warp_size <= limits.registers
    used = block.static_shared_bytes + block.dynamic_shared_bytes + limits.shared_reserved_bytes
    assert blocks * used <= limits.shared_bytes


@given(ANY, st.data())
def test_beside_is_no_more_than_alone(case: tuple[Kernel, SmLimits], data: st.DataObject):
    compute, limits = case
    comm = data.draw(kernels(limits))
    found = beside(compute, comm, limits)
    assert 0 <= found.blocks <= occupancy(compute, limits).blocks
    assert (found.blocks > 0) == (beside(comm, compute, limits).blocks > 0), "two share an SM"


@settings(max_examples=60)
@given(cases(TRIED), st.data())
def test_window_by_every_byte_count(case: tuple[Kernel, SmLimits], data: st.DataObject):
    compute, limits = case
    comm = data.draw(kernels(limits))
    blocks = data.draw(st.integers(1, occupancy(compute, limits).blocks + 1))
    thin = Kernel(1, 0, comm.static_shared_bytes, comm.dynamic_shared_bytes)
    granule, reserve = limits.shared_granule_bytes, limits.shared_reserved_bytes

    def taken(block: Kernel, total: int) -> int:
        return -(-(total + reserve) // granule) * granule

    want: list[int] = []
    comm_bytes = taken(thin, comm.static_shared_bytes + comm.dynamic_shared_bytes)
    most = limits.shared_bytes_per_block - compute.static_shared_bytes
    for dynamic in range(compute.dynamic_shared_bytes, most + 1):
        total = compute.static_shared_bytes + dynamic
        fits = comm_bytes + blocks * taken(compute, total) <= limits.shared_bytes
        if fits and is_exact(compute, limits, dynamic, blocks):
            want.append(total)
    found = window(compute, comm, limits, blocks)
    if found is None:
        assert want == []
        return
    assert list(range(found.low_bytes, found.high_bytes + 1)) == want
    shaped = dynamic_bytes_for(compute, limits, blocks)  # leaves room where any count of bytes does
    assert found.low_bytes == compute.static_shared_bytes + shaped
    dynamic = found.high_bytes - compute.static_shared_bytes
    there = beside(replace(compute, dynamic_shared_bytes=dynamic), comm, limits)
    assert (there.blocks >= blocks) == (not found.other_limit)


@pytest.mark.parametrize("comm", [RING, SEND_RECV])
def test_window_beside_nccl(comm: Kernel):
    """On Hopper 114.0 KiB < bytes + 1 KiB <= 125.6 KiB, of one block; none on A100 and A40."""
    found = window(GEMM, comm, SM90)
    assert found is not None
    assert (found.low_bytes + KIB - 1, found.high_bytes + KIB) == (114 * KIB, 125.625 * KIB)
    # beside NCCL a quarter has 1024 registers left: one warp of 32 a thread
    assert found.other_limit == "registers"
    lean = replace(GEMM, registers_per_thread=32)
    assert window(lean, comm, SM90) == Window(found.low_bytes, found.high_bytes, "")
    shaped = replace(lean, dynamic_shared_bytes=found.high_bytes)
    assert beside(shaped, comm, SM90) == Beside(1, "registers")
    assert beside(replace(shaped, threads=129), comm, SM90) == Beside(0, "registers")
    assert window(lean, comm, SM80) is None
    assert window(lean, comm, SM86) is None
    assert window(lean, comm, SM90, 2) is None


def test_beside_nccl():
    assert beside(GEMM, RING, SM90) == Beside(0, "registers")
    lean = Kernel(128, 32, 0, 16384)
    assert beside(lean, RING, SM90) == Beside(1, "registers")
    assert beside(Kernel(128, 32, 0, 127616), RING, SM90).blocks == 1
    assert beside(Kernel(128, 32, 0, 127617), RING, SM90) == Beside(0, "shared memory")
    # more than an A40 has: nothing fits beside what cannot be there
    assert beside(lean, RING, SM86).blocks == 0


@pytest.mark.parametrize(
    ("comm", "want"),
    [
        (Kernel(32, 16), Beside(7, "registers")),
        (Kernel(1024, 32), Beside(4, "registers")),
        (Kernel(32, 16, 0, 200 * KIB), Beside(1, "shared memory")),
        (Kernel(32, 16, 0, 228 * KIB), Beside(0, "shared memory")),
    ],
)
def test_what_binds_beside(comm: Kernel, want: Beside):
    assert beside(GEMM, comm, SM90) == want


def test_what_binds_beside_without_registers_or_memory():
    assert beside(Kernel(96, 8), Kernel(32, 8), SM90) == Beside(21, "threads")
    assert beside(Kernel(33, 8), Kernel(32, 8), SM90) == Beside(31, "warps")
    assert beside(Kernel(32, 8), Kernel(32, 8), SM90) == Beside(31, "blocks")
    # on AMD a block without LDS has room beside one that has all of it
    assert beside(Kernel(64, 8), Kernel(64, 8, 0, 64 * KIB), GFX942) == Beside(31, "threads")
    assert window(Kernel(64, 8), Kernel(64, 8, 0, 64 * KIB), GFX942, 32) == Window(0, 0, "threads")


THREADS = "block.threads must be 1 to 1024, got"


@pytest.mark.parametrize(
    ("block", "limits", "message"),
    [
        (Kernel(1025, 16), SM90, f"{THREADS} 1025"),
        (Kernel(0, 16), SM90, f"{THREADS} 0"),
        (Kernel(128, 256), SM90,
         "block.registers_per_thread must be 0 to 255 with 128 threads on sm_90, got 256"),
        (Kernel(1024, 65), SM90,
         "block.registers_per_thread must be 0 to 64 with 1024 threads on sm_90, got 65"),
        (Kernel(1024, 129), GFX942,
         "block.registers_per_thread must be 0 to 128 with 1024 threads on gfx942, got 129"),
        (RING, SM86, "block must be of 0 to 101376 bytes of shared memory on sm_86, got 103808"),
        (NVJET, SM80, "block must be of 0 to 166912 bytes of shared memory on sm_80, got 213188"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_fit(block: Kernel, limits: SmLimits, message: str):
    for call in (occupancy, feasible):
        with pytest.raises(InputError, match=f"^occupancy: {message}$"):
            call(block, limits)
    with pytest.raises(InputError, match=f"^dynamic_bytes_for: {message}$"):
        dynamic_bytes_for(block, limits, 1)
    message = message.replace("block", "compute", 1)
    for call in (beside, window):
        with pytest.raises(InputError, match=f"^{call.__name__}: {message}$"):
            call(block, GEMM, limits)


@pytest.mark.parametrize("call", [beside, window])
def test_a_kernel_without_threads_is_beside_nothing(call: type):
    with pytest.raises(InputError, match=r": comm.threads must be at least 1, got 0$"):
        call(GEMM, Kernel(0, 0), SM90)


@pytest.mark.parametrize("blocks", [0, 9])
def test_occupancies_that_cannot_be_had(blocks: int):
    wanted = f"blocks must be one of 8, 7, 6, 5, 4, 3, 2, 1 on sm_90, got {blocks}"
    with pytest.raises(InputError, match=f"^dynamic_bytes_for: {wanted}$"):
        dynamic_bytes_for(GEMM, SM90, blocks)
    assert window(GEMM, RING, SM90, blocks) is None
