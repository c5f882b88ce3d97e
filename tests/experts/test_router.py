"""Routing: kernels interpreted against torch's stable sorts, to the bit; and by torch."""

import warnings

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from counterpoint.experts.routes import router

INF, NAN = torch.inf, torch.nan
# tokens, experts, top
SHAPES = ((1, 8, 2), (7, 12, 3), (33, 64, 8), (5, 512, 16), (3, 1, 1), (18, 16, 16))
KINDS = ("drawn", "ties", "all equal", "no numbers", "bf16")


def logits_of(kind: str, tokens: int, experts: int) -> Tensor:
    if kind == "ties":
        some = torch.tensor([-1.0, -0.5, -0.0, 0.0, 0.5])
        return some[torch.randint(len(some), (tokens, experts))]
    if kind == "all equal":
        return torch.full((tokens, experts), -3.5)
    logits = torch.randn(tokens, experts)
    if kind == "no numbers":
        some = torch.tensor([NAN, INF, -INF, -NAN, 0.0, -0.0])
        drawn = torch.randint(4 * len(some), logits.shape)
        logits = torch.where(drawn < len(some), some[drawn % len(some)], logits)
        logits[0], logits[-1] = -INF, NAN
    return logits.bfloat16() if kind == "bf16" else logits


def first_ones(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The largest, of equal ones the first; a stable sort has NaN above all, as topk."""
    values, experts = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :top], experts[:, :top]


def near(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want.double(), 2e-6, 1e-7, equal_nan=True)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_the_kernel_chooses_as_a_stable_sort(
    rank: int, ranks: int, kind: str, tokens: int, experts: int, top: int, renormalize: bool
) -> list[str]:
    found: list[str] = []
    logits = logits_of(kind, tokens, experts)
    values, want = first_ones(logits, top)
    assert torch.equal(logits.float().topk(top)[0].nan_to_num(9e9), values.nan_to_num(9e9))
    chosen = torch.full((tokens, top), -1, dtype=torch.int32)
    weights = torch.full((tokens, top), NAN if kind != "no numbers" else 5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind == "no numbers" else "error", RuntimeWarning)
        router.choose_into(weights, chosen, logits, renormalize)
    exact = logits.double().requires_grad_()
    every = exact if not renormalize else exact.gather(1, want)
    shares = every.softmax(-1)
    wanted = shares if renormalize else shares.gather(1, want)
    if not torch.equal(chosen.long(), want):
        found.append("experts")
    if not near(weights, wanted.detach()):
        found.append("weights")
    if kind == "no numbers":
        return found
    dweights = torch.randn(tokens, top)
    dwant = torch.autograd.grad(wanted, exact, dweights.double())[0]
    dlogits = torch.full_like(logits, NAN)
    router.choose_gradient_into(dlogits, dweights, weights, chosen, logits, renormalize)
    bound = 1e-6 + torch.finfo(logits.dtype).eps * dwant.abs()
    if not ((dlogits.double() - dwant).abs() <= bound).all():
        found.append("gradient")
    return found


def named(kind: str, tokens: int, experts: int, top: int) -> Tensor:
    """Experts of tokens, those of one token may be equal."""
    drawn = torch.randint(experts, (tokens, top))
    if kind == "one takes all":
        drawn.fill_(experts - 1)
    if kind == "experts without rows":
        drawn = drawn // 3 * 3
    return drawn


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("block", "programs"), [(128, 128), (16, 3)])
@pytest.mark.parametrize("kind", ["drawn", "one takes all", "experts without rows"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top"), [(1, 8, 2), (33, 64, 8), (18, 16, 16), (0, 8, 2)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@on_ranks(1)
def test_the_kernels_order_as_a_stable_sort(
    rank: int, ranks: int, dtype: torch.dtype, tokens: int, experts: int, top: int, kind: str,
    block: int, programs: int,
):  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK", block), ("PROGRAMS", programs), ("COUNTS", 128)):
            patch.setattr(router, name, value)
        chosen = named(kind, tokens, experts, top).to(dtype)
        want = router.order_by_expert(chosen, experts)  # by torch
        got = [torch.full_like(t, -7) for t in want]
        router.order_into(*got, chosen)  # type: ignore[call-arg]
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@on_ranks(1)
def test_what_names_no_expert_comes_last_and_is_not_counted(rank: int, ranks: int):
    """So that the kernel that sums finds rows beyond the counts, and says so."""
    experts = torch.tensor([[0, 9], [-1, 3], [3, 0], [4, -5]])
    counts, places, tokens = (torch.full((n,), -7, dtype=torch.int32) for n in (4, 8, 8))
    router.order_into(counts, places.view(4, 2), tokens, experts)
    assert counts.tolist() == [2, 0, 0, 2]
    assert places.tolist() == [0, 4, 5, 2, 3, 1, 6, 7]
    assert tokens.tolist() == [0, 2, 1, 2, 0, 1, 3, 3]


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_operators(renormalize: bool):
    ops = torch.ops.counterpoint
    logits = torch.randn(6, 9).requires_grad_()
    weights, experts = router.choose_experts(logits, 3, renormalize)
    exact = logits.detach().double().requires_grad_()
    want = exact.softmax(-1).gather(1, exact.topk(3)[1])
    want = want / want.sum(1, keepdim=True) if renormalize else want
    assert torch.equal(experts.long(), exact.topk(3)[1]) and near(weights.detach(), want.detach())
    dweights = torch.randn(6, 3)
    (found,) = torch.autograd.grad(weights, logits, dweights)
    assert near(found, torch.autograd.grad(want, exact, dweights.double())[0])
    torch.library.opcheck(ops.choose_experts, (logits, 3, renormalize))
    given = (dweights, weights.detach(), experts, logits.detach(), renormalize)
    torch.library.opcheck(ops.choose_experts_gradient, given)
    torch.library.opcheck(ops.order_by_expert, (experts, 9))
