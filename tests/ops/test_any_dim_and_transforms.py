"""The last dim gathered or scattered, transforms of torch.func, and what a compiler must keep."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch._functorch import config as functorch
from torch._library.utils import is_impure

import counterpoint as cp
from counterpoint.errors import UnsupportedError
from counterpoint.group.workspace import workspaces_of
from counterpoint.ops import plans


@pytest.mark.parametrize("rows", [None, [3, 1]])
@on_ranks(2)
def test_the_last_dim(rank: int, ranks: int, rows: list[int] | None) -> None:
    torch.manual_seed(7)
    counts = rows or [2] * ranks
    total, own = sum(counts), slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for shape in ((5,), (2, 3)):
        for bias in (None, torch.randn(4)):
            x = torch.randn(*shape, total)
            ws = [torch.randn(total, 4) for _ in range(ranks)]
            shard = x[..., own].clone().requires_grad_()
            w = ws[rank].clone().requires_grad_()
            y = cp.all_gather_matmul(shard, w, bias=bias, gather_dim=-1, rows=rows)
            want = x @ ws[rank] + (0 if bias is None else bias)
            torch.testing.assert_close(y, want)
            assert y.stride() == want.stride()
            dys = [torch.randn(*shape, 4) for _ in range(ranks)]
            y.backward(dys[rank])
            whole = sum(dy @ each.t() for dy, each in zip(dys, ws, strict=True))
            torch.testing.assert_close(shard.grad, whole[..., own])
            torch.testing.assert_close(w.grad, x.flatten(0, -2).t() @ dys[rank].flatten(0, -2))
    for shape in ((5,), (2, 3)):
        for bias in (None, torch.randn(total)):
            xs = [torch.randn(*shape, 3) for _ in range(ranks)]
            ws = [torch.randn(3, total) for _ in range(ranks)]
            x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
            y = cp.matmul_reduce_scatter(x, w, bias=bias, scatter_dim=len(shape), rows=rows)
            want = sum(a @ b for a, b in zip(xs, ws, strict=True))
            want = (want + (0 if bias is None else bias))[..., own]
            torch.testing.assert_close(y, want)
            assert y.is_contiguous()
            dys = [torch.randn(*shape, count) for count in counts]
            y.backward(dys[rank])
            dy = torch.cat(dys, -1)
            torch.testing.assert_close(x.grad, dy @ ws[rank].t())
            torch.testing.assert_close(w.grad, xs[rank].flatten(0, -2).t() @ dy.flatten(0, -2))


@on_ranks(2)
def test_no_columns_of_a_3d_tensor(rank: int, ranks: int):
    x, w = torch.randn(2, 3, 5), torch.randn(5, 0)
    for op in (cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce):
        for _ in range(2):
            y: Any = op(x, w)
            assert y.shape[1:] == (3, 0)


@on_ranks(2)
def test_vmap_is_refused(rank: int, ranks: int):
    x, w = torch.randn(4, 5), torch.randn(5, 6)
    calls = (cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce)
    for op in calls:
        want: Any = op(x, w)
        for batch in (x.expand(3, 4, 5), torch.randn(2, 4, 5)):
            with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap over an operator"):
                torch.func.vmap(op, in_dims=(0, None))(batch, w)
        assert torch.equal(op(x, w), want)  # the group goes on


@on_ranks(2)
def test_plans_made_anew_are_forgotten(rank: int, ranks: int):
    problem = cp.Problem("all_gather_matmul", 8, 6, 5, ranks, "float32")
    x, w = torch.randn(4, 5), torch.randn(5, 6)
    want: Any = cp.all_gather_matmul(x, w)
    for _ in range(plans.MAX_KEYS + 9):
        plan = cp.build(problem, "shard_p2p")
        for _ in range(3):
            torch.testing.assert_close(cp.all_gather_matmul(x, w, plan=plan), want)
    assert len(plans.KEYS) <= plans.MAX_KEYS


@pytest.mark.parametrize("op", [
    "all_gather_matmul", "all_gather_matmul_list", "matmul_reduce_scatter", "matmul_all_reduce",
    "all_to_all_matmul", "matmul_all_to_all", "matmul_all_to_all_sum", "embedding_bag_all_to_all",
    "all_gather_matmul_backward", "matmul_reduce_scatter_backward", "all_gather_matmul_wgrad",
    "exchange_counts", "embedding_bag_gradients", "sum_over_group",
    "sum_of_biases",
])  # fmt: skip
def test_compilers_keep_what_ranks_do_together(op: str):
    from counterpoint.nn import replicated

    assert replicated
    for name in ("all_to_all_matmul", "embedding_bag_all_to_all", "matmul_all_reduce",
                 "matmul_reduce_scatter", "all_gather_matmul", "exchange_counts"):  # fmt: skip
        getattr(cp, name)
    assert is_impure(getattr(torch.ops.counterpoint, op).default)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_a_rank_that_ignores_the_result_takes_part(rank: int, ranks: int, backend: str):
    def step(x: torch.Tensor, w: torch.Tensor, use: bool) -> torch.Tensor:
        y = cp.matmul_all_reduce(x, w, plan="serial")
        return y.sum() + x.sum() if use else x.sum()

    x, w = torch.randn(4, 5), torch.randn(5, 6)
    # what was compiled before an operator was marked would be taken from there
    caches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with (
        torch._inductor.config.patch(caches), functorch.patch(enable_autograd_cache=False),
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which inductor imports
        compiled = torch.compile(step, backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(x, w, rank == 0)
    cp.matmul_all_reduce(x, w)


@on_ranks(2)
def test_grouped_takes_an_addend(rank: int, ranks: int):
    """The gradient of rows that were returned is added to that of the products: by which plan."""
    torch.manual_seed(3)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 3)
    counts = torch.full((2, 4), 2)
    y, rows = cp.all_to_all_matmul(x, w, counts=counts, plan="grouped", return_rows=True)
    (y.sum() + rows.square().sum()).backward()
    want = 2 * x.detach()  # both ranks have the same weights and rows
    every = torch.cat([w.sum(2), w.sum(2)]).repeat_interleave(2, 0)
    torch.testing.assert_close(x.grad, want + every)
    (workspace,) = workspaces_of(dist.group.WORLD)
    (*_, known) = workspace.code.values()
    plan = known.code.program.plan
    assert (plan.problem.op, plan.family) == ("matmul_all_to_all", "grouped")
