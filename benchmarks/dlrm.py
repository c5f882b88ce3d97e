"""The models of `counterpoint bench steps`: recommenders whose tables are fused, or torch's.

MLPerf's DLRM-DCNv2, and the DLRM of arXiv 2305.06942 with the sizes that `counterpoint.scale`
assumes. Embedding tables, each whole on one rank; on all ranks a bottom MLP, a low-rank cross
network or dot products of its output and all pooled rows, and a top MLP. A rank pools its tables
for all samples, and gets the rows of all tables for its own: in one call, or by an EmbeddingBag a
table, an all-to-all and a concat. Tables have dense gradients and torch's Adagrad, or are updated
in the backward, by row-wise Adagrad. All ways have the same update.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp
import counterpoint.nn as cnn
from benchmarks.embedding_gradient import zipf
from counterpoint.scale.recommenders.dlrm import DLRMS, Dlrm

WARM = 11  # backwards of DDP before one is captured, as torch's notes on CUDA graphs ask
EPS = 1e-4  # of Adagrad: a gradient that is nothing but rounding moves nothing


class Sizes(NamedTuple):
    """A model, and one batch of all ranks."""

    model: Dlrm
    batch: int  # a multiple of the ranks
    lr: float
    table_lr: float  # so large that in bf16 a step is no rounding of a table's numbers


def cut(name: str, most: int, **changes: Any) -> Dlrm:
    """One of `counterpoint.scale`'s models, with at most so many rows in a table.

    Args:
        changes: other sizes of it.
    """
    model = replace(DLRMS[name], **changes)
    return replace(model, rows=tuple(min(n, most) for n in model.rows))


SMALL = Sizes(
    cut("dlrm-dcnv2", 40, dim=8, bottom=(32, 8), cross=(2, 16), top=(64, 32, 1)), 240, 0.01, 0.01
)
SMALL_PAPER = Sizes(
    cut("dlrm-paper", 40, dim=8, rows=(50, 40) * 3, pooling=(3,) * 6, bottom=(32, 8), top=(16, 1)),
    240, 0.01, 0.01,
)  # fmt: skip
LARGE = Sizes(cut("dlrm-dcnv2", 10**6), 65536, 1e-3, 0.1)
PAPER = Sizes(cut("dlrm-paper", 10**5), 16384, 1e-3, 0.1)


class Batch(NamedTuple):
    """A rank's samples, and the indices of its tables for the samples of all ranks."""

    features: Tensor  # [own samples, features]
    clicked: Tensor  # [own samples], 0 or 1
    indices: Tensor  # int64, of one own table after another


def balanced(pooling: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """The rank of each table, and the work of each rank: the heaviest first, to who has least."""
    owners, work = [0] * len(pooling), [0] * ranks
    for t in sorted(range(len(pooling)), key=lambda t: -pooling[t]):
        owners[t] = work.index(min(work))
        work[owners[t]] += pooling[t]
    return owners, work


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a ReLU between each two."""
    layers = [m for pair in pairwise(widths) for m in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Dense(nn.Module):
    """All but the tables: features and pooled rows to logits."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        m, (layers, rank) = s.model, s.model.cross
        self.columns = m.columns
        columns = m.columns + m.dim
        self.bottom = nn.Sequential(mlp(m.features, *m.bottom), nn.ReLU())
        self.down = nn.ModuleList(nn.Linear(columns, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, columns) for _ in range(layers))
        self.top = mlp(m.width, *m.top)

    def forward(self, features: Tensor, pool: Callable[[], Tensor]) -> Tensor:
        # before the tables: its backward then comes after theirs, beside a fused update
        own, pooled = self.bottom(features), pool()
        own = own.to(pooled.dtype)
        first = x = torch.cat([own, pooled], 1)
        for down, up in zip(self.down, self.up, strict=True):  # the cross network
            x = first * up(down(x)) + x
        if not self.down:
            vectors = first.unflatten(1, (-1, own.shape[1]))
            dots, n = vectors.bmm(vectors.transpose(1, 2)).flatten(1), vectors.shape[1]
            i, j = torch.tril_indices(n, n, -1, device=dots.device)
            x = torch.cat([own, dots.index_select(1, n * i + j)], 1)
        return self.top(x).squeeze(1)


class InOneCall(nn.Module):
    """Pooled rows of own samples, [own samples, columns of all tables], by counterpoint."""

    def __init__(
        self, s: Sizes, bags: cnn.ShardedEmbeddingBags, device: torch.device, captured: int = 0
    ) -> None:  # fmt: skip
        super().__init__()
        self.bags = bags
        each = torch.tensor([s.model.pooling[t] for t in bags.own], dtype=torch.int64)
        counts = each.repeat_interleave(s.batch).to(device)
        self.offsets = counts.cumsum(0) - counts
        # peers write there, so nothing is copied; it has been read when the next forward begins
        self.out = cp.PooledOutputs(s.model.columns, bags.weights[0].dtype, s.batch, device=device,
                                    captured=captured)  # fmt: skip

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
        dim, pooling = s.model.dim, [s.model.pooling[t] for t in bags.own]
        make = partial(nn.EmbeddingBag.from_pretrained, freeze=False, mode="sum")
        self.tables = nn.ModuleList(make(weight.detach().clone()) for weight in bags.weights)
        self.lengths = [s.batch * each for each in pooling]
        self.offsets = [torch.arange(0, n, n // s.batch, device=device) for n in self.lengths]
        self.sent = [self.samples * dim * len(bags.own)] * len(bags.dims)
        self.received = [self.samples * sum(dims) for dims in bags.dims]

    def fuse_optimizer(self, optimizer: cnn.RowWiseAdagrad) -> None:
        """Have the backward update each table as soon as its gradient is there, and keep none."""
        for table in self.tables:
            weight: Any = table.weight
            weight.register_post_accumulate_grad_hook(partial(_row_wise, optimizer, _sums(weight)))

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


def _sums(weight: Tensor) -> Tensor:
    """Row-wise Adagrad's state, at least fp32."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros(len(weight), dtype=dtype, device=weight.device)


@torch.no_grad()
def _row_wise(optimizer: cnn.RowWiseAdagrad, state: Tensor, weight: Tensor) -> None:
    """The rule of `RowWiseAdagrad`, by torch."""
    assert weight.grad is not None
    lr, eps, scale = optimizer.rates
    grad = weight.grad.to(state.dtype) * scale
    state += grad.square().mean(1)
    weight.copy_(weight.to(state.dtype) - grad * (lr / (state.sqrt() + eps))[:, None])
    weight.grad = None


class Training:
    """A model and its optimizer.

    Args:
        s: sizes.
        tables: an InOneCall or InThree.
        dense: the other layers.
        dtype: of activations, by autocast.
        in_backward: tables have a fused optimizer, and are none of this one's business.
    """

    def __init__(
        self, s: Sizes, tables: nn.Module, dense: Dense, dtype: torch.dtype, *,
        in_backward: bool = False,
    ) -> None:  # fmt: skip
        self.tables, self.dtype = tables, dtype
        self.dense = _distributed(dense)  # averages gradients over ranks; tables' are a sum
        groups: list[dict[str, Any]] = [{"params": list(dense.parameters())}]
        if not in_backward:
            groups.append({"params": list(tables.parameters()), "lr": s.table_lr})
        self.optimizer = torch.optim.Adagrad(groups, lr=s.lr, eps=EPS)

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


def _distributed(dense: Dense) -> nn.Module:
    """In DDP, made on a stream that a capture may join, and warm."""
    like = next(dense.parameters())
    aside = torch.cuda.Stream(like.device) if like.is_cuda else None
    if aside:
        aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside) if aside else nullcontext():
        made = nn.parallel.DistributedDataParallel(dense)
        features = like.new_zeros(1, dense.bottom[0][0].in_features)
        pooled = like.new_zeros(1, dense.columns)
        for _ in range(WARM):
            made(features, lambda: pooled).sum().backward()
        made.zero_grad()
    if aside:
        torch.cuda.current_stream().wait_stream(aside)
    return made


def batch_of(
    s: Sizes, own: tuple[int, ...], seed: int, device: torch.device, named: str = "uniform"
) -> Batch:  # fmt: skip
    """A rank's part; features, and whether the rows that it names are even, say what is clicked.

    Args:
        s: sizes.
        own: this rank's tables.
        seed: of the batch.
        device: where it is.
        named: how rows are drawn, "uniform" or "zipf".
    """
    draw = torch.Generator(device).manual_seed(0)
    slope = torch.randn(s.model.features, generator=draw, device=device)
    draw.manual_seed(1 + seed)
    features = torch.randn(s.batch, s.model.features, generator=draw, device=device)
    score, indices = features @ slope, list[Tensor]()
    for t, (rows, pooling) in enumerate(zip(s.model.rows, s.model.pooling, strict=True)):
        if named == "zipf":
            drawn = zipf(s.batch * pooling, rows, draw).view(-1, pooling)
        else:
            drawn = torch.randint(rows, (s.batch, pooling), generator=draw, device=device)
        if rows <= 1000:  # of more, a row is named too rarely to be learnt
            score += 1 - 2 * (drawn % 2).float().mean(1)
        if t in own:
            indices.append(drawn.flatten())
    mine = torch.arange(s.batch, device=device).chunk(dist.get_world_size())[dist.get_rank()]
    return Batch(features[mine], (score[mine] > 0).float(), torch.cat(indices))
