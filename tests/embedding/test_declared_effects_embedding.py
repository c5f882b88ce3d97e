"""What plans of embedding bags declare that their kernels write, against what these do write.

All memory of all ranks is filled with garbage, twice with another one, before one call of the
interpreted kernels. An element that differs from either garbage has been written; a rank's tables
hold one number, its own, so an element says who has written it.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log2
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedding_cases import problem_of
from rank_bodies import world
from rankpool import RankPool
from torch import Tensor

import counterpoint as cp
from counterpoint.embedding.launch_lookups import Bags
from counterpoint.errors import PlanError
from counterpoint.group.workspace import workspace_of
from counterpoint.plan.bind import Box, bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import Plan, Region
from counterpoint.run.execute import compile_plan
from counterpoint.run.fused import fused_memory

CPU = torch.device("cpu")
GARBAGE = (0x5A5A5A5A, 0x24242424)  # also the epoch before the call, which is then odd
SOMEBODY = -1  # who writes a flag does not show in it
Effect = set[tuple[str, int, int]]  # buffer, who writes, element as its rank stores it

# columns of each rank's tables, and bags of each rank
SIZES: dict[str, Any] = {
    "equal": (((8, 4), (8, 4)), (3, 3)), "ragged": (((8, 3), (), (5,)), (3, 0, 4)),
}  # fmt: skip
KINDS = [("serial", False), ("fused", False), ("fused", True)]


def plan_of(sizes: str, spec: str, out: bool) -> Plan:
    return build(problem_of(*SIZES[sizes], out=out), spec)


def written(rank: int, ranks: int, sizes: str, spec: str, out: bool) -> Effect:
    """Elements of this rank's memory that a call of all ranks writes."""
    plan = plan_of(sizes, spec, out)
    p, workspace = plan.problem, workspace_of(world(), CPU)
    code = compile_plan(plan, workspace)
    outputs = cp.PooledOutputs(p.n, torch.float32, p.rows) if out else None
    memory = fused_memory(workspace)
    y = torch.empty(p.rows[rank], p.n)
    rooms: dict[str, tuple[Tensor, int]] = {"y": (y.view(-1), 0)}
    if outputs is not None:
        y = outputs.view(0)
        rooms["y"] = outputs.memory.local().view(torch.float32), 0
    if workspace.scratch is not None:
        rooms["pooled"] = workspace.scratch.view(torch.float32), 0
    for name, shared in (("rows", memory.turns), ("flags", memory.flags)):
        if shared.memory is not None:
            rooms[name] = shared.memory.local().view(torch.float32), shared.half_bytes // 4
    num = p.m * len(p.tables[rank])
    tables = [torch.full((2, d), 2.0**rank) for d in p.tables[rank]]
    where = (outputs.bases, outputs.turn_bytes // 16, 0) if outputs is not None else None
    bags: Any = Bags(tables, torch.zeros(num, dtype=torch.int64), torch.arange(num), None, False,
                     False, {}, where)  # fmt: skip
    found: Effect = set()
    for garbage in GARBAGE:
        for room, _ in rooms.values():
            room.view(torch.int32).fill_(garbage)
        memory.state[0] = garbage
        dist.barrier()
        code.run({"bags": bags, "y": y})
        dist.barrier()
        for name, (room, start) in rooms.items():
            places = (room.view(torch.int32) != garbage).nonzero().flatten()
            who = [SOMEBODY] * len(places)
            if name == "y" and not out:
                who = [rank] * len(places)  # that it copies, or the library brings
            elif name != "flags":
                who = [int(log2(v)) for v in room[places].tolist()]
            found |= {(name, w, i - start) for w, i in zip(who, places.tolist(), strict=True)}
    return found


def declared(plan: Plan, rank: int) -> Effect:
    """What plans of all ranks say that they write to this rank's memory."""
    found: Effect = set()
    for writer in range(plan.problem.ranks):
        for bound in bind(plan, writer).steps:
            for part in bound.parts:
                if part.write.rank == rank:
                    who = SOMEBODY if part.write.buffer == "flags" else writer
                    box = part.write
                    found |= {(box.buffer, who, i) for i in elements(plan, box)}
    return found


def elements(plan: Plan, box: Box) -> Iterator[int]:
    # a lookup's rows lie without gaps, whatever others need
    packed = box.buffer == "pooled"
    width, first = (box.c1 - box.c0, box.c0) if packed else (plan.buffer(box.buffer).shape[1], 0)
    for row in range(box.r0, box.r1):
        yield from (row * width + col - first for col in range(box.c0, box.c1))


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans whose first step, a kernel, declares another effect."""
    step, *rest = plan.steps

    def with_writes(*writes: Region) -> Plan:
        return replace(plan, steps=(replace(step, writes=writes), *rest))

    for i, region in enumerate(step.writes):
        others = step.writes[:i], step.writes[i + 1 :]
        yield f"without {region}", with_writes(*others[0], *others[1])
        changes: list[dict[str, Any]] = []
        if region.cols == "own":
            changes.append({"cols": (0, 1)})
            # of one width, all columns that a rank has room for are its own
            ragged = len(set(map(sum, plan.problem.tables))) > 1
            changes += [{"cols": None}] if ragged or region.buffer != "pooled" else []
        if region.at:
            changes.append({"at": ()})
        for change in changes:
            yield (
                f"{change} of {region}",
                with_writes(*others[0], replace(region, **change), *others[1]),
            )
    yield "one more flag", with_writes(*step.writes, Region("flags", shards=((0,),)))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("spec", "out"), KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_write_what_plans_declare(pool: RankPool, sizes: str, spec: str, out: bool):
    """To the element, on every rank; and each mutant of the declaration shows."""
    plan = plan_of(sizes, spec, out)
    everyone = pool.run(written, plan.problem.ranks, sizes, spec, out, timeout_s=60)
    for rank, found in enumerate(everyone):
        assert found == declared(plan, rank)
    count = 0
    for name, mutant in mutants(plan):
        if "flag" in name and spec == "serial":
            continue  # the plan has none
        count += 1
        try:
            same = all(found == declared(mutant, r) for r, found in enumerate(everyone))
        except PlanError:
            continue  # a lookup writes what it reads, so this is no plan
        assert not same, f"{name} does not show"
    assert count >= (2 if spec == "serial" else 8)
