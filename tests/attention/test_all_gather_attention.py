"""all_gather_attention against fp64: forward and gradients, causal and not, grouped queries."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_bodies import PLANS, gradients_by, mine, whole, wrong, wrong_gradients
from island_bodies import on_islands, plans_run
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor

import counterpoint as cp
from counterpoint.attention import steps as attention
from counterpoint.ops.samples import sample_of
from counterpoint.problem import Problem

OP = "all_gather_attention"


@pytest.mark.drawn(4)
@pytest.mark.shows("all_gather_attention", "forward, backward", "bf16 fp16 fp32")
@pytest.mark.parametrize("causal", [False, True])
@on_ranks(1, 2, 3, 4)
def test_attention_and_gradients_are_those_of_fp64(
    rank: int, ranks: int, causal: bool
) -> list[str]:
    found: list[str] = []
    for seed, plan in enumerate(PLANS):
        found += wrong(rank, ranks, plan, (1, 12, 4, 2, 8), torch.float32, causal, seed=seed)
    found += wrong(rank, ranks, "shard_p2p", (2, 10, 6, 6, 5), torch.bfloat16, causal)
    found += wrong(rank, ranks, "shard_p2p", (3, 2, 2, 1, 16), torch.float16, causal, scale=0.3)
    return found


BY_HEADS = ("by_heads ring", "by_heads ring chunks=1", "by_heads ring chunks=3")


@on_ranks(1, 2, 3, 4)
def test_gradients_by_heads_are_those_of_fp64(rank: int, ranks: int) -> list[str]:
    """Of one head or several at a time, of as many on all ranks or not."""
    found: list[str] = []
    for seed, plan in enumerate(BY_HEADS):
        for shape in ((1, 6, 8, 4, 8), (2, 5, 6, 3, 4)):
            found += wrong_gradients(rank, ranks, plan, shape, torch.float32, seed)
    return found + wrong_gradients(rank, ranks, BY_HEADS[0], (1, 4, 10, 10, 16), torch.bfloat16)


@on_ranks(4)
def test_attention_between_islands_is_the_librarys(rank: int, ranks: int) -> list[str]:
    """Forward and gradients; no plan reaches the memory of another island."""
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size):
            for causal in (False, True):
                found += wrong(rank, ranks, "auto", (2, 8, 4, 2, 8), torch.float32, causal)
            assert {(n, spec) for _, n, spec in plans_run()} == {(ranks // size, "serial")}
            given = shards_of(rank, ranks)[:3]
            with pytest.raises(cp.InputError, match="plan must be for ranks of one island"):
                cp.all_gather_attention(*given, plan="shard_p2p ring")
    return found


@on_ranks(3)
def test_calls_by_heads_share_one_memory(rank: int, ranks: int) -> None:
    """Of any plan, one after the other; the same call gives the same bits."""
    shape = (1, 6, 8, 4, 8)
    plans = (*BY_HEADS, "serial", "shard_p2p ring")
    want = {plan: gradients_by(rank, ranks, plan, shape, torch.float32) for plan in plans}
    for turn in range(3):
        for plan in plans[turn:] + plans[:turn]:
            found = gradients_by(rank, ranks, plan, shape, torch.float32)
            assert all(map(torch.equal, found, want[plan])), plan


def shards_of(rank: int, ranks: int, seed: int = 0, causal: bool = True) -> list[Tensor]:
    drawn = whole(ranks, (1, 8, 4, 2, 8), torch.float32, seed)
    return [mine(x, rank, ranks, causal).clone() for x in drawn]


def gradients(call: Callable[..., Tensor], shards: list[Tensor]) -> list[Tensor]:
    """y, dq, dk and dv."""
    leaves = [x.detach().clone().requires_grad_() for x in shards[:3]]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, shards[3])]


@pytest.mark.shows("all_gather_attention", "compiled forward, compiled backward", "fp32")
@on_ranks(2)
def test_a_compiled_call_is_the_eager_one(rank: int, ranks: int) -> None:
    """In one graph; so is that of a plan of one's own, from JSON."""
    shards = shards_of(rank, ranks)
    call = partial(cp.all_gather_attention, group=world(), causal=True)
    torch.compiler.reset()
    compiled = torch.compile(partial(call, plan="shard_p2p"), backend="aot_eager", fullgraph=True)
    problem = Problem(OP, 16, 32, 16, 2, "float32", head_dim=8, causal=True)
    plan = cp.Plan.from_json(cp.build(problem, "shard_p2p").to_json())
    want = gradients(partial(call, plan="shard_p2p"), shards)
    for other in (compiled, partial(call, plan=plan)):
        assert all(map(torch.equal, gradients(other, shards), want))


@on_ranks(3)
def test_calls_that_follow_one_another_share_one_memory(rank: int, ranks: int) -> None:
    """Causal or not, of one plan or another; the same call gives the same bits."""
    group = world()
    kinds = [(causal, plan) for causal in (False, True) for plan in PLANS[1:]]
    want: dict[tuple[bool, str], list[Tensor]] = {}
    for turn in range(3):
        for causal, plan in kinds[turn:] + kinds[:turn]:
            found = gradients(
                partial(cp.all_gather_attention, group=group, causal=causal, plan=plan),
                shards_of(rank, ranks, causal=causal),
            )
            for got, first in zip(found, want.setdefault((causal, plan), found), strict=True):
                assert torch.equal(got, first)


@pytest.mark.shows("all_gather_attention", "double backward", "refused")
@on_ranks(2)
def test_a_second_gradient_is_refused(rank: int, ranks: int) -> None:
    q, k, v, _ = (x.requires_grad_() for x in shards_of(rank, ranks))
    y = cp.all_gather_attention(q, k, v, group=world())
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(cp.UnsupportedError, match="double backward"):
        dq.sum().backward()


@on_ranks(2)
def test_ranks_that_differ_are_told(rank: int, ranks: int) -> None:
    q, k, v, _ = shards_of(rank, ranks)
    with pytest.raises(cp.InputError, match="causal must be equal on all ranks, False as on rank"):
        cp.all_gather_attention(q, k, v, causal=rank == 1)


@on_ranks(1)
def test_arguments_are_checked(rank: int, ranks: int) -> None:
    q, k, v, _ = shards_of(rank, ranks)
    half = q[:, :7], k[:, :7], v[:, :7]
    wrong_calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("q must be a Tensor, got int", (1, k, v), {}),
        ("q must be bf16 or fp16, or fp32 on CPU, got torch.float64", (q.double(), k, v), {}),
        ("q must be [batch, rows of this rank, heads, head dim], of 4 dims, got 3-D",
         (q[0], k, v), {}),
        ("q must be of two halves where it is causal, got (1, 7, 4, 8)", half, {"causal": True}),
        ("k must be torch.float32 as q, got torch.float16", (q, k.half(), v), {}),
        ("k must be [1, 8, a divisor of 4 heads, 8], got (1, 8, 3, 8)",
         (q, torch.zeros(1, 8, 3, 8), v), {}),
        ("v must be [1, 8, a divisor of 4 heads, 8], got (1, 7, 2, 8)", (q, k, v[:, :7]), {}),
        ("v must be (1, 8, 2, 8) as k, got (1, 8, 1, 8)", (q, k, v[:, :, :1]), {}),
        ("causal must be True or False, got 1", (q, k, v), {"causal": 1}),
        ("scale must be a number above 0, or None, got -1", (q, k, v), {"scale": -1}),
        ("layout must be one of bshd, bhsd, or None, got 'sbhd'", (q, k, v), {"layout": "sbhd"}),
        ("q must be [batch, heads, rows of this rank, head dim], of 4 dims, got 3-D", (q[0], k, v),
         {"layout": "bhsd"}),
        ("k must be [1, a divisor of 4 heads, 8, 8], got (1, 3, 8, 8)",
         (q.transpose(1, 2), torch.zeros(1, 3, 8, 8), v), {"layout": "bhsd"}),
        ('k must be [batch, rows of this rank, heads, head dim] of as many rows as heads or more '
         'where layout is None, got (1, 4, 8, 8); pass layout="bhsd" if dims are [batch, heads, ',
         (q.transpose(1, 2),) * 3, {}),
        ("k must be [1, 4, a divisor of 8 heads, 8], got (1, 2, 8, 8); pass layout=",
         tuple(t.transpose(1, 2) for t in (q, k, v)), {}),
    ]  # fmt: skip
    for text, given, options in wrong_calls:
        with pytest.raises(cp.InputError, match=f"^{OP}: {re.escape(text)}"):
            cp.all_gather_attention(*given, **options)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)], ids=str)
@on_ranks(2)
def test_heads_before_rows(rank: int, ranks: int, heads: tuple[int, int]) -> None:
    """The same numbers, and gradients, in the layout of scaled_dot_product_attention."""
    given = [torch.randn(2, 6, h, 8) for h in (heads[0], heads[1], heads[1], heads[0])]
    dy = given.pop()
    plain = [t.clone().requires_grad_() for t in given]
    want = cp.all_gather_attention(*plain, layout="bshd", causal=True)
    want.backward(dy)
    moved = [t.transpose(1, 2).contiguous().requires_grad_() for t in given]
    got = cp.all_gather_attention(*moved, layout="bhsd", causal=True)
    got.backward(dy.transpose(1, 2))
    assert torch.equal(got, want.transpose(1, 2))
    for one, other in zip(moved, plain, strict=True):
        assert torch.equal(one.grad, other.grad.transpose(1, 2))


@on_ranks(2)
def test_plans_are_tuned_on_random_calls(rank: int, ranks: int) -> None:
    for op, results in ((OP, 2), (f"{OP}_backward", 3)):
        problem = Problem(op, 16, 32, 16, 2, "float32", head_dim=8, causal=True)
        sample = sample_of(problem, world(), torch.device("cpu"))
        want: Any = sample.call("serial")(0)
        found: Any = sample.call("shard_p2p ring")(0)
        assert len(found) == results
        for got, each in zip(found, want, strict=True):
            torch.testing.assert_close(got, each)


@on_ranks(2)
def test_opcheck_of_both_operators(rank: int, ranks: int) -> None:
    group = world()
    where = True, 0.0, "serial", group.group_name, ranks
    q, k, v, dy = (x.transpose(0, 1) for x in shards_of(rank, ranks))
    ops: Any = torch.ops.counterpoint
    y, lse = ops.all_gather_attention(q, k, v, *where)
    tests = ("test_schema", "test_faketensor")
    for op, given in ((ops.all_gather_attention, (q, k, v)),
                      (ops.all_gather_attention_backward, ([q, k, v, dy, y, lse],))):  # fmt: skip
        found = torch.library.opcheck(op.default, (*given, *where), test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("causal", [False, True])
@on_ranks(2)
def test_queries_come_some_rows_at_a_time(rank: int, ranks: int, causal: bool) -> list[str]:
    """As many as one would not have here: 14 of them, or 7, by 4."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LEAST_ROWS", 2), ("ROWS_APART", 2), ("MOST_ELEMENTS", 4 * 32)):
            patch.setattr(attention, name, value)
        assert attention.rows_at_a_time(14 * 16, 32) == 4
        return wrong(rank, ranks, "shard_p2p", (1, 14, 4, 2, 8), torch.float32, causal)
