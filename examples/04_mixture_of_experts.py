"""Train a layer of experts over several ranks, beside the same in plain torch on one of them.

    python examples/04_mixture_of_experts.py --ranks 4 --islands 2   # CPU processes, as on 2 hosts
    torchrun --nproc-per-node 4 examples/04_mixture_of_experts.py --dtype bfloat16  # GPUs

Each rank has some of the tokens and of the experts. The router, on all ranks, gives a token a logit
for each expert. To those of its largest logits it is sent, to another island once, and comes back.
"""

import argparse
import os
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

# tokens are those of one rank, hidden is of one expert; the ranks share the experts evenly
Sizes = namedtuple("Sizes", "features hidden experts top_k tokens learning_rate")
SMALL, LARGE = Sizes(24, 32, 12, 2, 96, 0.01), Sizes(4096, 1536, 128, 8, 4096, 1e-3)
ROUNDING = {"float32": 1e-3, "bfloat16": 5e-2}  # of the loss after all steps, relative


class Parallel(nn.Module):
    """A router and the experts of this rank."""

    def __init__(self, s: Sizes, max_rows: int | None) -> None:
        super().__init__()
        self.router = nn.Linear(s.features, s.experts, bias=False)
        self.experts = cp.nn.ExpertParallelMLP(s.features, s.hidden, s.experts, max_rows=max_rows)
        self.top_k = s.top_k

    def forward(self, x: Tensor) -> Tensor:
        router = cp.nn.copy_to_group(self.router.weight)  # its gradients, of tokens, are summed
        with torch.autocast(x.device.type, enabled=False):  # so that rounding picks no expert
            logits = F.linear(x, router)
        return self.experts(x, logits=logits, top_k=self.top_k)


class Plain(nn.Module):
    """The same with all experts on one device, one after the other."""

    def __init__(self, layer: Parallel) -> None:
        super().__init__()
        self.router, self.top_k = nn.Parameter(layer.router.weight.detach().clone()), layer.top_k
        for name, own in layer.experts.named_parameters():
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own.detach())
            self.register_parameter(name, nn.Parameter(torch.cat(parts)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weights, experts = F.linear(x, self.router).softmax(-1).topk(self.top_k)
        weights, y = weights / weights.sum(-1, keepdim=True), torch.zeros_like(x)
        for e in range(len(self.down)):
            token, j = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.down[e])
            y = y.index_add(0, token, (weights[token, j, None] * out).to(y.dtype))
        return y


def batch_of(s: Sizes, tokens: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and what is to be learnt of them: each kind is turned another way."""
    draw = torch.Generator(device).manual_seed(0)
    kinds, turns = torch.randn(2, 8, s.features, generator=draw, device=device)
    kind = torch.randint(8, (tokens,), generator=draw.manual_seed(seed), device=device)
    x = kinds[kind] + 0.3 * torch.randn(tokens, s.features, generator=draw, device=device)
    return x, torch.tanh(x * turns[kind])


def train(device: torch.device, args: argparse.Namespace) -> None:
    """What each rank does; the first one trains the plain layer as well."""
    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, args.dtype)
    if args.islands:  # as if on so many hosts, which ranks find out by themselves
        os.environ["COUNTERPOINT_ISLAND"] = str(rank * args.islands // ranks)
    s = LARGE if device.type == "cuda" else SMALL
    torch.manual_seed(0)  # equal on all ranks: each keeps its own of the experts drawn
    ours = Parallel(s, args.max_rows).to(device)
    plain = Plain(ours)
    adam = {m: torch.optim.Adam(m.parameters(), lr=s.learning_rate) for m in (ours, plain)}

    def step(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = (model(x).float() - target).square().sum() / (ranks * s.tokens * s.features)
        loss.backward()
        adam[model].step()
        adam[model].zero_grad()
        return loss.detach()

    for number in range(1, args.steps + 1):
        x, target = batch_of(s, ranks * s.tokens, number, device)
        mine = x.chunk(ranks)[rank], target.chunk(ranks)[rank]
        dist.all_reduce(loss := step(ours, *mine))  # the sum of parts of the mean over all tokens
        want = step(plain, x, target) if rank == 0 else loss
        if rank == 0 and (number % 10 == 0 or number in (1, args.steps)):
            print(f"step {number:3} of {args.steps}   loss {loss:.5f}   plain torch {want:.5f}")
    _, timeline = cp.profile(lambda: step(ours, *mine))
    cp.check()  # on a GPU a call returns before its work has run
    assert abs(loss - want) <= ROUNDING[args.dtype] * want, "the losses differ"
    if rank == 0:
        print(f"the losses on {ranks} ranks and in plain torch agree")
        parts = timeline.duration_s, timeline.communication_s(0), timeline.exposed_s(0)
        print("a step: {:.4f} s, communication {:.4f} s, exposed {:.4f} s".format(*parts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    parser.add_argument("--islands", type=int, help="that CPU processes are taken to be on")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-rows", type=int, help="that a rank may get; the host waits for none")
    parser.add_argument("--dtype", choices=ROUNDING, default="float32", help="of the activations")
    args = parser.parse_args()
    cp.run_on_ranks(train, args, ranks=args.ranks, timeout_s=3600)
