"""Shaping is exact: equal bits at every number of blocks per SM, and the driver's occupancy."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl

from benchmarks.kernel_matmul import matmul_kernel
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import graph_nodes
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import node_footprint
from counterpoint.gpu.occupancy import feasible, occupancy
from counterpoint.resources.shape import Nodes, Shape
from counterpoint.resources.shape_triton import triton_launches

NUM_KERNELS = 100


@triton.jit
def scan_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + rows, tl.cumsum(tl.load(x_ptr + rows), 0))


def normal(*sizes, dtype=torch.float32):
    return torch.randn(sizes, device="cuda").to(dtype)


def random_call(draw: random.Random):
    """A call of ATen, Triton or a compiled function, at random sizes; returns its result."""
    rows, cols = draw.choice((64, 777, 2048)), draw.choice((96, 1000, 4096))
    x, dtype = normal(rows, cols), draw.choice((torch.bfloat16, torch.float32))
    half = x.to(dtype)
    kind = draw.randrange(13)
    if kind == 0:
        return lambda: F.relu(half)
    if kind == 1:
        return lambda: torch.softmax(half, -1)
    if kind == 2:
        return lambda: F.layer_norm(half, (cols,))
    if kind == 3:
        return lambda: half.sum(draw_dim)
    if kind == 4:
        return lambda: torch.cumsum(x, 1)
    if kind == 5:
        return lambda: half.t().contiguous()
    if kind == 6:
        return lambda: torch.cat([half, half], 1)
    if kind == 7:
        index = torch.randint(0, rows, (333,), device="cuda")
        return lambda: half.index_select(0, index)
    if kind == 8:
        return lambda: F.gelu(half) * half
    if kind == 9:
        return lambda: x.norm(dim=1)
    if kind == 10:
        block = draw.choice((256, 1024, 4096))
        size, warps = 64 * block, draw.choice((1, 4, 8))
        flat, y = normal(size), torch.empty(size, device="cuda")
        return lambda: scan_kernel[(64,)](flat, y, block, num_warps=warps) and y
    tile_m, tile_n, tile_k = (draw.choice((32, 64, 128)) for _ in range(3))
    m, n, k = 4 * tile_m, 4 * tile_n, 4 * tile_k
    stages, warps = draw.choice((1, 2, 3)), draw.choice((4, 8))
    a, b = normal(m, k, dtype=torch.bfloat16), normal(k, n, dtype=torch.bfloat16)
    c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: matmul_kernel[(16,)](
        a, b, c, m, n, k, tile_m, tile_n, tile_k, 4, num_warps=warps, num_stages=stages
    ) and c  # fmt: skip


draw_dim = 0


def captured(call):
    """The graph of a call that has run before, and its result, which the graph writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=side):
        result = call()
    return graph, result


def check_exact(call, limits) -> int:
    """Replay at every feasible number of blocks and compare bits; how many kernels there were."""
    graph, result = captured(call)
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    want = result.clone()
    raw = int(graph.raw_cuda_graph())
    own = {node: graph_nodes.kernel_of(node) for node in Nodes(raw, limits).kernels}
    with Nodes(raw, limits) as nodes:
        for node, kernel in nodes.kernels.items():
            function = graph_nodes.function_of(node)
            for blocks in feasible(kernel, limits):
                shape = Shape(blocks_per_sm=blocks)
                nodes.set(shape)
                nodes.set(shape, int(graph.raw_cuda_graph_exec()))
                result.fill_(7)
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(result, want), (kernel, blocks)
                num_bytes = shape.bytes_of(kernel, limits)
                resident = graph_nodes.resident_blocks(function, kernel.threads, num_bytes)
                assert resident == blocks, (kernel, blocks)
        shaped = len(nodes.kernels)
    assert {node: graph_nodes.kernel_of(node) for node in own} == own
    return shaped


def test_a_hundred_random_kernels(gpus):
    limits, draw, shaped = limits_here(gpus), random.Random(dist.get_rank()), 0
    for _ in range(400):
        shaped += check_exact(random_call(draw), limits)
        if shaped >= NUM_KERNELS:
            break
    assert shaped >= NUM_KERNELS


def test_kernels_of_the_compiler(gpus):
    """torch.compile's kernels are Triton's, launched by code of its own."""
    limits = limits_here(gpus)

    def norm_and_gate(x, w):
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
        return F.silu(y) * y.cumsum(-1)

    x, w = normal(512, 2048), normal(2048)
    call = torch.compile(norm_and_gate)
    call(x, w)
    assert check_exact(lambda: call(x, w), limits) >= 1


@pytest.mark.parametrize("size", [64, 4096])
def test_occupancy_is_the_drivers_also_of_what_is_not_shaped(gpus, size):
    limits = limits_here(gpus)
    a = normal(size, size, dtype=torch.bfloat16)
    calls = [lambda: a @ a, lambda: torch.sort(a)[0]]
    if dist.get_world_size() > 1:
        big = normal(1 << 22, dtype=torch.bfloat16)
        calls.append(lambda: dist.all_reduce(big))
    for call in calls:
        graph, _ = captured(call)
        for node in graph_nodes.nodes(int(graph.raw_cuda_graph())):
            if graph_nodes.kind_of(node) != "kernel":
                continue
            kernel = Nodes(int(graph.raw_cuda_graph()), limits, [node]).kernels.get(node)
            found = graph_nodes.kernel_of(node)
            function, block = graph_nodes.function_of(node), found.block
            threads = block[0] * block[1] * block[2]
            resident = graph_nodes.resident_blocks(function, threads, found.dynamic_shared_bytes)
            assert occupancy(node_footprint(node), limits).blocks == resident, found
            assert kernel is None or kernel.short_name


def test_what_cannot_be_shaped_is_refused_by_name(gpus):
    limits = limits_here(gpus)
    a = normal(8192, 8192, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    calls = {"cluster": lambda: torch.mm(a, a, out=out)}
    if dist.get_world_size() > 1:
        calls["peers"] = lambda: dist.all_reduce(out)
    for why, call in calls.items():
        graph, _ = captured(call)
        nodes = Nodes(int(graph.raw_cuda_graph()), limits)
        assert not nodes.kernels and any(why in text for text in nodes.refused.values())
        with pytest.raises(UnsupportedError, match="nothing can be shaped"):
            nodes.check()


def test_a_carve_out_is_set_and_taken_back(gpus):
    limits = limits_here(gpus)
    x = normal(1 << 20)
    graph, result = captured(lambda: torch.relu(x))
    raw = int(graph.raw_cuda_graph())
    (node,) = [n for n in graph_nodes.nodes(raw) if graph_nodes.kind_of(n) == "kernel"]

    def carve_out() -> int:
        return graph_nodes._node_attribute(
            node, "PREFERRED_SHARED_MEMORY_CARVEOUT"
        ).sharedMemCarveout

    before, kernel = carve_out(), graph_nodes.kernel_of(node)
    with Nodes(raw, limits) as nodes:
        nodes.set(Shape(carve_out=True))
        assert carve_out() == 100
        graph.instantiate()
        result.zero_()
        graph.replay()
        assert torch.equal(result, torch.relu(x))
        with pytest.raises(InputError, match="an instantiated graph"):
            nodes.set(Shape(carve_out=True), int(graph.raw_cuda_graph_exec()))
    assert (carve_out(), graph_nodes.kernel_of(node)) == (before, kernel)
    graph.instantiate()
    graph.replay()


def test_eager_triton_launches(gpus):
    limits = limits_here(gpus)
    m = 1024
    a, b = normal(m, m, dtype=torch.bfloat16), normal(m, m, dtype=torch.bfloat16)
    c = torch.empty_like(a)

    def call():
        return matmul_kernel[(m // 64 * (m // 64),)](
            a, b, c, m, m, m, 64, 64, 32, 8, num_warps=4, num_stages=2
        )

    kernel = call()
    want, packed = c.clone(), kernel.packed_metadata
    function = int(kernel.function)
    with pytest.raises(RuntimeError, match="on purpose"):  # noqa: SIM117
        with triton_launches([kernel], Shape(blocks_per_sm=2), limits) as found:
            c.zero_()
            call()
            assert torch.equal(c, want)
            (num_bytes,) = found.values()
            assert graph_nodes.resident_blocks(function, 128, num_bytes) == 2
            launched = captured(call)[0]
            (node,) = graph_nodes.nodes(int(launched.raw_cuda_graph()))
            assert graph_nodes.kernel_of(node).dynamic_shared_bytes == num_bytes
            raise RuntimeError("on purpose")
    assert kernel.packed_metadata == packed
    with triton_launches([kernel], Shape(carve_out=True), limits):
        call()
    assert torch.equal(c, want)
