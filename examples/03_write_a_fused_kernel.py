"""The smallest fused kernel of your own: the sum of x over all ranks, plus a residual.

    python examples/03_write_a_fused_kernel.py --ranks 4              # CPU: Triton's interpreter
    torchrun --nproc-per-node 4 examples/03_write_a_fused_kernel.py   # GPUs

An all-reduce and an addition are one kernel of thirty lines. Each program takes blocks of x. It
stores a block into the memory of every rank and posts a flag behind it. Then it waits for the
same block of every rank, sums in rank order, and adds the residual. docs/kernels.md explains it.
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


@triton.jit(do_not_specialize=["rank", "tag", "timeout_ns"])
def all_reduce_add_kernel(
    x_ptr, residual_ptr, out_ptr, numel,  # [numel] each, of one dtype
    bases_ptr, half_bytes, flags_at, state_ptr, fault_ptr, rank, tag, timeout_ns,
    WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum of x over the ranks + residual. Payload: [WORLD, numel]; flags: [blocks, WORLD]."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program, programs, blocks = tl.program_id(0), tl.num_programs(0), tl.cdiv(numel, BLOCK)
    epoch = next_epoch(tl.load(state_ptr))
    half = (epoch & 1).to(tl.int64) * half_bytes  # calls use the halves in turn
    ranks = tl.arange(0, WORLD)

    # all ranks' slots for this rank, as a column of pointers
    slots = peer_ptr(bases_ptr, ranks, half, DTYPE)[:, None] + rank * numel
    flags = peer_ptr(bases_ptr, ranks, half + flags_at, tl.int32) + rank
    for block in range(program, blocks, programs):
        offs = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.broadcast_to(tl.load(x_ptr + offs, mask=offs < numel), (WORLD, BLOCK))
        put(slots + offs, x, (offs < numel) & (ranks[:, None] >= 0))
        post(flags + block * WORLD, epoch)  # pairs with the wait below, on the peers

    late = tl.zeros((WORLD,), tl.int32)
    own_slots = peer_ptr(bases_ptr, rank, half, DTYPE)
    own_flags = peer_ptr(bases_ptr, rank, half + flags_at, tl.int32)
    for block in range(program, blocks, programs):
        offs = block * BLOCK + tl.arange(0, BLOCK)
        flags = own_flags + block * WORLD + ranks
        late |= wait(flags, epoch, state_ptr + 2, timeout_ns).to(tl.int32)
        total = tl.load(residual_ptr + offs, mask=offs < numel).to(tl.float32)
        for source in tl.static_range(WORLD):  # in rank order: the same bits on all ranks
            got = tl.load(own_slots + source * numel + offs, mask=offs < numel,
                          cache_modifier=".cg")  # fmt: skip
            total += got.to(tl.float32)
        tl.store(out_ptr + offs, total.to(DTYPE), mask=offs < numel)
    end_of_call(late, ranks, programs, state_ptr, fault_ptr, tag)


class AllReduceAdd:
    """Memory for tensors of one size and dtype; all ranks make and call it."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, block: int = 1024):
        ranks, self.block, self.blocks = dist.get_world_size(), block, -(-numel // block)
        self.kernel = PeerKernel(
            all_reduce_add_kernel, device=device, payload_bytes=ranks * numel * dtype.itemsize,
            num_flags=ranks * self.blocks,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.kernel(
            self.blocks, x_ptr=x, residual_ptr=residual, out_ptr=out, numel=x.numel(),
            BLOCK=self.block,
        )  # fmt: skip
        return out


def run(device: torch.device) -> None:
    """Call it a few times and compare with fp64."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    fused = AllReduceAdd(5000, torch.float32, device)
    for _ in range(5):
        x, residual = torch.randn(2, 5000, device=device)
        out = fused(x, residual)
        want = x.double()
        dist.all_reduce(want)
        torch.testing.assert_close(out.double(), want + residual, rtol=1e-5, atol=1e-5)
    if rank == 0:
        print(f"five calls on {world_size} ranks agree with all-reduce and addition")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    cp.run_on_ranks(run, ranks=parser.parse_args().ranks)
