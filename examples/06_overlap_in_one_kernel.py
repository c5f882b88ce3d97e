"""A fused kernel of your own that overlaps: x w, summed over the ranks and scattered by rows.

    python examples/06_overlap_in_one_kernel.py --ranks 4              # CPU: Triton's interpreter
    torchrun --nproc-per-node 4 examples/06_overlap_in_one_kernel.py   # GPUs

A program computes a tile, stores it into the memory of the rank that owns its rows, and posts a
flag. The tile travels while the next one is computed. Last, the program waits for tiles and sums.
"""

import argparse
import os

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

import counterpoint as cp
from counterpoint.device import PeerKernel, end_of_call, next_epoch, peer_ptr, post, put, wait

BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def matmul_reduce_scatter_kernel(
    x_ptr, w_ptr, y_ptr, M, N, K,  # x [WORLD * M, K], w [K, N] and y [M, N], all contiguous
    bases_ptr, half_bytes, flags_at, state_ptr, fault_ptr, rank, tag, timeout_ns,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Payload: partial sums by sender, [WORLD, M, N]. Flags: [tiles, WORLD]."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns, tiles = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    epoch = next_epoch(tl.load(state_ptr))
    half = (epoch & 1).to(tl.int64) * half_bytes  # calls use the halves in turn
    offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]

    for step in range(WORLD):
        owner = (rank + 1 + step) % WORLD  # each rank begins with another one; itself last
        slot = peer_ptr(bases_ptr, owner, half, DTYPE) + rank * M * N
        flags = peer_ptr(bases_ptr, owner, half + flags_at, tl.int32) + rank
        for tile in range(program, tiles, programs):
            rows, cols = tile // columns * BLOCK_M + offs_m, tile % columns * BLOCK_N + offs_n
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                xk, wk = k + tl.arange(0, BLOCK_K)[None, :], k + tl.arange(0, BLOCK_K)[:, None]
                x = tl.load(x_ptr + (owner * M + rows) * K + xk, (rows < M) & (xk < K), 0.0)
                w = tl.load(w_ptr + wk * N + cols, (wk < K) & (cols < N), 0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
            put(slot + rows * N + cols, acc.to(DTYPE), (rows < M) & (cols < N))
            post(flags + tile * WORLD, epoch)  # pairs with the wait below, on the owner

    ranks, late = tl.arange(0, WORLD), tl.zeros((WORLD,), tl.int32)
    own_slots = peer_ptr(bases_ptr, rank, half, DTYPE)
    own_flags = peer_ptr(bases_ptr, rank, half + flags_at, tl.int32) + ranks
    for tile in range(program, tiles, programs):
        rows, cols = tile // columns * BLOCK_M + offs_m, tile % columns * BLOCK_N + offs_n
        mask = (rows < M) & (cols < N)
        late |= wait(own_flags + tile * WORLD, epoch, state_ptr + 2, timeout_ns).to(tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for source in tl.static_range(WORLD):  # in rank order: the same bits in every run
            place = (source * M + rows) * N + cols
            total += tl.load(own_slots + place, mask, cache_modifier=".cg").to(tl.float32)
        tl.store(y_ptr + rows * N + cols, total.to(DTYPE), mask)
    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)


class MatmulReduceScatter:
    """Memory for results [m, n] of one dtype; all ranks make and call it."""

    def __init__(self, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.m, self.n, ranks = m, n, dist.get_world_size()
        self.tiles = -(-m // BLOCKS["BLOCK_M"]) * -(-n // BLOCKS["BLOCK_N"])
        sizes = {"payload_bytes": ranks * m * n * dtype.itemsize, "num_flags": ranks * self.tiles}
        self.kernel = PeerKernel(matmul_reduce_scatter_kernel, device=device, **sizes)

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(self.m, self.n)
        sizes = {"M": self.m, "N": self.n, "K": x.shape[1]}
        self.kernel(self.tiles, x_ptr=x, w_ptr=w, y_ptr=y, **sizes, **BLOCKS)
        return y


def run(device: torch.device) -> None:
    """Call it a few times and compare with matmul and reduce-scatter in fp64."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    m, n, k = 40, 96, 80
    fused = MatmulReduceScatter(m, n, torch.float32, device)
    for _ in range(5):
        x, w = (torch.randn(*s, device=device) for s in ((world_size * m, k), (k, n)))
        want = (x.double() @ w.double()).view(world_size, m, n)
        dist.all_reduce(want)
        assert (fused(x, w) - want[rank]).norm() < 1e-6 * want[rank].norm()
    if rank == 0:
        print(f"five calls on {world_size} ranks agree with matmul and reduce-scatter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    cp.run_on_ranks(run, ranks=parser.parse_args().ranks)
