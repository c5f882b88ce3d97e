"""Known calls of which a gradient is asked for: the bits and gradients of torch's dispatcher."""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from threading import Thread
from typing import Any

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import Watching, world
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.nn import rowwise
from counterpoint.ops import watched
from counterpoint.tensor_parallel.backward import gradients_of_scatter

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
NEEDS = [needs for needs in product((False, True), repeat=3) if any(needs)]  # x, w, bias
WAYS: list[dict[str, Any]] = [{}, {"plan": "graded"}, {"plan": "serial"}, {"dim": 1},
                              {"rows": [4, 2, 6]}]  # fmt: skip


def given(op: str, rank: int, ranks: int, how: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(rank)
    rows = how["rows"][rank] if "rows" in how and op == OPS[0] else 4 * ranks
    shape = (2, rows, 8) if "dim" in how else (rows, 8)
    return [torch.randn(*shape), torch.randn(8, 6), torch.randn(6)]


def call(op: str, tensors: list[Tensor], how: dict[str, Any]) -> Tensor:
    x, w, bias = tensors
    names = {"dim": "gather_dim" if op == OPS[0] else "scatter_dim"}
    return getattr(cp, op)(x, w, bias=bias, **{names.get(name, name): how[name] for name in how})


def step(op: str, tensors: list[Tensor], needs: tuple[bool, ...], how: dict[str, Any]) -> Any:
    """What dispatches the call, its result, and the gradients that are asked for."""
    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = call(op, leaves, how)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    assert y.grad_fn is not None
    return y.grad_fn.name(), [y.detach(), *(t.grad for t in leaves)]


def same(one: list[Any], other: list[Any]) -> bool:
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b))
               for a, b in zip(one, other, strict=True))  # fmt: skip


def ways(op: str) -> list[dict[str, Any]]:
    return [how for how in WAYS if op != OPS[2] or (not {"dim", "rows"} & {*how}
            and how.get("plan") != "graded")]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_they_have_the_bits_of_the_dispatcher(
    rank: int, ranks: int, op: str, draw: Draw
) -> list[str]:
    wrong: list[str] = []
    for how, needs in draw([*product(ways(op), NEEDS)], 9):
        tensors = given(op, rank, ranks, how)
        with Watching():
            name, want = step(op, tensors, needs, how)
        found = [step(op, tensors, needs, how) for _ in range(3)]
        with torch.no_grad():
            plain = call(op, tensors, how)
        by = [way for way, _ in found]
        # the result of another dim than the first is a view
        if "dim" not in how and ("Generated" not in name or {*by} != {f"{op}Backward"}):
            wrong.append(f"{how} {needs}: by {name} and {by}")
        if not all(same(want, each) for _, each in found) or not torch.equal(plain, want[0]):
            wrong.append(f"{how} {needs}: other bits")
    return wrong


# what a result is computed of, and what computes it of x and two weights
SEVERAL: dict[str, Callable[..., list[Tensor]]] = {
    "list": lambda x, *w, **how: cp.all_gather_matmul(x, [*w], **how),
    "gated": lambda x, *w, **how: [cp.all_gather_matmul(x, w, activation="silu_mul", **how)],
}


@pytest.mark.parametrize("name", SEVERAL)
@on_ranks(3)
def test_of_several_weights(rank: int, ranks: int, name: str, draw: Draw) -> list[str]:
    """Some of the results, of some operands, and where ranks have their own numbers of rows."""
    torch.manual_seed(rank)
    wrong: list[str] = []
    hows: list[dict[str, Any]] = [{}, {"plan": "graded"}, {"plan": "serial"}, {"rows": [4, 2, 6]}]
    uses = [(0,), (1,), (0, 1)] if name == "list" else [(0,)]
    for how, needs, used in draw([*product(hows, NEEDS, uses)], 12):
        rows = how.get("rows", [4] * ranks)[rank]
        second = 6 if name == "gated" else 5
        tensors = [torch.randn(rows, 8), torch.randn(8, 6), torch.randn(8, second)]

        def run(
            tensors: Any = tensors, how: Any = how, needs: Any = needs, used: Any = used
        ) -> Any:
            leaves = [
                t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)
            ]
            results = SEVERAL[name](*leaves, **how)
            y = sum(results[i].square().sum() for i in used)
            grads = torch.autograd.grad(
                y, [t for t in leaves if t.requires_grad], allow_unused=True
            )
            return results[0].grad_fn, [*(each.detach() for each in results), *grads]

        with Watching():
            _, want = run()
        found = [run() for _ in range(3)]
        by = {str(way) for way, _ in found}
        if name == "list" and not all("all_gather_matmul_listBackward" in way for way in by):
            wrong.append(f"{how} {needs}: by {by}")
        if not all(same(want, each) for _, each in found):
            wrong.append(f"{how} {needs} of results {used}: other bits")
        with torch.no_grad():
            plain = SEVERAL[name](*tensors, **how)
        if not same(want[: len(plain)], plain) and name == "list":
            wrong.append(f"{how} {needs}: other bits without a gradient")
    return wrong


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_a_rank_that_is_watched_meets_one_that_is_not(rank: int, ranks: int, op: str) -> list[str]:
    tensors, needs, wrong = given(op, rank, ranks, {}), (True, True, True), list[str]()
    _, want = step(op, tensors, needs, {})
    for turn in range(4):
        with Watching() if turn % 2 == rank else nullcontext():
            name, found = step(op, tensors, needs, {})
        wrong += [f"turn {turn} by {name}: other bits"] * (not same(want, found))
    return wrong


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_checkpoints_and_hooks_of_saved_tensors_see_it(rank: int, ranks: int, op: str) -> list[str]:
    tensors, wrong = given(op, rank, ranks, {}), list[str]()
    _, want = step(op, tensors, (True, True, True), {})
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.clone()

    for recompute in (False, True):
        leaves = [t.detach().requires_grad_() for t in tensors]
        for _ in range(2):
            for leaf in leaves:
                leaf.grad = None
            with nullcontext() if recompute else torch.autograd.graph.saved_tensors_hooks(
                pack, lambda t: t
            ):  # fmt: skip
                y = (checkpoint(call, op, leaves, {}, use_reentrant=False) if recompute
                     else call(op, leaves, {}))  # fmt: skip
            assert isinstance(y, Tensor)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
            if not same(want, [y.detach(), *(t.grad for t in leaves)]):
                wrong.append(f"recompute={recompute}: other bits")
    return wrong + ["two tensors are saved"] * (len(packed) != 4)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_what_is_remembered_holds_no_tensor(rank: int, ranks: int, op: str) -> list[str]:
    tensors = [t.requires_grad_() for t in given(op, rank, ranks, {})]
    for _ in range(2):
        call(op, tensors, {}).sum().backward()
    left = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    return [f"tensor {i} is held" for i, ref in enumerate(left) if ref() is not None]


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "double backward", "refused"
)
@on_ranks(2)
def test_a_gradient_of_a_gradient_is_refused(rank: int, ranks: int) -> None:
    for op in OPS:
        tensors = [t.requires_grad_() for t in given(op, rank, ranks, {})]
        for _ in range(2):
            y = call(op, tensors, {})
            (dx,) = torch.autograd.grad(y.square().sum(), tensors[:1], create_graph=True)
            said = "double backward .* is not supported; call backward"
            with pytest.raises(cp.UnsupportedError, match=said):
                dx.sum().backward()


class Doubled(TorchFunctionMode):
    """Doubles the results of our operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **kwargs or {})
        return 2 * y if "counterpoint" in str(func) else y


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_whatever_watches_a_call_sees_it(rank: int, ranks: int, op: str) -> list[str]:
    """Though nothing shows it but the keys of torch's dispatcher."""
    x, w, _ = given(op, rank, ranks, {})
    w.requires_grad_()
    wrong: list[str] = []

    def plain(x: Tensor) -> Tensor:
        return getattr(cp, op)(x, w)

    for _ in range(2):
        y = plain(x)
    with Doubled():
        wrong += ["a function mode"] * (not torch.equal(plain(x), 2 * y))
    graph = make_fx(plain, pre_dispatch=True)(x).graph
    wrong += ["pre-dispatch"] * (f"counterpoint.{op}" not in str(graph))
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(w.detach()))
    module.forward = lambda x: getattr(cp, op)(x, module.w)  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, (x,), check_trace=False)  # pyright: ignore
    wrong += ["jit.trace"] * (f"counterpoint::{op}" not in str(traced.graph))  # type: ignore[attr-defined]
    return wrong


@on_ranks(2)
def test_gradients_that_are_no_plain_numbers(rank: int, ranks: int) -> list[str]:
    x, w, _ = given(OPS[1], rank, ranks, {})
    x.requires_grad_()
    wrong: list[str] = []
    for _ in range(2):
        y = cp.matmul_reduce_scatter(x, w)
        (dx,) = torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape))
        wrong += ["of zeros"] * bool(dx.any())

    def of(x: Tensor) -> Tensor:
        return cp.matmul_reduce_scatter(x, w)

    y, vjp = torch.func.vjp(of, x)
    (want,) = torch.autograd.grad(of(x), x, torch.ones_like(y))
    with torch.no_grad():
        for _ in range(3):
            wrong += ["of vjp"] * (not torch.equal(vjp(torch.ones_like(y))[0], want))
    own = x[:4].detach()
    loop, batched = (
        torch.autograd.functional.jacobian(of, own, vectorize=vectorize)
        for vectorize in (False, True)
    )
    assert isinstance(loop, Tensor) and isinstance(batched, Tensor)
    return wrong + ["of a batch"] * (not torch.allclose(loop, batched, atol=1e-6))


@on_ranks(2)
def test_a_backward_in_a_group_that_was_made_anew_is_refused(rank: int, ranks: int) -> None:
    """Where this rank is another one by now, or their number is."""
    x, w, _ = given(OPS[1], rank, ranks, {})
    rows, name = [3, 5], world().group_name
    dy = cp.matmul_reduce_scatter(x, w, rows=rows)
    for needs in ((True, True), (False, True), (True, True)):
        gradients_of_scatter(dy, x, w, needs, "auto", rows, (name, ranks, rank))
        for where, said in (((name, ranks, 1 - rank), "rank must be"),
                            ((name, 3, rank), "group_size must be")):  # fmt: skip
            with pytest.raises(cp.InputError, match=said):
                gradients_of_scatter(dy, x, w, needs, "auto", rows, where)


@pytest.mark.parametrize("name", ["gathered", "scattered"])
@on_ranks(2)
def test_a_backward_that_a_compiler_traces(rank: int, ranks: int, name: str) -> None:
    torch.manual_seed(rank)
    call = getattr(rowwise, name)
    given = torch.randn(8, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    found: list[list[Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            x, w = (t.detach().requires_grad_() for t in given)
            y = run(x, w, None, world(), "auto", 0)
            found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, w))])
    assert same(*found)


def test_the_keys_of_what_nothing_watches():
    """In a thread of its own, and of tensors that are views, parameters or of inference mode."""
    found: list[int] = []
    thread = Thread(target=lambda: found.append(watched.keys_of_thread().raw_repr()))
    thread.start()
    thread.join()
    assert {*found, watched.keys_of_thread().raw_repr()} <= watched.USUAL
    numbers, plain = torch.ones(2, 3), watched.keys_of_plain("cpu")
    with torch.inference_mode():
        assert watched.keys_of_thread().raw_repr() in watched.USUAL
        assert watched.keys_of(numbers + 1).raw_repr() in plain
    for t in (numbers.t(), nn.Parameter(numbers), numbers.bfloat16()[1:], numbers.requires_grad_()):
        assert watched.keys_of(t).raw_repr() in plain
