"""Footprints of kernels as they are launched, against what their makers say of them."""

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cli import kernels
from counterpoint.gpu import driver
from counterpoint.gpu.driver import Copy
from counterpoint.gpu.footprint import Footprint, footprints, gemm_tile
from counterpoint.gpu.step_footprints import step_footprints
from counterpoint.run import compute


@triton.jit
def product_kernel(
    x_ptr,  # [BLOCK, BLOCK]
    y_ptr,  # [BLOCK, BLOCK]
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    square = offs[:, None] * BLOCK + offs[None, :]
    x = tl.load(x_ptr + square)
    tl.store(y_ptr + square, tl.dot(x, x).to(y_ptr.dtype.element_ty))


def captured(call) -> tuple[Footprint, ...]:
    """Footprints of `call`, which has then run once."""
    call()
    torch.cuda.synchronize()
    return footprints(call)


def empty(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("size", [4096, 8192])
def test_a_cublas_matmul_has_a_tile_and_fits_its_grid(gpus, size):
    x, w, y = empty(size, size), empty(size, size), empty(size, size)
    found = captured(lambda: torch.mm(x, w, out=y))
    (gemm,) = [f for f in found if gemm_tile(f)]
    rows, cols = gemm_tile(gemm)
    num_sms = torch.cuda.get_device_properties(gpus).multi_processor_count
    num_tiles = min(
        triton.cdiv(size, a) * triton.cdiv(size, b) for a, b in ((rows, cols), (cols, rows))
    )
    assert gemm.kind == "kernel"
    assert gemm.num_blocks >= 100
    # one block for each tile, unless the blocks stay and take tile after tile
    assert gemm.num_blocks <= num_sms or gemm.num_blocks >= num_tiles
    assert gemm.threads % 32 == 0 and 64 <= gemm.threads <= 1024
    assert 32 <= gemm.registers_per_thread <= 255
    assert 16 << 10 <= gemm.static_shared_bytes + gemm.dynamic_shared_bytes <= 227 << 10
    # a grid is whole clusters
    assert all(g % c == 0 for g, c in zip(gemm.grid, gemm.cluster, strict=True))
    assert gemm.priority == 0


@pytest.mark.parametrize("num_warps", [4, 8])
def test_a_triton_kernel_takes_what_triton_says(gpus, num_warps):
    x, y = empty(64, 64), empty(64, 64)
    compiled = product_kernel[(3,)](x, y, 64, num_warps=num_warps)
    (found,) = captured(lambda: product_kernel[(3,)](x, y, 64, num_warps=num_warps))
    shared_bytes = compiled.metadata.shared
    assert shared_bytes >= 64 * 64 * 2  # an operand at least
    assert found == Footprint(
        kind="kernel",
        name="product_kernel",
        grid=(3, 1, 1),
        block=(32 * num_warps, 1, 1),
        cluster=(1, 1, 1),
        registers_per_thread=compiled.n_regs,
        static_shared_bytes=0,
        dynamic_shared_bytes=shared_bytes,
    )


def test_a_kernel_keeps_the_priority_of_its_stream(gpus):
    x, y = empty(4096), empty(4096)
    urgent = torch.cuda.Stream(priority=-1)
    assert urgent.priority < 0

    def call():
        urgent.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(urgent):
            x.mul_(2)
        y.add_(1)
        torch.cuda.current_stream().wait_stream(urgent)

    priorities = [f.priority for f in captured(call) if f.kind == "kernel"]
    assert sorted(priorities) == [urgent.priority, 0]


def test_nothing_that_is_captured_runs(gpus):
    x = torch.zeros(4096, device=gpus)
    for _ in range(2):
        found = footprints(lambda: x.add_(1))
        assert [f.kind for f in found] == ["kernel"]
        assert found[0].short_name.startswith("at::native::")
    assert not x.any()


def test_kernels_come_in_stream_order(gpus):
    x, y, z = empty(64, 64), empty(64, 64), empty(64, 64)

    def call():
        y.fill_(1)
        product_kernel[(1,)](x, y, 64)
        torch.mm(x, y, out=z)
        product_kernel[(1,)](z, y, 64)

    names = [f.short_name for f in captured(call)]
    first, last = (i for i, name in enumerate(names) if name == "product_kernel")
    assert 0 < first < last - 1
    assert last == len(names) - 1


@pytest.mark.parametrize(("width", "height"), [(1 << 20, 1), (64, 64), (1, 1)])
def test_bytes_of_copies(gpus, width, height):
    pitch = 256 if height > 1 else width
    source, target = torch.zeros(2, pitch * height, device=gpus, dtype=torch.uint8)
    copy = Copy(target.data_ptr(), pitch, source.data_ptr(), pitch, width, height)

    def call():
        driver.copy_async(copy, torch.cuda.current_stream().cuda_stream)

    assert captured(call) == (Footprint(kind="memcpy", total_bytes=width * height),)


def test_an_nccl_all_gather_is_found(gpus):
    world = dist.get_world_size()
    if world == 1:
        pytest.skip("one rank gathers by a copy")
    shard, full = empty(1 << 20), empty(world << 20)
    found = captured(lambda: compute.all_gather(full, shard))
    (nccl,) = [f for f in found if f.kind == "kernel" and "nccl" in f.name]
    assert nccl.short_name.startswith("ncclDevKernel_")
    assert nccl.threads >= 32
    assert nccl.num_blocks >= 1
    assert nccl.registers_per_thread >= 32
    assert gemm_tile(nccl) is None


def test_doctor_finds_a_kernel_or_a_copy_in_every_call_of_a_step(gpus):
    world = dist.get_world_size()
    group = dist.group.WORLD if world > 1 else None
    found = step_footprints((1000, 512, 256), group)
    kinds: dict[str, set[str]] = {}
    for name, footprint in found:
        kinds.setdefault(name, set()).add(footprint.kind)
    collectives = {"all-gather", "reduce-scatter"} if group else set()
    assert set(kinds) == {"matmul", "signal", "reduce", "copy"} | collectives
    assert "memcpy" in kinds.pop("copy")
    assert all("kernel" in of_call for of_call in kinds.values())
    for name, footprint in found:
        row = kernels._row(name, footprint, (1000, 512, 256), 132)
        assert (row["tile"] is None) == (row["waves"] is None)
    named = {name: f.short_name for name, f in found if f.kind == "kernel"}
    assert (named["signal"], named["reduce"]) == ("signal_kernel", "reduce_kernel")
