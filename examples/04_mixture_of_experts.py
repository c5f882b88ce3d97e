"""Train a layer of experts over several ranks, beside the same in plain torch on one of them.

    python examples/04_mixture_of_experts.py --ranks 4                          # CPU processes
    torchrun --nproc-per-node 4 examples/04_mixture_of_experts.py --dtype bf16  # GPUs

Each rank has some of the tokens and some of the experts. The router, which all ranks have, picks
`top_k` experts for each token and says how much each counts; tokens are sent to them and come back.
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
ROUNDING = {"fp32": 1e-3, "bf16": 5e-2}  # of the loss after all steps, relative
EVERY = 10  # steps between two lines


class Sizes(NamedTuple):
    """Of the whole layer, and the tokens of one rank."""

    features: int
    hidden: int  # of one expert
    experts: int  # a multiple of the ranks
    top_k: int
    tokens: int
    lr: float


SMALL = Sizes(24, 32, 12, 2, tokens=96, lr=0.01)
LARGE = Sizes(4096, 1536, 128, 8, tokens=4096, lr=1e-3)  # as of Qwen3-235B


class Router(nn.Module):
    """Which experts a token goes to, and their weights; in fp32, so that rounding picks none."""

    def __init__(self, s: Sizes, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group, self.top_k = group, s.top_k
        self.weight = nn.Parameter(torch.randn(s.experts, s.features) * s.features**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # the gradient of each rank is of its tokens: copy_to_group makes it the sum
        weight = cnn.copy_to_group(self.weight, group=self.group) if self.group else self.weight
        with torch.autocast(x.device.type, enabled=False):
            weights, experts = F.linear(x, weight).softmax(-1).topk(self.top_k)
        return experts, weights / weights.sum(-1, keepdim=True)


class PlainExperts(nn.Module):
    """All experts on one device, one after the other, with the parameters of all ranks."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        # unbind: the gradient of weight[e] would be as large as that of all experts
        each = zip(self.gate_up.unbind(), self.down.unbind(), strict=True)
        for e, (gate_up, down) in enumerate(each):
            token, j = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, down)
            y = y.index_add(0, token, (weights[token, j, None] * out).to(y.dtype))
        return y


class Training:
    """A router, experts and their optimizer."""

    def __init__(self, s: Sizes, router: Router, experts: nn.Module, dtype: torch.dtype) -> None:
        self.s, self.dtype = s, dtype
        self.router, self.experts = router, experts
        parameters = [*router.parameters(), *experts.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=s.lr)
        self.times_s: list[float] = []

    def step(self, x: Tensor, target: Tensor, num_tokens: int) -> Tensor:
        """The loss of these tokens, as their part of the mean over `num_tokens`."""
        start_s = time.perf_counter()
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            y = self.experts(x, *self.router(x))
        loss = (y.float() - target).square().sum() / (num_tokens * self.s.features)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()
        self.times_s.append(time.perf_counter() - start_s)
        return loss.detach()


def batch_of(
    s: Sizes, ranks: int, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens of all ranks and what is to be learnt of them: each kind is turned another way."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    kinds, turns = normal(8, s.features), normal(8, s.features)
    generator.manual_seed(1 + step)
    kind = torch.randint(8, (ranks * s.tokens,), generator=generator, device=device)
    x = kinds[kind] + 0.3 * normal(len(kind), s.features)
    return x, torch.tanh(x * turns[kind])


def gathered(part: Tensor) -> Tensor:
    """The experts of all ranks."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts)


def train(
    rank: int, ranks: int, s: Sizes, device: torch.device, args: argparse.Namespace
) -> None:  # fmt: skip
    """What each rank does; the first one trains the plain layer as well."""
    torch.manual_seed(args.seed)  # equal on all ranks: each keeps its own of the experts drawn
    group, dtype = dist.group.WORLD, DTYPES[args.dtype]
    with device:
        router, layer = Router(s, group), cnn.ExpertParallelMLP(
            s.features, s.hidden, s.experts, group=group, max_rows=args.max_rows, plan=args.plan
        )  # fmt: skip
    whole = [gathered(p) for p in (layer.gate_up, layer.down)]
    plain = None
    if rank == 0:
        alone = Router(s, None).to(device)
        alone.load_state_dict(router.state_dict())
        plain = Training(s, alone, PlainExperts(*whole), dtype)
    ours = Training(s, router, layer, dtype)
    del whole
    for step in range(1, args.steps + 1):
        x, target = batch_of(s, ranks, args.seed + step, device)
        mine = slice(rank * s.tokens, (rank + 1) * s.tokens)
        loss = ours.step(x[mine], target[mine], len(x))
        dist.all_reduce(loss)  # the sum of the parts
        if plain is None:
            continue
        want = plain.step(x, target, len(x))
        if step % EVERY == 0 or step in (1, args.steps):
            print(f"step {step:3} of {args.steps}   loss {loss:.5f}   plain torch {want:.5f}")
        if step == args.steps:
            assert abs(loss - want) <= ROUNDING[args.dtype] * want, "the losses differ"
            print(f"the losses on {ranks} ranks and in plain torch agree")
    cp.check()  # on a GPU a call returns before its work has run
    if plain is not None and device.type == "cuda":
        for name, training in ((f"{ranks} GPUs", ours), ("plain torch on one", plain)):
            rate = ranks * s.tokens / statistics.median(training.times_s)
            print(f"{name}: {rate:,.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a layer of experts over several ranks, beside plain torch.",
        epilog="Example: python examples/04_mixture_of_experts.py --ranks 4",
    )
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes (torchrun says GPUs)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plan", default="auto", help="serial, fused or auto")
    parser.add_argument("--max-rows", type=int, help="that a rank may get; the host waits for none")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the activations")
    parser.add_argument("--small", action="store_true", help="the CPU's sizes on GPUs as well")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torchrun = "LOCAL_RANK" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if torchrun else args.ranks
    on_gpu = torchrun and torch.cuda.is_available()
    s = LARGE if on_gpu and not args.small else SMALL
    if ranks < 1 or s.experts % ranks:
        parser.error(f"the number of ranks must divide the {s.experts} experts, got {ranks}")
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
