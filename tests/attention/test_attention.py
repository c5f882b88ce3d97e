"""Attention of the library: how torch's kernels are called, the formula, and what a step makes."""

import pytest
import torch

from counterpoint.attention.steps import (
    CuDNN,
    Flash,
    Formula,
    Given,
    Library,
    made_whole,
    merge_into,
    rows_at_a_time,
)
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.problem import Problem

OP = "all_gather_attention"


@pytest.mark.parametrize("library", [CuDNN(), Flash()], ids=lambda x: type(x).__name__)
def test_torch_takes_what_it_is_given(library: Library):
    """Without values: names, order and shapes of arguments and results, grouped queries too."""

    def empty(rows: int, heads: int) -> torch.Tensor:
        flat = torch.empty(rows, heads * 128, dtype=torch.bfloat16, device="meta")
        return flat.unflatten(1, (heads, 128)).transpose(0, 1)[None]

    q, k, v, dy = empty(64, 8), empty(32, 2), empty(32, 2), empty(64, 8)
    y, lse = library.forward(q, k, v, False, 0.1)
    assert (y.shape, lse.shape, lse.dtype) == (q.shape, (8, 64), torch.float32)
    assert y[0].transpose(0, 1).flatten(1).data_ptr() == y.data_ptr()
    dq, dk, dv = library.backward(Given(q, k, v, dy, y, lse), False, 0.1)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_is_torchs(causal: bool):
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, h, 6, 4, dtype=torch.float64) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=0.7, enable_gqa=True
    )
    grads = torch.autograd.grad(want, leaves, dy)
    q, k, v, dy = (x.detach().float() for x in (q, k, v, dy))
    y, lse = Formula().forward(q, k, v, causal, 0.7)
    torch.testing.assert_close(y, want.detach().float())
    given = Given(q, k, v, dy, y, lse)
    for got, each in zip(Formula().backward(given, causal, 0.7), grads, strict=True):
        torch.testing.assert_close(got, each.float(), atol=1e-5, rtol=1e-4)


def test_merged_parts_are_the_whole():
    """And the gradients by parts of the keys are a sum, with y and the log-sum-exp of all."""
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(1, 2, 6, 4) for _ in range(4))
    whole, sums = Formula().forward(q, k, v, False, 0.5)
    parts = [(k[:, :, some], v[:, :, some]) for some in (slice(0, 1), slice(1, 6))]
    (y, lse), (other, lse_other) = (Formula().forward(q, *part, False, 0.5) for part in parts)
    merge_into(y[0].transpose(0, 1), lse, other[0].transpose(0, 1), lse_other)
    torch.testing.assert_close(y, whole)
    torch.testing.assert_close(lse, sums)
    want = Formula().backward(Given(q, k, v, dy, whole, sums), False, 0.5)
    given = [Given(q, some_k, some_v, dy, whole, sums) for some_k, some_v in parts]
    found = [Formula().backward(each, False, 0.5) for each in given]
    torch.testing.assert_close(found[0][0] + found[1][0], want[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([found[0][i], found[1][i]], 2), want[i])


def test_results_that_wait_for_their_merge_are_small():
    """Of 32 heads of 128 columns: as the keys of 8 heads at 8192 tokens of 2 ranks; 16 MiB."""
    found = [rows_at_a_time(rows * heads * 128, 32 * 128) for rows, heads in
             ((4096, 8), (16384, 8), (16384, 32), (128, 1))]  # fmt: skip
    assert found == [1024, 2048, 2048, 1024]


@pytest.mark.parametrize(
    ("spec", "causal", "ranks", "made"),
    [
        ("serial", False, 2, {"y", "lse"}),
        ("shard_p2p", True, 2, {"y", "lse"}),
        ("shard_p2p", True, 3, {"lse"}),
        ("serial", True, 4, {"lse"}),
        ("shard_p2p ring chunks=2", False, 2, {"lse"}),
    ],
)
def test_what_a_step_makes_takes_its_place(spec: str, causal: bool, ranks: int, made: set[str]):
    problem = Problem(OP, 8 * ranks, 4, 2, ranks, causal=causal)
    plan = build(problem, spec)
    assert all(made_whole(bind(plan, rank)) == made for rank in range(ranks))
