"""What fused steps say that they write is what their kernels write, element by element.

Each rank fills the memory that kernels share with a pattern, and its outputs with NaN. Then all
ranks make one call, interpreted, on the road of every call. What has changed on each rank has to be
what the bound steps of all ranks declare; and a declaration with a mistake has to differ from it.

A plan of another operator joins by two lines of CASES, and `operands_of` if its tensors are others.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from expert_bodies import small_kernels
from planted import take_and_leave
from rank_bodies import world
from rankpool import RankPool

import counterpoint.tensor_parallel.launch_fused_sum  # noqa: F401  (it registers its kernels)
from counterpoint.experts.fused import launch as fused_experts  # noqa: F401
from counterpoint.experts.routes.on_device import Sizes, found_by
from counterpoint.group.workspace import workspace_of
from counterpoint.norms import (
    kernel_all_reduce_norm,
    launch_norm,  # noqa: F401
)
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.steps import OWN_PROTOCOL, Plan, Region
from counterpoint.problem import ITEM_BYTES, Problem
from counterpoint.run.execute import compile_plan
from counterpoint.run.fused import fused_memory
from counterpoint.tensor_parallel import kernel_matmul_all_reduce

PATTERN = {2: -23131, 4: -1515870811}  # 0xA5A5...: no small integer of 16 bits, and no epoch
EMPTY = -(1 << 31)
ODD = 1  # the epoch before the call, which then is in the first half of each memory
Extent = tuple[int, int]  # first element, and the one behind the last
Changed = dict[str, list[Extent]]  # by space


class Case(NamedTuple):
    """A fused plan.

    Args:
        facts: of its problem.
        spec: of the plan.
    """

    facts: dict[str, Any]
    spec: str


def of_sum(op: str, m: int, n: int, ranks: int) -> dict[str, Any]:
    return {"op": op, "m": m, "n": n, "k": 32, "ranks": ranks, "dtype": "float16"}


def of_norm(m: int, n: int, ranks: int, **options: str | bool) -> dict[str, Any]:
    facts = {"op": "all_reduce_norm", "m": m, "n": n, "ranks": ranks, "dtype": "float16"}
    return {**facts, "residual": True, **options}


def of_experts(op: str, ranks: int, local: int, counts: str = "equal") -> dict[str, Any]:
    return {
        "op": op, "m": 6 * ranks * local, "n": 16, "k": 24, "ranks": ranks, "dtype": "float16",
        "experts": local, "counts": counts, "top_k": int(counts == "device_routed"),
    }  # fmt: skip


CASES = [  # two of a kind
    Case(of_sum("matmul_all_reduce", 1, 64, 2), "fused one_shot 16x16x1"),
    Case(of_sum("matmul_all_reduce", 3, 32, 4), "fused one_shot 16x16x1"),
    Case(of_sum("matmul_all_reduce", 4, 64, 2), "fused two_shot 32x16x1"),
    Case(of_sum("matmul_all_reduce", 1, 32, 4), "fused two_shot 16x16x1"),
    Case(of_sum("matmul_reduce_scatter", 6, 32, 2), "fused scatter 16x16x1"),
    Case(of_sum("matmul_reduce_scatter", 8, 32, 4), "fused scatter 16x16x1"),
    Case(of_norm(1, 16, 2), "fused one_shot"),
    Case(of_norm(3, 24, 4, norm="layer", bias=True), "fused two_shot"),
    Case(of_experts("all_to_all_matmul", 2, 3), "fused"),
    Case(of_experts("all_to_all_matmul", 4, 2, "host"), "fused"),
    Case(of_experts("matmul_all_to_all", 2, 3), "fused"),
    Case(of_experts("matmul_all_to_all", 4, 2, "device"), "fused"),
    Case(of_experts("all_to_all_matmul", 2, 3, "device_routed"), "fused"),
    Case(of_experts("matmul_all_to_all", 4, 2, "device_routed"), "fused"),
]


def plan_of(case: Case) -> Plan:
    with small_kernels():
        return build(Problem(**case.facts), case.spec)


def operands_of(plan: Plan, rank: int) -> dict[str, torch.Tensor]:
    """Small integers in, NaN out; counts are equal, which is what a declaration is for."""
    p, found = plan.problem, dict[str, torch.Tensor]()
    for buffer in plan.buffers:
        rows = p.rows[rank] if buffer.holds == "own" and buffer.split else buffer.shape[0]
        if buffer.name == "counts":
            found["counts"] = torch.full(buffer.shape, p.m // buffer.shape[1])
        elif buffer.space == "input":
            found[buffer.name] = torch.randint(1, 4, (rows, buffer.shape[1])).half()
        elif buffer.space == "output":
            found[buffer.name] = torch.full((rows, buffer.shape[1]), torch.nan).half()
    if p.experts:
        found["w"] = found["w"].view(p.experts, p.k, p.n)
    if p.by_routes:  # a token has one expert
        every = p.ranks * p.experts
        ids = torch.arange(every).repeat_interleave(p.m // every).repeat(p.ranks)[:, None]
        sizes = Sizes(p.m, 1, p.ranks, p.m)
        routes = found_by(rank, sizes, ids, torch.ones(ids.shape), every)
        found |= {"routes": routes.firsts, "lists": routes.lists}
    return found


def elements_of(plan: Plan, space: str) -> int:
    """Bytes of an element of that space: all its buffers have one size."""
    sizes = {ITEM_BYTES[b.dtype] for b in plan.buffers if b.space == space}
    assert len(sizes) == 1, "offsets in elements"
    return sizes.pop()


def spaces_of(plan: Plan) -> list[str]:
    return sorted({b.space for b in plan.buffers if b.space in OWN_PROTOCOL})


def extents(changed: torch.Tensor) -> list[Extent]:
    """Where a mask is True."""
    edges = torch.diff(changed.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int())
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def run_once(rank: int, ranks: int, case: Case) -> tuple[Changed, int]:
    """What one call changes on this rank; and how many elements of its outputs are still NaN."""
    workspace, plan = workspace_of(world(), torch.device("cpu")), plan_of(case)
    with pytest.MonkeyPatch.context() as patch:
        # words that have been taken are emptied: left as they are, they show
        for kernels in (kernel_matmul_all_reduce, kernel_all_reduce_norm):
            patch.setattr(kernels, "take_words", take_and_leave)
        code = compile_plan(plan, workspace)
        memory, views = fused_memory(workspace), dict[str, torch.Tensor]()
        memory.state[0] = ODD
        for space in spaces_of(plan):
            size = elements_of(plan, space)
            whole = getattr(memory, space).memory.local()
            views[space] = whole[: len(whole) // size * size].view(
                {2: torch.int16, 4: torch.int32}[size]
            )
            views[space].fill_(EMPTY if space == "words" else PATTERN[size])
        before = {space: view.clone() for space, view in views.items()}
        operands = operands_of(plan, rank)
        dist.barrier()
        code.run(operands)
        dist.barrier()
    changed = {space: extents(view != before[space]) for space, view in views.items()}
    outputs = [operands[b.name] for b in plan.buffers if b.space == "output"]
    return changed, sum(int(y.isnan().sum()) for y in outputs)


def declared(plan: Plan, placed: Plan) -> list[Changed]:
    """What the steps of all ranks say that they write, on each rank.

    Args:
        placed: whose buffers lie where they are; `plan` itself, but for a mutant of it.
    """
    offsets, ends = dict[str, int](), dict.fromkeys(OWN_PROTOCOL, 0)
    for buffer in placed.buffers:
        if buffer.space in OWN_PROTOCOL:
            offsets[buffer.name] = ends[buffer.space]
            ends[buffer.space] += buffer.shape[0] * buffer.shape[1]
    found: list[Changed] = [
        {space: [] for space in spaces_of(placed)}
        for _ in plan.steps
        for _ in range(plan.problem.ranks)
    ]
    for rank in range(plan.problem.ranks):
        for bound in bind(plan, rank).steps:
            for box in (part.write for part in bound.parts):
                buffer = plan.buffer(box.buffer)
                if buffer.space not in OWN_PROTOCOL:
                    continue
                wide = placed.buffer(box.buffer).shape[1]
                for row in range(box.r0, box.r1):
                    start = offsets[buffer.name] + row * wide
                    found[box.rank][buffer.space].append((start + box.c0, start + box.c1))
    return [{space: _joined(each) for space, each in of_rank.items()} for of_rank in found]


def _joined(found: list[Extent]) -> list[Extent]:
    """In order, neighbours as one."""
    joined: list[Extent] = []
    for start, stop in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        elif stop > start:
            joined.append((start, stop))
    return joined


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Declarations with a mistake, and what it is."""
    (step,) = plan.steps
    own = [i for i, r in enumerate(step.writes) if plan.buffer(r.buffer).space in OWN_PROTOCOL]
    for i in own:
        region, ranks = step.writes[i], plan.problem.ranks
        rest = step.writes[:i] + step.writes[i + 1 :]
        yield f"{region} is missing", replace(plan, steps=(replace(step, writes=rest),))
        if region.at:
            other = replace(region, at=((region.at[0] + 1) % ranks,) if ranks > 2 else ())
            writes = (*step.writes[:i], other, *step.writes[i + 1 :])
            yield f"{region} of another peer", replace(plan, steps=(replace(step, writes=writes),))
        whose = replace(region, shards=((1,),))
        writes = (*step.writes[:i], whose, *step.writes[i + 1 :])
        yield f"{region} of another's", replace(plan, steps=(replace(step, writes=writes),))
    for buffer in (b for b in plan.buffers if b.space in OWN_PROTOCOL):
        rows, cols = buffer.shape
        if cols > 1:
            shorter = replace(buffer, shape=(rows, cols - 1))
            buffers = tuple(shorter if b is buffer else b for b in plan.buffers)
            yield f"{buffer.name} is a column less", replace(plan, buffers=buffers)
        elif rows > plan.problem.ranks and buffer.chunks > 1:
            chunks = buffer.chunks - 1
            fewer = replace(buffer, shape=(chunks * plan.problem.ranks, 1), chunks=chunks)
            buffers = tuple(fewer if b is buffer else b for b in plan.buffers)
            yield f"{buffer.name} is a flag less", replace(plan, buffers=buffers)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", range(7), ids=lambda kind: f"{CASES[2 * kind].facts['op']} {kind}")
@pytest.mark.parametrize("which", range(2))
def test_a_kernel_writes_what_its_step_declares(pool: RankPool, kind: int, which: int):
    case = CASES[2 * kind + which]
    plan, ranks = plan_of(case), case.facts["ranks"]
    results = pool.run(run_once, ranks, case, timeout_s=120)
    changed = [found for found, _ in results]
    assert [nans for _, nans in results] == [0] * ranks, "outputs are declared as a whole"
    assert changed == declared(plan, plan)
    assert any(extent for found in changed for extent in found.values()), "nothing was written"
    count = 0
    for what, mutant in mutants(plan):
        count += 1
        assert changed != declared(mutant, plan), what
    assert count >= 2 * ranks


def test_regions_are_as_their_buffers_lie():
    """What the comparison rests on: the words of each sender one after the other, flags by part."""
    plan = plan_of(CASES[8])
    for rank in range(2):
        boxes = [part.write for part in bind(plan, rank).steps[0].parts]
        flags = [box[3:5] for box in boxes if box.buffer == "arrived" and box.rank == 1 - rank]
        assert flags == [(2 * i + rank, 2 * i + rank + 1) for i in range(6)]
        rows = [box[3:5] for box in boxes if box.buffer == "moved" and box.rank == 1 - rank]
        assert rows == [(6 * (2 * e + rank), 6 * (2 * e + rank) + 6) for e in range(3)]
    assert Region("moved", (1,), ((0,),)) in plan.steps[0].writes
