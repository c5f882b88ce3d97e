"""Every family of the operators, on 1 to 4 ranks and odd shapes: against fp64, and bit for bit."""

from collections import Counter
from dataclasses import replace
from itertools import count
from math import prod

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import Case, by_reference, wrong_cases

from counterpoint.plan.families import build, families
from counterpoint.plan.operation import operation_of
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.problem import Problem
from counterpoint.schedules.grading import compositions

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["plain", "transposed", "strided"]
OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]


def shapes(ranks: int) -> list[tuple[tuple[int, ...], int, int, tuple[int, ...]]]:
    """(rows, K, N, inner): ones, primes, one less and one more than a tile, ranks without rows."""
    uneven = (3, 0, 7, 1)[:ranks]
    return [
        ((1,) * ranks, 1, 1, ()),
        ((1,) * ranks, 31, 1, ()),
        ((7,) * ranks, 1, 13, ()),
        ((13,) * ranks, 67, 5, ()),
        ((16,) * ranks, 64, 48, ()),
        (uneven, 17, 11, ()),
        (uneven[::-1], 129, 3, ()),
        ((2,) * ranks, 9, 10, (5,)),
        (uneven, 8, 6, (1, 3)),
    ]


def specs(op: str, ranks: int) -> list[tuple[str, str]]:
    """(spec, whose bits): each family with what its spec may say."""
    gathers = op == "all_gather_matmul"
    whole = "whole" if gathers else ""
    found = [("serial", whole), ("auto", whole)]
    if op == "matmul_all_reduce":  # its kernel has a file of tests of its own
        by_copies = ("shard_p2p ring", "shard_p2p ring chunks=3", "running_sum chunks=3")
        found += [(spec, "") for spec in by_copies if ranks > 1]
        return found if ranks == 3 else [*found, ("direct", ""), ("fused", "")]
    if ranks == 1:
        return [*found, ("graded", whole), ("shard_p2p", whole)]
    found += [("graded", ""), ("shard_p2p", "shards" if gathers else "")]
    if not gathers:
        found += [(f"running_sum{tail}", "") for tail in ("", " chunks=1", " chunks=3")]
    orders = ["ring"]
    if ranks & (ranks - 1) == 0:
        orders.append("xor")
        found += [("direct", whole)] if gathers else [("direct", ""), ("fused", "")]
    for peers in orders:
        found += [(f"{name} {peers}", "") for name in families(op) if name[-2:] in ("1d", "2d")]
        found.append((f"shard_p2p {peers}", "shards" if gathers else ""))
        found += [(f"shard_p2p {peers} chunks={n}", "") for n in ((3,) if gathers else (2, 3))]
        for groups in compositions(ranks):
            bits = {1: "whole", ranks: "shards"}.get(len(groups), "") if gathers else ""
            spec = f"graded {'/'.join(map(str, groups))} {peers}"
            found.append((spec, bits))
            if not gathers and groups[0] == 1 < len(groups):
                found.append((f"{spec} chunks=2", ""))
    return found


def refuses(case: Case) -> bool:
    """Whether the family has no plan for so many rows, or for such numbers."""
    family = operation_of(case.op).family(str(case.plan).split()[0])
    if family is None or len(case.rows) == 1:  # "auto"
        return False
    inner, dtype = prod(case.inner), str(case.dtype).removeprefix("torch.")
    rows = tuple(n * inner for n in case.rows)
    shares = () if case.op == "matmul_all_reduce" else rows
    problem = Problem(case.op, sum(rows), case.n, case.k, len(rows), dtype, shares)  # type: ignore[arg-type]
    return bool(family.refusal(problem))


def cases(op: str, ranks: int) -> list[Case]:
    """Each family meets each shape, its specs share them; the rest in turn."""
    turns, seen = count(), Counter[str]()
    found: list[Case] = []
    all_specs = specs(op, ranks)
    num_specs = Counter(spec.split()[0] for spec, _ in all_specs)
    for spec, bits in all_specs:
        family = spec.split()[0]
        i, shares = seen[family], min(num_specs[family], 3)
        seen[family] += 1
        for rows, k, n, inner in shapes(ranks)[i % shares :: shares]:
            turn = next(turns) * 7 // 5 + i // 3  # no multiple of the number of shapes
            found.append(Case(op, spec, rows, k, n, DTYPES[turn % 3], turn % 2 == 0,
                              LAYOUTS[turn // 3 % 3], inner, bits))  # fmt: skip
    return [case for case in found if not refuses(case)]


def off(rank: int, ranks: int, found: list[Case]) -> list[str]:
    with by_reference():
        return wrong_cases(rank, ranks, found)


@pytest.mark.drawn(4)
@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "forward", "bf16 fp16 fp32"
)
@pytest.mark.parametrize("op", OPS)
@on_ranks(1, 2, 3, 4)
def test_every_family_and_spec(rank: int, ranks: int, op: str, draw: Draw) -> list[str]:
    found = cases(op, ranks)
    assert {case.plan for case in found} == {spec for spec, _ in specs(op, ranks)}
    if ranks > 1 and op != "matmul_all_reduce":  # one spec of few meets each shape once
        each = len(shapes(ranks))
        assert len({(case.rows, case.k, case.dtype) for case in found}) == each * len(DTYPES)
        assert len({(case.rows, case.k, case.layout) for case in found}) == each * len(LAYOUTS)
    return off(rank, ranks, draw(found, len(found) // 3))


@on_ranks(4)
def test_sizes_and_families_in_turn_on_one_workspace(
    rank: int, ranks: int, draw: Draw
) -> list[str]:
    """Memory grows twice (a granule is 2 MiB), shrinking calls use a part of it."""
    gather, scatter, _ = OPS
    found = [
        Case(gather, "graded 1/1/2 ring", (3,) * 4, 5, 7, torch.float16),
        Case(scatter, "graded 1/3 xor chunks=3", (331,) * 4, 8, 457, bias=True),
        Case(gather, "uniform_fused_2d xor", (5, 1, 0, 2), 200, 9, torch.bfloat16, bias=True),
        Case(gather, "graded 2/2 ring", (331,) * 4, 457, 31, layout="transposed"),
        Case(scatter, "serial", (1,) * 4, 3, 2, bias=True),
        Case(scatter, "shard_p2p ring", (509, 0, 1, 1021), 16, 811, torch.float16),
        Case(gather, "uniform_fused_1d ring", (509, 0, 1, 1021), 811, 17),
        Case(gather, "serial", (2, 3, 4, 5), 811, 17, bits="whole"),
        Case(gather, "shard_p2p xor", (1,) * 4, 1, 1, bits="shards"),
    ]
    return off(rank, ranks, [*found, *draw(found[::-1], 1)])


def own_plans(op: str, ranks: int) -> list[Plan]:
    """A family's plan with another name and more order than it needs, and out of files."""
    rows = (4, 0, 3)[:ranks]
    problem = Problem(op, 7, 5, 6, ranks, "float32", rows, bias=True)  # type: ignore[arg-type]
    plan = build(problem, "graded 1/2 ring")
    last = plan.steps[-1]
    ordered = replace(last, after=tuple(step.name for step in plan.steps[:-1]))
    mine = replace(plan, family="mine", variant="", steps=(*plan.steps[:-1], ordered))
    return [mine, Plan.from_json(to_json(mine)), Plan.from_json(to_json(plan))]


@pytest.mark.parametrize("op", OPS[:2])
@on_ranks(3)
def test_own_plans(rank: int, ranks: int, op: str) -> list[str]:
    found = [Case(op, plan, plan.problem.rows, 6, 5, bias=True) for plan in own_plans(op, 3)]
    return off(rank, ranks, found)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(4)
def test_sums_over_ranks_and_slices_are_rounded_once(
    rank: int, ranks: int, dtype: torch.dtype
) -> list[str]:
    """Each partial result is a whole number that the dtype holds, their sum need not be."""
    found = [
        # K as many slices: what a rank multiplies at a time is one product
        *(Case(OPS[0], spec, (5,) * 4, 4, 37, dtype, True, bits="exact", integers=True)
          for spec in ("uniform_fused_2d ring", "uniform_fused_2d xor")),
        *(Case(OPS[1], spec, (5,) * 4, 1, 37, dtype, True, bits="exact", integers=True)
          for spec, _ in specs(OPS[1], 4) if spec.split()[0] in ("shard_p2p", "graded")),
    ]  # fmt: skip
    return off(rank, ranks, found)
