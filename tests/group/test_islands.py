"""Ranks on several islands: found from their names, and operators between them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedding_cases import Bags, expected, problem_of, random_bags
from grad_bodies import GradCase, several_weights, wrong_grad_cases
from island_bodies import CPU, everyone, near, on_islands, shards
from on_ranks import on_ranks
from rank_bodies import Case, by_reference, world
from torch import Tensor

import counterpoint as cp
from counterpoint.adapters.explain import Explained, _plans
from counterpoint.choose.known import Knowledge, save_machine
from counterpoint.errors import InputError, PeerTimeoutError, UnsupportedError
from counterpoint.group.islands import group_of_island, islands_of
from counterpoint.group.ranks import gather_object
from counterpoint.group.workspace import workspace_of
from counterpoint.machine import LinkSpec
from counterpoint.ops.auto import choose_spec
from counterpoint.ops.call import prepare
from counterpoint.ops.place import place_of
from counterpoint.ops.samples import operands, operator_of
from counterpoint.plan.operation import operation_of
from counterpoint.presets import preset
from counterpoint.problem import Problem


def test_islands_are_neighbours_of_one_name():
    found = islands_of(["a", "a", "b", "b", "c", "c"], 3)
    assert (found.number, found.size, [*found.mine], found.why) == (3, 2, [2, 3], "")
    assert found.named(5) == "rank 5 (island 2)"
    assert islands_of(["a"] * 3, 1)[:3] == (1, 3, 1)


@pytest.mark.parametrize(
    ("names", "why"),
    [("aab", "islands have 1 and 2 ranks"), ("abab", "ranks of one island are not neighbours")],
)
def test_what_is_no_grid_is_islands_of_one_rank(names: str, why: str):
    found = islands_of([*names], 2)
    assert (found.number, found.size, [*found.mine], found.why) == (len(names), 1, [2], why)


@on_ranks(4)
def test_operators_between_islands(rank: int, world_size: int):
    for size in (1, 2):
        with on_islands(rank, size) as islands:
            assert islands == world_size // size
            for call, rows in enumerate((8, 4, 12)):
                compare(rank, world_size, rows, f"islands chunks={(1, 2, 4)[call]}")


def compare(rank: int, world_size: int, rows: int, plan: str) -> None:
    """All operators that have such plans, against fp64."""
    x, w, bias = shards(rank, rows, 16), shards(rank + 9, 16, 8), shards(rank, 8)
    y = cp.all_gather_matmul(x, w, bias=bias, plan=plan)
    near(y, torch.cat(everyone(x)) @ w.double() + bias.double())
    partial = shards(rank, rows * world_size, 16)
    products = [p @ v for p, v in zip(everyone(partial), everyone(w), strict=True)]
    total = torch.stack(products).sum(0)
    own = slice(rank * rows, (rank + 1) * rows)
    near(cp.matmul_reduce_scatter(partial, w, bias=bias, plan=plan), total[own] + bias.double())
    near(cp.matmul_all_reduce(partial, w, plan=plan), total)


GRADIENTS = [
    GradCase(Case(op, "islands chunks=2", rows, 9, 6, bias=True, layout=layout), needs)
    for op, layout in (("all_gather_matmul", "plain"), ("matmul_reduce_scatter", "transposed"))
    for rows in ((5, 5, 5, 5), (3, 0, 7, 1))
    for needs in ((True, True), (True, False), (False, True))
    # sums between islands are of equal rows; gradients of a gather go the library's way then
    if op == "all_gather_matmul" or len(set(rows)) == 1
]


@on_ranks(4)
def test_gradients_between_islands(rank: int, world_size: int) -> list[str]:
    found: list[str] = []
    for size in (1, 2):
        with on_islands(rank, size):
            found += wrong_grad_cases(rank, world_size, GRADIENTS[size - 1 :: 2])
            for rows in ((4,) * 4, (1, 5, 2, 0)):
                found += several_weights(rank, world_size, "islands", rows, torch.float32)
            found += wrong_backward_plans(rank, world_size, world_size // size)
    return found


def wrong_backward_plans(rank: int, ranks: int, islands: int) -> list[str]:
    """Each plan of a gradient that is weighed computes the same as serial."""
    found: list[str] = []
    for op in ("all_gather_matmul_backward", "all_gather_matmul_wgrad",
               "matmul_reduce_scatter_backward"):  # fmt: skip
        problem = Problem(op, 8 * ranks, 12, 20, ranks, "float32", islands=islands)
        torch.manual_seed(rank)
        given = operands(problem, rank, CPU)
        specs = operation_of(op).candidates(problem)
        want, *others = (
            prepare(operator_of(op), given, spec, [], world())(given) for spec in specs
        )  # fmt: skip
        assert len(others) == 4
        for spec, got in zip(specs[1:], others, strict=True):
            pairs = zip(got, want, strict=True)
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs):
                found.append(f"{op} {spec} on {islands} islands")
    return found


@on_ranks(4)
def test_rows_may_differ_where_islands_gather(rank: int, world_size: int):
    counts = (3, 0, 4, 2)
    with on_islands(rank, 2):
        x, w = shards(rank, counts[rank], 16), shards(rank, 16, 8)
        y = cp.all_gather_matmul(x, w, rows=counts, plan="islands chunks=2")
        near(y, torch.cat(everyone(x)) @ w.double())
        with pytest.raises(InputError, match="plan must be for equal rows on all ranks"):
            cp.matmul_reduce_scatter(shards(rank, 9, 16), w, rows=counts, plan="islands")


@on_ranks(4)
def test_what_reaches_no_other_island_is_refused_or_left_to_the_library(rank: int, world_size: int):
    with on_islands(rank, 2):
        x, w = shards(rank, 8, 16), shards(rank, 16, 8)
        near(cp.all_gather_matmul(x, w), torch.cat(everyone(x)) @ w.double())
        with pytest.raises(InputError, match="plan must be for ranks of one island"):
            cp.all_gather_matmul(x, w, plan="shard_p2p ring")
        with pytest.raises(UnsupportedError, match=r"PooledOutputs: .* they are on 2 islands"):
            cp.PooledOutputs(8, batch=[4] * 4, dtype=torch.float32, device="cpu")
        table = shards(rank, 10, 8)
        indices = torch.arange(16) % 10
        y = cp.embedding_bag_all_to_all(
            [table], indices, torch.arange(0, 17, 1), include_last_offset=True
        )
        want = torch.cat([each[indices][4 * rank : 4 * rank + 4] for each in everyone(table)], 1)
        near(y, want)


# columns of each rank's tables, and bags of each rank
EVEN: Any = ((8,),) * 6, (4,) * 6
RAGGED: Any = ((8, 3), (), (5, 16, 16), (1,), (2,), (7,)), (5, 9, 0, 3, 2, 4)
BAGS: list[tuple[Any, dict[str, Any]]] = [
    (EVEN, {}), (RAGGED, {"weighted": True}), (RAGGED, {"mean": True, "index": torch.int32}),
    (RAGGED, {"dtype": torch.bfloat16}), (EVEN, {"mean": True, "dtype": torch.float16}),
]  # fmt: skip


def bags_of_islands(rank: int, ranks: int, *sizes: int) -> None:
    for size in sizes:
        bags_of_islands_of(rank, ranks, size)


def bags_of_islands_of(rank: int, ranks: int, size: int) -> None:
    """Calls of growing and shrinking chunks in one memory, and gradients, against fp64."""
    with on_islands(rank, size) as islands:
        assert islands == ranks // size
        for call, ((dims, batch), case) in enumerate(BAGS):
            dims, batch = dims[:ranks], batch[:ranks]
            p, mean = problem_of(dims, batch, case.get("dtype", torch.float32)), "mean" in case
            draw = {k: v for k, v in case.items() if k != "mean"}
            everyone = [random_bags(d, p.m, seed=r + call, **draw) for r, d in enumerate(dims)]
            plan = f"islands chunks={(2, 4, 1)[call % 3]}"
            mine, mode = everyone[rank], "mean" if mean else "sum"
            y, grads = called(mine, p, mode, plan)
            serial, serial_grads = called(mine, p, mode, "serial")
            want = expected(everyone, p, rank, mean=mean)
            eps = torch.finfo(y.dtype).eps
            torch.testing.assert_close(y.double(), want, rtol=2 * eps, atol=20 * 1.2e-7)
            assert torch.equal(y, serial) and all(map(torch.equal, grads, serial_grads))


def called(bags: Bags, p: cp.Problem, mode: str, plan: str) -> tuple[Tensor, list[Tensor]]:
    """A call of one rank, and the gradients of its tables."""
    tables = [t.clone().requires_grad_() for t in bags.tables]
    y = cp.embedding_bag_all_to_all(
        tables, bags.indices, bags.offsets, mode=mode, per_sample_weights=bags.weights,
        include_last_offset=True, batch=p.rows, dims=p.tables, dtype=getattr(torch, p.dtype),
        plan=plan,
    )  # fmt: skip
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return y.detach(), [t.grad for t in tables if t.grad is not None]


@on_ranks(4)
def test_embedding_bags_between_islands_by_interpreted_kernels(rank: int, world_size: int):
    bags_of_islands(rank, world_size, 1, 2)


@on_ranks(6)
def test_embedding_bags_between_islands_by_torch(rank: int, world_size: int):
    with by_reference():
        bags_of_islands(rank, world_size, 3, 2)


@on_ranks(4)
def test_bags_that_islands_cannot_exchange_are_refused_on_all_ranks(rank: int, world_size: int):
    """Before anything is launched; the group is as good as before."""
    with on_islands(rank, 2):
        bags, dims = random_bags((8,), 8), ((8,),) * 4
        p = problem_of(dims, (2,) * 4)
        for plan, want in (("islands chunks=9", "a spec of words"), ("fused", "for ranks of one")):
            with pytest.raises(InputError, match=f"plan must be {want}"):
                called(bags, p, "sum", plan)
        with pytest.raises(InputError, match="batch must be equal on all ranks"):
            called(bags, problem_of(dims, (2, 3, 1, 2) if rank else (2,) * 4), "sum", "islands")
        called(bags, p, "sum", "islands")


@on_ranks(4)
def test_auto_takes_what_the_model_says_once_the_nic_is_known(
    rank: int, world_size: int, tmp_path: Path
):
    """Without a machine it is the library's way, whatever there is in the cache for one island.

    Of tokens by routes the way of the fewest bytes: of few tokens it is serial that is predicted.
    """
    folder = gather_object(str(tmp_path), dist.group.WORLD)[0]  # type: ignore[arg-type]
    nic = LinkSpec(name="NIC", bytes_per_s=45e9, latency_s=5e-6)
    inside = preset("h200-2")
    machine = replace(inside, measured=inside.costs, nic=nic)
    problem = Problem("all_gather_matmul", 65536, 8192, 8192, world_size, islands=2)
    routed = Problem("all_to_all_matmul", 64, 64, 64, world_size, experts=2, counts="routed",
                     top_k=2, islands=2)  # fmt: skip
    specs: list[str] = []
    by_routes: list[str] = []
    for known in (None, machine, replace(machine, nic=None)):
        with on_islands(rank, 2), pytest.MonkeyPatch.context() as patch:
            patch.setenv("COUNTERPOINT_CACHE", folder)
            if known is not None and rank == 0:
                save_machine(known, place_of(CPU, world_size, 2))
            dist.barrier()
            workspace = workspace_of(dist.group.WORLD, CPU)  # type: ignore[arg-type]
            specs.append(choose_spec(problem, workspace, ()).spec)
            by_routes.append(choose_spec(routed, workspace, ()).spec)
            x, w = shards(rank, 8, 16), shards(rank, 16, 8)
            near(cp.all_gather_matmul(x, w), torch.cat(everyone(x)) @ w.double())
    want = cp.choose(problem, machine)
    assert want.plan.family == "islands" and specs == ["serial", want.spec, "serial"]
    assert by_routes == ["islands", "serial", "islands"]


@on_ranks(4)
def test_what_is_serial_as_no_nic_is_known_says_what_to_run(rank: int, world_size: int):
    """Not where a plan between islands was asked for, nor once the NIC is known."""
    group: Any = dist.group.WORLD
    problem = Problem("all_gather_matmul", 32, 8, 16, 4, "float32")
    one = Explained("all-gather", "", False, (8, 16), "float32", 4, problem.op, (), "", (problem,),
                    group.group_name, "")  # fmt: skip
    why = "; auto weighs no other plan between 2 islands until their NIC has been measured: run "
    x, w = shards(rank, 8, 16), shards(rank, 16, 8)
    for plan, known in (("auto", False), ("auto", True), ("islands chunks=2", False)):
        with on_islands(rank, 2):
            workspace = workspace_of(group, CPU)
            if known:
                nic = LinkSpec(name="NIC", bytes_per_s=45e9, latency_s=5e-6)
                workspace.knowledge = Knowledge(replace(preset("h200-2"), nic=nic), {})
            cp.all_gather_matmul(x, w, plan=plan)
            (ran,) = one.plans
            said = ""
            if plan == "auto" and not known:
                assert ran == "serial"
                said = f"{why}`counterpoint characterize` on these ranks"
            assert str(one).endswith(f": all_gather_matmul, plan {ran}{said}")
    with on_islands(rank, 2):  # which has no other plan between islands
        cp.all_reduce_rms_norm(x.clone(), None, torch.ones(16))
        (ran,) = (line for line in _plans() if "all_reduce_norm" in line)
        assert "islands until" not in ran
    with pytest.raises(InputError, match=r"machine must be a machine with a nic.*characterize"):
        cp.choose(replace(problem, islands=2), "h200-2")


@on_ranks(2)
def test_a_block_may_come_before_one_is_sent(rank: int, world_size: int):
    """Else gloo says so to the other end behind the block, and directions take turns."""
    order: list[str] = []

    def noting(name: str) -> Any:
        op = getattr(dist, name)
        return lambda *args: order.append(name) or op(*args)

    with on_islands(rank, 1), pytest.MonkeyPatch.context() as patch:
        for name in ("isend", "irecv"):
            patch.setattr(dist, name, noting(name))
        cp.all_gather_matmul(shards(rank, 8, 16), shards(rank, 16, 8), plan="islands chunks=2")
    assert order == ["irecv", "isend"] * 2


@on_ranks(4)
def test_who_does_not_come_to_a_meeting_is_named_with_its_island(rank: int, world_size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_TIMEOUT_S", "1")
        with on_islands(rank, 2):
            workspace = workspace_of(dist.group.WORLD, CPU)  # type: ignore[arg-type]
            if rank in (0, 1):
                late = r"rank 2 \(island 1\), rank 3 \(island 1\) did not come to a meeting"
                with pytest.raises(PeerTimeoutError, match=late) as caught:
                    workspace.gather(rank)
                assert caught.value.rank == 2


@on_ranks(2)
def test_one_island_has_no_plan_between_islands(rank: int, world_size: int):
    x, w = shards(rank, 8, 16), shards(rank, 16, 8)
    with pytest.raises(InputError, match="plan must be for ranks of several islands"):
        cp.all_gather_matmul(x, w, plan="islands")


@on_ranks(2, 4)
def test_an_island_has_one_group(rank: int, ranks: int) -> None:
    """However often it is asked for: each new one would keep its communicators to the end."""
    group: Any = dist.group.WORLD
    first = rank // 2 * 2
    mine = range(first, first + 2)
    found = group_of_island(group, mine)
    assert found is group_of_island(group, mine) and found.size() == 2
    assert (found is group) == (ranks == 2)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=found)
    assert total.item() == 2 * first + 1
