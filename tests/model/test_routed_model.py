"""Rows of tokens by routes as the model expects them, against counted ones, and what is chosen."""

from dataclasses import replace
from itertools import combinations, product
from math import comb

import pytest
import torch
from island_bodies import on_islands
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint.errors import InputError
from counterpoint.experts.routes.lists import blocks_in
from counterpoint.machine import LinkSpec, Machine
from counterpoint.plan.operation import operation_of
from counterpoint.presets import preset
from counterpoint.schedules.expected_rows import once, reaches, share

OPS = DISPATCH, COMBINE = "all_to_all_matmul", "matmul_all_to_all"
NIC = LinkSpec(name="NIC", bytes_per_s=45e9, latency_s=5e-6)


def problem_of(op: str, tokens: int, top_k: int, ranks: int, islands: int = 1) -> cp.Problem:
    return cp.Problem(op, tokens * max(top_k, 1), 512, 1024, ranks, experts=2, counts="routed",
                      top_k=top_k, islands=islands)  # fmt: skip


def machine() -> Machine:
    return replace(preset("h200-8"), nic=NIC)


@pytest.mark.parametrize(("ranks", "islands"), [(4, 2), (3, 3), (6, 2)])
def test_of_all_draws_as_many_tokens_go_to_a_rank_or_an_island(ranks: int, islands: int):
    """Each set of experts once: what is expected is what is counted."""
    size, every = ranks // islands, 2 * ranks
    for top_k in range(1, every + 1):
        draws = [*combinations(range(every), top_k)]
        to_rank = sum(any(e // 2 == 1 for e in draw) for draw in draws)
        to_island = sum(any(e // 2 // size == 1 for e in draw) for draw in draws)
        p = problem_of(DISPATCH, comb(every, top_k), top_k, ranks, islands)
        assert reaches(p, 1) * len(draws) == pytest.approx(to_rank)
        block = p.m / ranks  # rows of a block of a rank in the boxes of a plan
        for names, blocks, count in ((("received", "sums", "passing"), 1, to_rank),
                                     (("out", "gone"), size, to_island)):  # fmt: skip
            for name in names:
                assert share(p, name) * blocks * block == pytest.approx(count)
        assert p.m * once(p, ranks) == pytest.approx(len(draws))
        assert share(p, "rows") == share(replace(p, top_k=0), "out") == 1


@on_ranks(4)
def test_drawn_routes_have_about_the_rows_that_are_expected(rank: int, ranks: int):
    """Of 4,000 tokens, within 5 standard deviations of a count."""
    tokens, top_k, local = 4000, 3, 2
    generator = torch.Generator().manual_seed(rank)
    experts = torch.rand(tokens, ranks * local, generator=generator).argsort(1)[:, :top_k]
    weights = torch.ones(tokens, top_k)
    with on_islands(rank, 2):
        routes = cp.exchange_routes(experts, weights, num_experts=ranks * local)
        found = blocks_in(routes.numbers)
        p = problem_of(DISPATCH, tokens, top_k, ranks, 2)
        for name, blocks in (("received", 4), ("passing", 4), ("came", 2), ("out", 2)):
            want = share(p, name) * blocks * p.m / ranks
            assert abs(found.count(name) - want) < 5 * (blocks * tokens / 4) ** 0.5


@pytest.mark.parametrize("op", OPS)
def test_an_exchange_takes_the_nic_for_the_tokens_of_an_island(op: str):
    """A token of 4 of 32 experts goes to another of 2 islands unless it has none there."""
    p = problem_of(op, 4096, 4, 16, 2)
    name, cols = ("give_1", p.k) if op == DISPATCH else ("return_1", p.n)
    rows = 4096 * (1 - comb(16, 4) / comb(32, 4))
    for problem, count in ((p, rows), (replace(p, top_k=0), p.m / 2)):
        plan = cp.build(problem, "islands")
        ran = {span.label: span.end_s - span.start_s for span in cp.estimate(plan, machine()).spans}
        assert ran[name] == pytest.approx(NIC.latency_s + count * cols * 2 / NIC.bytes_per_s)
    serial_s, wire_s = cp.choose(p, machine()).serial_s, rows * cols * 2 / NIC.bytes_per_s
    assert serial_s > 8 * reaches(p, 1) / reaches(p, 8) * wire_s


@pytest.mark.parametrize("op", OPS)
def test_where_the_device_knows_routes_all_tokens_go_to_each_island(op: str):
    """As many bytes however many experts a token has, and whoever has them."""
    for islands, top_k in product((2, 4), (1, 4)):
        known = problem_of(op, 4096, top_k, 8 * islands, islands)
        p = replace(known, counts="device_routed")
        name, cols = ("give_1", p.k) if op == DISPATCH else ("return_1", p.n)
        timeline = cp.estimate(cp.build(p, "islands"), machine())
        ran = {span.label: span.end_s - span.start_s for span in timeline.spans}
        assert ran[name] == pytest.approx(NIC.latency_s + 4096 * cols * 2 / NIC.bytes_per_s)
        assert {s for s in ran if "_" in s} == {f"{name[:-1]}{d}" for d in range(1, islands)}
        choice = cp.choose(p, machine())
        assert choice.spec == "islands" == operation_of(op).untold(p)
        assert "waits for the host to read the counts" in choice.explain()
        odd = replace(p, ranks=6 * islands, experts=4, m=p.m * 6, rows=())
        assert cp.choose(odd, machine()).spec == "serial", "an island of 6 has no kernel"


@pytest.mark.parametrize("op", OPS)
def test_what_is_chosen_is_weighed_once_it_is_known_how_many_experts_tokens_have(op: str):
    for tokens, islands in product((8, 8192), (2, 4)):
        p = problem_of(op, tokens, 8, 8 * islands, islands)
        choice = cp.choose(p, machine())
        times = {c.spec: c.seconds for c in choice.table}
        assert choice.spec == ("islands" if tokens > 8 else "serial")
        assert {"serial", "islands"} <= set(times) and choice.seconds == min(times.values())
        assert choice.comm_s < cp.choose(replace(p, top_k=0), machine()).comm_s
        assert cp.choose(replace(p, top_k=0), machine()).spec == "islands"
        assert operation_of(op).untold(p) == "islands"


def test_experts_of_a_token_are_refused_where_they_cannot_be():
    with pytest.raises(InputError, match="top_k must be 0 where counts are not routed, got 2"):
        cp.Problem(DISPATCH, 64, 8, 8, 4, experts=2, top_k=2)
    with pytest.raises(InputError, match="top_k must be at most 8, all experts, got 9"):
        problem_of(DISPATCH, 64, 9, 4)
    assert "routed top 3 " in str(problem_of(DISPATCH, 64, 3, 4))
