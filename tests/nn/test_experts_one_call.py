"""A known call of ExpertParallelMLP is one call, with the bits of its operators."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from drawing import Draw
from expert_layer_bodies import pair
from island_bodies import on_islands
from on_ranks import on_ranks
from rank_bodies import Watching, by_reference
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.experts import layer as expert_layer
from counterpoint.group.workspace import workspace_of
from counterpoint.nn import expert_ways
from counterpoint.run import activated

FEATURES, HIDDEN, LOCAL, TOP, DTYPE = 16, 8, 3, 2, torch.bfloat16


@contextmanager
def ways() -> Iterator[list[str]]:
    """How each call of a layer goes."""
    found: list[str] = []
    both = {"one call": (expert_layer, "through"),
            "operators": (expert_ways, "_by_operators")}  # fmt: skip

    def noted(way: str, call: Any) -> Any:
        def run(*given: Any) -> Any:
            found.append(way)
            return call(*given)

        return run

    with pytest.MonkeyPatch.context() as patch, by_reference():
        for way, (place, name) in both.items():
            patch.setattr(place, name, noted(way, getattr(place, name)))
        yield found


def drawn(rank: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """x, logits, experts, weights and the gradient of the result, of one rank."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    every = LOCAL * torch.distributed.get_world_size()
    x, dy = (torch.randn(tokens, FEATURES, generator=draw).to(DTYPE) for _ in range(2))
    logits = torch.randn(tokens, every, generator=draw)
    weights, experts = logits.softmax(-1).topk(TOP)
    return {"x": x, "dy": dy, "logits": logits, "experts": experts, "weights": weights}


def step(layer: Any, given: dict[str, Tensor], by: str, needs: tuple[bool, ...]) -> list[Any]:
    """The result, dropped rows, and gradients of x, the route and both parameters, as needed."""
    of_route = "logits" if by == "logits" else "weights"
    route = given[of_route] if by != "half weights" else given["weights"].to(DTYPE)
    leaves = [given["x"], route, layer.gate_up, layer.down]
    leaves = [
        t.detach().clone().requires_grad_(need) for t, need in zip(leaves, needs, strict=True)
    ]
    x, route, gate_up, down = leaves
    named = {"logits": route, "top_k": TOP} if by == "logits" else {
        "experts": given["experts"], "weights": route}  # fmt: skip
    parameters = {"gate_up": gate_up, "down": down}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in parameters.items():
            patch.setitem(layer._parameters, name, torch.nn.Parameter(value, value.requires_grad))
        y = layer(x, **named)
        wanted = [t for t in (x, route, layer.gate_up, layer.down) if t.requires_grad]
        grads = torch.autograd.grad(y, wanted, given["dy"].to(y.dtype)) if wanted else ()
    return [y.detach(), layer.dropped, *grads]


def same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


NEEDS = list(product((False, True), repeat=4))  # x, route, gate_up, down
LAYERS: dict[str, dict[str, Any]] = {
    "room": {}, "drops": {"max_rows": 9, "capacity": "drop"},
    "max_rows": {"max_rows": 200, "plan": "routed"}, "fused": {"plan": "fused"},
}  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("by", ["logits", "weights", "half weights"])
@pytest.mark.parametrize("name", list(LAYERS))
@on_ranks(2, 4)
def test_a_known_call_has_the_bits_of_its_operators(
    rank: int, ranks: int, name: str, by: str, draw: Draw
) -> list[str]:
    """Of every subset of gradients, and of uneven tokens where they may be."""
    found: list[str] = []
    tokens = 7 if "max_rows" in LAYERS[name] else (7, 3, 0, 5)[rank]
    with on_islands(rank, ranks), ways() as went:
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, **LAYERS[name])
        for needs in (some := draw(NEEDS, 6)):
            given = drawn(rank, tokens)
            with Watching():
                want = step(layer, given, by, needs)
            first, known = (step(layer, given, by, needs) for _ in range(2))
            found += [f"{needs}: other bits"] * (not same(want, first) or not same(want, known))
    if went != ["operators", "one call", "one call"] * len(some):
        found.append(f"went by {went}")
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("hidden", [24, 136])
@on_ranks(2)
def test_gate_and_up_are_activated_where_they_are_multiplied(
    rank: int, ranks: int, hidden: int, draw: Draw
) -> list[str]:
    """By the kernel, interpreted: the bits of two kernels, with and without gradients."""
    layer, _ = pair(FEATURES, hidden, ranks * LOCAL, dtype=torch.float16, plan="fused")
    given = {name: t.half() if t.dtype == DTYPE else t
             for name, t in drawn(rank, (7, 3)[rank]).items()}  # fmt: skip
    wrong: list[str] = []
    for needs in draw((NEEDS[0], NEEDS[-1]), 1):
        with Watching():
            want = step(layer, given, "logits", needs)
        got = [step(layer, given, "logits", needs) for _ in range(2)]
        wrong += [f"{needs}: other bits"] * (not all(same(want, each) for each in got))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(activated, "into", lambda *_: wrong.append("activated again"))
        layer(given["x"], logits=given["logits"], top_k=TOP)
    return wrong


@on_ranks(2, 3)
def test_ranks_that_are_watched_meet_those_that_are_not(rank: int, ranks: int) -> list[str]:
    """Each in turn goes by the operators, forward and backward, where the others do not."""
    with on_islands(rank, ranks), ways() as went:
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, plan="auto")
        given, needs = drawn(rank, 5 + rank), NEEDS[-1]
        want = step(layer, given, "logits", needs)
        wrong: list[str] = []
        for i in range(2 * ranks):
            with Watching() if i % ranks == rank else nullcontext():
                wrong += [f"step {i}"] * (not same(want, step(layer, given, "logits", needs)))
    if ranks == 2 and went != ["one call", *["operators", "one call"][:: 1 - 2 * rank] * 2]:
        wrong.append(f"went by {went}")
    return wrong


@on_ranks(2)
def test_graphs_that_are_kept_recomputed_or_differentiated_twice(rank: int, ranks: int):
    with on_islands(rank, ranks), ways() as went:
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 6)
        want = step(layer, given, "logits", NEEDS[-1])
        leaves = [given["x"].requires_grad_(), given["logits"].requires_grad_()]
        leaves += [layer.gate_up, layer.down]

        def call() -> Any:
            return layer(leaves[0], logits=leaves[1], top_k=TOP)

        y = call()
        for _ in range(2):
            found = torch.autograd.grad(y, leaves, given["dy"], retain_graph=True)
            assert same(want[2:], list(found))
        y: Any = checkpoint(call, use_reentrant=False)
        assert same(want[2:], list(torch.autograd.grad(y, leaves, given["dy"])))
        dx, *_ = torch.autograd.grad(call(), leaves, given["dy"], create_graph=True)
        assert torch.equal(dx.detach(), want[2]) and dx.requires_grad
        with pytest.raises(cp.UnsupportedError, match="double backward"):
            torch.autograd.grad(dx.float().sum(), leaves)
        assert {*went} == {"one call"}


@on_ranks(2)
def test_what_is_changed_is_looked_at_again(rank: int, ranks: int):
    """Options, parameters and tensors of a layer that is known."""
    with on_islands(rank, ranks), ways() as went, torch.no_grad():
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 6)
        x, logits = given["x"], given["logits"]
        want = layer(x, logits=logits, top_k=TOP)
        assert torch.equal(layer(x, logits=logits, top_k=TOP), want)
        assert went == ["one call"] * 2
        for wrong in ({"x": x[:, 1:]}, {"x": x.float()}, {"logits": logits[1:]}, {"top_k": 99},
                      {"top_k": float(TOP)}, {"top_k": [TOP]}, {"renormalize": 1}):  # fmt: skip
            taken: dict[str, Any] = {"x": x, "logits": logits, "top_k": TOP} | wrong
            with pytest.raises(cp.InputError):
                layer(**taken)
        assert torch.equal(layer(x, logits=logits, top_k=TOP), want)
        columns = x.t().contiguous().t()
        for _ in range(2):
            assert torch.equal(layer(columns, logits=logits, top_k=TOP), want)
        layer.down.mul_(2)
        assert torch.equal(layer(x, logits=logits, top_k=TOP), 2 * want)
        layer.down = torch.nn.Parameter((layer.down / 2).mT.contiguous().mT)
        for _ in range(2):
            assert torch.equal(layer(x, logits=logits, top_k=TOP), want)
        cp.release(torch.distributed.group.WORLD)  # memory, and all that is known of it
        for _ in range(2):
            assert torch.equal(layer(x, logits=logits, top_k=TOP), want)
        layer.max_rows, layer.capacity = 1, "drop"
        for _ in range(2):
            layer(x, logits=logits, top_k=TOP)
            assert layer.dropped is not None and int(layer.dropped.sum()) == 6 * ranks * TOP - ranks


class Unused(torch.autograd.Function):
    """A result of which one rank has no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, used: bool) -> Tensor:
        ctx.used = used
        return y * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.used else None, None


@on_ranks(2)
def test_each_rank_makes_the_same_calls_in_a_backward(rank: int, ranks: int):
    """One rank goes by the operators: of some gradients alone, of none, and in checkpoints."""
    with on_islands(rank, ranks), ways():
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 6)
        x, logits = given["x"].requires_grad_(), given["logits"].requires_grad_()
        leaves = {"x": x, "logits": logits, "gate_up": layer.gate_up, "down": layer.down}

        def call() -> Any:
            return layer(x, logits=logits, top_k=TOP)

        wants = dict(zip(leaves, torch.autograd.grad(call(), list(leaves.values()), given["dy"]),
                         strict=True))  # fmt: skip
        for watched in (0, 1, None):
            for name, leaf in leaves.items():
                with Watching() if rank == watched else nullcontext():
                    y = call()
                assert torch.equal(torch.autograd.grad(y, leaf, given["dy"])[0], wants[name])
            with Watching() if rank == watched else nullcontext():
                y = Unused.apply(call(), rank == 0)
            (dx,) = torch.autograd.grad(y, x, given["dy"], allow_unused=True)
            assert dx.shape == x.shape
            with Watching() if rank == watched else nullcontext():
                y: Any = checkpoint(call, use_reentrant=False)
            if watched is None:  # else its recomputation saves what the other way does
                dx, *_ = torch.autograd.grad(y, list(leaves.values()), given["dy"])
                assert torch.equal(dx, wants["x"])


@on_ranks(2)
def test_what_no_gradient_needs_is_not_kept(rank: int, ranks: int):
    """Routes may be of inference mode, or be written to; and own gradients hold no padding."""
    with on_islands(rank, ranks), ways():
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 3 if rank == 0 else 30)
        x = given["x"].requires_grad_()
        for _ in range(2):
            with torch.inference_mode():
                experts, weights = given["experts"].clone(), given["weights"].clone()
            y = layer(x, experts, weights)
            (dx,) = torch.autograd.grad(y, x, given["dy"])
            assert dx.untyped_storage().nbytes() == dx.nbytes
            experts, weights = given["experts"].clone(), given["weights"].clone()
            y = layer(x, experts, weights)
            experts.zero_()
            weights.zero_()
            assert torch.equal(torch.autograd.grad(y, x, given["dy"])[0], dx)


@on_ranks(2)
def test_a_backward_behind_memory_that_has_moved(rank: int, ranks: int):
    """One rank by the operators, which meet: the other has not kept what points there."""
    with on_islands(rank, ranks), ways():
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 6)
        x = given["x"].requires_grad_()
        for moves in (False, False, True):
            with Watching() if moves and rank == 0 else nullcontext():
                y = layer(x, logits=given["logits"], top_k=TOP)
            if moves:
                rows = torch.ones(1 << 12, 256)
                cp.all_gather_matmul(rows, torch.ones(256, 64), plan="shard_p2p")
                workspace_of(layer.group, x.device).drop_code()
            (dx,) = torch.autograd.grad(y, x, given["dy"])
            want = dx if not moves else want  # noqa: F821
            assert torch.equal(dx, want)


@on_ranks(2)
def test_a_layer_is_copied_and_pickled_without_what_it_knows(rank: int, ranks: int):
    with on_islands(rank, ranks), ways() as went, torch.no_grad():
        layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        given = drawn(rank, 6)
        want = layer(given["x"], logits=given["logits"], top_k=TOP)
        state = layer.__getstate__()
        assert not state.pop("_known")  # as those were that older versions have written
        again: Any = layer.__new__(type(layer))
        again.__setstate__(state)
        for each in (again, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(each(given["x"], logits=given["logits"], top_k=TOP), want)
        assert went == ["one call"] * 4


@contextmanager
def launches() -> Iterator[list[bool]]:
    """Whether each forward was launched at once."""
    found: list[bool] = []
    at_once = expert_layer.at_once

    def noted(*given: Any) -> Any:
        made = at_once(*given)
        found.append(made is not None)
        return made

    with pytest.MonkeyPatch.context() as patch, by_reference():
        patch.setattr(expert_layer, "at_once", noted)
        yield found


def warmed(rank: int, ranks: int, **options: Any) -> tuple[list[Tensor], Any, Tensor]:
    """Leaves, a call on them, and the gradient of its result; memory has grown before."""
    layer, _ = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, **options)
    given = drawn(rank, 6)
    experts = torch.tensor([[1, 0]] * 3 + [[4, 3]] * 3)
    leaves = [given["x"].requires_grad_(), given["weights"].requires_grad_(),
              layer.gate_up, layer.down]  # fmt: skip

    def call() -> Any:
        return layer(leaves[0], experts, leaves[1])

    for _ in range(2):
        with Watching():
            torch.autograd.grad(call(), leaves, given["dy"])
        with torch.no_grad():
            call()
    return leaves, call, given["dy"]


@pytest.mark.parametrize("options", [
    {"plan": "fused"}, {"plan": "routed", "max_rows": 12}, {"max_rows": 12, "capacity": "drop"}],
    ids=["room", "little room", "drops"])  # fmt: skip
@pytest.mark.parametrize("between", ["nothing", "memory moves", "a profiler"])
@on_ranks(2)
def test_a_checkpoint_recomputes_what_was_kept(
    rank: int, ranks: int, between: str, options: dict[str, Any]
):
    """Though one of both goes at once and the other one call by call."""
    with on_islands(rank, ranks), launches() as at_once:
        leaves, call, dy = warmed(rank, ranks, **options)
        with Watching():
            want = torch.autograd.grad(call(), leaves, dy)
        if between != "nothing":  # so the forward is known
            for _ in range(2):
                torch.autograd.grad(call(), leaves, dy)
        at_once.clear()
        y: Any = checkpoint(call, use_reentrant=False)
        if between == "memory moves":
            workspace_of(torch.distributed.group.WORLD, leaves[0].device).drop_code()
        with torch.autograd.profiler.profile() if between == "a profiler" else nullcontext():
            got = torch.autograd.grad(y, leaves, dy)
        assert same(list(want), list(got))
        assert same(list(want), list(torch.autograd.grad(call(), leaves, dy)))
        drops, known = "capacity" in options, between != "nothing"
        assert at_once[:2] == [known and not drops, not known and not drops], at_once


@on_ranks(2)
def test_modes_and_hooks_around_what_is_kept(rank: int, ranks: int):
    """Inference first; tensors that are kept elsewhere; results that are changed."""
    with on_islands(rank, ranks), launches() as at_once:
        leaves, call, dy = warmed(rank, ranks, plan="fused")
        with torch.inference_mode():
            first = [call() for _ in range(2)]
        want = torch.autograd.grad(call(), leaves, dy)
        assert torch.equal(first[1], call().detach()) and at_once[-1]
        for hook in (save_on_cpu(), saved_tensors_hooks(torch.clone, torch.clone)):
            with hook:
                y = call()
            assert same(list(want), list(torch.autograd.grad(y, leaves, dy)))
        y, other = call(), call()
        y.mul_(2)
        for result, of in ((y, dy / 2), (other, dy)):
            assert same(list(want), list(torch.autograd.grad(result, leaves, of)))


@on_ranks(2)
def test_weights_that_are_stored_by_rows(rank: int, ranks: int):
    """Gate and up are then multiplied, and activated behind it, by kernels that are interpreted."""
    layer, _ = pair(FEATURES, 16, ranks * LOCAL, dtype=torch.float16, plan="fused")
    layer.gate_up = torch.nn.Parameter(layer.gate_up.detach().mT.contiguous().mT)
    given = drawn(rank, 5)
    x, logits = given["x"].half(), given["logits"]
    with torch.no_grad():
        with Watching():
            want = layer(x, logits=logits, top_k=TOP)
        for _ in range(3):
            assert torch.equal(layer(x, logits=logits, top_k=TOP), want)
