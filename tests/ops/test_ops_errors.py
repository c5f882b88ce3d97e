"""What the ops refuse, by its text; a refused call launches nothing, and a good one follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_bodies import Case, device, wrong
from rankpool import RankPool

import counterpoint as cp
from counterpoint.errors import CounterpointError, InputError, PlanError
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.runtime.workspace import workspaces_of

GATHER, SCATTER = SHARING = ("all_gather_matmul", "matmul_reduce_scatter")
REDUCE = "matmul_all_reduce"
OPS = (*SHARING, REDUCE)
RANKS, M, K, N = 3, 6, 5, 4


class Bad(NamedTuple):
    """Arguments that replace those of a good call, and the text of the refusal."""

    args: Callable[[], dict[str, Any]]
    text: str
    ops: tuple[str, ...] = OPS
    error: type[CounterpointError] = InputError


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device())


def own_plan(op: str, k: int = K) -> Plan:
    return build(Problem(op, M, N, k, RANKS, "float32"), "shard_p2p")  # type: ignore[arg-type]


def broken_plan() -> Plan:
    plan = own_plan(SCATTER)
    return replace(plan, steps=plan.steps[:-1])


# what depends on three ranks; the rest is in tests/test_bad_input.py
BAD = [
    Bad(
        lambda: {"rows": [5, 7, 8]},
        "x must be [{rows}, ..., K] as rows[{rank}] says, got (6, 5)",
        (GATHER,),
    ),
    Bad(
        lambda: {"rows": [1, 2, 2]},
        "rows must be counts that add up to 6, got [1, 2, 2]",
        (SCATTER,),
    ),
    Bad(
        lambda: {"x": normal(7, 2, K)},
        "x must be [M, ..., K] with M a multiple of the 3 ranks, got (7, 2, 5); "
        "pass rows=, one count per rank",
        (SCATTER,),
    ),
    Bad(
        lambda: {"plan": "shard_p2p xor"},
        "plan must be for a power of two of ranks where it says xor, got 'shard_p2p xor'; use ring",
        SHARING,
    ),
    Bad(
        lambda: {"plan": "direct"},
        "plan must be for a number of ranks that is a power of two up to 32, got 'direct'",
    ),
    Bad(
        lambda: {"plan": "fused"},
        "plan must be for a number of ranks that is a power of two up to 32, got 'fused'",
        (SCATTER, REDUCE),
    ),
    Bad(
        lambda: {"plan": own_plan(SCATTER, k=9)},
        "plan must be for matmul_reduce_scatter M6 N4 K5 float32 on 3 ranks, "
        "got for matmul_reduce_scatter M6 N4 K9 float32 on 3 ranks",
        (SCATTER,),
    ),
    *(
        Bad(
            lambda: {"plan": own_plan(SCATTER)},
            f"plan must be for {op} M{m} N4 K5 float32 on 3 ranks, "
            "got for matmul_reduce_scatter M6 N4 K5 float32 on 3 ranks",
            (op,),
        )
        for op, m in ((GATHER, 18), (REDUCE, 6))
    ),
]


def refuse_all(rank: int, world_size: int, op: str) -> list[str]:
    """What is refused wrongly, or not at all."""
    good: dict[str, Any] = {"x": normal(M, K), "w": normal(K, N)}
    problems: list[str] = []
    for bad in BAD:
        if op not in bad.ops:
            continue
        args = good | bad.args()
        rows = args.get("rows")
        text = bad.text
        if "{" in text:
            mine = rows[rank] if isinstance(rows, list) else ""
            text = text.format(rank=rank, rows=mine)
        try:
            getattr(cp, op)(**args)
        except CounterpointError as error:
            if type(error) is not bad.error or str(error) != f"{op}: {text}":
                problems.append(f"got  {type(error).__name__}: {error}\nwant {op}: {text}")
        else:
            problems.append(f"not refused: {text}")
    assert not any(w.epoch or w.code for w in workspaces_of(dist.group.WORLD)), "a launch"
    return problems + wrong(Case(op, "serial", (2, 2, 2), K, N))


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_are_refused_before_any_launch(pool: RankPool, op: str):
    problems = sum(pool.run(refuse_all, RANKS, op), [])
    assert not problems, "\n\n".join(problems)


def refuse_wrong_plan(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"^plan shard_p2p ring, step push_.* never waits for it"):
        cp.matmul_reduce_scatter(normal(M, K), normal(K, N), plan=broken_plan())
    assert not workspaces_of(dist.group.WORLD)
    assert wrong(Case(SCATTER, own_plan(SCATTER), (2, 2, 2), K, N)) == []


def test_a_wrong_plan_is_refused(pool: RankPool):
    pool.run(refuse_wrong_plan, RANKS)


def refuse_groups(rank: int, world_size: int) -> None:
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


def test_groups_that_are_none_or_another_are_refused(pool: RankPool):
    pool.run(refuse_groups, 2)


def without_gradients(rank: int, world_size: int) -> None:
    x, w = normal(2, K).requires_grad_(), normal(K, N)
    with torch.no_grad():
        assert cp.all_gather_matmul(x, w).shape == (4, N)
        assert not cp.matmul_reduce_scatter(x, w).requires_grad
        assert not cp.matmul_all_reduce(x, w).requires_grad


def test_parameters_are_taken_without_gradients(pool: RankPool):
    pool.run(without_gradients, 2)


def empty_sizes(rank: int, world_size: int) -> None:
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


def test_empty_sizes(pool: RankPool):
    pool.run(empty_sizes, 2)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


ROWS_FIX = "; pass rows= where shards differ"


def disagree(rank: int, world_size: int) -> list[str]:
    """The texts of calls in which rank 1 differs from the others in one fact each."""
    odd = rank == 1
    x, w = normal(M, K), normal(K, N)
    one, other, third = cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce
    calls: list[Callable[[], object]] = [
        lambda: (other if odd else one)(x, w),
        lambda: one(normal(M + odd, K), w),
        lambda: one(normal(M, K + odd), normal(K + odd, N)),
        lambda: other(x, normal(K, N + odd)),
        lambda: one(x.bfloat16(), w.bfloat16()) if odd else one(x, w),
        lambda: one(x, w, bias=normal(N) if odd else None),
        lambda: one(x, w, plan="graded" if odd else "shard_p2p"),
        lambda: other(x, w, rows=[1, 2, 3] if odd else [2, 2, 2]),
        lambda: third(x, w, plan="auto" if odd else "serial"),
    ]
    texts: list[str] = []
    # compared at the first call with new facts, and where it is asked for at each call
    for call in calls:
        with pytest.raises(InputError) as info:
            call()
        texts.append(str(info.value))
    one(x, w)
    with environment("COUNTERPOINT_CHECK", "1"):
        with pytest.raises(InputError, match=r"x.shape must be equal on all ranks, \(6, 5\) as on"):
            one(normal(M + odd, K), w)
        # rows of an own size are as rows= says
        one(normal(M + odd, K), w, rows=[M, M + 1, M])
        problems = wrong(Case(GATHER, "graded 1/2", (2, 2, 2), K, N))
    assert problems == []
    return texts


def test_ranks_that_disagree_are_named_on_all(pool: RankPool):
    as_on = "must be equal on all ranks, {} as on rank 0, got {} on rank 1"
    want = [
        f"{GATHER}: op " + as_on.format(GATHER, SCATTER),
        f"{GATHER}: x.shape " + as_on.format("(6, 5)", "(7, 5)") + ROWS_FIX,
        f"{GATHER}: x.shape " + as_on.format("(6, 5)", "(6, 6)") + ROWS_FIX,
        f"{SCATTER}: w.shape " + as_on.format("(5, 4)", "(5, 5)"),
        f"{GATHER}: x.dtype " + as_on.format("torch.float32", "torch.bfloat16"),
        f"{GATHER}: bias is None " + as_on.format("True", "False"),
        f"{GATHER}: plan " + as_on.format("shard_p2p", "graded"),
        f"{SCATTER}: rows " + as_on.format("(2, 2, 2)", "(1, 2, 3)"),
        f"{REDUCE}: plan " + as_on.format("serial", "auto"),
    ]
    assert pool.run(disagree, RANKS) == [want] * RANKS
