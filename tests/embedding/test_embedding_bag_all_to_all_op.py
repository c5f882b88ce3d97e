"""embedding_bag_all_to_all as an operator, on CPU ranks: rows, gradients, what it refuses."""

import random
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embedding_cases import Bags, expected, problem_of, random_bags
from on_ranks import on_ranks
from own_calls import own_calls
from rank_bodies import world
from rankpool import RankPool
from refusals import Refusal, wrongly_refused

import counterpoint as cp
from counterpoint.embedding.call import Known, Ready, ready_for
from counterpoint.group import library
from counterpoint.group.workspace import Workspace, workspace_of
from counterpoint.problem import Problem
from counterpoint.run import launch

DIMS = ((8, 3), (), (5, 16, 16), (1,))
BATCH = (5, 9, 0, 3)
OWN = ("dtype", "index", "weighted", "longest")  # of the bags, not of the call
CASES: dict[str, dict[str, Any]] = {
    "sum": {}, "mean": {"mode": "mean"}, "weights": {"weighted": True},
    "int32": {"index": torch.int32, "mode": "mean"}, "fp16": {"dtype": torch.float16},
    "bf16": {"dtype": torch.bfloat16, "weighted": True}, "sparse": {"sparse": True},
    "equal": {"batch": (4,) * 4, "plan": "serial"}, "fused": {"plan": "fused"},
    "empty": {"longest": 0}, "nothing": {"batch": (0,) * 4},
}  # fmt: skip


def everyones(ranks: int, name: str) -> tuple[dict[str, Any], Problem, list[Bags]]:
    """Arguments, p and all ranks' bags of a case."""
    case = dict(CASES[name])
    own = {k: case.pop(k) for k in OWN if k in case}
    dtype = own.get("dtype", torch.float32)
    p = problem_of(DIMS[:ranks], case.get("batch", BATCH)[:ranks], dtype)
    bags = [random_bags(d, p.m, seed=r, **own) for r, d in enumerate(p.tables)]
    case["batch"] = p.rows
    if name == "equal" and () not in p.tables:
        case["batch"] = None
    if () in p.tables:
        case |= {"dims": p.tables, "dtype": dtype_of(p)}
    return case, p, bags


def dtype_of(p: Problem) -> torch.dtype:
    return getattr(torch, p.dtype)


def arguments(bags: Bags) -> dict[str, Any]:
    return {"tables": bags.tables, "indices": bags.indices, "offsets": bags.offsets,
            "per_sample_weights": bags.weights, "include_last_offset": True}  # fmt: skip


def called(bags: Bags, **case: Any) -> torch.Tensor:
    return cp.embedding_bag_all_to_all(**arguments(bags), **case)


@pytest.mark.drawn(3)
@pytest.mark.shows("embedding_bag_all_to_all", "forward", "bf16 fp16 fp32")
@pytest.mark.parametrize(
    ("ranks", "kernels"), [(1, False), (2, False), (3, False), (4, False), (1, True), (3, True)]
)
@on_ranks()
def test_rows_of_all_tables_for_own_bags(rank: int, ranks: int, kernels: bool) -> list[str]:
    """By torch and gloo, and by the kernels, interpreted."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setattr(launch, "INTERPRETED", False)
        for name in CASES:
            found += wrong_rows_of(rank, ranks, name)
    return found


def wrong_rows_of(rank: int, ranks: int, name: str) -> list[str]:
    case, p, everyone = everyones(ranks, name)
    bags = everyone[rank]
    y = called(bags, **case)
    without = cp.embedding_bag_all_to_all(
        bags.tables, bags.indices, bags.offsets[:-1], per_sample_weights=bags.weights, **case
    )
    want = expected(everyone, p, rank, mean=case.get("mode") == "mean")
    bound = 1e-5 + torch.finfo(y.dtype).eps * want.abs()
    if y.shape != want.shape or y.dtype != dtype_of(p):
        return [f"{name}: {y.shape} of {y.dtype}"]
    if not bool(((y - want).abs() <= bound).all()) or not torch.equal(y, without):
        return [f"{name}: off by {(y - want).abs().max()}"]
    return []


@pytest.mark.drawn(3)
@pytest.mark.shows("embedding_bag_all_to_all", "backward", "bf16 fp16 fp32")
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
@on_ranks(1, 2, 3)
def test_gradients_of_tables_and_weights(rank: int, ranks: int, into: bool) -> list[str]:
    """Against those of fp64: of all ranks' outputs, each times its own random numbers."""
    found: list[str] = []
    for name in CASES:
        case, p, everyone = everyones(ranks, name)
        mean = case.get("mode") == "mean"
        for bags in everyone:
            bags.tables = [t.double().requires_grad_() for t in bags.tables]
            if bags.weights is not None:
                bags.weights = bags.weights.double().requires_grad_()
        exact = [
            torch.randn(n, p.n, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(r)).to(dtype_of(p)).double()
            for r, n in enumerate(p.rows)
        ]  # fmt: skip
        for r, dy in enumerate(exact):
            expected(everyone, p, r, mean=mean).backward(dy)
        own = everyone[rank]
        mine = random_bags(
            p.tables[rank], p.m, seed=rank,
            **{k: v for k, v in CASES[name].items() if k in OWN},
        )  # fmt: skip
        leaves = [*mine.tables, *([] if mine.weights is None else [mine.weights])]
        for t in leaves:
            t.requires_grad_()
        out = cp.PooledOutputs(p.n, dtype_of(p), p.rows) if into else None
        y = called(mine, out=out, **case)
        assert y.requires_grad
        y.backward(exact[rank].to(dtype_of(p)))
        wants = [*own.tables, *([] if own.weights is None else [own.weights])]
        for i, (leaf, want) in enumerate(zip(leaves, wants, strict=True)):
            grad = leaf.grad
            assert grad is not None
            if case.get("sparse") and i < len(mine.tables):
                assert grad.is_sparse
                rows = grad._indices()[0]  # autograd forgets that they are coalesced
                assert torch.equal(rows, rows.unique())
                grad = grad.to_dense()
            full = torch.zeros(leaf.shape, dtype=torch.float64) if want.grad is None else want.grad
            bound = 2e-5 + 2 * torch.finfo(grad.dtype).eps * full.abs()
            if not bool(((grad - full).abs() <= bound.double()).all()):
                found.append(f"{name}, {i}: off by {(grad - full).abs().max()}")
    return found


@pytest.mark.parametrize("plan", ["auto", "serial"])
@on_ranks(2)
def test_the_dispatcher(rank: int, ranks: int, plan: str):
    case, p, everyone = everyones(ranks, "weights")
    bags = everyone[rank]
    for t in bags.tables:
        t.requires_grad_()
    assert bags.weights is not None
    bags.weights.requires_grad_()
    y = called(bags, **case)
    dims = [n for each in p.tables for n in (len(each), *each)]
    anchor = torch.empty(0, requires_grad=True)
    arguments = (bags.tables, bags.indices, bags.offsets, bags.weights, anchor, False, True, False,
                 dims, list(p.rows), torch.float32, rank, plan,
                 world().group_name, "", None, [])  # fmt: skip
    op = torch.ops.counterpoint.embedding_bag_all_to_all
    results: dict[str, str] = torch.library.opcheck(op, arguments, raise_exception=True)
    compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
    again = compiled(*arguments)
    again.sum().backward()
    assert all([set(results.values()) == {"SUCCESS"}, torch.equal(again, y),
            all(t.grad is not None for t in bags.tables)])  # fmt: skip


def ready_of(bags: Bags, p: Problem, plan: str, out: Any = None, mode: str = "sum") -> Ready:
    """What such calls run with: no rank meets another one before it does."""
    given = (bags.tables, bags.indices, bags.offsets, bags.weights, mode, True, p.rows, p.tables,
             dtype_of(p), out, plan)  # fmt: skip
    return ready_for(given, world(), asks=False).ready


def by_ready(ready: Ready, bags: Bags, out: Any = None) -> torch.Tensor:
    return ready(bags.tables, bags.indices, bags.offsets, bags.weights, True, {}, out)


def as_nccl(
    calls: Any, got: torch.Tensor, sent: torch.Tensor, sizes: list[int], splits: list[int]
) -> None:
    """An all-to-all that sends nothing and waits for nobody where there is none."""
    rank, works = dist.get_rank(), list[Any]()
    for peer, (to, mine) in enumerate(zip(got.split(sizes), sent.split(splits), strict=True)):
        if peer == rank:
            to.copy_(mine)
            continue
        works += [dist.isend(mine, peer)] if mine.numel() else []
        works += [dist.irecv(to, peer)] if to.numel() else []
    for work in works:
        work.wait()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("into", [False, True], ids=["copied", "out"])
@on_ranks(2, 3)
def test_both_plans_by_turns(rank: int, ranks: int, into: bool):
    """What a GPU runs, interpreted.

    Both plans by turns, a rank late at random: each output holds while it may.

    Of the last rank, which has no tables, nobody gets a row: others hear of it all the same. Bags
    are of several means, so that all settings of the kernels are taken.
    """
    found: list[bool] = []
    draw = random.Random(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library._OnCpu, "all_to_all", as_nccl)  # pyright: ignore[reportPrivateUsage]
        p = problem_of(((8, 3), (20,), ())[:ranks], (3, 0, 4)[-ranks:])
        out = cp.PooledOutputs(p.n, torch.float32, p.rows) if into else None
        first = [random_bags(d, p.m, seed=r) for r, d in enumerate(p.tables)][rank]
        fused, serial = (ready_of(first, p, plan, out) for plan in ("fused", "serial"))
        plans = [fused, serial, serial, fused, fused, serial, fused, serial, serial, fused]
        for call, ready in enumerate(plans):
            longest = (2, 80, 0, 200)[call % 4]
            everyone = [random_bags(d, p.m, seed=9 * call + r, longest=longest)
                        for r, d in enumerate(p.tables)]  # fmt: skip
            if draw.random() < 0.4:
                time.sleep(0.01)
            y = by_ready(ready, everyone[rank], out)
            if draw.random() < 0.4:
                time.sleep(0.01)  # and is read late
            want = expected(everyone, p, rank, mean=False)
            found.append(y.shape == want.shape and torch.allclose(y.double(), want, atol=1e-4))
    assert found == [True] * 10


@on_ranks(2)
def test_a_rank_without_rows_is_waited_for(rank: int, ranks: int, tmp_path: Path):
    """No rank leaves a call into turns before all are in it, though one sends no row and gets none.

    The one that is there has waited for the one that comes late.
    """
    p = problem_of(((8,), ()), (3, 0))
    bags = random_bags(p.tables[rank], 3)
    out = cp.PooledOutputs(p.n, torch.float32, p.rows)
    ready = ready_of(bags, p, "serial", out)
    with pytest.MonkeyPatch.context() as patch:
        calls = library._OnCpu  # pyright: ignore[reportPrivateUsage]
        patch.setattr(calls, "all_to_all", as_nccl)
        waits, meet = tmp_path / "waits", calls.all_reduce

        def waiting(*given: Any, **named: Any) -> None:
            waits.touch()
            meet(*given, **named)

        patch.setattr(calls, "all_reduce", waiting)
        if rank:
            while not waits.exists():
                time.sleep(0.01)
            (tmp_path / "comes").touch()
        by_ready(ready, bags, out)
        has_waited = (tmp_path / "comes").exists()
        waits.touch()  # if it has not, the other one need not either
    assert has_waited


@pytest.mark.shows("embedding_bag_all_to_all", "compiled forward, compiled backward", "fp32")
@on_ranks(2)
def test_it_compiles_into_one_graph(rank: int, ranks: int):
    """As one graph, with its backward; one rank of two has no tables."""
    case, _, everyone = everyones(2, "mean")
    bags = everyone[rank]
    for t in bags.tables:
        t.requires_grad_()

    def both(scale: torch.Tensor) -> torch.Tensor:
        return called(bags, **case) * scale

    y = torch.compile(both, backend="aot_eager", fullgraph=True)(torch.tensor(2.0))
    same = torch.equal(y, 2 * called(bags, **case))
    y.sum().backward()
    text = ""
    try:
        torch.compile(both, backend="aot_eager", fullgraph=True)(case.pop("dims"))
    except Exception as error:
        text = str(error)
    assert same and all(t.grad is not None for t in bags.tables)
    assert "given while" in text


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int) -> list[str]:
    """Beside what tests/test_bad_input.py has."""
    good = random_bags((4, 8), 6, rows=5)
    tables, n = good.tables, good.indices.numel()
    falling, outside = good.offsets.clone(), good.indices.clone()
    falling[3] = n
    outside[0] += 0 if rank else 99
    out = cp.PooledOutputs(24, torch.float32, 6)
    other = cp.PooledOutputs(23, torch.float32, 6)
    none = {"tables": [], "indices": good.indices[:0], "offsets": good.offsets[:1]}
    described = "dims must be of the tables of each of 2 ranks, (4, 8) on rank"
    pairs = ((4, 8), (4, 8))
    cases: list[Refusal] = [
        ({"offsets": good.offsets[:-1]}, "offsets must be a bag for each of 2 tables"),
        ({"batch": (3, 3) if rank else (2, 4)},
         "batch must be equal on all ranks, (2, 4) as on rank 0, got (3, 3) on rank 1"),
        ({"mode": "mean" if rank else "sum"},
         "mode must be equal on all ranks, sum as on rank 0, got mean on rank 1"),
        (none, "tables must be some, or described, got none; pass dims= and dtype= and batch=, an"),
        (none | {"dims": ((), ()), "dtype": torch.float32, "batch": (3, 3)},
         "tables must be some on one rank at least, got none on all"),
        ({"dims": (*pairs, ())}, f"{described} 0"),
        ({"dims": ((4, 8), (4, 7)) if rank == 0 else ((4, 7), (4, 8))},
         "dims must be equal on all ranks, ((4, 8), (4, 7)) as on rank 0, got ((4, 7), (4, 8)) on"),
        ({"tables": [t.half() if rank else t for t in tables]},
         "tables must be equal on all ranks, torch.float32 as on rank 0, got torch.float16 on"),
        ({"offsets": falling}, "offsets must be 0 at first, rising to"),
        ({"indices": outside}, "indices of tables[0] must be 0 to 4, got 0 to 10"),
        ({"out": other}, "out must be 24 columns of torch.float32"),
        ({"out": out if rank else None},
         "out is given must be equal on all ranks, False as on rank 0"),
        ({"out": other if rank else out},
         "out must be equal on all ranks, (24, torch.float32, (3, 3), False) as on rank 0"),
        # wrong on one rank alone, told to all
        ({"dims": ((4, 8), (4, 7)) if rank else pairs}, f"{described} 1, got ((4, 8), (4, 7))"),
        ({"dims": pairs if rank else None},
         "dims must be equal on all ranks, None as on rank 0, got ((4, 8), (4, 8)) on rank 1"),
        ({"dims": (4, 8) if rank else None}, "dims must be columns of each rank's tables, got (4"),
        ({"mode": "max" if rank else "sum"}, "mode must be 'sum' or 'mean', got 'max'"),
        ({"indices": good.indices.float()} if rank else {}, "indices must be int32 or int64"),
        ({"tables": 3} if rank else {}, "tables must be a list of Tensors, got int"),
        ({"plan": "graded"},
         "plan must be auto or one of serial, fused, fused_after_barrier, islands, got 'graded'"),
        ({"plan": "serial" if rank else "fused"},
         "plan must be equal on all ranks, fused as on rank 0, got serial on rank 1"),
    ]  # fmt: skip
    base = arguments(good)
    found = wrongly_refused(cp.embedding_bag_all_to_all, base, cases)
    assert cp.embedding_bag_all_to_all(**base, out=out).shape == (3, 24)
    return found


@on_ranks(2)
def test_mistakes_of_a_first_call_are_told_apart(rank: int, ranks: int) -> list[str]:
    two, one = random_bags((4, 8), 6, rows=5), random_bags((4,), 6, rows=5)
    modules: list[Any] = [torch.nn.EmbeddingBag(5, 4), two.tables[1]]
    half, weights = [t.half() for t in two.tables], torch.ones(len(two.indices)).double()
    ends, begins = (f"pass include_last_offset={last} if" for last in (True, False))
    each = "pass batch= with the bags of each rank, on all ranks"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (two, {"tables": modules},
         "tables must be a list of Tensors, got list of EmbeddingBag, Tensor"),
        (two, {"out": torch.empty(3, 24)},
         "out must be PooledOutputs, got Tensor; make one of them, counterpoint.PooledOutputs("),
        (two, {"per_sample_weights": weights, "tables": half},
         "per_sample_weights must be torch.float16 or torch.float32, ("),
        (two, {"include_last_offset": False}, f"got 13 of them; {ends}"),
        (two, {"offsets": two.offsets[:-1]}, f"got 12 of them; {begins}"),
        (one, {"include_last_offset": False}, f"got 7 bags; {each}; or {ends}"),
        (one, {"offsets": one.offsets[:-1]}, f"got 5 bags; {each}; or {begins}"),
        (one, {"include_last_offset": False, "batch": (2, 4)}, f"7 in all, got (2, 4); {ends}"),
        (one, {"offsets": one.offsets[:-1], "batch": (2, 4)}, f"5 in all, got (2, 4); {begins}"),
        # neither would be right with the other include_last_offset: it is not spoken of
        (two, {"offsets": two.offsets[:-2]}, f"2 equal parts, got 5 bags; {each}"),
        (one, {"offsets": one.offsets[:-3], "batch": (2, 4)}, "3 in all, got (2, 4)"),
    ]  # fmt: skip
    found: list[str] = []
    for bags, given, want in cases:
        found += wrongly_refused(cp.embedding_bag_all_to_all, arguments(bags), [(given, want)])
    for bags, given, _ in cases[-2:]:
        with pytest.raises(cp.InputError) as error:
            cp.embedding_bag_all_to_all(**arguments(bags) | given)
        assert "include_last_offset" not in str(error.value)
    return found


@on_ranks(2)
def test_a_rank_freezes_its_tables(rank: int, ranks: int):
    """One rank freezes its tables: both take part in the backward, whatever they train."""
    everyone = [random_bags((4, 8), 6, seed=r) for r in range(ranks)]
    bags = everyone[rank]
    if rank == 0:
        for t in bags.tables:
            t.requires_grad_()
    y = called(bags, dims=((4, 8),) * ranks)
    y.sum().backward()
    with torch.no_grad():
        plain = called(bags, dims=((4, 8),) * ranks)
    assert all([y.requires_grad, not plain.requires_grad,
            all((t.grad is not None) == (rank == 0) for t in bags.tables)])  # fmt: skip


@on_ranks(2)
def test_outputs_are_used_in_turn(rank: int, ranks: int):
    """What a call returned holds during the next one, and is another turn's memory then."""
    out = cp.PooledOutputs(24, torch.float32, 6)
    bags = [random_bags((4, 8), 6, seed=s) for s in range(3)]
    want = [called(b) for b in bags]
    first, second = called(bags[0], out=out), called(bags[1], out=out)
    assert torch.equal(first, want[0]) and torch.equal(second, want[1])
    third = called(bags[2], out=out)
    dist.barrier()
    assert torch.equal(third, want[2]) and third.data_ptr() == first.data_ptr()
    assert torch.equal(first, third)


@pytest.mark.parametrize("turns", [2, 3])
@on_ranks(2)
def test_what_is_saved_of_an_output(rank: int, ranks: int, turns: int):
    """A backward may come as long as its output holds; later it is refused, not wrong."""
    out = cp.PooledOutputs(24, torch.float32, 6, turns=turns)
    bags = [random_bags((4, 8), 6, seed=9 * rank + s) for s in range(4)]
    table = bags[0].tables[1].requires_grad_()
    (called(bags[0]) ** 2).sum().backward()
    want = table.grad
    assert want is not None
    for later in range(turns):
        table.grad = None
        squares = (called(bags[0], out=out) ** 2).sum()
        for other in range(later):
            called(bags[1 + other], out=out)
        if later < turns - 1:
            squares.backward()
            assert table.grad is not None and torch.equal(table.grad, want)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                squares.backward()


@on_ranks(2)
def test_outputs_in_a_compiled_model(rank: int, ranks: int):
    """The call runs between two graphs, in turns, and gradients come through it."""
    out = cp.PooledOutputs(24, torch.float32, 6)
    table = random_bags((4, 8), 6, seed=rank).tables[1].requires_grad_()
    scale = torch.tensor(2.0)

    def both(indices: torch.Tensor, offsets: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y = cp.embedding_bag_all_to_all(
            [first, table], indices, offsets, include_last_offset=True, out=out
        )
        return (y * scale).square()

    # torch's compiler looks for .grad of what comes out of the call
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    compiled = torch.compile(both, backend="aot_eager")
    several = [random_bags((4, 8), 6, seed=9 * rank + seed) for seed in range(4)]
    for bags in several:
        first = bags.tables[0].requires_grad_()
        found: list[tuple[torch.Tensor, ...]] = []
        for call in (both, compiled):
            table.grad = first.grad = None
            squares = call(bags.indices % 17, bags.offsets, first)
            squares.sum().backward()
            assert table.grad is not None and first.grad is not None
            found.append((squares.detach().clone(), table.grad, first.grad))
        assert all(map(torch.equal, *found)) and bool(found[0][1].any())

    def afresh(*given: Any) -> torch.Tensor:
        return both(*given)

    whole = torch.compile(afresh, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="pooled_outputs_take_turns"):
        whole(several[0].indices, several[0].offsets, several[0].tables[0])


@on_ranks(2)
def test_outputs_made_under_inference_mode(rank: int, ranks: int):
    """Outputs that were made under inference_mode serve training as well."""
    with torch.inference_mode():
        out = cp.PooledOutputs(24, torch.float32, 6)
    bags = random_bags((4, 8), 6, seed=rank)
    with torch.inference_mode():
        want = called(bags, out=out).clone()
    for t in bags.tables:
        t.requires_grad_()
    y = called(bags, out=out)
    y.sum().backward()
    grads = [t.grad for t in bags.tables]
    assert all([y.requires_grad, torch.equal(y, want),
            all(g is not None and bool(g.any()) for g in grads)])  # fmt: skip


@on_ranks(1)
def test_a_capture_makes_nothing(rank: int, ranks: int):
    """A call that a graph would record makes nothing that an eager one would have to find."""
    p = problem_of(((8, 3),), (4,))
    short, long = (random_bags((8, 3), 4, longest=n) for n in (1, 200))
    long.tables = short.tables
    placed: dict[object, Any] = {}
    ready = ready_of(short, p, "auto")

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("made in a capture")

    with pytest.MonkeyPatch.context() as patch:
        for capturing, bags in ((False, short), (True, long)):
            if capturing:
                patch.setattr(torch, "ones", refused)
                patch.setattr(torch, "tensor", refused)
                patch.setattr(Workspace, "refuse_growth", refused)
            y = ready(bags.tables, bags.indices, bags.offsets, None, True, placed)
            patch.undo()
            want = expected([bags], p, 0, mean=False)
            assert torch.allclose(y.double(), want, atol=1e-4)
        patch.setattr(Workspace, "refuse_growth", refused)
        with pytest.raises(AssertionError, match="made in a capture"):
            ready_of(short, p, "auto", mode="mean")


@on_ranks(2)
def test_plans_are_texts_objects_and_files(rank: int, ranks: int):
    """Text, a Plan of other indices, its file; one that is of other tables is refused."""
    p = problem_of(((4, 8), (4, 8)), (3, 3), indices=(7, 9))
    bags = random_bags((4, 8), 6, seed=rank)
    want = called(bags, dims=p.tables)
    found: list[bool] = []
    for spec in ("serial", "fused"):
        plan = cp.build(p, spec)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "plan.json")
            path.write_text(plan.to_json())
            ys = [
                called(bags, dims=p.tables, plan=given) for given in (spec, plan, path, str(path))
            ]
        found.append(all(torch.equal(y, want) for y in ys))
    try:
        called(bags, dims=p.tables, plan=cp.build(problem_of(((4, 9), (4, 8)), (3, 3)), "fused"))
        found.append(False)
    except cp.InputError as error:
        found.append("plan must be for" in str(error))
    _, timeline = cp.profile(lambda: called(bags, dims=p.tables, plan="serial"))
    found.append({span.label for span in timeline.spans} == {"lookup", "exchange"})
    tuned = cp.tune(problem_of(((4, 8), (4,)), (3, 3), indices=(20, 5)), rounds=1)
    found.append({c.spec for c in tuned.table} == {"serial", "fused"})
    assert found == [True] * 5


def host_calls(fn: Any) -> tuple[int, int]:
    """How many functions of ours a call runs, and of how many modules.

    Kernels are left out, and what launches one that is interpreted, and the executor of CPU ranks,
    which stands for a GPU's.
    """
    beside = ("kernels/", "embedding/kernel_", "run/execute_cpu", "group/pads_cpu",
              "run/launch.py _arguments", "group/library", "group/notice_board",
              "group/ranks")  # fmt: skip
    notes = "group/notice_board.py note"
    found = [c.split()[0] for c in own_calls(fn) if c == notes or not c.startswith(beside)]
    return len(found), len(set(found))


class Remembered(dict[Any, Any]):
    """What a GPU's workspace knows of each call: CPU ranks compare each one."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known

    def get(self, key: Any, default: Any = None) -> Known:
        hash(key)
        return self.known


def counted(rank: int, ranks: int, tables: int, plan: str) -> tuple[int, int]:
    """Of a warm call, of which each rank knows the columns of all."""
    p = problem_of(((4,) * tables,) * ranks, (3,) * ranks)
    bags = random_bags(p.tables[rank], p.m, longest=1, seed=rank)
    ready, workspace = ready_of(bags, p, plan), workspace_of(world(), torch.device("cpu"))
    workspace.known = Remembered(Known(ready, {}))
    call = partial(called, bags, dims=p.tables, plan=plan, group=world())
    with torch.no_grad():
        call()
        return host_calls(call)


@pytest.mark.parametrize("plan", ["serial", "fused"])
def test_a_warm_call_runs_few_functions(pool: RankPool, plan: str):
    """As many with any number of tables; on GPUs run, follow and, of fused, in_turn are more."""
    few, many = (pool.run(counted, 2, n, plan, timeout_s=60) for n in (2, 7))
    assert few == many
    for calls, modules in few:
        executor = 2 + (plan == "fused")
        assert calls + executor <= 12 and modules + executor <= 8
