"""A fused kernel of one's own: x w + b, each block of rows stored to its owner as it is computed.

    python examples/03_write_a_fused_kernel.py --ranks 4              # CPU: Triton's interpreter
    torchrun --nproc-per-node 4 examples/03_write_a_fused_kernel.py   # GPUs

What would be a matmul, a bias and an all-to-all is one kernel of forty lines. A program computes a
tile for one rank, stores it into that rank's memory, and raises a flag behind it; then it waits for
the tile that it gets itself. Two halves of the memory are used in turn, so calls need no barrier.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

from counterpoint.kernels.peer import peer_ptr, post, put, wait
from counterpoint.runtime.ranks import spawn
from counterpoint.runtime.symmetric import allocate

BLOCK_N, BLOCK_K = 32, 32
TIMEOUT_NS = tl.constexpr(10_000_000_000)


@triton.jit
def matmul_all_to_all_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, bases_ptr, epoch_ptr, stop_ptr, N, K, half_bytes, rank,
    WORLD: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[s] = rows of this rank of (x w + b) on rank s: [WORLD, M, N] from [WORLD * M, K]."""
    tiles = tl.cdiv(N, BLOCK_N)
    step, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    to, source = (rank + 1 + step) % WORLD, (rank - 1 - step + WORLD) % WORLD  # itself last
    epoch = tl.load(epoch_ptr)
    half = (epoch % 2) * half_bytes
    rows, cols = tl.arange(0, M)[:, None], tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + (to * M + rows) * K + ks[None, :])
        acc = tl.dot(x, tl.load(w_ptr + ks[:, None] * N + cols), acc, input_precision="ieee")
    y = (acc + tl.load(b_ptr + cols).to(tl.float32)).to(out_ptr.dtype.element_ty)
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    put(peer_ptr(bases_ptr, to, half, OUT) + (rank * M + rows) * N + cols, y)
    flags = 2 * half_bytes + (epoch % 2) * 4 * WORLD * tiles
    post(peer_ptr(bases_ptr, to, flags, tl.int32) + rank * tiles + tile, epoch)
    own_flag = peer_ptr(bases_ptr, rank, flags, tl.int32) + source * tiles + tile
    wait(own_flag + tl.arange(0, 1), epoch, stop_ptr, TIMEOUT_NS)
    place = (source * M + rows) * N + cols
    got = tl.load(peer_ptr(bases_ptr, rank, half, OUT) + place, cache_modifier=".cg")
    tl.store(out_ptr + place, got)


class MatmulAllToAll:
    """Its memory, for [ranks * m, k] x [k, n]; all ranks make and call it."""

    def __init__(self, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.m, self.n, self.tiles = m, n, n // BLOCK_N
        self.half_bytes = self.ranks * m * n * dtype.itemsize
        num_bytes = 2 * (self.half_bytes + 4 * self.ranks * self.tiles)
        self.memory = allocate(num_bytes, dist.group.WORLD, device)  # type: ignore[arg-type]
        self.bases = torch.tensor(self.memory.buffer_ptrs, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=device)  # 1: a peer did not come

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.ranks, self.m, self.n)
        self.epoch += 1  # on the device: a graph counts on
        kernel: Any = matmul_all_to_all_kernel
        kernel[(self.ranks * self.tiles,)](
            x, w, b, out, self.bases, self.epoch, self.stop, self.n, x.shape[1], self.half_bytes,
            self.rank, self.ranks, self.m, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        return out


def run(rank: int, world_size: int, device: torch.device) -> None:
    """Call it a few times and compare with matmul, bias and all-to-all of the libraries."""
    torch.manual_seed(rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    m, n, k = 16, 64, 96
    fused = MatmulAllToAll(m, n, dtype, device)
    for _ in range(5):
        x, w, b = (
            torch.randn(*s, device=device).to(dtype) for s in ((world_size * m, k), (k, n), (n,))
        )
        got = fused(x, w, b)
        want = torch.empty_like(got)
        dist.all_to_all_single(want, (x @ w + b).view_as(got))
        error = float((got.float() - want.float()).norm() / want.float().norm())
        assert error < 1e-2 and not fused.stop.any(), f"error {error:.1e} on rank {rank}"
    if rank == 0:
        print(f"five calls on {world_size} ranks agree with matmul, bias and all-to-all")


def main() -> None:
    """Start the ranks, or be one that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes on the CPU")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        spawn(run, args.ranks, torch.device("cpu"), timeout_s=600)
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    run(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
