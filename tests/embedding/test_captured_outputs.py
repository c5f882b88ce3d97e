"""Outputs of embedding bags that CUDA graphs hold, on CPU ranks: calls that a capture would see."""

import random
import time
from typing import Any

import pytest
import torch
from embedding_cases import Bags, expected, problem_of, random_bags
from on_ranks import on_ranks
from rank_bodies import world

import counterpoint as cp
from counterpoint.embedding import pooled_outputs
from counterpoint.embedding.call import Ready, ready_for
from counterpoint.group.workspace import Workspace
from counterpoint.problem import Problem


def ready_of(bags: Bags, p: Problem, plan: str, out: Any) -> Ready:
    given = (bags.tables, bags.indices, bags.offsets, None, "sum", True, p.rows, p.tables,
             torch.float32, out, plan)  # fmt: skip
    return ready_for(given, world(), asks=False).ready


def captures(_: torch.device) -> bool:
    """As of a GPU's stream that a graph records."""
    return True


def run(ready: Ready, bags: Bags, out: Any) -> torch.Tensor:
    return ready(bags.tables, bags.indices, bags.offsets, None, True, {}, out)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("plan", ["fused", "serial"])
@on_ranks(2, 3)
def test_replays_among_calls_in_turn(rank: int, ranks: int, plan: str):
    """What a GPU runs, interpreted; of two graphs, each of which has one output. Ranks are late.

    A replay is a call into the same output again. What each leaves is read late, after which
    another rank may long have come to the next one.
    """
    late, draw = random.Random(rank), random.Random(9)
    p = problem_of(((8, 3), (20,), ())[:ranks], (3, 1, 4)[:ranks])
    out = cp.PooledOutputs(p.n, torch.float32, p.rows, captured=2)
    first = [random_bags(d, p.m, seed=r) for r, d in enumerate(p.tables)][rank]
    ready = ready_of(first, p, plan, out)
    found: list[bool] = []
    places: dict[int, set[int]] = {-1: set(), 0: set(), 1: set()}
    for call in range(16):
        graph = draw.choice((-1, 0, 0, 1))
        everyone = [random_bags(d, p.m, seed=9 * call + r) for r, d in enumerate(p.tables)]
        with pytest.MonkeyPatch.context() as patch:
            if graph >= 0:
                patch.setattr(out, "take", lambda graph=graph: out.turns + graph)
            y = run(ready, everyone[rank], out)
        places[graph].add(y.data_ptr())
        if late.random() < 0.25:
            time.sleep(0.2)
        want = expected(everyone, p, rank, mean=False)
        found.append(torch.allclose(y.double(), want, atol=1e-4))
    assert found == [True] * 16
    assert len(places[0]) == len(places[1]) == 1 and len(places[-1]) == 2
    assert not places[-1] & (places[0] | places[1]) and places[0] != places[1]


@on_ranks(2)
def test_a_capture_finds_what_eager_calls_have_made(rank: int, ranks: int):
    """Of other tables, dtypes and numbers of indices than those of the first call."""
    p = problem_of(((8, 3),) * 2, (3, 1))
    out = cp.PooledOutputs(p.n, torch.float32, p.rows, captured=1)
    ready = ready_of(random_bags((8, 3), p.m, seed=rank), p, "fused", out)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("made in a capture")

    for index, longest in ((torch.int32, 2), (torch.int64, 200)):
        everyone = [random_bags((8, 3), p.m, seed=r, index=index, longest=longest) for r in (0, 1)]
        run(ready, everyone[rank], out)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(out, "take", lambda: out.turns)
            patch.setattr(torch, "ones", refused)
            patch.setattr(torch, "tensor", refused)
            patch.setattr(Workspace, "refuse_growth", refused)
            y = run(ready, everyone[rank], out)
        want = expected(everyone, p, rank, mean=False)
        assert torch.allclose(y.double(), want, atol=1e-4)


@on_ranks(2)
def test_a_graph_keeps_its_output(rank: int, ranks: int):
    """No later call gets it, and there are as many as were asked for."""
    p = problem_of(((4, 8),) * 2, (3, 3))
    bags = random_bags((4, 8), 6, seed=rank)
    out = cp.PooledOutputs(24, torch.float32, 6, captured=2)
    none = cp.PooledOutputs(24, torch.float32, 6)

    def called(into: Any) -> torch.Tensor:
        return cp.embedding_bag_all_to_all(
            bags.tables, bags.indices, bags.offsets, include_last_offset=True, dims=p.tables,
            out=into,
        )  # fmt: skip

    eager = [called(out).data_ptr() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_outputs, "captures", captures)
        held = [called(out).data_ptr() for _ in range(2)]
        for into, count in ((out, 2), (none, 0)):
            text = f"captured must be one for each call that a CUDA graph records, got {count}"
            with pytest.raises(cp.InputError, match=text):
                called(into)
    assert len({*eager, *held}) == 4
    assert [called(out).data_ptr() for _ in range(4)] == 2 * eager
    assert torch.equal(called(out), called(none))


@on_ranks(2)
def test_a_backward_of_what_a_graph_holds(rank: int, ranks: int):
    """However many calls in turn come between: its memory is none of theirs."""
    bags = [random_bags((4, 8), 6, seed=9 * rank + s) for s in range(3)]
    out = cp.PooledOutputs(24, torch.float32, 6, captured=1)
    table = bags[0].tables[0].requires_grad_()

    def called(some: Bags, into: Any) -> torch.Tensor:
        return cp.embedding_bag_all_to_all(
            some.tables, some.indices, some.offsets, include_last_offset=True, out=into
        )

    called(bags[0], None).square().sum().backward()
    want, table.grad = table.grad, None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_outputs, "captures", captures)
        squares = called(bags[0], out).square().sum()
    for some in bags:
        called(some, out)
    squares.backward()
    assert want is not None and table.grad is not None and torch.equal(table.grad, want)
