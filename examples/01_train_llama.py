"""Train a small Llama over several ranks, beside the same model in plain torch on one of them.

    python examples/01_train_llama.py --ranks 4                              # processes on the CPU
    torchrun --nproc-per-node 4 examples/01_train_llama.py --dtype bfloat16  # GPUs

Tensor parallel: each rank has some heads and some hidden features. Sequence parallel: between the
layers each rank has some positions. An activation is [positions, batch, features].
"""

import argparse
from collections import namedtuple
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

Sizes = namedtuple("Sizes", "dim heads kv_heads hidden layers vocab positions batch learning_rate")
SMALL = Sizes(192, 24, 12, 384, 2, 64, 48, 4, 3e-3)  # the ranks divide the 12 KV heads
LARGE = Sizes(4096, 32, 8, 14336, 4, 8192, 8192, 1, 3e-4)  # as of Llama-3 8B
ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2}  # of the loss after all steps, relative


class Block(nn.Module):
    """Attention with grouped KV heads, then a SwiGLU MLP; sizes are those of the whole layer."""

    def __init__(self, s: Sizes, parallel: bool, plan: str) -> None:
        super().__init__()
        column = partial(cp.nn.ColumnParallelLinear, plan=plan) if parallel else nn.Linear
        row = partial(cp.nn.RowParallelLinear, plan=plan) if parallel else nn.Linear
        # several layers of one x: it is gathered once for all of them
        self.project = cp.nn.gather_once if parallel else lambda x, *layers: [f(x) for f in layers]
        self.gated = cp.nn.gather_gated if parallel else lambda x, g, up: F.silu(g(x)) * up(x)
        self.head_dim, kv = s.dim // s.heads, s.kv_heads * s.dim // s.heads
        self.q, self.k, self.v = (column(s.dim, n, bias=False) for n in (s.dim, kv, kv))
        self.gate, self.up = (column(s.dim, s.hidden, bias=False) for _ in range(2))
        self.o, self.down = (row(n, s.dim, bias=False) for n in (s.dim, s.hidden))

    def forward(self, x: Tensor) -> Tensor:
        # some positions -> all positions of this rank's heads -> some positions
        q, k, v = self.project(F.rms_norm(x, x.shape[-1:]), self.q, self.k, self.v)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for t in (q, k, v))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(self.gated(F.rms_norm(x, x.shape[-1:]), self.gate, self.up))


def turned(x: Tensor) -> Tensor:
    """Rotary positions. x [batch, heads, positions, head_dim] has all of them, from 0 on."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    speed = 10_000.0 ** -torch.linspace(0, 1, pairs.shape[-1] + 1, device=x.device)[:-1]
    angle = torch.outer(torch.arange(x.shape[-2], device=x.device), speed)
    turns = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Llama(nn.Module):
    """Tokens of this rank's positions to their logits; the head is the embedding again."""

    def __init__(self, s: Sizes, parallel: bool, plan: str) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(s.vocab, s.dim) * s.dim**-0.5)
        self.blocks = nn.Sequential(*(Block(s, parallel, plan) for _ in range(s.layers)))
        # a rank's gradient is of its positions: copy_to_group makes it the sum over the ranks
        self.shared = cp.nn.copy_to_group if parallel else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        embedding = self.shared(self.embedding)
        x = self.blocks(F.embedding(tokens, embedding))
        return F.linear(F.rms_norm(x, x.shape[-1:]), embedding)


def train(device: torch.device, args: argparse.Namespace) -> None:
    """What each rank does; the first one trains the plain model as well."""
    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, args.dtype)
    s = LARGE if device.type == "cuda" else SMALL
    with device:
        torch.manual_seed(0)  # equal on all ranks: each slices the same whole weights
        ours = Llama(s, True, args.plan)
        torch.manual_seed(0)
        plain = Llama(s, False, args.plan)
    adam = {m: torch.optim.AdamW(m.parameters(), lr=s.learning_rate) for m in (ours, plain)}

    def step(model: nn.Module, given: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(given).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), target.flatten())
        loss = loss * (len(given) / s.positions)  # these positions' part of the mean over all
        loss.backward()
        adam[model].step()
        adam[model].zero_grad()
        return loss.detach()

    for number in range(1, args.steps + 1):
        torch.manual_seed(number)  # the same batch on all ranks: each token says what follows it
        tokens = torch.arange(s.positions + 1)[:, None] * 5 + torch.randint(s.vocab, (s.batch,))
        given, target = tokens[:-1].to(device) % s.vocab, tokens[1:].to(device) % s.vocab
        loss = step(ours, given.chunk(ranks)[rank], target.chunk(ranks)[rank])
        dist.all_reduce(loss)  # the sum of the parts
        want = step(plain, given, target) if rank == 0 else loss
        if rank == 0 and (number % 5 == 0 or number in (1, args.steps)):
            print(f"step {number:3} of {args.steps}   loss {loss:.5f}   plain torch {want:.5f}")
    cp.check()  # on a GPU a call returns before its work has run
    assert abs(loss - want) <= ROUNDING[args.dtype] * want, "the losses differ"
    if rank == 0:
        print(f"the losses on {ranks} ranks and in plain torch agree")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plan", default="auto", help='such as "graded" or "serial"')
    parser.add_argument("--dtype", choices=ROUNDING, default="float32", help="of the activations")
    args = parser.parse_args()
    cp.run_on_ranks(train, args, ranks=args.ranks, timeout_s=3600)
