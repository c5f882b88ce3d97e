"""A loop whose every iteration has a product of its own, on CPU ranks and on GPUs alike.

A buffer is reused two iterations later, and what has arrived is read by a stage of its own: an edge
that is missing lets a later product stand where an earlier one is expected.
"""

from typing import Any

import torch
import torch.distributed as dist
from rank_bodies import device, world
from torch import Tensor

from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Eager

ITERATIONS = 6


class Loop:
    """x_i w -> collective -> copied out, with two buffers in turn."""

    def __init__(self, op: Any, size: int, *, triton: bool = False) -> None:
        self.op, self.size = op, size
        self.dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
        self.pipeline = pipeline = Pipeline(world(), device())
        ranks = dist.get_world_size()
        rows = {"all_gather": size * ranks, "reduce_scatter": size // ranks}.get(op, size)
        self.xs = [self._empty(size, size) for _ in range(ITERATIONS)]
        self.w = self._empty(size, size)
        in_place = op == "all_reduce"
        sent = [self._opened(size) if in_place else self._empty(size, size) for _ in range(2)]
        received = sent if in_place else [self._opened(rows) for _ in range(2)]
        self.results = [self._empty(rows, size) for _ in range(ITERATIONS)]
        self.buffers = [*sent, *received]
        launch = self._triton if triton else self._library
        for i, x in enumerate(self.xs):
            out, target, result = sent[i % 2], received[i % 2], self.results[i]
            call = launch(x, out)
            kernels = [call()] if triton else []
            pipeline.compute(call, reads=[x, self.w], writes=[out], kernels=kernels)
            pipeline.collective(op, target, out)
            pipeline.compute(lambda r=result, t=target: r.copy_(t), reads=[target], writes=[result])

    def change(self, call: int) -> None:
        """Inputs of this call, and no trace of the last one; ranks are in step afterwards."""
        draw = torch.Generator(device()).manual_seed(100 * call + dist.get_rank())
        for tensor in (*self.xs, self.w):
            tensor.normal_(generator=draw)
        for tensor in (*self.buffers, *self.results):
            tensor.fill_(torch.nan)
        self._meet()

    def error(self) -> float:
        """The largest relative error of any iteration's result, of any rank."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        part = slice(rank * self.size // ranks, (rank + 1) * self.size // ranks)
        worst = torch.zeros((), dtype=torch.float64, device=device())
        self._meet()
        for x, result in zip(self.xs, self.results, strict=True):
            product = x.double() @ self.w.double()
            every = [torch.empty_like(product) for _ in range(ranks)]
            dist.all_gather(every, product)
            want = {
                "all_reduce": torch.stack(every).sum(0),
                "reduce_scatter": torch.stack(every).sum(0)[part],
                "all_gather": torch.cat(every),
                "all_to_all": torch.cat([x[part] for x in every]),
            }[self.op]
            error = (result.double() - want).norm() / want.norm()
            worst = torch.maximum(worst, error.nan_to_num(torch.inf))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    @property
    def tolerance(self) -> float:
        """Of a product that is rounded to the dtype, and once more by a sum."""
        return 2 * torch.finfo(self.dtype).eps

    def _empty(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype, device=device())

    def _opened(self, rows: int) -> Tensor:
        return self.pipeline.empty(rows, self.size, dtype=self.dtype)

    def _library(self, x: Tensor, out: Tensor) -> Any:
        return lambda: torch.mm(x, self.w, out=out)

    def _triton(self, x: Tensor, out: Tensor) -> Any:
        from benchmarks.kernel_matmul import matmul_kernel

        n = self.size
        launch: Any = matmul_kernel
        return lambda: launch[(n // 64 * (n // 64),)](
            x, self.w, out, n, n, n, 64, 64, 32, 8, num_warps=4, num_stages=2
        )

    def _meet(self) -> None:
        if device().type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def plain_errors(rank: int, world_size: int, op: str, size: int) -> list[tuple[float, float]]:
    """The errors of two calls each, plain and one after the other, with their tolerance."""
    loop = Loop(op, size)
    found: list[tuple[float, float]] = []
    for controls in (OFF, SEQUENTIAL):
        with Eager(loop.pipeline, controls) as run:
            for call in range(2):
                loop.change(call)
                run()
                found.append((loop.error(), loop.tolerance))
    return found


def error_without_an_edge(rank: int, world_size: int) -> float:
    """What the loop says where the third product lands before the first one has been read."""
    loop = Loop("all_to_all", 12)
    stages = loop.pipeline._stages
    first_read = stages.pop(2)
    stages.insert(7, first_read)
    loop.change(0)
    with Eager(loop.pipeline, Controls()) as run:
        run()
    return loop.error()
