"""The ops as torch's own: opcheck, fake tensors, torch.compile, groups of every kind."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import Case, Operands, call, device, exact, operands, tensors, world, wrong
from rankpool import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import counterpoint as cp
from counterpoint import Problem, all_gather_matmul, build, matmul_reduce_scatter
from counterpoint.group.workspace import workspace_of
from counterpoint.operators import IMPLEMENTED, implementation
from counterpoint.ops.declare import _where_it_belongs
from counterpoint.ops.register import as_a_constant

GATHER = Case("all_gather_matmul", "graded", (3, 3), 5, 4, bias=True)
SCATTER = Case("matmul_reduce_scatter", "graded", (3, 3), 5, 4, bias=True)
REDUCE = Case("matmul_all_reduce", "fused", (3, 3), 5, 4, bias=True)


def of_ranks(case: Case, ranks: int, **changes: object) -> Case:
    return Case(**{**vars(case), "rows": case.rows[:1] * ranks, **changes})


@pytest.mark.parametrize(
    ("ranks", "case"), [(1, GATHER), (3, GATHER), (1, SCATTER), (3, SCATTER), (2, REDUCE)],
    ids=lambda value: getattr(value, "op", value),
)  # fmt: skip
@on_ranks()
def test_opcheck(rank: int, ranks: int, case: Case):
    uneven = {"inner": (2,), "plan": "serial", "rows": (1, 4, 2)[:ranks], "bias": False}
    for given in (of_ranks(case, ranks), of_ranks(case, ranks, **uneven)):
        x, w, bias = operands(given, rank, 0, device())
        rows = [] if given.even else list(given.rows)
        args = [x, w, bias, given.plan, rows, world().group_name, ranks, rank]
        if case.op == "all_gather_matmul":
            args = args[:-1]
        if case.op == "matmul_all_reduce":
            behind = [None, None, "eps=1e-06"] if given.inner else []
            args = [*args[:4], world().group_name, ranks, *behind]
        assert callable(getattr(cp, case.op)), "an operator is defined where it is looked up"
        op = getattr(torch.ops.counterpoint, case.op).default
        assert set(torch.library.opcheck(op, tuple(args)).values()) == {"SUCCESS"}


@on_ranks(3)
def test_fake_tensors_have_the_shapes_of_real_ones(rank: int, world_size: int):
    for case in (
        of_ranks(case, 3, rows=rows, inner=inner, plan=plan)
        for case, plan in ((GATHER, "graded"), (SCATTER, "graded"), (REDUCE, "serial"))
        for rows in [(3, 3, 3), (0, 5, 2), (1, 1, 1)]
        for inner in [(), (2, 3)]
    ):
        real = call(case, operands(case, rank, 0, device()))
        with FakeTensorMode() as mode:
            given = operands(case, rank, 0, device())
            fake = [None if t is None else mode.from_tensor(t) for t in given]
            y = call(case, Operands(*fake))  # type: ignore[arg-type]
        assert (y.shape, y.dtype, y.stride()) == (real.shape, real.dtype, real.stride()), case


def two_layers(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """What a user compiles: both ops in one function, the group left out."""
    hidden = torch.relu(all_gather_matmul(x, w, bias=bias, plan="graded"))
    return matmul_reduce_scatter(hidden, w.t(), plan="shard_p2p")


def run_compiled(rank: int, world_size: int, backend: str, cache: str, sizes: list[int]) -> None:
    """Rows of each call: at the second size, torch compiles again, for any size."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        # inductor's own imports warn
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled: Callable[..., Tensor] = torch.compile(two_layers, fullgraph=True, backend=backend)
        for turn, rows in enumerate(sizes):
            case = of_ranks(GATHER, world_size, rows=(rows,) * world_size)
            everyone = [operands(case, r, turn, device()) for r in range(world_size)]
            y = compiled(*everyone[rank])
            hidden = [exact(case, r, everyone).relu() for r in range(world_size)]
            products = [h @ o.w.t().double() for h, o in zip(hidden, everyone, strict=True)]
            total = torch.stack(products).sum(0)
            want = total[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(y, want.float())


def test_compile_without_a_graph_break(pool: RankPool, tmp_path: Path):
    pool.run(run_compiled, 2, "aot_eager", str(tmp_path), [2, 2, 3, 5])


@on_ranks(2)
def test_a_plan_of_ones_own_compiles(rank: int, world_size: int):
    """A Plan is an argument as a family's name is."""
    plan = build(
        Problem("all_gather_matmul", 3 * world_size, 4, 5, world_size, "float32"), "graded"
    )
    x, w = torch.randn(3, 5), torch.randn(5, 4)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_matmul(x, w, plan=plan)

    want = layer(x, w)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, w)
    assert torch.equal(got, want)


@pytest.mark.apart("make test-all")
def test_inductor_keeps_group_sizes_apart(pool: RankPool, tmp_path):
    """Its cache on disk, shared by both runs, knows nothing of groups."""
    for ranks in (1, 2):
        pool.run(run_compiled, ranks, "inductor", str(tmp_path), [2, 2])


@on_ranks(1, 2)
def test_the_result_is_memory_of_its_own(rank: int, ranks: int):
    for case in (
        of_ranks(case, ranks, plan=plan, inner=inner)
        for case in (GATHER, SCATTER, REDUCE)
        for plan in ("auto", "serial", "direct", "graded", "shard_p2p", "fused")
        if case is REDUCE or plan != "fused"
        if case is not REDUCE or plan not in ("graded", "shard_p2p")
        for inner in [(), (1,)]
    ):
        given = operands(case, rank, 0, device())
        y = call(case, given)
        kept = y.clone()
        places = {t.untyped_storage().data_ptr() for t in tensors(given)}
        assert y.untyped_storage().data_ptr() not in places, case
        # nor a part of the workspace, which the next call writes to
        call(case, operands(case, rank, 1, device()))
        assert torch.equal(y, kept), case


@on_ranks(4)
def test_a_group_of_some_ranks(rank: int, world_size: int) -> list[str]:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    return wrong(GATHER, group) + wrong(SCATTER, group)


@on_ranks(4)
def test_groups_side_by_side(rank: int, world_size: int) -> list[str]:
    """Two groups of two at once, of other sizes and plans, and all ranks between them."""
    pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = pairs[rank % 2]
    problems: list[str] = []
    for turn in range(3):
        case = of_ranks((GATHER, SCATTER)[(rank + turn) % 2], 2, k=7 + rank % 2)
        problems += wrong(case, mine, seed=turn)
        problems += wrong(of_ranks((GATHER, SCATTER)[turn % 2], 4), None, seed=turn)
    workspaces = {id(workspace_of(group, device())) for group in (mine, world())}
    assert len(workspaces) == 2
    return problems


@on_ranks(2)
def test_a_group_made_again_with_the_same_name(
    rank: int, world_size: int, tmp_path: Path
) -> list[str]:
    old = world()
    name = old.group_name
    problems = wrong(GATHER)
    kept = workspace_of(old, device())
    dist.destroy_process_group()
    # the ranks change places: what the old group knew of its peers is wrong now
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=1 - rank, world_size=2
    )
    assert world().group_name == name
    problems += wrong(SCATTER) + wrong(GATHER)
    workspace = workspace_of(world(), device())
    assert workspace is not kept
    assert workspace.rank == 1 - rank
    return problems


class OnGpu3(Tensor):
    """A tensor that says so."""

    is_cuda = True
    device = torch.device("cuda", 3)  # type: ignore[assignment]


@pytest.mark.parametrize("current", [0, 3])
def test_an_operator_runs_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch, current: int):
    """Whatever the current one is, also where the first tensors are in a list."""
    entered = list[torch.device]()

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        entered.append(where)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    counts = replace(implementation("add_norm"), run=lambda *given: len(given))
    monkeypatch.setitem(IMPLEMENTED, "add_norm", counts)
    run = _where_it_belongs("add_norm")
    there = torch.ones(2).as_subclass(OnGpu3)
    for given in ((there, 1), (None, [there], "plan"), (torch.ones(2), there)):
        assert run(*given) == len(given)
    assert run(torch.ones(2), None, []) == 3
    assert entered == [torch.device("cuda", 3)] * 3 * (current != 3)


def test_a_function_is_marked_as_torch_marks_one_of_a_constant_result():
    ours, theirs = as_a_constant(lambda: 1), lambda: 1
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)
