"""What the controls stand on: questions to the hardware, answered as rows. Run by gpu_suite.py.

E   does a launch-order edge of a graph work: behind a plain kernel, behind NCCL's
F   does cuBLAS compute the same with fewer blocks than it was launched with
G   an all-to-all by NCCL's kernels, by NCCL without kernels, and by our copies: alone, and
    launched together with a matmul
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from counterpoint.cli.launch import nccl_group
from counterpoint.errors import UnsupportedError
from counterpoint.kernels.clock import now_ns
from counterpoint.measure import record
from counterpoint.measure.timing import rotate
from counterpoint.resources.controls import Transport
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.transport import carriers
from counterpoint.runtime import driver, graph_nodes
from counterpoint.runtime.footprint import Footprint, gemm_tile

SIZE = 8192
EXCHANGED_BYTES = 896 << 20


@triton.jit
def stamp_kernel(out_ptr):
    tl.store(out_ptr, now_ns())


@triton.jit
def busy_kernel(out_ptr, busy_ns):
    start_ns = now_ns()
    while now_ns() - start_ns < busy_ns:
        pass
    tl.store(out_ptr + tl.program_id(0), now_ns())


def main() -> None:
    """Ask them all; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    with nccl_group() as (group, device):
        facts = {"table": "sharing", "ranks": group.size()} | record.environment()
        rows = [*order_edges(group), *fewer_blocks(device), *transports(group, device)]
        if group.rank() == 0:
            record.append(args.out, [row | facts for row in rows])


def order_edges(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """When a kernel starts behind a launch-order edge, and when what it is behind ends."""
    times = torch.zeros(4, dtype=torch.int64, device="cuda")
    start, end, after, then = (times[i : i + 1] for i in range(4))
    blocks = torch.zeros(64, dtype=torch.int64, device="cuda")
    busy, stamp = as_launch(busy_kernel), as_launch(stamp_kernel)
    sent = torch.randn(1 << 27, device="cuda")
    received = torch.empty_like(sent)
    side, other = torch.cuda.Stream(priority=-1), torch.cuda.Stream()

    def source(name: str) -> None:
        if name == "NCCL":
            dist.all_to_all_single(received, sent, group=group)
        else:
            busy[(64,)](blocks, 2_000_000)

    rows: list[dict[str, Any]] = []
    for name in ("a kernel without clusters", "NCCL"):
        with torch.cuda.stream(side):
            source(name)
            stamp[(1,)](end)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            stamp[(1,)](start)
            for stream in (side, other):
                stream.wait_stream(main)
            with torch.cuda.stream(side):
                source(name)
                stamp[(1,)](end)
            with torch.cuda.stream(other):
                stamp[(1,)](after)
                stamp[(1,)](then)
            for stream in (side, other):
                main.wait_stream(stream)
        raw = int(graph.raw_cuda_graph())
        kernels = {
            node: graph_nodes.kernel_of(node)
            for node in graph_nodes.nodes(raw) if graph_nodes.kind_of(node) == "kernel"
        }  # fmt: skip
        followers: dict[int, list[int]] = {}
        for a, b in graph_nodes.edges(raw):
            followers.setdefault(a, []).append(b)
        (first,) = (n for n in kernels if all(b != n for _, b in graph_nodes.edges(raw)))
        (long,) = (n for n, k in kernels.items() if "stamp" not in k.name)
        (ordered,) = (n for n in followers[first] if n != long)
        graph_nodes.launch_order_edge(raw, long, ordered)
        graph.instantiate()
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
        begin = int(start)
        rows.append(
            {"question": "E", "behind": name, "cluster": kernels[long].cluster,
             "starts_s": (int(after) - begin) * 1e-9, "next_starts_s": (int(then) - begin) * 1e-9,
             "ends_s": (int(end) - begin) * 1e-9}
        )  # fmt: skip
    return rows


def fewer_blocks(device: torch.device) -> list[dict[str, Any]]:
    """How much of a cuBLAS result is missing where its node has fewer blocks."""
    x = torch.randn(SIZE, SIZE, device=device).bfloat16()
    y = torch.empty_like(x)
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    want = y.clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        torch.mm(x, x, out=y)
    nodes = graph_nodes.nodes(int(graph.raw_cuda_graph()))
    kernels = {n: graph_nodes.kernel_of(n) for n in nodes if graph_nodes.kind_of(n) == "kernel"}
    node, kernel = next(
        (n, k) for n, k in kernels.items() if gemm_tile(Footprint(kind="kernel", name=k.name))
    )
    params: Any = driver.ask("cuGraphKernelNodeGetParams", node)
    params.gridDimY = kernel.grid[1] - 2
    driver.ask("cuGraphKernelNodeSetParams", node, params)
    graph.instantiate()
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return [
        {"question": "F", "kernel": kernel.name, "blocks": kernel.grid[0] * kernel.grid[1],
         "blocks_left": kernel.grid[0] * (kernel.grid[1] - 2), "equal": torch.equal(y, want),
         "missing": int(y.isnan().sum()) / y.numel()}
    ]  # fmt: skip


def transports(group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """An exchange by each transport, alone and on an urgent stream together with a matmul."""
    x = torch.randn(SIZE, SIZE, device=device).bfloat16()
    y = torch.empty_like(x)
    numel = EXCHANGED_BYTES // 2
    arms: dict[str, Any] = {"matmul": lambda: torch.mm(x, x, out=y)}
    refused: dict[str, str] = {}
    side = torch.cuda.Stream(priority=-1)

    def alone(carry: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            carry()
        torch.cuda.current_stream().wait_stream(side)

    def beside(carry: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        torch.mm(x, x, out=y)
        with torch.cuda.stream(side):
            carry()
        torch.cuda.current_stream().wait_stream(side)

    names: tuple[Transport, ...] = ("sm", "copy_engine", "zero_cta")
    kept: list[Pipeline] = []
    for name in names:
        pipeline = Pipeline(group, device)
        memory: Any = "library" if name == "zero_cta" else "peers"
        try:
            source, target = (
                pipeline.empty(numel, dtype=torch.bfloat16, memory=memory) for _ in range(2)
            )
        except UnsupportedError as error:
            refused[name] = str(error)
            continue
        pipeline.all_to_all(target, source.normal_())
        (carry,) = carriers(pipeline, name)
        arms[name] = lambda c=carry: alone(c)
        arms[f"{name} beside"] = lambda c=carry: beside(c)
        kept.append(pipeline)
    times = rotate(arms, group=group, device=device, rounds=9, soak_s=0.5)
    found: list[dict[str, Any]] = [
        {"question": "G", "arm": name, "median_s": t.median_s, "bytes": EXCHANGED_BYTES,
         "p20_s": t.quantile_s(2), "p80_s": t.quantile_s(8)}
        for name, t in times.items()
    ]  # fmt: skip
    return found + [{"question": "G", "arm": a, "refused": why} for a, why in refused.items()]


def as_launch(kernel: Any) -> Any:
    """A Triton kernel, compiled before it is captured."""
    scratch = torch.zeros(64, dtype=torch.int64, device="cuda")
    kernel[(1,)](*((scratch,) if kernel is stamp_kernel else (scratch, 1)))
    return kernel


if __name__ == "__main__":
    main()
