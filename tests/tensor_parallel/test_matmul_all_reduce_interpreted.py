"""matmul and sum over ranks in one kernel: interpreted on ranks that share memory, against fp64."""

import pytest
import torch
from late import GIVES_UP, TIMEOUT_S, looks_of
from on_ranks import on_ranks
from rank_bodies import Case, world, wrong_cases
from rankpool import RankPool

import counterpoint as cp
from counterpoint.group.workspace import Places, workspace_of
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.problem import Problem
from counterpoint.run.execute import compile_plan
from counterpoint.run.fused import FusedMemory, fused_memory
from counterpoint.run.launch import Site
from counterpoint.tensor_parallel.launch_fused_sum import prepare

CPU = torch.device("cpu")
SUM, SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
TILE = "16x32x1 warps=4"  # small: programs are two, so that each has several
KINDS = [(SUM, "one_shot"), (SUM, "two_shot"), (SCATTER, "scatter")]


def case(op: str, shots: str, rows: tuple[int, ...], k: int, n: int, *rest: object) -> Case:
    return Case(op, f"fused {shots} {TILE}", rows, k, n, *rest)  # type: ignore[arg-type]


def wrong_from(rank: int, ranks: int, cases: list[Case], epoch: int) -> list[str]:
    """Every case on one memory, whose calls are counted from `epoch`."""
    memory = fused_memory(workspace_of(world(), CPU))
    memory.state[0] = epoch
    found = wrong_cases(rank, ranks, cases)
    assert memory.state[0] != epoch, "the kernel has not run"
    assert not memory.fault.any() and not any(memory.state.tolist()[1:])
    return found


# as 32-bit words: -2 is 2^32 - 2
@pytest.mark.drawn(3)
@pytest.mark.parametrize(("ranks", "epoch"), [(2, -2), (2, 2**31 - 2), (4, 0)])
@pytest.mark.parametrize(("op", "shots"), KINDS)
def test_the_sum_over_ranks(pool: RankPool, op: str, shots: str, ranks: int, epoch: int):
    """Sizes and dtypes in turn, and no meeting of ranks but that of their own words."""
    if op == SCATTER:
        cases = [
            case(op, shots, (1,) * ranks, 64, 64, torch.float16, False, "transposed"),
            case(op, shots, (3,) * ranks, 40, 56, torch.float16, True, "strided"),
        ]
    else:
        cases = [
            case(op, shots, (1,), 64, 64, torch.float16, False, "transposed"),
            case(op, shots, (3,), 40, 56, torch.float32, True),  # nothing divides
            case(op, shots, (17,), 32, 16, torch.float32, False, "transposed"),
        ]
    cases = cases if ranks == 2 else cases[1:2]
    assert pool.run(wrong_from, ranks, cases, epoch) == [[]] * ranks


@pytest.mark.parametrize("shots", ["one_shot", "two_shot"])
@on_ranks(2)
def test_nothing_behind_operands_is_multiplied(rank: int, ranks: int, shots: str):
    """Sizes that nothing divides; what lies behind is no number."""
    x, w = (
        torch.cat([torch.randn(rows * cols), torch.full((4096,), torch.nan)])[: rows * cols].view(
            rows, cols
        ) for rows, cols in ((3, 40), (40, 56))
    )  # fmt: skip
    y = cp.matmul_all_reduce(x, w, plan=f"fused {shots} {TILE}")
    assert torch.allclose(y, cp.matmul_all_reduce(x, w, plan="serial"), atol=1e-4)


def refused_in_bf16(rank: int, ranks: int) -> str:
    x, w = (torch.ones(16, 16, dtype=torch.bfloat16) for _ in "xw")
    with pytest.raises(cp.UnsupportedError, match="multiplies bf16 numbers wrongly") as error:
        cp.matmul_all_reduce(x, w, plan="fused")
    assert torch.equal(cp.matmul_all_reduce(x, w), 2.0 * 16 * torch.ones_like(x))
    return str(error.value)


def test_bf16_is_refused(pool: RankPool):
    """Numbers of 16 bits that the interpreter would take for others."""
    first, second = pool.run(refused_in_bf16, 2)
    assert first == second and first.startswith("plan fused two_shot ")


def late_by_a_call(rank: int, ranks: int) -> tuple[list[bool], int]:
    """Rank 0 gives up before rank 1 comes; neither takes what the other has for a sum."""
    workspace = workspace_of(world(), CPU)
    workspace.timeout_s = TIMEOUT_S
    plan = build(Problem(SUM, 2, 32, 16, ranks, "float32"), f"fused two_shot {TILE}")
    compile_plan(plan, workspace)  # there is memory
    action = prepare(Site(bind(plan, rank).steps[0], Places(workspace, plan), 6))
    x, w, y = torch.randn(2, 16), torch.randn(16, 32), torch.full((2, 32), torch.nan)
    looks = looks_of(rank, lambda: [action({"x": x, "w": w, "y": y}) for _ in range(2)])
    memory = fused_memory(workspace)
    fault = int(memory.fault[0])
    return [memory.state.tolist()[2] == 2, fault & 0xFFFFFFFF == 7, bool(fault >> 32 & 3)], looks


def test_a_rank_that_has_given_up_sends_no_sums(pool: RankPool):
    (first, looks), (second, others) = pool.run(late_by_a_call, 2)
    assert first == second == [True] * 3
    # of two calls of two tiles: what comes behind a wait in vain does not wait
    assert looks == GIVES_UP + 2 + 2 + 4
    assert others == looks - 1  # rank 0 had sent its parts, and no sums


def grown(rank: int, ranks: int) -> list[int]:
    """Sizes of a memory that calls of more and more make grow."""
    words, found = FusedMemory(workspace_of(world(), CPU)).words, list[int]()
    for num_bytes in range(1, 9):
        words.reserve(num_bytes << 20)
        assert words.half_bytes >= num_bytes << 20
        assert words.memory is not None
        assert (words.memory.local().view(torch.int32) == -(1 << 31)).all()  # they are EMPTY
        found.append(words.memory.num_bytes >> 20)
    return list(dict.fromkeys(found))


def test_memory_that_grows_doubles(pool: RankPool):
    """What is kept of it, for graphs that know it, is then less than what there is."""
    assert pool.run(grown, 2) == [[2, 4, 8, 16]] * 2
