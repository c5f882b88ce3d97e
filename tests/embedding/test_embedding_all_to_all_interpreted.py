"""Embedding bags and their all-to-all in one kernel: interpreted on ranks that share memory."""

from typing import Any

import pytest
import torch
from embedding_cases import expected, problem_of, random_bags
from late import GIVES_UP, TIMEOUT_S, looks_of
from rank_bodies import world
from rankpool import RankPool

from counterpoint.embedding import plan_embedding_bag_all_to_all as plans
from counterpoint.embedding.launch_lookups import Bags, Pooling
from counterpoint.group.workspace import workspace_of
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.run import launch
from counterpoint.run.execute import compile_plan
from counterpoint.run.fused import fused_memory

CPU = torch.device("cpu")
DIMS = ((32, 16), (), (48, 20, 16), (10,))  # of each rank; vectors of 4 divide not all
BATCH = (5, 9, 0, 3)
CASES: dict[str, dict[str, Any]] = {
    "sum": {}, "mean": {"mean": True}, "weights": {"weighted": True},
    "int32": {"index": torch.int32}, "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16, "weighted": True}, "long": {"longest": 11},
    "one": {"unroll": 1}, "empty": {"unroll": 1, "longest": 0}, "four": {"unroll": 4, "longest": 9},
}  # fmt: skip


def close(y: torch.Tensor, want: torch.Tensor) -> bool:
    """fp32 sums of a few numbers, rounded once."""
    eps = torch.finfo(y.dtype).eps
    bound = 8 * 1.2e-7 * 12 + eps * want.abs()
    return y.shape == want.shape and bool(((y.double() - want).abs() <= bound).all())


def ran(code: Any, p: Problem, bags: Any, rank: int, *, last: bool, mean: bool) -> torch.Tensor:
    """What a call leaves in an output of NaN."""
    y = torch.full((p.rows[rank], p.n), torch.nan, dtype=getattr(torch, p.dtype))
    offsets = bags.offsets if last else bags.offsets[:-1]
    given = Bags(bags.tables, bags.indices, offsets, bags.weights, last, mean, {}, None)
    code.run({"bags": given, "y": y})
    return y


def wrong_calls(rank: int, ranks: int, name: str, spec: str, epoch: int = 0) -> list[str]:
    """Calls that are off, of two in a row on one memory; offsets without and with the last."""
    workspace = workspace_of(world(), CPU)
    memory = fused_memory(workspace)
    memory.state[0] = epoch
    found, case = list[str](), dict(CASES[name])
    mean, unroll = case.pop("mean", False), case.pop("unroll", 2)
    p = problem_of(DIMS[:ranks], BATCH[:ranks], case.get("dtype", torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "POOLING", (("else", f"256x{unroll}x4"),))
        patch.setattr(launch, "INTERPRETED_BLOCKS", 3)
        code = compile_plan(build(p, spec), workspace)
        for call in range(2):
            everyone = [
                random_bags(d, p.m, seed=10 * call + r, **case) for r, d in enumerate(p.tables)
            ]
            y = ran(code, p, everyone[rank], rank, last=call > 0, mean=mean)
            if not close(y, expected(everyone, p, rank, mean=mean)):
                found.append(f"call {call}")
    assert not memory.fault.any() and memory.state.tolist()[1:] == [0] * 5
    return found


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("ranks", "spec"), [(1, "serial"), (2, "serial"), (2, "fused"), (3, "fused"), (4, "fused")]
)
@pytest.mark.parametrize("name", CASES)
def test_rows_come_to_their_owners(pool: RankPool, ranks: int, spec: str, name: str):
    assert pool.run(wrong_calls, ranks, name, spec, timeout_s=120) == [[]] * ranks


@pytest.mark.parametrize("epoch", [-2, 2**31 - 2])
def test_epochs_wrap(pool: RankPool, epoch: int):
    assert pool.run(wrong_calls, 2, "sum", "fused", epoch, timeout_s=60) == [[]] * 2


def aligned(rank: int, ranks: int) -> list[int]:
    """Elements of a load, of tables that start at odd addresses or have odd columns too."""
    found: list[int] = []
    cut = Pooling._cut  # pyright: ignore[reportPrivateUsage]

    def seen(pooling: Any, bags: Any) -> Any:
        chunks = cut(pooling, bags)
        found.append(chunks.vec_in)
        return chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pooling, "_cut", seen)
        for dims, shift in [((32, 64), 0), ((20, 7, 16), 0), ((16, 16), 1)]:
            p, bags = problem_of((dims,), (13,)), random_bags(dims, 13, longest=9)
            bags.tables = [
                torch.cat([torch.zeros(shift), t.flatten()])[shift:].view(t.shape)
                for t in bags.tables
            ]
            code = compile_plan(build(p, "serial"), workspace_of(world(), CPU))
            for _ in range(2):  # found again where they lie
                y = ran(code, p, bags, 0, last=True, mean=False)
            assert close(y, expected([bags], p, 0, mean=False))
    return found


def test_loads_are_as_wide_as_tables_allow(pool: RankPool):
    assert pool.run(aligned, 1, timeout_s=60) == [[4, 1, 1]]


def late_by_a_call(rank: int, ranks: int) -> tuple[list[bool], int]:
    """Rank 0 gives up on rank 1 and says so; later calls wait no more and store nothing."""
    workspace = workspace_of(world(), CPU)
    workspace.timeout_s = TIMEOUT_S
    p, bags = problem_of(((16,), (16,)), (4, 4)), random_bags((16,), 8)
    code: Any = compile_plan(build(p, "fused"), workspace)
    memory = fused_memory(workspace)
    given = Bags(bags.tables, bags.indices, bags.offsets, None, True, False, {}, None)
    (action,) = code.actions[0]

    def two_calls() -> None:
        for _ in range(2):
            action({"bags": given, "y": torch.empty(4, 32)})

    looks = looks_of(rank, two_calls)
    fault = int(memory.fault[0])
    # rank 1's peer had posted before it gave up; of the second call it has not
    named = fault >> 32 == (1 if rank else 2) and fault & 0xFFFFFFFF == 1
    return [memory.state.tolist()[2] != 0, named], looks


def test_a_rank_that_gives_up_names_the_other(pool: RankPool):
    for facts, looks in pool.run(late_by_a_call, 2, timeout_s=60):
        assert facts == [True, True] and looks <= 2 * GIVES_UP


def of_no_bags(rank: int, ranks: int) -> tuple[int, ...]:
    """There is no row to store, and nothing is run."""
    p = problem_of(((16,),) * ranks, (0,) * ranks)
    code = compile_plan(build(p, "fused"), workspace_of(world(), CPU))
    return tuple(ran(code, p, random_bags((16,), 0), rank, last=True, mean=False).shape)


def test_calls_of_no_bags(pool: RankPool):
    assert pool.run(of_no_bags, 2) == [(0, 32)] * 2
