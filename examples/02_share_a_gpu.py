"""A loop of matmuls and all-to-alls of one's own, and how it shares the GPU best.

    python examples/02_share_a_gpu.py --ranks 4                          # CPU: runs and checks
    NCCL_GRAPH_REGISTER=0 torchrun --nproc-per-node 4 examples/02_share_a_gpu.py   # GPUs: tunes

Each rank multiplies its tokens by one weight after another and sends every rank its part of the
result, as an expert layer does, while the next product is computed. Two buffers in turn: the
exchange of one is under way while the other is written.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp

NUM_LAYERS = 4
EXACT = 1e-2  # of a bf16 product against fp32, relative


def loop(x: Tensor, weights: list[Tensor]) -> tuple[cp.resources.Pipeline, list[Tensor]]:
    """The pipeline, and the buffers that its exchanges fill."""
    pipeline = cp.resources.Pipeline(dist.group.WORLD, x.device)
    rows, cols = x.shape[0], weights[0].shape[1]
    sent = [torch.empty(rows, cols, dtype=x.dtype, device=x.device) for _ in range(2)]
    received = [pipeline.empty(rows, cols, dtype=x.dtype) for _ in range(2)]
    for i, w in enumerate(weights):
        out = sent[i % 2]
        pipeline.compute(
            lambda w=w, out=out: torch.mm(x, w, out=out), reads=[x, w], writes=[out], name=f"{i}"
        )
        pipeline.all_to_all(received[i % 2], out)
    return pipeline, received


def check(rank: int, x: Tensor, weights: list[Tensor], received: list[Tensor]) -> None:
    """What has arrived of the last two layers, against the products of all ranks."""
    for i in (len(weights) - 2, len(weights) - 1):
        product = x.float() @ weights[i].float()
        every = [torch.empty_like(product) for _ in range(dist.get_world_size())]
        dist.all_gather(every, product)
        part = len(x) // len(every)
        want = torch.cat([p[rank * part : (rank + 1) * part] for p in every])
        error = ((received[i % 2].float() - want).norm() / want.norm()).item()
        assert error < EXACT, f"layer {i}: error {error:.1e} on rank {rank}"


def run(device: torch.device, size: int | None) -> None:
    """Build, tune where there are GPUs, run, check."""
    rank, ranks, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    torch.manual_seed(rank)
    size, dtype = size or (8192 if on_gpu else 256), torch.bfloat16 if on_gpu else torch.float32
    x = torch.randn(size - size % ranks, size, device=device).to(dtype)
    weights = [torch.randn(size, size, device=device).to(dtype) for _ in range(NUM_LAYERS)]
    pipeline, received = loop(x, weights)
    if on_gpu:
        with cp.resources.tune(pipeline) as tuned:
            tuned()
            torch.cuda.synchronize()
            text = tuned.explain()
    else:
        with cp.resources.Eager(pipeline) as plain:
            plain()
        text = "CPU ranks run the stages one after the other: there is nothing to tune"
    check(rank, x, weights, received)
    if rank == 0:
        print(text)
        print(f"the exchanged products on {ranks} ranks agree with fp32")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    parser.add_argument("--size", type=int, help="of the square products; 8192 on GPUs, else 256")
    args = parser.parse_args()
    cp.run_on_ranks(run, args.size, ranks=args.ranks)
