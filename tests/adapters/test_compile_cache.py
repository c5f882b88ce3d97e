"""Graphs that torch takes from its cache: never another rank's, nor of another number of ranks."""

import runpy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from compiled import SEAM, kept_in, overlap_pass, quick, sequence_parallel, step
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from rankpool import RankPool
from torch import Tensor, nn
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import counterpoint as cp
from counterpoint.adapters.compile import LAST
from counterpoint.adapters.explain import Report
from counterpoint.adapters.graph import retold
from counterpoint.adapters.graph.depends_on import facts
from counterpoint.errors import CounterpointWarning, InputError

K, N = 6, 12


def functional(name: str) -> Any:
    """One of torch's, whose names end otherwise before torch 2.13."""
    return getattr(collectives, f"{name}_single", None) or getattr(collectives, f"{name}_tensor")


all_gathered, scattered = functional("all_gather"), functional("reduce_scatter")


def mean(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    return collectives.all_reduce(x @ w, "avg", group)


def mean_of_rows(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    return scattered(x @ w, "avg", 0, group)


def own_columns(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The bias is summed by hand: each rank adds its share of it."""
    shared = collectives.all_reduce(b, "sum", group)
    y = torch.addmm(shared / group.size(), x, w)
    return scattered(y, "sum", 1, group)


def gathered(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gathered(x, 0, group) @ w


Case = Callable[..., Tensor]
CASES = mean, mean_of_rows, own_columns, gathered


def compiled(
    rank: int, ranks: int, folder: str, swap: bool, cases: tuple[Case, ...]
) -> tuple[list[str], int]:
    """What is wrong with results, and how often torch had their graphs."""
    group, wrong = world(), list[str]()
    own, shared = (torch.Generator().manual_seed(seed) for seed in (rank + 1, 99))
    x, w = torch.randn(N, K, generator=own), torch.randn(K, N, generator=own)
    b = torch.randn(N, generator=shared)
    # what a rank has compiled lies where another one looks for it
    place = f"{folder}/{(rank + 1) % ranks if swap else rank}"
    with torch.no_grad(), by_reference(), kept_in(place) as hits:
        for case in cases:
            call = torch.compile(partial(case, group=group), options=cp.compile_options())
            y, want = call(x, w, b) + 0, case(x, w, b, group) + 0
            report = cp.explain(call)
            if not torch.allclose(y, want, atol=1e-5) or not report.matched:
                wrong.append(f"{case.__name__}: {y[0]}, not {want[0]}: {report}")
        return wrong, hits()


def test_one_cache_for_2_ranks_and_3(pool: RankPool, tmp_path: Path, thorough: bool):
    """And for ranks that find what other ranks have compiled; the same ranks find their own."""
    warm = False
    for ranks, swap in ((2, False), (3, False), (2, False), (2, True)):
        cases = CASES if thorough else CASES[:1]
        found = pool.run(compiled, ranks, str(tmp_path), swap, cases)
        assert not any(wrong for wrong, _ in found), found
        assert all(bool(hits) == (warm and not swap) for _, hits in found), (ranks, swap, found)
        warm = ranks == 3


def mlp(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    layers = nn.Sequential()
    layers.add_module("up", nn.Linear(16, 24))
    layers.add_module("act", nn.ReLU())
    layers.add_module("down", nn.Linear(24, 16))
    return sequence_parallel(layers, "down", dtype, (2, 12, 16))


def trained(rank: int, ranks: int, folder: str, train: bool, autograd: bool) -> Any:
    """Results and gradients of a model as they are and compiled, hits, and what was done."""
    found: list[list[Tensor]] = []
    with (
        by_reference(), kept_in(f"{folder}/{rank}") as hits,
        torch._functorch.config.patch(enable_autograd_cache=autograd),  # type: ignore[attr-defined]
        torch.set_grad_enabled(train),
    ):  # fmt: skip
        for wants_compiled in (False, True):
            model, x = mlp(torch.float32)
            leaves = [x.requires_grad_(), *model.parameters()] if train else []
            call: Any = model
            if wants_compiled:
                call = torch.compile(model, options=cp.compile_options())
            found.append(step(call, x, leaves))
        torch.testing.assert_close(*found)
        return hits(), cp.explain(call).to_json()


@pytest.mark.parametrize(("train", "autograd"), [
    pytest.param(True, True, marks=pytest.mark.apart("make test-all")),
    pytest.param(True, False, marks=pytest.mark.apart("make test-all")), (False, True),
])  # fmt: skip
def test_what_was_done_is_known_of_a_graph_from_the_cache(
    pool: RankPool, tmp_path: Path, train: bool, autograd: bool
):
    """By torch's cache of both graphs, and by that of each."""
    cold = pool.run(trained, 2, str(tmp_path), train, autograd)
    warm = pool.run(trained, 2, str(tmp_path), train, autograd)
    other = pool.run(trained, 3, str(tmp_path), train, autograd)
    for (none, first), (hits, again), (_, more) in zip(cold, warm, other, strict=False):
        assert not none and hits
        assert again == first
        report, with_3 = Report.from_json(again), Report.from_json(more)
        assert report.to_json() == first
        assert report.matched == len(report.found) == len(with_3.found) == (4 if train else 2)
        assert {one.ranks for one in with_3.found} == {3}


def is_said(rank: int, ranks: int, folder: str) -> tuple[int, list[str]]:
    group, x = world(), torch.ones(2, 2)
    with kept_in(f"{folder}/{rank}") as hits, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        largest = torch.compile(
            lambda x: collectives.all_reduce(x @ x, "max", group), options=cp.compile_options()
        )
        largest(x)
        return hits(), [str(w.message) for w in caught if w.category is CounterpointWarning]


def test_that_nothing_is_replaced_is_said_of_a_graph_from_the_cache(pool: RankPool, tmp_path: Path):
    cold, warm = (pool.run(is_said, 2, str(tmp_path)) for _ in range(2))
    for (none, first), (hits, again) in zip(cold, warm, strict=True):
        assert not none and hits
        assert again == first and len(first) == 1 and "none of 1 collectives" in first[0]


@on_ranks(2)
def test_what_a_graph_depends_on(rank: int, world_size: int):
    """Each of it changes the key."""
    keys = [overlap_pass().uuid(), overlap_pass(merge_reductions=True).uuid()]
    dist.new_group([0, 1])
    keys.append(overlap_pass().uuid())
    cp.matmul_all_reduce(torch.ones(2, 2), torch.ones(2, 2))  # its islands are known then
    keys.append(overlap_pass().uuid())
    found = facts()
    assert found is not None and len({str(key) for key in keys}) == len(keys)
    group: list[Any] = [None, None]
    dist.all_gather_object(group, str(found))
    assert group[0] != group[1]


class Own(CustomGraphPass):
    """A pass of a user's."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: Any) -> None:
        self.ran.append(self.name)

    def uuid(self) -> Any:
        return self.name


@on_ranks(2)
def test_passes_of_a_users_own_run_before(rank: int, world_size: int):
    """One, or a list of them; ours stands in for none of them in the key."""
    ran: list[str] = []
    a, b, c = (Own(name, ran) for name in "abc")
    x, w, bias, group = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4), world()
    with torch.no_grad(), by_reference(), fresh_cache():
        for own in ([a, b], (a, b), a):
            ran.clear()
            options = cp.compile_options({SEAM: own, LAST: c})
            torch.compile(partial(mean, group=group), options=options)(x, w, bias)
            assert ran == ([*"abc"] if own is not a else [*"ac"])
    keys = {str(cp.compile_options({SEAM: own})[SEAM].uuid()) for own in ([a, b], [b, a], a, None)}
    assert len(keys) == 4
    assert cp.compile_options({SEAM: [a, print]})[SEAM].uuid() is None
    assert cp.compile_options({LAST: [print]})[LAST].uuid() is None
    with pytest.raises(InputError, match=f"{SEAM} must be a pass that can be called, got 3"):
        cp.compile_options({SEAM: [a, 3]})


@pytest.mark.parametrize("older", [False, True])
def test_passes_of_a_users_own_are_told_of_inference_where_they_ask(older: bool):
    """Torch 2.11 knows no such passes: none of that torch's may be told."""
    told: list[object] = []

    class Asks(getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)):  # type: ignore[misc]
        def __call__(self, graph: Any, is_inference: bool = False) -> None:
            told.append(is_inference)

        def uuid(self) -> Any:
            return "asks"

    with pytest.MonkeyPatch.context() as patch:
        if older:
            patch.delattr(custom_graph_pass, "CustomInferenceAwareGraphPass", raising=False)
        module = runpy.run_path(str(retold.__file__))
    knows = module["InferenceAware"] is not None
    assert knows is (not older and hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"))
    last = module["Retold"](overlap_pass(), [Own("own", []), Asks()])
    assert isinstance(last, CustomGraphPass)
    last(torch.fx.Graph(), **({"is_inference": True} if knows else {}))
    assert told == [knows]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@on_ranks(3)
def test_a_graph_of_a_group_that_has_another_size_by_now(rank: int, world_size: int, case: Case):
    """It is refused on all ranks, and never computes."""
    x, w, b = torch.ones(N, K), torch.ones(K, N), torch.ones(N)
    pair: Any = dist.new_group([0, 1])
    if rank < 2:
        with torch.no_grad(), by_reference(), quick(overlap_pass()) as backend:
            call = torch.compile(partial(case, group=pair), backend=backend)
            call(x, w, b)
            with pytest.MonkeyPatch.context() as patch:  # the name is by now that of all ranks
                patch.setattr("counterpoint.group.ranks.group_of", lambda _: world())
                with pytest.raises(InputError, match=r"group_size must be 3, .* got 2; call"):
                    call(x, w, b)


def called(
    rank: int, ranks: int, folder: str, swap: bool, names: list[str]
) -> tuple[list[str], int]:
    """As `compiled`, of operators that a model calls itself: their sizes are those of any rank."""
    own = torch.Generator().manual_seed(rank)
    x = torch.randn(N, K, generator=own, requires_grad=True)
    w = torch.randn(K, N, generator=own, requires_grad=True)
    table = torch.randn(5, 4, generator=own, requires_grad=True)
    bags = torch.arange(2 * ranks) % 5
    at = torch.randn(2, 4 * ranks, generator=own)

    def gathers() -> Tensor:
        return (cp.all_gather_matmul(x, w) ** 2).sum()

    def scatters() -> Tensor:
        return (cp.matmul_reduce_scatter(x, w) ** 2).sum()

    def pools() -> Tensor:
        y = cp.embedding_bag_all_to_all(
            [table], bags, torch.arange(2 * ranks), dims=[[4]] * ranks, batch=[2] * ranks
        )
        return (y * at).sum()

    wrong: list[str] = []
    place = f"{folder}/{(rank + 1) % ranks if swap else rank}"
    with by_reference(), kept_in(place) as hits:
        for call, leaves in ((gathers, (x, w)), (scatters, (x, w)), (pools, (table,))):
            if call.__name__ not in names:
                continue
            want = torch.autograd.grad(call(), leaves)
            got = torch.autograd.grad(torch.compile(call)(), leaves)
            wrong += [f"{call.__name__}: {a}, not {b}" for a, b in zip(got, want, strict=True)
                      if not torch.allclose(a, b, atol=1e-4)]  # fmt: skip
        return wrong, hits()


def test_operators_in_graphs_that_another_rank_compiled(pool: RankPool, tmp_path: Path, draw: Draw):
    names = draw(["gathers", "scatters", "pools"], 1)
    for swap in (False, True):
        found = pool.run(called, 2, str(tmp_path), swap, names)
        assert not any(wrong for wrong, _ in found), found
        assert all(bool(hits) == swap for _, hits in found), found
