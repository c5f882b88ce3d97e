"""`counterpoint warmup`: compile the kernels of given sizes before traffic comes."""

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from counterpoint.cli.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.cli.problems import numbers, op_of
from counterpoint.cli.show import progress, table
from counterpoint.ops.all_gather_matmul import all_gather_matmul
from counterpoint.ops.matmul_all_reduce import matmul_all_reduce
from counterpoint.ops.matmul_reduce_scatter import matmul_reduce_scatter
from counterpoint.plan.operation import operation_of

OPS: dict[str, Callable[..., Any]] = {
    "matmul_all_reduce": matmul_all_reduce,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}


def warmup(*, ops: str, layers: str, rows: str, dtype: str, ranks: int) -> int:
    """Call each operator at each size on the GPUs here; 0.

    Raises:
        InputError: there is no such operator, a size is none, or there are too few GPUs.
    """
    names = [op_of("warmup", "--op", name.strip(), tuple(OPS)) for name in ops.split(",")]
    shapes, counts = layers_of(layers), numbers("warmup", "--rows", rows, "numbers with commas")
    if not under_torchrun():
        ranks = ranks or torch.cuda.device_count()
        if ranks < 2 or torch.cuda.device_count() < ranks:
            raise too_few_gpus("warmup", "CPU ranks compile nothing, so they need no warm-up")
        return torchrun(ranks)
    with nccl_group() as (group, device):
        world = group.size()
        cases = [
            (name, m, n, k)
            for name, (n, k), m in product(names, shapes, sorted(counts, reverse=True))
            if m % world == 0 or not operation_of(name).shares_rows
        ]
        made = table("operator", ">M, N, K", ">first call, ms", ">then, ms")
        first, console = group.rank() == 0, Console()
        with progress(console, shown=first) as bar:
            task = bar.add_task("compiling", total=len(cases))
            for name, m, n, k in cases:
                bar.update(task, description=f"{name} {m},{n},{k}")
                times = _calls(name, m, n, k, getattr(torch, dtype), group, device)
                made.add_row(name, f"{m}, {n}, {k}", *(f"{t * 1e3:.1f}" for t in times))
                bar.advance(task)
        if first:
            console.print(made)
            skipped = len(names) * len(shapes) * len(counts) - len(cases)
            if skipped:
                console.print(f"{skipped} left out: {world} ranks do not share those rows evenly.")
            console.print("Triton keeps what was compiled; in a server, call once at the largest "
                          "size before a graph is captured.")  # fmt: skip
    return 0


def _calls(
    name: str, m: int, n: int, k: int, dtype: torch.dtype, group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of the first call and of the one after it."""
    x = torch.randn(m // (group.size() if name == "all_gather_matmul" else 1), k, device=device)
    x, w = x.to(dtype), torch.randn(n, k, device=device).to(dtype).t()

    def seconds() -> float:
        torch.cuda.synchronize(device)
        dist.barrier(group)
        start_s = time.perf_counter()
        y: Tensor = OPS[name](x, w, group=group)
        torch.cuda.synchronize(device)
        assert y.isfinite().all()
        return time.perf_counter() - start_s

    return seconds(), seconds()


def layers_of(text: str) -> list[tuple[int, int]]:
    """N and K of "8192,3584:8192,1024".

    Raises:
        InputError: not two numbers above 0 each.
    """
    want = "N,K of each layer with colons between, numbers"
    each = (numbers("warmup", "--layers", layer, want, count=2) for layer in text.split(":"))
    return [(n, k) for n, k in each]
