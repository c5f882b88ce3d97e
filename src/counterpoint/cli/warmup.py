"""`counterpoint warmup`: compile the kernels of given sizes before traffic comes."""

import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from counterpoint.cli.shared.launch import nccl_group, too_few_gpus, torchrun, under_torchrun
from counterpoint.cli.shared.problems import numbers, op_of
from counterpoint.cli.shared.show import progress, table
from counterpoint.norms.all_reduce_norm import all_reduce_layer_norm, all_reduce_rms_norm
from counterpoint.norms.matmul_all_reduce_norm import (
    matmul_all_reduce_layer_norm,
    matmul_all_reduce_rms_norm,
)
from counterpoint.tensor_parallel.all_gather_matmul import all_gather_matmul
from counterpoint.tensor_parallel.matmul_all_reduce import matmul_all_reduce
from counterpoint.tensor_parallel.matmul_reduce_scatter import matmul_reduce_scatter

MATMULS: dict[str, Callable[..., Tensor]] = {
    "matmul_all_reduce": matmul_all_reduce,
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
NORMED: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "matmul_all_reduce_rms_norm": matmul_all_reduce_rms_norm,
    "matmul_all_reduce_layer_norm": matmul_all_reduce_layer_norm,
}
NORMS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "all_reduce_rms_norm": all_reduce_rms_norm,
    "all_reduce_layer_norm": all_reduce_layer_norm,
}
OPS = (*MATMULS, *NORMED, *NORMS)
SHARED = ("all_gather_matmul", "matmul_reduce_scatter")  # their rows, over the ranks


class Sizes(NamedTuple):
    """M over all ranks, N and K of one; of a norm without a matmul no K."""

    m: int
    n: int
    k: int


def warmup(*, ops: str, layers: str, rows: str, dtype: str, ranks: int) -> int:
    """Call each operator at each size on the GPUs here; 0.

    Raises:
        InputError: there is no such operator, a size is none, or there are too few GPUs.
    """
    names = [op_of("warmup", "--op", name.strip(), OPS) for name in ops.split(",")]
    shapes, counts = layers_of(layers), numbers("warmup", "--rows", rows, "numbers with commas")
    if not under_torchrun():
        ranks = ranks or torch.cuda.device_count()
        if ranks < 2 or torch.cuda.device_count() < ranks:
            raise too_few_gpus("warmup", "CPU ranks compile nothing, so they need no warm-up")
        return torchrun(ranks)
    with nccl_group() as (group, device):
        world = group.size()
        cases = [
            (name, Sizes(m, n, k))
            for name, (n, k), m in product(names, shapes, sorted(counts, reverse=True))
            if m % world == 0 or name not in SHARED
        ]
        made = table("operator", ">M, N, K", ">first call, ms", ">then, ms")
        first, console = group.rank() == 0, Console()
        with progress(console, shown=first) as bar:
            task = bar.add_task("compiling", total=len(cases))
            for name, sizes in cases:
                m, n, k = sizes
                bar.update(task, description=f"{name} {m},{n},{k}")
                call = call_of(name, sizes, getattr(torch, dtype), group, device)
                times = [_seconds(call, group, device) for _ in range(2)]
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


def call_of(
    name: str, sizes: Sizes, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """A call of an operator on random tensors; norms have a residual, and a LayerNorm a bias."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    m, n, k = sizes
    residual, weight = normal(m, n), normal(n)
    biases = [normal(n)] if "layer" in name else []
    if name in NORMS:
        x = normal(m, n)
        return lambda: NORMS[name](x, residual, weight, *biases, group=group)
    x = normal(m // (group.size() if name == "all_gather_matmul" else 1), k)
    w = normal(n, k).t()
    if name in MATMULS:
        return lambda: MATMULS[name](x, w, group=group)
    given: dict[str, Any] = {"residual": residual, "norm_weight": weight, "group": group}
    given |= dict(zip(["norm_bias"], biases, strict=False))
    return lambda: NORMED[name](x, w, **given)


def _seconds(call: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Of one call."""
    torch.cuda.synchronize(device)
    dist.barrier(group)
    start_s = time.perf_counter()
    found = call()
    torch.cuda.synchronize(device)
    assert all(y.isfinite().all() for y in (found if isinstance(found, tuple) else (found,)))
    return time.perf_counter() - start_s


def layers_of(text: str) -> list[tuple[int, int]]:
    """N and K of "8192,3584:8192,1024".

    Raises:
        InputError: not two numbers above 0 each.
    """
    want = "N,K of each layer with colons between, numbers"
    each = (numbers("warmup", "--layers", layer, want, count=2) for layer in text.split(":"))
    return [(n, k) for n, k in each]
