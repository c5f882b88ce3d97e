"""A layer of experts at sizes of real models: its cases, its counts, and a rank's tensors."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Model(NamedTuple):
    """Sizes of a model's experts; those of a rank are as on 8 ranks."""

    name: str
    experts: int  # of a rank
    hidden: int
    ffn: int
    top: int


MODELS = (Model("DeepSeek-V3", 32, 7168, 2048, 8), Model("Qwen3-235B", 16, 4096, 1536, 8),
          Model("Mixtral-8x7B", 1, 4096, 14336, 2))  # fmt: skip
TOKENS = (4096, 1024, 256)  # of a rank
ROUTINGS = ("uniform", "skewed")
DIRECTIONS = ("all_to_all_matmul", "matmul_all_to_all")


class Case(NamedTuple):
    """One layer: gate and up are one weight behind the all-to-all, down is before it."""

    op: str
    model: Model
    tokens: int
    routing: str

    @property
    def text(self) -> str:
        """Of a line."""
        return f"{self.op} {self.model.name} {self.tokens} {self.routing}"

    @property
    def k(self) -> int:
        """Contracted size."""
        return self.model.hidden if self.op == "all_to_all_matmul" else self.model.ffn

    @property
    def n(self) -> int:
        """Columns of y."""
        return 2 * self.model.ffn if self.op == "all_to_all_matmul" else self.model.hidden

    def counts(self, ranks: int) -> Tensor:
        """[ranks, experts], equal on all ranks; each rank sends tokens * top rows."""
        rows, experts = self.tokens * self.model.top, ranks * self.model.experts
        if self.routing == "uniform":
            return torch.full((ranks, experts), rows // experts, dtype=torch.int64)
        busy = min(3.0, 0.9 * ranks) / ranks
        share = torch.full((ranks,), (1 - busy) / (ranks - 1))
        share[0] = busy
        draw = torch.Generator().manual_seed(self.tokens)
        of_experts = share.repeat_interleave(self.model.experts)
        chosen = torch.multinomial(of_experts.expand(ranks, -1), rows, True, generator=draw)
        return torch.stack([each.bincount(minlength=experts) for each in chosen])


class Layer:
    """The tensors of a case on this rank, and the two libraries' parts."""

    def __init__(self, case: Case, group: dist.ProcessGroup, device: torch.device) -> None:
        self.case, self.group = case, group
        ranks, rank = group.size(), group.rank()
        self.counts = case.counts(ranks)
        self.experts, self.local = self.counts.shape[1], case.model.experts
        own = self.counts[:, rank * self.local : (rank + 1) * self.local]
        self.sent, self.come = int(self.counts[rank].sum()), int(own.sum())
        owners = self.counts.view(ranks, ranks, self.local).sum(2)
        takes = 0 if case.op == "all_to_all_matmul" else 1
        self.limit, self.busiest = int(owners.sum(takes).max()), int(owners.sum(0).max())
        self.to, self.of = owners[rank].tolist(), owners[:, rank].tolist()
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        # each row, as its owner has it, and each weight by columns, as a Linear stores it
        self.w = normal(self.local, case.n, case.k).transpose(1, 2)
        self.there = there = case.op == "all_to_all_matmul"
        self.x = normal(self.sent if there else self.come, case.k)
        # what ours takes with counts on the device: equally many rows on all ranks
        most = int(owners.sum(1).max() if there else owners.sum(0).max())
        self.given = torch.cat((self.x, normal(most - len(self.x), case.k)))
        rows = [(e, s) for e in range(self.local) for s in range(ranks)]
        starts, place = {}, 0
        for s in range(ranks):
            for e in range(self.local):
                starts[e, s] = place
                place += int(own[s, e])
        order = [torch.arange(starts[r], starts[r] + int(own[r[1], r[0]])) for r in rows]
        # row i of those sorted by expert is row order[i] of those sorted by rank
        self.order = torch.cat(order).to(device)
        self.back = torch.argsort(self.order)
        sums = own.sum(0).cumsum(0)
        self.offs = sums.to(torch.int32).to(device)
        self.edges = [0, *sums.tolist()]
        self.on_device = self.counts.to(torch.int32).to(device)
        self.arrived = normal(self.come, case.k)  # what the library's all-to-all brings
        self.product = normal(self.come, case.n)
        self.sorted = torch.empty_like(self.arrived if there else self.product)
        # a token is the sum of `top` of the rows that come back, wherever they are
        rows = torch.randperm(self.sent, device=device, generator=generator)
        self.index = rows[: self.sent // case.model.top * case.model.top].view(-1, case.model.top)
        self.weights = torch.rand(self.index.shape, device=device, generator=generator)
        self.y = normal(self.come if there else self.sent, case.n)

    def exchange(self, source: Tensor, target: Tensor, *, there: bool) -> None:
        """The library's all-to-all, of rows sorted by rank on both sides."""
        sizes = (self.of, self.to) if there else (self.to, self.of)
        dist.all_to_all_single(target, source, *sizes, group=self.group)

    def grouped(self, x: Tensor, _: Tensor) -> None:
        """The library's grouped matmul, which makes its result."""
        self.result = torch._grouped_mm(x, self.w, offs=self.offs)  # pyright: ignore

    def looped(self, x: Tensor, y: Tensor) -> None:
        """A matmul of the library for each expert."""
        for e in range(self.local):
            first, last = self.edges[e : e + 2]
            if first < last:
                torch.mm(x[first:last], self.w[e], out=y[first:last])
        self.result = y
