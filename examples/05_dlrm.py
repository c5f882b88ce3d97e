"""Train a small recommendation model over several ranks, beside the same in plain torch on one.

    python examples/05_dlrm.py --ranks 4                              # processes on the CPU
    torchrun --nproc-per-node 4 examples/05_dlrm.py --dtype bfloat16  # GPUs

Each rank has some of the tables, a part of the samples and all dense layers. In one call it pools
rows of its tables for the samples of all ranks, and gets those of all tables for its own.
"""

import argparse
import copy
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import counterpoint as cp

FEATURES, POOLING = 13, (3, 2, 1, 8, 1, 20, 5, 1)  # of a sample: numbers, rows of each table
Sizes = namedtuple("Sizes", "rows dim hidden batch learning_rate")  # the batch is that of all ranks
SMALL, LARGE = Sizes(40, 8, 32, 240, 0.02), Sizes(10**6, 128, 1024, 61440, 1e-3)
ROUNDING = {"float32": 1e-3, "bfloat16": 2e-2}  # of the loss after all steps, relative


class Dense(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(FEATURES, s.hidden), nn.Linear(s.hidden, 1)
        self.middle = nn.Linear(s.hidden + s.dim * len(POOLING), s.hidden)

    def forward(self, features: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([self.bottom(features).relu(), pooled], 1)
        return self.top(self.middle(x).relu()).squeeze(1)


class Parallel(nn.Module):
    """The tables of this rank, and the dense layers; indices are those of all samples."""

    def __init__(self, s: Sizes, owners: list[int]) -> None:
        super().__init__()
        self.bags = cp.nn.ShardedEmbeddingBags([(s.rows, s.dim)] * len(POOLING), owners=owners)
        self.dense = Dense(s)

    def forward(self, features: Tensor, indices: list[Tensor]) -> Tensor:
        own = [indices[t] for t in self.bags.own]
        lengths = torch.cat([torch.full_like(i[:, 0], i.shape[1]) for i in own])
        pooled = self.bags(torch.cat([i.flatten() for i in own]), lengths.cumsum(0) - lengths)
        return self.dense(features, pooled)


class Plain(nn.Module):
    """The same with all tables on one device."""

    def __init__(self, s: Sizes, owners: list[int], model: Parallel) -> None:
        super().__init__()
        self.dense = copy.deepcopy(model.dense)
        self.bags = nn.ModuleList(nn.EmbeddingBag(s.rows, s.dim, mode="sum") for _ in POOLING)
        for t, bag in enumerate(self.bags):
            own = getattr(model.bags, f"table_{t}", bag.weight)
            dist.broadcast(bag.weight.data.copy_(own.data), owners[t])

    def forward(self, features: Tensor, indices: list[Tensor]) -> Tensor:
        return self.dense(features, torch.cat([self.bags[t](i) for t, i in enumerate(indices)], 1))


def batch_of(s: Sizes, seed: int, device: torch.device) -> tuple[Tensor, list[Tensor], Tensor]:
    """Features, indices of each table, and what is clicked; alike on all ranks."""
    draw = torch.Generator(device).manual_seed(seed)
    features = torch.randn(s.batch, FEATURES, generator=draw, device=device)
    indices = [torch.randint(s.rows, (s.batch, p), generator=draw, device=device) for p in POOLING]
    odd = sum((i % 2 * 2 - 1).float().mean(1) for i in indices)
    return features, indices, (features.mean(1) + odd > 0).float()


def train(device: torch.device, args: argparse.Namespace) -> None:
    """What each rank does; the first one trains the plain model as well."""
    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, args.dtype)
    s = LARGE if device.type == "cuda" else SMALL
    owners = sorted(t % ranks for t in range(len(POOLING)))  # each rank needs a table
    torch.manual_seed(0)  # the dense layers are equal on all ranks
    with device:
        ours = Parallel(s, owners)
        plain = Plain(s, owners, ours)
    adagrad = {m: torch.optim.Adagrad(m.parameters(), s.learning_rate) for m in (ours, plain)}

    def step(model: nn.Module, features: Tensor, indices: list[Tensor], clicked: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(features, indices).float()
        loss = nn.BCEWithLogitsLoss(reduction="sum")(logits, clicked) / s.batch
        loss.backward()
        for parameter in ours.dense.parameters() if model is ours else ():
            dist.all_reduce(parameter.grad)  # those of tables are of all samples
        adagrad[model].step()
        adagrad[model].zero_grad()
        return loss.detach()

    for number in range(1, args.steps + 1):
        features, indices, clicked = batch_of(s, number, device)
        mine = features.chunk(ranks)[rank], indices, clicked.chunk(ranks)[rank]
        dist.all_reduce(loss := step(ours, *mine))  # the sum of the parts
        want = step(plain, features, indices, clicked) if rank == 0 else loss
        if rank == 0 and (number % 5 == 0 or number in (1, args.steps)):
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=ROUNDING, default="float32", help="of the activations")
    cp.run_on_ranks(train, args := parser.parse_args(), ranks=args.ranks, timeout_s=3600)
