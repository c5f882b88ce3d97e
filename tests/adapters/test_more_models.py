"""Models unlike those of benchmarks/blocks.py, and parallelism in two dims, under torch.compile."""

import warnings

import pytest
import torch
import torch.distributed as dist
from compiled import local, overlap_pass, quick, worse
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from counterpoint.errors import CounterpointWarning

DIM, HIDDEN, HEADS, S, TOKENS = 16, 24, 4, 6, 40
COLUMNS = DIM // HEADS


class FusedAttention(nn.Module):
    """Queries, keys and values by one linear layer, head by head as in GPT-NeoX."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=bias), nn.Linear(DIM, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        heads = self.qkv(x).view(b, s, -1, 3 * COLUMNS).transpose(1, 2).chunk(3, -1)
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class FusedGlu(nn.Module):
    """Gate and values by one linear layer, as in Phi-3."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * values)


class Both(nn.Module):
    """Attention and MLP of one input, added, as in PaLM, GPT-J and Falcon."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.attention, self.mlp = FusedAttention(bias=bias), FusedGlu(bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.mlp(x)


class Block(nn.Module):
    """x + inner(norm(x))."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(DIM), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def sharded(
    model: nn.Module, plan: dict[str, ParallelStyle], dtype: torch.dtype, ranks: int, batch: int
) -> tuple[nn.Module, Tensor]:
    """A model whose input is this rank's part of each sequence."""
    parallelize_module(model.to(dtype), mesh_of(ranks), plan)
    torch.manual_seed(1)
    x = torch.randn(batch, ranks * S, DIM).to(dtype)
    return model, x.chunk(ranks, 1)[dist.get_rank()].clone()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("batch", "bias"), [(1, False), (3, True)])
@on_ranks(2)
def test_attention_and_mlp_side_by_side(rank: int, world_size: int, batch: int, bias: bool):
    """One gather for both, and one reduce-scatter of their sum."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        partial = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "inner": PrepareModuleInputOutput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),),
                output_layouts=(Partial(),), desired_output_layouts=(Shard(1),),
            ),
            "inner.attention.qkv": ColwiseParallel(), "inner.attention.out": partial,
            "inner.mlp.up": ColwiseParallel(), "inner.mlp.down": partial,
        }  # fmt: skip
        return sharded(Block(Both(bias=bias)), plan, dtype, world_size, batch)

    return worse(make, matched=4)


@on_ranks(2)
def test_fp16(rank: int, world_size: int):
    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "inner": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "inner.qkv": ColwiseParallel(),
            "inner.out": RowwiseParallel(output_layouts=Shard(1)),
        }
        return sharded(Block(FusedAttention(bias=True)), plan, dtype, world_size, 2)

    return worse(make, matched=4, dtype=torch.float16)


class Gathered(nn.Module):
    """Data parallelism: each rank has a part of each weight, and gradients are reduced."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype, op: str) -> None:
        super().__init__()
        shapes = (HIDDEN, DIM), (DIM, HIDDEN)
        self.parts = nn.ParameterList(
            nn.Parameter(distribute_tensor(torch.randn(shape).to(dtype), mesh, [Shard(0)]))
            for shape in shapes
        )
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        up, down = (
            part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial(self.op)])
            for part in self.parts
        )
        return x + functional.linear(functional.gelu(functional.linear(x, up)), down)


@pytest.mark.parametrize(("op", "dtype", "left"), [
    ("sum", torch.float32, []),
    ("avg", torch.float32, []),
    ("avg", torch.float16, ["the sum that its average is of may be too large for float16"] * 2),
])  # fmt: skip
@on_ranks(2)
def test_weights_that_are_gathered(
    rank: int, world_size: int, op: str, dtype: torch.dtype, left: list[str]
):
    """As compiled data parallelism does; gradients are averages."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model = Gathered(mesh_of(world_size), dtype, op)
        torch.manual_seed(1 + rank)
        return model, torch.randn(2, S, DIM).to(dtype)

    return worse(make, matched=4 - len(left), left=left, dtype=dtype)


class Language(nn.Module):
    """An embedding, a block and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(TOKENS, DIM), Block(FusedGlu())
        self.head = nn.Linear(DIM, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


@on_ranks(2)
def test_embedding_and_logits(rank: int, world_size: int):
    """Sums of what they look up go with the norm behind them; what they hand out is torch's."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model = Language().to(dtype)
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "block.inner.up": ColwiseParallel(), "block.inner.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }  # fmt: skip
        parallelize_module(model, mesh_of(world_size), plan)
        return model, torch.randint(TOKENS, (2, S))

    left = ["no matmul reads it, but a result of the graph"]
    return worse(make, matched=2, left=left, train=False)


class Shares(nn.Module):
    """Adds to partial sums this rank's share of what was reduced before, as DTensor does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.other = (nn.Parameter(torch.randn(DIM, HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        group, ops = dist.group.WORLD, torch.ops._c10d_functional
        assert group is not None
        name, ranks = group.group_name, group.size()
        whole = ops.wait_tensor(ops.all_reduce(x @ self.one, "sum", name))
        y = (x @ self.other + whole / ranks).permute(1, 0, 2).contiguous()
        if self.kind == "all-reduce":
            return ops.wait_tensor(ops.all_reduce(y, "sum", name))
        return ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", ranks, name))


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
@on_ranks(2)
def test_what_all_ranks_have_in_a_sum(rank: int, world_size: int, kind: str):
    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(rank)
        return Shares(kind).to(dtype), torch.randn(3, 2 * S, DIM).to(dtype)

    return worse(make, matched=2, train=False)


class Branches(nn.Module):
    """A reduce-scatter in each branch of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(DIM, DIM)) for _ in range(2))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        group, ops = dist.group.WORLD, torch.ops._c10d_functional
        assert group is not None
        where = group.size(), group.group_name

        def scattered(y: Tensor) -> Tensor:
            return ops.wait_tensor(ops.reduce_scatter_tensor(y @ self.down, "sum", *where))

        full = ops.wait_tensor(ops.all_gather_into_tensor(x, *where))
        y = (full @ self.up).relu()
        return torch.cond(flag.sum() > 0, scattered, lambda y: scattered(2 * y), (y,))


@on_ranks(2)
def test_a_collective_in_a_conditional(rank: int, world_size: int):
    """It stays torch's; what stands before the condition becomes an operator."""
    torch.manual_seed(0)
    model = Branches()
    torch.manual_seed(1 + rank)
    x, overlap = torch.randn(4, DIM), overlap_pass()
    with torch.no_grad(), by_reference(), quick(overlap) as backend:
        compiled = torch.compile(model, backend=backend)
        for flag in torch.ones(1), -torch.ones(1):
            torch.testing.assert_close(compiled(x, flag), model(x, flag))
    assert [(report.matched, len(report.found)) for report in overlap.reports] == [(1, 1)]


@on_ranks(4)
def test_sharded_data_parallelism_around_a_block(rank: int, world_size: int):
    """A mesh of two dims: FSDP2 gathers what tensor parallelism has left of each weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    overlap, results = overlap_pass(), []
    with by_reference():
        for own in (None, overlap):
            torch.manual_seed(0)
            model = Block(FusedGlu())
            plan = {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            with quick(own) as backend:
                model.compile(backend=backend)
                fully_shard(model, mesh=mesh["dp"])
                torch.manual_seed(1 + mesh["dp"].get_local_rank())
                y = model(torch.randn(2, S, DIM))
                y.square().sum().backward()
            grads = [p.grad for p in model.parameters()]
            results.append([y.detach(), *(local(g) for g in grads if g is not None)])
    assert len(results[1]) == 4
    torch.testing.assert_close(results[1], results[0])
    (report,) = overlap.reports
    assert report.matched == len(report.found) == 2, str(report)


class Promoted(nn.Module):
    """A product in fp16 and what is added to it in fp32, reduced in fp32."""

    def __init__(self, share: bool) -> None:
        super().__init__()
        self.share = share
        self.one = nn.Parameter(torch.full((DIM, HIDDEN), 250.0).half())
        self.other = nn.Parameter(torch.ones(DIM, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        group, ops = dist.group.WORLD, torch.ops._c10d_functional
        assert group is not None
        y = x.float() @ self.other
        if self.share:
            whole = ops.wait_tensor(ops.all_reduce(y, "sum", group.group_name))
            y = whole / group.size()
        y = x @ self.one + y
        return ops.wait_tensor(ops.reduce_scatter_tensor(y, "sum", group.size(), group.group_name))


@pytest.mark.parametrize("share", [False, True], ids=["product", "share"])
@on_ranks(2)
def test_a_sum_in_a_wider_dtype_than_a_product_is_left(rank: int, ranks: int, share: bool):
    """Its two parts of 40,000 fit fp16, and their sum does not."""
    model, x = Promoted(share), torch.full((4, DIM), 160.0 / DIM).half()
    overlap = overlap_pass()
    with torch.no_grad(), quick(overlap) as backend, warnings.catch_warnings():
        warnings.simplefilter("ignore", CounterpointWarning)
        got = torch.compile(model, backend=backend)(x)
    (report,) = overlap.reports
    assert report.found[-1].reason == "it reduces in another dtype than its matmul's", str(report)
    assert report.matched == share
    torch.testing.assert_close(got, model(x))
    assert got.isfinite().all() and got.max() > torch.finfo(torch.float16).max
