"""What the library relies on beyond torch's public API: one test each, first in `make gpu`."""

import gc

import pytest
import torch
import torch.distributed as dist
import triton

from counterpoint.gpu import cublaslt, driver
from counterpoint.gpu.driver import Copy
from counterpoint.gpu.footprint import footprints
from counterpoint.group.symmetric import allocate
from counterpoint.kernels.signal import signal_kernel
from counterpoint.measure.timing import relative_error


def test_versions():
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)
    assert tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def test_symmetric_memory_reaches_every_peer(gpus):
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = allocate(4096 * world, dist.group.WORLD, gpus)
    for peer in range(world):
        memory.peer(peer).view(world, 4096)[rank].fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier()
    want = torch.arange(1, world + 1, device=gpus, dtype=torch.uint8)
    assert torch.equal(memory.local().view(world, 4096).amin(1), want)
    assert torch.equal(memory.local().view(world, 4096).amax(1), want)


def test_a_tensor_keeps_its_memory_alive(gpus):
    """As outputs that peers have written do, whoever still holds what allocated them."""
    memory = allocate(1 << 25, dist.group.WORLD, gpus)
    mine = memory.local().view(torch.int32)[:1000]
    mine.fill_(7)
    dist.barrier()  # no peer opens it any more
    del memory
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.full((1 << 25,), 1, dtype=torch.int32, device=gpus)
    torch.cuda.synchronize()
    assert (mine == 7).all() and (others == 1).all()


def test_matmul_accumulates_bf16_products_in_fp32(gpus):
    x, w = (
        torch.randn(64, 128, device=gpus).bfloat16(),
        torch.randn(128, 32, device=gpus).bfloat16(),
    )
    total = torch.randn(64, 32, device=gpus)
    want = total.double() + x.double() @ w.double()
    torch.addmm(total, x, w, torch.float32, out=total)
    assert total.dtype == torch.float32
    assert (total.double() - want).norm() / want.norm() < 1e-6


def test_copies_plain_strided_and_batched(gpus):
    source = torch.randint(0, 255, (64, 256), device=gpus, dtype=torch.uint8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    target = torch.zeros_like(source)
    driver.copy_async(_copy(target, source, 64 * 256, 1), stream.cuda_stream)
    strided = torch.zeros_like(source)
    driver.copy_async(
        Copy(strided.data_ptr(), 256, source.data_ptr(), 256, 64, 64), stream.cuda_stream
    )
    batched = torch.zeros_like(source)
    rows = [_copy(batched[i], source[i], 256, 1) for i in range(64)]
    driver.copy_batch_async(rows, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(target, source)
    assert torch.equal(batched, source)
    assert torch.equal(strided[:, :64], source[:, :64])
    assert not strided[:, 64:].any()


def test_tables_can_be_uploaded_while_a_graph_is_captured(gpus):
    target, host = torch.zeros(8, dtype=torch.int64, device=gpus), torch.arange(8)
    upload, x = torch.cuda.Stream(), torch.zeros(4, device=gpus)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        driver.upload(host, target.data_ptr(), upload.cuda_stream)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), host)
    assert x.tolist() == [1.0] * 4


def _copy(target: torch.Tensor, source: torch.Tensor, width: int, height: int) -> Copy:
    return Copy(target.data_ptr(), width, source.data_ptr(), width, width, height)


def test_kernels_are_compiled_once_and_launched_directly(gpus):
    """`warmup` and `compiled[grid]` of Triton, which take what `kernel[grid]` takes."""
    word = torch.zeros(1, dtype=torch.int64, device=gpus)
    epoch = torch.tensor([4, 0, 0, 0], dtype=torch.int32, device=gpus)
    fault = torch.zeros(1, dtype=torch.int64).pin_memory()
    pad = torch.zeros(4, dtype=torch.int32, device=gpus)
    word.fill_(pad.data_ptr() + 8)
    arguments = (word, 1, word, 1, epoch, fault, 0, 10**9, True, 32)
    compiled = signal_kernel.warmup(*arguments, grid=(1,), num_warps=1)
    compiled[(1, 1, 1)](*arguments, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert pad.tolist() == [0, 0, 5, 0]
    assert epoch.tolist() == [5, 0, 0, 0]
    assert fault.item() == 0


def test_what_every_eager_call_asks_torch(gpus):
    """Modes, keys of tensors, autocast, the current stream's handle, the group's collectives."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from counterpoint.group import library
    from counterpoint.group.notice_board import Awaited
    from counterpoint.group.workspace import workspace_of
    from counterpoint.ops import watched
    from counterpoint.run.lanes_cuda import raw_stream

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert watched.keys_of_thread().raw_repr() in watched.USUAL
    with Mode():
        assert watched.keys_of_thread().raw_repr() not in watched.USUAL
    plain, numbers = watched.keys_of_plain("cuda"), torch.ones(2, 3, device=gpus)
    for t in (numbers, numbers.t(), torch.nn.Parameter(numbers)):
        assert watched.keys_of(t).raw_repr() in plain
    assert watched.keys_of(torch._efficientzerotensor((2,), device=gpus)).raw_repr() not in plain
    assert not watched.any_autocast()
    with torch.autocast("cuda", torch.bfloat16):
        assert watched.any_autocast()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert raw_stream(gpus.index) == side.cuda_stream
    world = dist.get_world_size()
    mine, whole = (
        torch.full((4,), dist.get_rank() + 1.0, device=gpus),
        torch.empty(4 * world, device=gpus),
    )
    calls = library.library_of(workspace_of(dist.group.WORLD, gpus), Awaited("", "", ""))
    calls.all_gather(whole, mine)
    want = torch.arange(1.0, world + 1, device=gpus).repeat_interleave(4)
    assert torch.equal(whole, want)
    part = torch.empty(4, device=gpus)
    calls.reduce_scatter(part, whole)
    assert torch.equal(part, mine * world)
    calls.reduce_scatter(part, whole, average=True)
    assert torch.equal(part, mine)
    rows = [0, *(r * (r + 3) // 2 for r in range(1, world + 1))]  # 2, 3, 4, ... rows
    own = torch.full((dist.get_rank() + 2, 3), dist.get_rank() + 1.0, device=gpus)
    every = torch.empty(rows[-1], 3, device=gpus)
    calls.gather_rows(every, own, rows)
    assert all((every[rows[r] : rows[r + 1]] == r + 1).all() for r in range(world))
    summed = torch.empty_like(own)
    calls.scatter_rows(summed, every, rows)
    assert torch.equal(summed, own * world)


def test_matmuls_of_fp8_with_scales_and_out(gpus):
    """Scales of rows, and of blocks whose number along K is padded to a multiple of 4."""
    if torch.cuda.get_device_capability(gpus) != (9, 0):
        return
    fp8, m, n, k = torch.float8_e4m3fn, 20, 272, 640
    x, w = torch.randn(m, k, device=gpus).to(fp8), torch.randn(n, k, device=gpus).to(fp8)
    rows, columns = torch.rand(m, 1, device=gpus) + 1, torch.rand(1, n, device=gpus) + 1
    y = torch.full((m, n), torch.nan, device=gpus, dtype=torch.bfloat16)
    torch._scaled_mm(x, w.t(), rows, columns, out_dtype=y.dtype, out=y)
    want = (x.double() * rows.double()) @ (w.double().t() * columns.double())
    assert (y.double() - want).norm() / want.norm() < 2e-3
    of_x, of_w = torch.rand(k // 128, m, device=gpus) + 1, torch.rand(3, k // 128, device=gpus) + 1
    padded = torch.nn.functional.pad(of_w, (0, 3)).t()
    torch._scaled_mm_v2(
        x, w.t(), [of_x.t()], [4], [], [padded], [5], [], None, y.dtype, out=y.fill_(torch.nan)
    )
    whole = of_w.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    left = x.double() * of_x.t().double().repeat_interleave(128, 1)
    want = left @ (w.double() * whole).t()
    assert (y.double() - want).norm() / want.norm() < 2e-3


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_matmul_library_adds_to_a_sum_that_lies_elsewhere(gpus, dtype, columns):
    for m, n, k in ((1, 8, 8), (37, 24, 40), (129, 257, 191), (512, 1024, 768)):
        x, w = torch.randn(m, k, device=gpus).to(dtype), torch.randn(k, n, device=gpus).to(dtype)
        w = w.t().contiguous().t() if columns else w
        c, y = torch.randn(m, n, device=gpus).to(dtype), torch.empty(m, n, device=gpus, dtype=dtype)
        kept, want = c.clone(), c.double() + x.double() @ w.double()
        assert cublaslt.takes(c, x, w, y)
        for _ in range(2):
            y.fill_(torch.nan)
            cublaslt.add(c, x, w, y)
            assert relative_error(y, want) <= 2 * relative_error(torch.addmm(c, x, w), want)
        assert torch.equal(c, kept)
    # of a large one, one kernel and no copy; and a graph replays it
    assert [found.kind for found in footprints(lambda: cublaslt.add(c, x, w, y))] == ["kernel"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cublaslt.add(c, x, w, y)
    x.mul_(2)
    graph.replay()
    want = c.double() + x.double() @ w.double()
    assert relative_error(y, want) <= 2 * relative_error(torch.addmm(c, x, w), want)
