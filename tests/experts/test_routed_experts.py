"""Experts by routes: right against fp64, and a token goes to another island once."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from island_bodies import everyone, on_islands, shards
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from routed_bodies import CHOICES, LOCAL, TOP, K, N, chosen, layer, weights_by_row, wrong_layer
from torch import Tensor

import counterpoint as cp
from counterpoint.experts import steps_counted
from counterpoint.group import wire
from counterpoint.group.workspace import Operands, Places
from counterpoint.plan.bind import BoundStep, Box


@pytest.mark.shows("exchange_routes", "forward, backward", "fp32")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("known", ["host", "room", "drop"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4), (4, 2), (3, 1), (6, 3)])
@on_ranks()
def test_a_layer_against_fp64(rank: int, ranks: int, size: int, known: str, name: str) -> list[str]:
    """Of fp32, which kernels do not take, and of fp16 by what stands in for them."""
    own = ("routed 1/1 ring", "routed") if size == ranks else ("islands",)
    if known == "host":
        cases = [(torch.float32, (*own, "auto", "serial"))]
        counts = [[9] * ranks, [2 * r for r in range(ranks)], [0] * ranks]
    else:
        more = () if size in (3, ranks) else own
        cases = [(torch.float32, ("auto", "serial")), (torch.float16, ("auto", "serial", *more))]
        counts = [[9] * ranks, [0] * ranks][: 1 if known == "drop" else 2]
    with on_islands(rank, size), nullcontext() if known == "host" else by_reference():
        return [
            text for tokens in counts for dtype, plans in cases
            for text in wrong_layer(rank, ranks, name, tokens, plans, dtype, known)
        ]  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(4)
def test_weights_lie_as_rows_do(rank: int, ranks: int, size: int):
    """In the same order whatever the islands are, and whoever knows how many rows there are."""
    with on_islands(rank, size):
        for name in CHOICES:
            experts, weights = chosen(name, rank, ranks, 31), shards(rank, 31, TOP)
            routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL)
            lists = [each.long() for each in everyone(experts)]
            want = weights_by_row(rank, ranks, lists, everyone(weights))
            assert routes.weights.double().tolist() == want
            every, room = ranks * LOCAL, ranks * 31 * TOP + 2
            roomy = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
            rows = len(routes.weights)
            assert torch.equal(roomy.weights[:rows], routes.weights)
            assert len(roomy.weights) == room and not roomy.weights[rows:].any()
            assert torch.equal(roomy.counts, routes.counts)


@on_ranks(4)
def test_sums_are_in_fp32(rank: int, ranks: int):
    """Of bf16, a sum is rounded once on each of its three ways, and products once."""
    with on_islands(rank, 2):
        experts, tokens = chosen("skewed", rank, ranks, 12), 12
        weights = shards(rank, tokens, TOP).softmax(1)
        x, w = shards(rank, tokens, K).bfloat16(), shards(rank, LOCAL, K, N).bfloat16()
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL)
        y = cp.all_to_all_matmul(x, w.mT.contiguous().mT, counts=routes)
        eye = torch.eye(N, dtype=torch.bfloat16).expand(LOCAL, N, N)
        got = cp.matmul_all_to_all(y, eye, counts=routes, plan="islands").double()
        ws = torch.cat(everyone(w))
        each = torch.einsum("tk,tjkn->tjn", x.double(), ws[experts]) * weights.double()[..., None]
        bound = 4 * torch.finfo(torch.bfloat16).eps * each.abs().sum(1)
        assert ((got - each.sum(1)).abs() <= bound).all()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("size", "known"), [(2, "host"), (2, "device"), (1, "device")])
@on_ranks(4)
def test_a_token_goes_to_another_island_once(
    rank: int, ranks: int, size: int, known: str, name: str
):
    """Rows on the wire are those of the rule, there and back, forward and backward.

    Where no host knows routes, each token goes to all islands, whatever its experts.
    """
    sent: list[tuple[int, int]] = []
    exchange = wire.Gloo.exchange

    def counting(self: Any, blocks: wire.Messages, *rest: Any) -> None:
        sent.extend((to, block.numel()) for block, to in blocks)
        exchange(self, blocks, *rest)

    with on_islands(rank, size) as islands, by_reference(), pytest.MonkeyPatch.context() as patch:
        tokens, wide = 11 + rank * (known == "host"), 16
        experts = chosen(name, rank, ranks, tokens)
        weights = shards(rank, tokens, TOP).softmax(1)
        room = ranks * tokens * TOP if known == "device" else None
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL, max_rows=room)
        dtype = torch.float32 if known == "host" else torch.float16
        x, w = shards(rank, tokens, wide).to(dtype), shards(rank, LOCAL, wide, wide).to(dtype)
        patch.setattr(wire.Gloo, "exchange", counting)
        layer(x.requires_grad_(), w, w, routes, "auto").sum().backward()
        if known == "device":
            assert [number for _, number in sent] == [tokens * wide] * (4 * (islands - 1))
            return
        lists = enumerate(everyone(experts))
        far = [int((each.long() // LOCAL // 2 != r // 2).any(1).sum()) * wide for r, each in lists]
        rail = (rank + 2) % 4
        assert sent == [(rail, far[r]) for r in (rank, rail, rank, rail)]


@on_ranks(4)
def test_a_plan_of_ones_own_is_for_tokens_of_any_number_of_experts(rank: int, ranks: int):
    with on_islands(rank, 2):
        experts, weights = chosen("uniform", rank, ranks, 9), torch.ones(9, TOP)
        x, w = shards(rank, 9, K), shards(rank, LOCAL, K, N)
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL)
        want = cp.all_to_all_matmul(x, w, counts=routes, plan="islands")
        for top_k in (0, TOP - 1):
            p = cp.Problem("all_to_all_matmul", 4096, N, K, ranks, "float32", experts=LOCAL,
                           counts="routed", top_k=top_k, islands=2)  # fmt: skip
            plan = cp.build(p, "islands")
            assert cp.Plan.from_json(plan.to_json()) == plan
            assert torch.equal(cp.all_to_all_matmul(x, w, counts=routes, plan=plan), want)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["uniform", "zipf"])
@on_ranks(2, 4, 8)
def test_a_token_goes_to_another_rank_once(rank: int, ranks: int, name: str) -> list[str]:
    """Rows copied to each peer are the tokens that have experts there; and they come back."""
    local, sent, found = 4, dict[tuple[str, int], int](), list[str]()
    boxes = steps_counted.boxes

    def counting(bound: BoundStep, places: Places) -> Any:
        pairs_of = boxes(bound, places)

        def pairs(operands: Operands) -> list[tuple[Box, Box]]:
            pairs = pairs_of(operands)
            for source, target in pairs:
                key = source.buffer, target.rank
                sent[key] = sent.get(key, 0) + source.r1 - source.r0
            return pairs

        return pairs

    with on_islands(rank, ranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_counted, "boxes", counting)
        tokens = 19 + 3 * rank
        experts = chosen(name, rank, ranks, tokens, local)
        weights = shards(rank, tokens, TOP).softmax(1)
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * local)
        x, w = shards(rank, tokens, K), shards(rank, local, K, K)
        once = [[int((each.long() // local == d).any(1).sum()) for d in range(ranks)]
                for each in everyone(experts)]  # fmt: skip
        gone = {("sent", d): n for d, n in enumerate(once[rank]) if n}
        back = {("sums", s): row[rank] for s, row in enumerate(once) if row[rank]}
        for plan in ("routed 1/2/1 ring", "routed 2/2 xor", "routed 4 ring"):
            sent.clear()
            layer(x, w, w, routes, plan)
            if sent != gone | back:
                found.append(f"{plan}: {sent}, and not {gone | back}")
    return found


@on_ranks(2)
def test_bits_are_those_of_every_plan(rank: int, ranks: int):
    """A fold has one order, whatever the plan: here products are exact, and sums are not."""
    with on_islands(rank, ranks):
        tokens, local = 40, 4
        experts = chosen("zipf", rank, ranks, tokens, local)
        weights = shards(rank, tokens, TOP)
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * local)
        x, w = shards(rank, tokens, K), torch.eye(K).expand(local, K, K)
        one, *others = (
            cp.matmul_all_to_all(cp.all_to_all_matmul(x, w, counts=routes, plan=plan), w,
                                 counts=routes, plan=plan)
            for plan in ("serial", "serial", "routed 1/2/1 ring", "routed 4 xor")
        )  # fmt: skip
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.shows("exchange_routes", "compiled forward, compiled backward", "fp32")
@pytest.mark.drawn(2)
@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize("known", ["host", "device"])
@on_ranks(2)
def test_the_dispatcher_fakes_and_compilers(rank: int, ranks: int, known: str, size: int):
    """opcheck of each operator, with gradients where it has them; and one graph of a layer."""
    on_device, every = known == "device", ranks * LOCAL
    dtype = torch.float16 if on_device else torch.float32
    own = ("fused" if on_device else "routed") if size == ranks else "islands"
    with on_islands(rank, size) as islands, by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports warn
        ops: Any = torch.ops.counterpoint
        where, room = (world().group_name, ranks), ranks * 7 * TOP if on_device else None
        experts, weights = chosen("uniform", rank, ranks, 7), shards(rank, 7, TOP).requires_grad_()
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        which, each, top = routes[:3], routes.weights.detach(), routes.top_k
        x, up, down = (shards(rank, *shape).to(dtype) for shape in
                       ((7, K), (LOCAL, K, K), (LOCAL, K, N)))  # fmt: skip
        h = torch.zeros(room or len(each), K, dtype=dtype)
        x, up, h, down, each = (t.requires_grad_() for t in (x, up, h, down, each))
        back = "auto" if on_device else "serial"
        calls = [
            (ops.exchange_routes, (experts, weights, every, room, islands, False, *where)),
            (ops.weights_back, (each.detach(), *which[1:], 7, TOP, on_device, *where)),
            (ops.matmul_all_to_all_routed, (h, down, *which, each, None, 7, top, back, *where)),
        ]
        if not on_device:
            calls.append(
                (ops.all_to_all_matmul_routed, (x, up, *which, len(each), True, 0, "auto", *where))
            )
        for op, given in calls:
            assert set(torch.library.opcheck(op, given).values()) == {"SUCCESS"}

        def whole(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
            routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
            return layer(x, up, down, routes, own)

        traced = torch.compile(whole, backend="aot_eager", fullgraph=True)
        for tokens, name in ((7, "uniform"), (7 if on_device else 5, "skewed")):
            leaves = [t[:tokens].detach().requires_grad_() for t in (x, weights)]
            given = (*leaves, chosen(name, rank, ranks, tokens))
            got, want = (
                (y := fn(*given), *torch.autograd.grad(y.square().sum(), (*leaves, up, down)))
                for fn in (traced, whole)
            )
            torch.testing.assert_close(got, want)


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int):
    experts, weights = chosen("uniform", rank, ranks, 5), shards(rank, 5, TOP)
    with on_islands(rank, 1):
        wrong = experts + (rank == 1) * ranks * LOCAL
        with pytest.raises(cp.InputError, match=r"experts must be 0 to 3, got 4 to \d on rank 1"):
            cp.exchange_routes(wrong, weights, num_experts=ranks * LOCAL)
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL)
        x, w = shards(rank, 5, K), shards(rank, LOCAL, K, N)
        with pytest.raises(cp.InputError, match="plan must be for ranks of one island, got 'grou"):
            cp.all_to_all_matmul(x, w, counts=routes, plan="grouped")
        with pytest.raises(cp.InputError, match="counts must be routes of 4 experts on 2 ran"):
            cp.all_to_all_matmul(x, w[:1], counts=routes)
        with pytest.raises(cp.InputError, match="max_rows must be left out with routes"):
            cp.all_to_all_matmul(x, w, counts=routes, max_rows=3)
        with pytest.raises(cp.InputError, match="sum_of must be left out with routes"):
            cp.matmul_all_to_all(x, w, counts=routes, sum_of=(experts, weights))
