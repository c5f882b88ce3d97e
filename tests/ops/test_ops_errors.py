"""What the ops refuse, by its text; a refused call launches nothing, and a good one follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import Case, device, wrong
from refusals import Refusal, wrongly_refused

import counterpoint as cp
from counterpoint.errors import InputError, PlanError
from counterpoint.group.ranks import timeout_of
from counterpoint.group.workspace import workspaces_of
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem

GATHER, SCATTER = SHARING = ("all_gather_matmul", "matmul_reduce_scatter")
REDUCE = "matmul_all_reduce"
OPS = (*SHARING, REDUCE)
RANKS, M, K, N = 3, 6, 5, 4


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device())


def own_plan(op: str, k: int = K) -> Plan:
    return build(Problem(op, M, N, k, RANKS, "float32"), "shard_p2p")  # type: ignore[arg-type]


def broken_plan() -> Plan:
    plan = own_plan(SCATTER)
    return replace(plan, steps=plan.steps[:-1])


def bad(op: str, rank: int) -> list[Refusal]:
    """What depends on three ranks; the rest is in tests/test_bad_input.py."""
    alone = "plan must be for a number of ranks that is a power of two up to 32, got"
    k, m, rows = (9 if op == SCATTER else K), (18 if op == GATHER else M), [5, 7, 8]
    found: list[Refusal] = [
        ({"plan": "direct"}, f"{alone} 'direct'"),
        ({"plan": own_plan(SCATTER, k)}, f"plan must be for {op} M{m} N4 K5 float32 on 3 ranks, "
         f"got for {SCATTER} M6 N4 K{k} float32 on 3 ranks"),
    ]  # fmt: skip
    if op != GATHER:
        found.append(({"plan": "fused"}, f"{alone} 'fused'"))
    if op in SHARING:
        found.append(({"plan": "shard_p2p xor"}, "plan must be for a power of two of ranks where "
                      "it says xor, got 'shard_p2p xor'; use ring"))  # fmt: skip
    if op == GATHER:
        want = f"x must be [{rows[rank]}, ..., K] as rows[{rank}] says, got (6, 5)"
        found.append(({"rows": rows}, want))
    if op == SCATTER:
        found += [
            ({"rows": [1, 2, 2]}, "rows must be counts that add up to 6, got [1, 2, 2]"),
            ({"x": normal(7, 2, K)}, "x must be [M, ..., K] with M a multiple of the 3 ranks, got "
             "(7, 2, 5); pass rows=, one count per rank"),
        ]  # fmt: skip
    return found


@pytest.mark.parametrize("op", OPS)
@on_ranks(RANKS)
def test_bad_arguments_are_refused_before_any_launch(
    rank: int, world_size: int, op: str
) -> list[str]:
    good: dict[str, Any] = {"x": normal(M, K), "w": normal(K, N)}
    found = wrongly_refused(getattr(cp, op), good, bad(op, rank), exact=True)
    assert not any(w.epoch or w.code for w in workspaces_of(dist.group.WORLD)), "a launch"
    return found + wrong(Case(op, "serial", (2, 2, 2), K, N))


@on_ranks(RANKS)
def test_a_wrong_plan_is_refused(rank: int, world_size: int):
    with pytest.raises(PlanError, match=r"^plan shard_p2p ring, step push_.* never waits for it"):
        cp.matmul_reduce_scatter(normal(M, K), normal(K, N), plan=broken_plan())
    assert not workspaces_of(dist.group.WORLD)
    assert wrong(Case(SCATTER, own_plan(SCATTER), (2, 2, 2), K, N)) == []


@on_ranks(2)
def test_groups_that_are_none_or_another_are_refused(rank: int, world_size: int):
    x, w = normal(2, K), normal(K, N)
    others = dist.new_group([0])
    calls = (cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce)
    for op in calls:
        if rank == 0:
            assert op(x, w, group=others).shape == (2, N)
        else:
            with pytest.raises(InputError, match="group must be a ProcessGroup that has this rank"):
                op(x, w, group=others)
        assert op(x, w).shape[1] == N
    dist.destroy_process_group()
    want = (
        "group must be an initialised process group, got None; "
        "start ranks with torchrun and call torch.distributed.init_process_group"
    )
    for op in calls:
        with pytest.raises(InputError) as info:
            op(x, w)
        assert str(info.value) == f"{op.__name__}: {want}"


@on_ranks(2)
def test_parameters_are_taken_without_gradients(rank: int, world_size: int):
    x, w = normal(2, K).requires_grad_(), normal(K, N)
    with torch.no_grad():
        assert cp.all_gather_matmul(x, w).shape == (4, N)
        assert not cp.matmul_reduce_scatter(x, w).requires_grad
        assert not cp.matmul_all_reduce(x, w).requires_grad


@on_ranks(2)
def test_empty_sizes(rank: int, world_size: int):
    calls = [(cp.all_gather_matmul, 2 * M), (cp.matmul_reduce_scatter, M // 2)]
    calls += [(cp.matmul_all_reduce, M)]
    for op, rows in calls:
        other = "fused" if op is cp.matmul_all_reduce else "graded"
        for plan, bias in product(("auto", other, "serial"), (None, normal(N))):
            with_bias = {"bias": bias, "plan": plan}
            assert op(normal(0, K), normal(K, N), **with_bias).shape == (0, N)
            assert op(normal(0, 3, K), normal(K, N), **with_bias).shape == (0, 3, N)
            assert op(normal(M, 0, K), normal(K, N), **with_bias).shape == (rows, 0, N)
            # a sum over nothing is zero
            y = op(normal(M, 0), normal(0, N), **with_bias)
            want = torch.zeros(rows, N, device=device()) + (0 if bias is None else bias)
            assert torch.equal(y, want)
            assert op(normal(M, K), normal(K, 0), plan=plan).shape == (rows, 0)
    assert cp.all_gather_matmul(normal(0, K), normal(K, N), rows=[0, 0]).shape == (0, N)
    # one rank without rows is no empty problem
    rows = [3, 0]
    assert cp.all_gather_matmul(normal(rows[rank], K), normal(K, N), rows=rows).shape == (3, N)
    assert cp.matmul_reduce_scatter(normal(3, K), normal(K, N), rows=rows).shape == (rows[rank], N)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@on_ranks(RANKS)
def test_ranks_that_disagree_are_named_on_all(rank: int, world_size: int):
    """In each of these calls rank 1 differs from the others in one fact."""
    odd = rank == 1
    x, w = normal(M, K), normal(K, N)
    one, other, third = cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce
    calls: list[tuple[str, str, str, str, Callable[[], object]]] = [
        (GATHER, "op", GATHER, SCATTER, lambda: (other if odd else one)(x, w)),
        (GATHER, "x.shape", "(6, 5)", "(7, 5)", lambda: one(normal(M + odd, K), w)),
        (GATHER, "x.shape", "(6, 5)", "(6, 6)",
         lambda: one(normal(M, K + odd), normal(K + odd, N))),
        (SCATTER, "w.shape", "(5, 4)", "(5, 5)", lambda: other(x, normal(K, N + odd))),
        (GATHER, "x.dtype", "torch.float32", "torch.bfloat16",
         lambda: one(x.bfloat16(), w.bfloat16()) if odd else one(x, w)),
        (GATHER, "bias is None", "True", "False",
         lambda: one(x, w, bias=normal(N) if odd else None)),
        (GATHER, "plan", "shard_p2p", "graded",
         lambda: one(x, w, plan="graded" if odd else "shard_p2p")),
        (SCATTER, "rows", "(2, 2, 2)", "(1, 2, 3)",
         lambda: other(x, w, rows=[1, 2, 3] if odd else [2, 2, 2])),
        (REDUCE, "plan", "serial", "auto", lambda: third(x, w, plan="auto" if odd else "serial")),
    ]  # fmt: skip
    # compared at the first call with new facts, and where it is asked for at each call
    for op, fact, first, second, call in calls:
        with pytest.raises(InputError) as info:
            call()
        fix = "; pass rows= where shards differ" if fact == "x.shape" else ""
        want = f"{fact} must be equal on all ranks, {first} as on rank 0, got {second} on rank 1"
        assert str(info.value) == f"{op}: {want}{fix}"
    one(x, w)
    with environment("COUNTERPOINT_CHECK", "1"):
        with pytest.raises(InputError, match=r"x.shape must be equal on all ranks, \(6, 5\) as on"):
            one(normal(M + odd, K), w)
        # rows of an own size are as rows= says
        one(normal(M + odd, K), w, rows=[M, M + 1, M])
        problems = wrong(Case(GATHER, "graded 1/2", (2, 2, 2), K, N))
    assert problems == []


@on_ranks(2)
def test_the_bound_of_a_wait(rank: int, world_size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COUNTERPOINT_TIMEOUT_S")
        cp.all_gather_matmul(normal(2, K), normal(K, N))
        group = dist.new_group(timeout=timedelta(seconds=77))
        cp.all_gather_matmul(normal(2, K), normal(K, N), group=group)
    (workspace,), (own,) = workspaces_of(dist.group.WORLD), workspaces_of(group)
    assert workspace.timeout_s == timeout_of(dist.group.WORLD, torch.device("cpu"))
    assert own.timeout_s == 77 and own.board.bound == "the timeout of its process group"
