"""The model of `counterpoint bench steps`: MLPerf's DLRM-DCNv2, its tables fused or by torch.

26 embedding tables, each whole on one rank; on all ranks a bottom MLP, a low-rank cross network of
its output and all pooled rows, and a top MLP. A rank pools its tables for all samples, and gets the
rows of all tables for its own: in one call, or by an EmbeddingBag a table, an all-to-all and a
concat. Tables are cut to `Sizes.rows` and have dense gradients, or a fused optimizer.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp
import counterpoint.nn as cnn

# of each table: rows, and how many of them a sample names
ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
        405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
        12_973, 108, 36)  # fmt: skip
POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
FEATURES = 13  # of a sample, beside what it names


class Sizes(NamedTuple):
    """Of the model, and one batch of all ranks."""

    dim: int  # columns of a table
    rows: int  # of a table, at most
    bottom: tuple[int, ...]
    cross: tuple[int, int]  # layers, their rank
    top: tuple[int, ...]
    batch: int  # a multiple of the ranks
    lr: float


SMALL = Sizes(8, 40, (32, 8), (2, 16), (64, 32, 1), batch=240, lr=0.01)
LARGE = Sizes(128, 10**6, (512, 256, 128), (3, 512), (1024, 1024, 512, 256, 1), 65536, lr=1e-3)


class Batch(NamedTuple):
    """A rank's samples, and the indices of its tables for the samples of all ranks."""

    features: Tensor  # [own samples, FEATURES]
    clicked: Tensor  # [own samples], 0 or 1
    indices: Tensor  # int64, of one own table after another


def balanced(ranks: int) -> tuple[list[int], list[int]]:
    """The rank of each table, and the work of each rank: the heaviest first, to who has least."""
    owners, work = [0] * len(POOLING), [0] * ranks
    for t in sorted(range(len(POOLING)), key=lambda t: -POOLING[t]):
        owners[t] = work.index(min(work))
        work[owners[t]] += POOLING[t]
    return owners, work


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers = [m for pair in pairwise(widths) for m in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Dense(nn.Module):
    """All but the tables: features and pooled rows to logits."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        columns, (layers, rank) = s.dim * (1 + len(POOLING)), s.cross
        self.bottom = nn.Sequential(mlp(FEATURES, *s.bottom), nn.ReLU())
        self.down = nn.ModuleList(nn.Linear(columns, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, columns) for _ in range(layers))
        self.top = mlp(columns, *s.top)

    def forward(self, features: Tensor, pool: Callable[[], Tensor]) -> Tensor:
        # before the tables: its backward then comes after theirs, beside a fused update
        own, pooled = self.bottom(features), pool()
        first = torch.cat([own.to(pooled.dtype), pooled], 1)
        x = first
        for down, up in zip(self.down, self.up, strict=True):  # the cross network
            x = first * up(down(x)) + x
        return self.top(x).squeeze(1)


class InOneCall(nn.Module):
    """Pooled rows of own samples, [own samples, columns of all tables], by counterpoint."""

    def __init__(self, s: Sizes, bags: cnn.ShardedEmbeddingBags, device: torch.device) -> None:
        super().__init__()
        self.bags = bags
        counts = torch.tensor([POOLING[t] for t in bags.own]).repeat_interleave(s.batch).to(device)
        self.offsets = counts.cumsum(0) - counts
        # peers write there, so nothing is copied; it has been read when the next forward begins
        columns = sum(map(sum, bags.dims))
        self.out = cp.PooledOutputs(columns, bags.weights[0].dtype, s.batch, device=device)

    def forward(self, indices: Tensor) -> Tensor:
        return self.bags(indices, self.offsets, batch=self.out.batch, out=self.out)


class Exchange(torch.autograd.Function):
    """all_to_all_single, whose gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = sent, received
        y = x.new_empty(sum(received))
        dist.all_to_all_single(y, x, received, sent)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Any, None, None]:
        return Exchange.apply(dy[0].contiguous(), *ctx.splits), None, None


class InThree(nn.Module):
    """The same by an EmbeddingBag for each table, all_to_all_single and cat."""

    def __init__(self, s: Sizes, bags: cnn.ShardedEmbeddingBags, device: torch.device) -> None:
        super().__init__()
        self.samples = s.batch // len(bags.dims)  # of a rank
        make = partial(nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum")
        self.tables = nn.ModuleList(make(weight.detach().clone()) for weight in bags.weights)
        self.lengths = [s.batch * POOLING[t] for t in bags.own]
        self.offsets = [torch.arange(0, n, n // s.batch, device=device) for n in self.lengths]
        self.sent = [self.samples * s.dim * len(bags.own)] * len(bags.dims)
        self.received = [self.samples * sum(dims) for dims in bags.dims]

    def pooled(self, indices: Tensor) -> Tensor:
        """[samples of all ranks, columns of own tables]."""
        bags = zip(self.tables, indices.split(self.lengths), self.offsets, strict=True)
        return torch.cat([table(*given) for table, *given in bags], 1)

    def exchanged(self, pooled: Tensor) -> Tensor:
        """[own samples, columns of all tables]."""
        got = Exchange.apply(pooled.flatten(), self.received, self.sent)
        return torch.cat([part.view(self.samples, -1) for part in got.split(self.received)], 1)

    def forward(self, indices: Tensor) -> Tensor:
        return self.exchanged(self.pooled(indices))


class Training:
    """A model and its optimizer."""

    def __init__(self, s: Sizes, tables: nn.Module, dense: Dense, dtype: torch.dtype) -> None:
        self.tables, self.dtype = tables, dtype
        self.dense = nn.parallel.DistributedDataParallel(dense)  # averages gradients over ranks
        # tables' are a sum: longer by a factor, of which Adagrad makes little. eps: a gradient
        # that is nothing but rounding moves nothing
        parameters = [p for m in (dense, tables) for p in m.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adagrad(parameters, lr=s.lr, eps=1e-4)

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of own samples."""
        with torch.autocast(batch.clicked.device.type, self.dtype, self.dtype != torch.float32):
            logits = self.dense(batch.features, lambda: self.tables(batch.indices))
        return F.binary_cross_entropy_with_logits(logits.float(), batch.clicked)

    def forward_backward(self, batch: Batch) -> Tensor:
        """The same, and gradients of it alone."""
        self.optimizer.zero_grad()
        loss = self.forward(batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> Tensor:
        """The same, and the optimizer's step."""
        loss = self.forward_backward(batch)
        self.optimizer.step()
        return loss


def batch_of(s: Sizes, own: tuple[int, ...], seed: int, device: torch.device) -> Batch:
    """A rank's part; features, and whether the rows that it names are even, say what is clicked."""
    draw = torch.Generator(device).manual_seed(0)
    slope = torch.randn(FEATURES, generator=draw, device=device)
    draw.manual_seed(1 + seed)
    features = torch.randn(s.batch, FEATURES, generator=draw, device=device)
    score, indices = features @ slope, list[Tensor]()
    for t, rows in enumerate(min(rows, s.rows) for rows in ROWS):
        named = torch.randint(rows, (s.batch, POOLING[t]), generator=draw, device=device)
        if rows <= 1000:  # of more, a row is named too rarely to be learnt
            score += 1 - 2 * (named % 2).float().mean(1)
        if t in own:
            indices.append(named.flatten())
    mine = torch.arange(s.batch, device=device).chunk(dist.get_world_size())[dist.get_rank()]
    return Batch(features[mine], (score[mine] > 0).float(), torch.cat(indices))
