"""A layer of experts as benchmarks have it: sizes of models, counts, and the tensors of a rank."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.declare import Bench, Case
from benchmarks.rows import Row, cut_for
from counterpoint.errors import InputError
from counterpoint.machine_of import shipped
from counterpoint.presets import preset_of


class Model(NamedTuple):
    """Sizes of a model's experts; those of a rank are as on 8 ranks."""

    name: str
    experts: int  # of a rank
    hidden: int
    ffn: int
    top: int


MODELS = (Model("DeepSeek-V3", 32, 7168, 2048, 8), Model("Qwen3-235B", 16, 4096, 1536, 8),
          Model("Mixtral-8x7B", 1, 4096, 14336, 2))  # fmt: skip


def case_of(op: str, model: Model, tokens: int, routing: str, shards: int = 8) -> Case:
    """One layer, with the experts that one of so many GPUs has: gate and up are one weight behind
    the all-to-all, down is before it."""
    to = op == "all_to_all_matmul"
    n, k = (2 * model.ffn, model.hidden) if to else (model.hidden, model.ffn)
    experts = cut_for(model.experts, shards)
    return Case(f"{op} {model.name} {tokens} {routing}", {
        "op": op, "model": model.name, "tokens": tokens, "routing": routing, "n": n, "k": k,
        "experts": experts, "top": model.top, "weight_bytes": 2 * experts * n * k,
        "shards": shards,
    })  # fmt: skip


def counts_of(case: Case, ranks: int) -> Tensor:
    """[ranks, experts], equal on all ranks; each rank sends tokens * top rows."""
    rows, experts = case["tokens"] * case["top"], ranks * case["experts"]
    if case["routing"] == "uniform":
        return torch.full((ranks, experts), rows // experts, dtype=torch.int64)
    busy = min(3.0, 0.9 * ranks) / ranks
    share = torch.full((ranks,), (1 - busy) / max(ranks - 1, 1))
    share[0] = busy
    draw = torch.Generator().manual_seed(case["tokens"])
    each = share.repeat_interleave(case["experts"]).expand(ranks, -1)
    found = torch.multinomial(each, rows, True, generator=draw)
    return torch.stack([row.bincount(minlength=experts) for row in found])


class Layer:
    """The tensors of a case on this rank, and what the libraries do with them."""

    def __init__(self, case: Case, bench: Bench, counts: Tensor | None = None) -> None:
        self.case, self.bench, ranks, rank = case, bench, bench.ranks, bench.rank
        self.counts = counts_of(case, ranks) if counts is None else counts
        self.local = case["experts"]
        own = self.counts[:, rank * self.local : (rank + 1) * self.local]
        self.sent, self.come = int(self.counts[rank].sum()), int(own.sum())
        owners = self.counts.view(ranks, ranks, self.local).sum(2)
        self.dispatches = case["op"] == "all_to_all_matmul"
        self.limit = int(owners.sum(0 if self.dispatches else 1).max())
        self.to, self.of = owners[rank].tolist(), owners[:, rank].tolist()
        # each weight by columns, as a Linear stores it
        self.w = bench.normal(self.local, case["n"], case["k"]).transpose(1, 2)
        self.x = bench.normal(self.sent if self.dispatches else self.come, case["k"])
        # what ours takes with counts on the device: equally many rows on all ranks
        most = int(owners.sum(1 if self.dispatches else 0).max())
        self.given = torch.cat((self.x, bench.normal(most - len(self.x), case["k"])))
        # rows lie by rank where they arrive, and by expert where they are multiplied
        sizes = own.flatten().tolist()
        blocks = torch.arange(self.come).split(sizes)
        by_expert = [blocks[s * self.local + e] for e in range(self.local) for s in range(ranks)]
        self.order = torch.cat(by_expert).to(bench.device)
        self.back = self.order.argsort()
        sums = own.sum(0).cumsum(0)
        self.ends, self.edges = sums.int().to(bench.device), [0, *sums.tolist()]
        self.on_device = self.counts.int().to(bench.device)
        self.arrived, self.product = (
            bench.empty(self.come, case["k"]),
            bench.empty(self.come, case["n"]),
        )
        self.sorted = torch.empty_like(self.arrived if self.dispatches else self.product)
        self.y = bench.empty(self.come if self.dispatches else self.sent, case["n"])
        # a token is the sum of `top` of the rows that come back, wherever they are
        top = case["top"]
        rows = torch.randperm(self.sent, device=bench.device, generator=bench.draw)
        self.index = rows[: self.sent // top * top].view(-1, top)
        self.weights = torch.rand(self.index.shape, device=bench.device, generator=bench.draw)

    def exchange(self, source: Tensor, target: Tensor) -> Tensor:
        """The library's all-to-all, of rows sorted by rank on both sides."""
        splits = (self.of, self.to) if self.dispatches else (self.to, self.of)
        dist.all_to_all_single(target, source, *splits, group=self.bench.group)
        return target

    def grouped(self, x: Tensor) -> Tensor:
        """The library's grouped matmul, which makes its result."""
        return functional.grouped_mm(x, self.w, offs=self.ends)

    def looped(self, x: Tensor) -> Tensor:
        """A matmul of the library for each expert."""
        for e in range(self.local):
            first, last = self.edges[e : e + 2]
            if first < last:
                torch.mm(x[first:last], self.w[e], out=self.product[first:last])
        return self.product

    def exact(self) -> Tensor:
        """Every row of the result, in fp64."""
        rows = self.x
        if self.dispatches:
            rows = self.exchange(self.x, self.arrived)[self.order]
        product = torch.empty(self.come, self.case["n"], dtype=torch.float64, device=rows.device)
        for e in range(self.local):
            first, last = self.edges[e : e + 2]
            product[first:last] = rows[first:last].double() @ self.w[e].double()
        if self.dispatches:
            return product
        return self.exchange(product[self.back], product.new_empty(self.sent, self.case["n"]))

    def summed(self, y: Tensor) -> Tensor:
        """The weighted sum of a token's rows, by the library."""
        rows = y.index_select(0, self.index.view(-1)).view(*self.index.shape, -1)
        return torch.bmm(self.weights.to(y.dtype)[:, None], rows)[:, 0]


def hbm_bytes_per_s(row: Row) -> float:
    """The rate at which a kernel reads the memory of the row's GPU: as measured, else of its
    preset.

    Raises:
        InputError: nothing is known of this GPU.
    """
    gpu, ranks = row["gpu"], row["ranks"]
    machine = shipped(gpu, ranks) or preset_of(gpu, ranks)
    if machine is None:
        want = "a GPU whose memory's rate is known"
        raise InputError("experts", "gpu", want=want, got=repr(gpu))
    return machine.costs.hbm_bytes_per_s
