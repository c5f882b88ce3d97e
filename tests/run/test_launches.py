"""What a GPU launches for plans of experts, done on CPU ranks: strided copies, batched matmuls.

Copies go by the addresses and pitches that the copy engine would get, byte by byte; matmuls of a
batch by the library's batched one. And the serial plan, which operators do without a plan.
"""

import ctypes
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_bodies import by_expert, by_owner, multiplied, tables, whole, wrong_products
from island_bodies import on_islands, shards
from on_ranks import on_ranks
from routed_bodies import CHOICES, LOCAL, TOP, chosen, layer

import counterpoint as cp
from counterpoint.experts import steps_routed
from counterpoint.experts.fused.launch_sums import sum_by_kernel
from counterpoint.gpu import copy_engine, driver
from counterpoint.gpu.driver import Copy
from counterpoint.group.workspace import Operands, Places, Workspace, workspace_of
from counterpoint.plan.bind import Program, bind
from counterpoint.plan.families import build
from counterpoint.plan.launches import batches, runs
from counterpoint.problem import Problem
from counterpoint.run import compute, execute_cpu
from counterpoint.run.execute import compile_plan

EXPERTS = ("all_to_all_matmul", "matmul_all_to_all")
K, N = 5, 7
copied: list[Copy] = []


def by_hand(copies: Sequence[Copy], stream: int, *, capturing: bool) -> None:
    for copy in copies:
        copied.append(copy)
        for row in range(copy.height):
            target = copy.target + row * copy.target_pitch
            ctypes.memmove(target, copy.source + row * copy.source_pitch, copy.width)


class AsLaunched(execute_cpu.CpuCode):
    """A program on a CPU rank, in the launches of a GPU."""

    def __init__(self, program: Program, workspace: Workspace, *more: Any) -> None:
        super().__init__(program, workspace, *more)
        places = Places(workspace, program.plan)
        for first, *rest in batches(program):
            bound = program.steps[first]
            if bound.step.kind == "copy":
                found = compute.copied_by_call(bound, places)
                enqueue = copy_engine.copies(bound, places, [], found)

                def copy(o: Operands, enqueue: copy_engine.Enqueue = enqueue) -> None:
                    enqueue(o, 0, False)

                self.actions[first] = [copy]
            elif rest:
                steps = [program.steps[i] for i in (first, *rest)]
                own = compute.of_family(steps, places, None)
                self.actions[first] = own or compute.matmuls(steps, places)
                for i in rest:
                    self.actions[i] = []


@pytest.mark.parametrize(
    ("ranks", "spec", "pitch"),
    [(2, "grouped 1/3", 1 << 31), (3, "grouped 3/1", 1 << 31), (4, "grouped 4 xor", 1 << 31),
     # a pitch beyond what CUDA takes
     (2, "grouped 1/1/1/1", 64), (2, "grouped 2/2", 64)],
)  # fmt: skip
@on_ranks()
def test_values_as_launched(rank: int, ranks: int, spec: str, pitch: int) -> list[str]:
    copied.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "copies_async", by_hand)
        patch.setattr(execute_cpu, "CpuCode", AsLaunched)
        patch.setattr(copy_engine, "MAX_PITCH_BYTES", pitch)
        found = wrong_products(rank, [[3] * (ranks * 4)] * ranks, spec, torch.float32, K, N)
    strided = any(copy.height > 1 for copy in copied)
    assert copied and strided == (pitch > 4096 and spec != "grouped 1/1/1/1")
    return found


@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (3, 2), (4, 1)])
@on_ranks()
def test_chunks_and_counts_that_differ_as_launched(rank: int, ranks: int, local: int) -> list[str]:
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "copies_async", by_hand)
        patch.setattr(execute_cpu, "CpuCode", AsLaunched)
        kinds = tables(ranks, local)
        for name in ("uneven", "even", "a rank that gets and sends nothing", "one pair"):
            for spec in ("grouped", f"grouped {local} chunks=2"):
                copied.clear()
                wrong = wrong_products(rank, kinds[name], spec, torch.float32, K, N)
                found += [f"{spec}, {name}: {text}" for text in wrong]
                assert copied or name != "even"
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("size", "plan"), [(4, "routed 1/1 ring"), (4, "routed 2 xor"), (2, "islands")]
)
@on_ranks(4)
def test_routes_as_launched(rank: int, ranks: int, size: int, plan: str):
    """By copies as the copy engine gets them and sums by the kernel: the bits of CPU ranks."""
    tokens = 13 + rank
    x, w = shards(rank, tokens, K), shards(rank, LOCAL, K, K)
    weights = shards(rank, tokens, TOP).softmax(1)

    def layers() -> list[torch.Tensor]:
        copied.clear()
        found: list[torch.Tensor] = []
        with on_islands(rank, size):
            for name in CHOICES:
                experts = chosen(name, rank, ranks, tokens)
                routes = cp.exchange_routes(experts, weights, num_experts=ranks * LOCAL)
                found.append(layer(x, w, w, routes, plan))
        return found

    want = layers()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Triton's interpreter warns
        patch.setattr(driver, "copies_async", by_hand)
        patch.setattr(execute_cpu, "CpuCode", AsLaunched)
        patch.setattr(steps_routed, "sum_rows", sum_by_kernel)
        got = layers()
    assert copied and all(map(torch.equal, got, want))


@pytest.mark.parametrize("experts", [1, 2])
def test_a_chunk_of_rows_is_one_batched_matmul(experts: int):
    """Those of each rank for an expert, equally far apart; where counts differ one by one."""
    for counts, many in (("equal", 4), ("host", 1)):
        problem = Problem(EXPERTS[0], 4 * experts * 12, N, K, 4, experts=experts, counts=counts)  # type: ignore[arg-type]
        plan = build(problem, f"grouped {experts} chunks=3")
        matmuls = [b for b in bind(plan, 2).steps if b.step.kind == "matmul"]
        assert len(matmuls) == 3 * experts
        for bound in matmuls:
            found = runs(bound, plan)
            assert [run.times for run in found] == [many] * (4 // many)
            assert {run.part.reads[1] for run in found} == {bound.parts[0].reads[1]}
            if many > 1:
                assert found[0][2:] == (12, 12) and found[0].part.write.shape == (4, N)


@pytest.mark.parametrize("op", EXPERTS)
@on_ranks(1, 2, 3)
def test_the_serial_plan(rank: int, ranks: int, op: str) -> list[str]:
    """The plan that predictions compare with computes the op too."""
    found: list[str] = []
    workspace = workspace_of(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    for local in (1, 3):
        counts = [[2] * (ranks * local)] * ranks
        given = whole(counts, K, N, torch.float32, back=op == "matmul_all_to_all")
        exact = given.double()
        if op == "matmul_all_to_all":
            want = by_owner(multiplied(exact.xs, exact.ws, counts), counts)[rank]
        else:
            want = multiplied(by_expert(exact.xs, counts), exact.ws, counts)[rank]
        plan = build(Problem(op, len(want), N, K, ranks, "float32", experts=local), "serial")
        y = torch.full(want.shape, torch.nan)
        code = compile_plan(plan, workspace)
        code.run({"x": given.xs[rank], "w": given.ws[rank], "y": y})
        if not torch.equal(y, want.float()):
            found.append(f"{local} experts")
    return found


@pytest.mark.parametrize("op", EXPERTS)
def test_a_group_is_one_copy_for_each_peer_and_one_matmul(op: str):
    plan = build(Problem(op, 4 * 8 * 16, N, K, 4, experts=8), "grouped 3/5 xor")
    for rank in range(4):
        program = bind(plan, rank)
        launches = [[program.steps[i].step.name for i in launch] for launch in batches(program)]
        groups = [launch for launch in launches if launch[0].startswith("matmul")]
        assert groups == [[f"matmul_{e}" for e in group] for group in (range(3), range(3, 8))]
        for bound in program.steps:
            if bound.step.kind != "copy":
                continue
            peers, found = {(p.write.rank, p.reads[0].rank) for p in bound.parts}, runs(bound, plan)
            assert sum(run.times for run in found) == len(bound.parts)
            if bound.step.name.startswith("push"):
                assert len(found) == len(peers) == 3
                assert {run.times for run in found} == {3 if bound.step.name[-1] == "0" else 5}
            # rows of a run neither overlap nor leave what the parts are
            expanded = [
                (part.reads[0].r0 + i * run.read_step, part.write.r0 + i * run.write_step)
                for run in found for i in range(run.times) for part in (run.part,)
            ]  # fmt: skip
            assert expanded == [(part.reads[0].r0, part.write.r0) for part in bound.parts]


def test_other_families_launch_what_they_did():
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        plan = build(Problem(op, 64, 16, 16, 4), "graded 1/1/2" if op[0] == "a" else "graded 2/1/1")
        assert all(len(launch) == 1 for launch in batches(bind(plan, 1)))
