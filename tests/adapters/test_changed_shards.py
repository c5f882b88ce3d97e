"""Shards that change between a forward and its backward, which gathers them again."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from compiled import overlap_pass, quick
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from counterpoint.errors import CounterpointWarning

M, K, N = 4, 8, 6
gathered: Any = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
with_gradient: Any = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(
    step: Callable[[Callable[..., Any]], Tensor], call: Callable[..., Any]
) -> tuple[list[str], str, int]:
    """What is wrong with a step of a compiled call; what its gather became; its copies."""
    overlap, copies = overlap_pass(), list[fx.Node]()

    class Seen:
        def __call__(self, graph: fx.Graph) -> None:
            overlap(graph)
            target: Any = torch.ops.prims.clone.default
            copies.extend(graph.find_nodes(op="call_function", target=target))

    with by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CounterpointWarning)
        want = step(call)
        with quick(Seen()) as backend:  # type: ignore[arg-type]
            got = step(torch.compile(call, backend=backend, fullgraph=True))
    (found,) = (one for one in overlap.reports[-1].found if one.kind == "all-gather")
    wrong = [] if torch.allclose(got, want, atol=1e-5) else [f"{got}, not {want}"]
    return wrong, found.operator or found.reason, len(copies)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda queue: queue.view(2 * M, K).chunk(2)[0],
    "unbind": lambda queue: queue.unbind(0)[0],
    "as_strided": lambda queue: queue.as_strided((M, K), (K, 1)),
    "dtype": lambda queue: queue.view(torch.int32).view(torch.float32)[0],
    "diagonal": lambda queue: queue.diagonal(0, 0, 1).t(),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("part", [*PARTS, "alias"])
@on_ranks(2)
def test_a_part_of_a_buffer_that_the_forward_writes(rank: int, ranks: int, part: str) -> list[str]:
    group = world()

    def step(call: Callable[..., Any]) -> Tensor:
        queue, w = random(rank + 1, 2, M, K), random(9, K, N).requires_grad_()
        y = call(queue, queue[0] if part == "alias" else None, w)
        return torch.autograd.grad(y.sin().sum(), w)[0]

    def layer(queue: Tensor, alias: Tensor | None, w: Tensor) -> Tensor:
        keys = PARTS[part](queue) if alias is None else alias.view(M, K)
        y = gathered(keys, 0, group) @ w
        with torch.no_grad():
            queue.mul_(3)
        return y

    wrong, done, _ = gradients(step, layer)
    return wrong + [done] * (done != "it reads an input that the graph writes")


# what is gathered of x, and a result that its caller changes before the backward; None: x is
CHANGED: dict[str, Callable[[Any], tuple[Tensor, Tensor | None]]] = {
    "result": lambda x: (h := x.tanh(), h),
    "view of a result": lambda x: (h := x.tanh(), h.view(2, -1, K)),
    "part of a result": lambda x: (h := x.tanh(), h.chunk(2)[0]),
    "input": lambda x: (x, None),
    "view of an input": lambda x: (x.view(K, M).t(), None),
    "DTensor": lambda x: (x.to_local(), None),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("what", CHANGED)
@on_ranks(2)
def test_what_the_caller_changes_is_saved_as_a_copy(rank: int, ranks: int, what: str) -> list[str]:
    group = world()
    mesh = init_device_mesh("cpu", (ranks,))

    def step(call: Callable[..., Any]) -> Tensor:
        x, w = random(rank + 1, M, K), random(9, K, N).requires_grad_()
        x = DTensor.from_local(x, mesh, [Shard(0)], run_check=False) if what == "DTensor" else x
        y, result = call(x, w)
        with torch.no_grad():
            (x if result is None else result).mul_(3)
        return torch.autograd.grad(y.sin().sum(), w)[0]

    def layer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        shard, result = CHANGED[what](x)
        return gathered(shard, 0, group) @ w, result

    wrong, done, copies = gradients(step, layer)
    good = ("all_gather_matmul and all_gather_matmul_wgrad", 1)
    return wrong + [f"{done}, {copies} copies"] * ((done, copies) != good)


@pytest.mark.parametrize("form", ["norm", "checkpoint"])
@on_ranks(2)
def test_what_no_caller_changes_is_not_copied(rank: int, ranks: int, form: str) -> list[str]:
    """An ordinary intermediate; and what torch, too, gathers again in the backward."""
    group = world()

    def step(call: Callable[..., Any]) -> Tensor:
        x, w = random(rank + 1, M, K).requires_grad_(), random(9, K, N).requires_grad_()
        return torch.cat([g.flatten() for g in torch.autograd.grad(call(x, w).sin().sum(), [x, w])])

    def product(x: Tensor, w: Tensor) -> Tensor:
        return with_gradient(x, 0, group) @ w

    def layer(x: Tensor, w: Tensor) -> Tensor:
        if form == "norm":
            return product(nn.functional.rms_norm(x, (K,)), w)
        return checkpoint(product, x, w, use_reentrant=False)  # type: ignore[no-any-return]

    wrong, done, copies = gradients(step, layer)
    return wrong + [f"{done}, {copies} copies"] * ("all_gather_matmul" not in done or copies > 0)
