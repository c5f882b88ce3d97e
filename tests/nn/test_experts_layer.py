"""ExpertParallelMLP: a mixture of experts over ranks trains as one in plain torch does."""

import copy
import re
import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from drawing import Draw
from expert_bodies import by_torch
from expert_layer_bodies import Plain, pair, wrong_mlp
from island_bodies import on_islands
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
import counterpoint.nn.expert_ways as expert_ways
from counterpoint.experts import layer as expert_layer

FEATURES, HIDDEN, EXPERTS, TOP_K, TOKENS, STEPS = 10, 6, 12, 3, 7, 3


WAYS = (  # ranks, islands, dims of a rank's tokens, plan
    (1, 1, (TOKENS,), "auto"), (2, 1, (TOKENS,), "serial"), (3, 1, (2, 3), "serial"),
    (4, 1, (TOKENS,), "auto"), (4, 1, (1, 3), "auto"),
    # a token goes once to an island, or to a rank, where the plan is not the library's
    (4, 2, (2, 3), "auto"), (4, 4, (2, 3), "islands"), (4, 2, (2, 3), "serial"),
    (4, 1, (2, 3), "routed 1/2 xor"), (4, 1, (2, 3), "routed"),
)  # fmt: skip
KINDS = {  # of logits, from such that are drawn
    "drawn": lambda logits: logits,
    "experts without rows": lambda logits: logits - 16 * (torch.arange(EXPERTS) % 3 == 0),
    "all to one rank": lambda logits: logits + 16 * (torch.arange(EXPERTS) < TOP_K),
    "far apart": lambda logits: 8 * logits,
}


def drawn(*dims: int) -> Tensor:
    """Logits of which no two of a token are equal, in bf16 neither."""
    return torch.rand(*dims, EXPERTS).argsort(-1) / 4


@pytest.mark.drawn(5)
@pytest.mark.parametrize("known", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "islands", "shape", "plan"), WAYS)
@on_ranks()
def test_results_and_gradients(
    rank: int, ranks: int, islands: int, shape: tuple[int, ...], plan: str, dtype: torch.dtype,
    known: str, draw: Draw,
) -> list[str]:  # fmt: skip
    """Against a dense layer in fp64; beside that one in the same dtype."""
    found, calls = list[str](), list[int]()
    cases = [(kind, k, True) for kind in KINDS for k in (1, TOP_K)]
    cases = draw([*cases, *(("drawn", k, False) for k in (1, TOP_K, EXPERTS))], 4)
    (tokens, *inner), at_once = shape, expert_layer.through
    exchange = expert_ways.exchange_routes
    plan = plan.split()[0] if known == "device" else plan  # whose plans are without sizes
    routed = (islands > 1 and plan != "serial") or plan.startswith("routed")

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            calls.append(1)
            return call(*args, **more)

        return run

    with (on_islands(rank, ranks // islands), by_torch(known),
          pytest.MonkeyPatch.context() as patch):  # fmt: skip
        patch.setattr(expert_ways, "exchange_routes", counted(exchange))
        patch.setattr(expert_layer, "through", counted(at_once))
        room = None if known == "host" else ranks * prod(shape) * EXPERTS
        layer, plain = pair(FEATURES, HIDDEN, EXPERTS, dtype=dtype, max_rows=room, plan=plan)
        # a rank without tokens, where all may have other numbers
        of_ranks = [0 if known == "host" and r == 1 else tokens for r in range(ranks)]
        dims = sum(of_ranks), *inner
        for kind, k, renormalize in cases:
            given = {"x": torch.randn(*dims, FEATURES).to(dtype),
                     "dy": torch.randn(*dims, FEATURES),
                     "logits": KINDS[kind](drawn(*dims)).to(dtype),
                     "top_k": k, "renormalize": renormalize}  # fmt: skip
            wrong = wrong_mlp(rank, ranks, layer, plain, of_ranks, **given)
            found += [f"{kind}, top {k}, {renormalize}: {text}" for text in wrong]
    return found + [f"{len(calls)} routed"] * (len(calls) != len(cases) * routed)


@on_ranks(2)
def test_other_uses_and_what_is_refused(rank: int, ranks: int):
    torch.manual_seed(1)
    layer = cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    plain = Plain(FEATURES, HIDDEN, EXPERTS)
    assert torch.equal(torch.rand(1), drawn), "the generators end at the same place"
    assert torch.equal(layer.down, plain.down.chunk(ranks)[rank])
    x, weights = torch.randn(TOKENS + rank, FEATURES), torch.rand(TOKENS + rank, TOP_K)
    experts = torch.randint(EXPERTS, weights.shape)  # with some twice for one token
    want = plain(x, experts, weights)
    torch.testing.assert_close(layer(x, experts, weights), want)
    torch.testing.assert_close(copy.deepcopy(layer)(x, experts, weights), want)
    with by_torch("device"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        layer.max_rows = 2 * len(x) * TOP_K
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(traced(x, experts, weights), want)
        layer.max_rows = None
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x, experts, weights)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, atol=0.05, rtol=0.05)
    # a rank without any token
    none = slice(0, 0 if rank == 0 else None)
    mine = x[none].clone().requires_grad_()
    got = layer(mine, experts[none], weights[none])
    torch.testing.assert_close(got, want[none])
    got.sum().backward()
    assert mine.grad is not None and layer.down.grad is not None and layer.down.grad.any()
    assert "num_experts=12, ranks=2, max_rows=None, plan='auto'" in repr(layer)
    assert cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, device="meta").down.is_meta

    def made(**options: Any) -> cnn.ExpertParallelMLP:
        return cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, **options)

    assert made(plan="grouped 2/2", max_rows=3).plan == "grouped 2/2"
    experts[0, :2] = torch.tensor([0, EXPERTS - 1])
    families = "plan must be one of auto, serial, fused, grouped, islands, routed, got"
    t = TOKENS + rank
    count = "max_rows must be a whole number from 1 to 2**40, got"
    for wrong, want in (
        (lambda: layer(x[:, 1:], experts, weights), f"x must be [..., 10], got ({t}, 9)"),
        (lambda: layer(x, experts[1:], weights),
         f"experts must be ({t}, 'top_k') as x, got ({t - 1}, 3)"),
        (lambda: layer(x, experts.float(), weights), "experts must be int32 or int64, got"),
        (lambda: layer(x, experts, weights[:, 1:]),
         f"weights must be ({t}, 3) as experts, got ({t}, 2)"),
        (lambda: layer(x, experts + EXPERTS * rank, weights),
         "experts must be 0 to 11, got 12 to 23 on rank 1"),
        (lambda: layer(x, experts.int() - (1 - rank), weights),
         "experts must be 0 to 11, got -1 to 10 on rank 0"),
        (lambda: cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS + 1),
         "num_experts must be a multiple of the 2 ranks, got 13"),
        (lambda: made(plan="gropued"), f"{families} 'gropued'"),
        (lambda: made(plan=None), f"{families} None"), (lambda: made(max_rows=0), f"{count} 0"),
        (lambda: made(max_rows=-4), f"{count} -4"), (lambda: made(max_rows=1.5), f"{count} 1.5"),
    ):  # fmt: skip
        with pytest.raises(cp.InputError, match=f"^ExpertParallelMLP: .*{re.escape(want)}"):
            wrong()


@on_ranks(2)
def test_router_logits_that_are_equal(rank: int, ranks: int):
    """Of equal logits as many experts as asked for, no expert twice, and equal weights."""
    layer, plain = pair(FEATURES, HIDDEN, EXPERTS, dtype=torch.float32)
    x = torch.randn(2, TOKENS, FEATURES)
    logits = torch.zeros(2, TOKENS, EXPERTS)
    logits[..., :TOP_K] += rank  # on rank 1 the ties are between those that nobody takes
    experts = logits.topk(TOP_K).indices
    assert all(len(set(row)) == TOP_K for row in experts.flatten(0, 1).tolist())
    want = plain(x, experts, torch.full(experts.shape, 1 / TOP_K))
    torch.testing.assert_close(layer(x, logits=logits, top_k=TOP_K), want)
    # with all experts nothing is to be chosen
    want = plain(x, torch.arange(EXPERTS).expand_as(logits), logits.softmax(-1))
    torch.testing.assert_close(layer(x, logits=logits, top_k=EXPERTS, renormalize=False), want)
    with by_torch("device"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        layer.max_rows = ranks * 2 * TOKENS * EXPERTS
        traced = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(traced(x, logits=logits, top_k=EXPERTS), want)


@on_ranks(2)
def test_ranks_may_have_other_numbers_of_tokens(rank: int, ranks: int):
    """max_rows given, and ranks with more and fewer tokens: as without it."""
    torch.manual_seed(0)
    whole = cnn.ExpertParallelMLP(FEATURES, HIDDEN, EXPERTS, group=world())
    roomy = copy.deepcopy(whole)
    roomy.max_rows = 500
    same: list[bool] = []
    for tokens in (13 + 6 * rank, 19 - 6 * rank, 0 if rank else 5):
        x, experts = torch.randn(tokens, FEATURES), torch.randint(EXPERTS, (tokens, TOP_K))
        weights = torch.rand(tokens, TOP_K)
        same.append(torch.equal(whole(x, experts, weights), roomy(x, experts, weights)))
    assert same == [True] * 3
