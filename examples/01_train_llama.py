"""Train a small Llama over several ranks, beside the same model in plain torch on one of them.

    python examples/01_train_llama.py --ranks 4                          # processes on the CPU
    torchrun --nproc-per-node 4 examples/01_train_llama.py --dtype bf16  # GPUs

Tensor parallel: each rank has some of the heads and some of the hidden features. Sequence parallel:
between the layers each rank has some of the positions. An activation is [positions, batch,
features], so that a rank's part of it lies in one piece. With `tp=None` the model is plain torch.
"""

import argparse
import os
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.runtime.ranks import spawn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDING = {"fp32": 1e-3, "bf16": 3e-2}  # of the loss after all steps, relative
EVERY = 5  # steps between two lines


class Sizes(NamedTuple):
    """Of the whole model and one batch."""

    dim: int
    heads: int
    kv_heads: int  # a multiple of the ranks
    hidden: int
    layers: int
    vocab: int
    positions: int
    batch: int
    lr: float


SMALL = Sizes(192, 24, 12, 384, 2, vocab=64, positions=48, batch=4, lr=3e-3)
LARGE = Sizes(4096, 32, 8, 14336, 4, vocab=8192, positions=8192, batch=1, lr=3e-4)  # as of 8B


class Norm(nn.Module):
    """RMSNorm. All ranks have its weight, and each uses it on its own positions."""

    def __init__(self, dim: int, tp: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        # the gradient of each rank is of its positions: copy_to_group makes it the sum
        weight = cnn.copy_to_group(self.weight, group=self.tp) if self.tp else self.weight
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=1e-5)


class Block(nn.Module):
    """Attention with grouped KV heads, then a SwiGLU MLP."""

    def __init__(self, s: Sizes, tp: dist.ProcessGroup | None, plan: str) -> None:
        super().__init__()
        self.head_dim = s.dim // s.heads

        def column(features: int) -> nn.Module:  # sizes are those of the whole layer
            if tp is None:
                return nn.Linear(s.dim, features, bias=False)
            return cnn.ColumnParallelLinear(s.dim, features, group=tp, bias=False, plan=plan)

        def row(features: int) -> nn.Module:
            if tp is None:
                return nn.Linear(features, s.dim, bias=False)
            return cnn.RowParallelLinear(features, s.dim, group=tp, bias=False, plan=plan)

        self.norm1, self.norm2 = Norm(s.dim, tp), Norm(s.dim, tp)
        self.q, self.k, self.v = (column(h * self.head_dim) for h in (s.heads, *[s.kv_heads] * 2))
        self.o = row(s.dim)
        self.gate, self.up, self.down = column(s.hidden), column(s.hidden), row(s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        gate, up = project(self.norm2(x), self.gate, self.up)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor) -> Tensor:
        # some positions -> all positions of this rank's heads [positions, batch, heads, head_dim]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in project(x, self.q, self.k, self.v))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotated(q), rotated(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.permute(2, 0, 1, 3).flatten(2))  # some positions again


def project(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Several layers of one x, which is gathered once for all of them."""
    parallel = [layer for layer in layers if isinstance(layer, cnn.ColumnParallelLinear)]
    return cnn.gather_once(x, *parallel) if parallel else [layer(x) for layer in layers]


def rotated(x: Tensor) -> Tensor:
    """Rotary positions. x [positions, batch, heads, head_dim] has all of them, from 0 on."""
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[0], device=x.device), speed)[:, None, None]
    a, b = x.float().chunk(2, -1)
    y = torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    return y.to(x.dtype)


class Llama(nn.Module):
    """Tokens of this rank's positions to their logits; the head is the embedding again."""

    def __init__(self, s: Sizes, tp: dist.ProcessGroup | None = None, plan: str = "auto") -> None:
        super().__init__()
        self.tp = tp
        self.embedding = nn.Parameter(torch.randn(s.vocab, s.dim) * s.dim**-0.5)
        self.blocks = nn.ModuleList(Block(s, tp, plan) for _ in range(s.layers))
        self.norm = Norm(s.dim, tp)

    def forward(self, tokens: Tensor) -> Tensor:
        embedding = self.embedding
        if self.tp:  # once for both uses: one sum
            embedding = cnn.copy_to_group(embedding, group=self.tp)
        x = F.embedding(tokens, embedding)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), embedding)


def batch_of(s: Sizes, step: int, device: torch.device) -> Tensor:
    """Tokens [positions + 1, batch], equal on all ranks: a cycle to learn, 2 % of it noise."""
    generator = torch.Generator().manual_seed(0)
    cycle = torch.randperm(s.vocab, generator=generator)
    shape = (s.positions + 1, s.batch)
    generator.manual_seed(1 + step)
    start = torch.randint(s.vocab, (s.batch,), generator=generator)
    tokens = cycle[(torch.arange(shape[0])[:, None] + start) % s.vocab]
    noise = torch.randint(s.vocab, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.02, noise, tokens).to(device)


class Training:
    """A model and its optimizer, on some of the positions."""

    def __init__(
        self, s: Sizes, tp: dist.ProcessGroup | None, positions: slice, device: torch.device,
        args: argparse.Namespace,
    ) -> None:  # fmt: skip
        self.s, self.positions, self.dtype = s, positions, DTYPES[args.dtype]
        torch.manual_seed(args.seed)  # equal on all ranks: each slices the same whole weights
        with device:
            self.model = Llama(s, tp, args.plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=s.lr)
        self.times_s: list[float] = []

    def step(self, tokens: Tensor) -> Tensor:
        """The loss of these positions, as their part of the mean over the whole batch."""
        start_s = time.perf_counter()
        given, targets = tokens[:-1][self.positions], tokens[1:][self.positions]
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(given).flatten(0, 1)
        total = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")
        loss = total / (self.s.positions * self.s.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        self.times_s.append(time.perf_counter() - start_s)
        return loss.detach()


def train(
    rank: int, ranks: int, s: Sizes, device: torch.device, args: argparse.Namespace
) -> None:  # fmt: skip
    """What each rank does; the first one trains the plain model as well."""
    mine = slice(s.positions * rank // ranks, s.positions * (rank + 1) // ranks)
    ours = Training(s, dist.group.WORLD, mine, device, args)
    plain = Training(s, None, slice(None), device, args) if rank == 0 else None
    for step in range(1, args.steps + 1):
        tokens = batch_of(s, args.seed + step, device)
        loss = ours.step(tokens)
        dist.all_reduce(loss)  # the sum of the parts
        if plain is None:
            continue
        want = plain.step(tokens)
        if step % EVERY == 0 or step in (1, args.steps):
            print(f"step {step:3} of {args.steps}   loss {loss:.5f}   plain torch {want:.5f}")
        if step == args.steps:
            assert abs(loss - want) <= ROUNDING[args.dtype] * want, "the losses differ"
            print(f"the losses on {ranks} ranks and in plain torch agree")
    cp.check()  # on a GPU a call returns before its work has run
    if plain is not None and device.type == "cuda":
        for name, training in ((f"{ranks} GPUs", ours), ("plain torch on one", plain)):
            rate = s.positions * s.batch / statistics.median(training.times_s)
            print(f"{name}: {rate:,.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small Llama over several ranks, beside plain torch.",
        epilog="Example: python examples/01_train_llama.py --ranks 4 --plan graded",
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plan", default="auto", help='such as "graded" or "serial"')
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the activations")
    parser.add_argument("--small", action="store_true", help="the CPU's sizes on GPUs as well")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torchrun = "LOCAL_RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if torchrun else args.ranks
    on_gpu = torchrun and torch.cuda.is_available()
    s = LARGE if on_gpu and not args.small else SMALL
    if s.kv_heads % ranks:
        parser.error(f"the number of ranks must divide the {s.kv_heads} KV heads, got {ranks}")
    if not torchrun:
        spawn(train, ranks, s, torch.device("cpu"), args, timeout_s=3600)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    train(dist.get_rank(), ranks, s, device, args)
    cp.release()  # before its group goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
