"""DTensors as arguments: results and gradients are those of the whole matrices, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as spread
from torch.nn.functional import layer_norm, rms_norm, silu

import counterpoint as cp
import counterpoint.nn as cnn

K, N = 8, 12
Given = dict[str, Any]


def gathered(g: Given) -> Tensor:
    return g["x"] @ g["w"] + g.get("bias", 0)


def normed(norm: Callable[..., Tensor], weight: str, bias: str) -> Callable[[Given], Any]:
    def both(g: Given) -> tuple[Tensor, Tensor]:
        h = (gathered({k: g[k] for k in ("x", "w")}) if "w" in g else g["x"]) + g["residual"]
        more = [g[bias]] if bias in g else []
        return norm(h, h.shape[-1:], g[weight], *more, eps=1e-5), h

    return both


def gated(g: Given) -> Tensor:
    return silu(g["x"] @ g["w"][0]) * (g["x"] @ g["w"][1])


def of(m: int) -> dict[str, Any]:
    """Cases of m rows: operator, sizes and placements, other arguments, reference, results."""
    x, w, bias = (m, K), (K, N), ((N,), Shard(0))
    rows, same = Shard(0), Replicate()
    sums = {"x": ((m, K), Shard(1)), "w": (w, rows), "bias": ((N,), same)}
    more = {"residual": ((m, N), same), "norm_weight": ((N,), same)}
    total = {"x": ((m, N), Partial()), "residual": ((m, N), same), "weight": ((N,), same)}
    rms, layer = cp.all_reduce_rms_norm, cp.all_reduce_layer_norm
    return {
        "gather": (cp.all_gather_matmul, {"x": (x, rows), "w": (w, Shard(1)), "bias": bias}, {},
                   gathered, Shard(1)),
        "gather 3-D": (cp.all_gather_matmul, {"x": ((2, m, K), Shard(1)), "w": (w, Shard(1))},
                       {"gather_dim": 1}, gathered, Shard(2)),
        "gather K": (cp.all_gather_matmul, {"x": ((3, m), Shard(1)), "w": ((m, N), Shard(1))},
                     {"gather_dim": -1}, gathered, Shard(1)),
        "several": (cp.all_gather_matmul, {"x": (x, rows), "w": [(w, Shard(1)), (w, Shard(1))]},
                    {}, lambda g: tuple(g["x"] @ w for w in g["w"]), Shard(1)),
        "gated": (cp.all_gather_matmul, {"x": (x, rows), "w": [(w, Shard(1)), (w, Shard(1))]},
                  {"activation": "silu_mul"}, gated, Shard(1)),
        "scatter": (cp.matmul_reduce_scatter, sums, {}, gathered, rows),
        "scatter 3-D": (cp.matmul_reduce_scatter, sums | {"x": ((2, m, K), Shard(2))},
                        {"scatter_dim": 1}, gathered, Shard(1)),
        "scatter N": (cp.matmul_reduce_scatter,
                      {"x": ((3, K), Shard(1)), "w": ((K, m), rows), "bias": ((m,), same)},
                      {"scatter_dim": 1}, gathered, Shard(1)),
        "reduce": (cp.matmul_all_reduce, sums, {}, gathered, same),
        "rms": (rms, total, {"eps": 1e-5}, normed(rms_norm, "weight", ""), same),
        "layer": (layer, total | {"bias": ((N,), same)}, {},
                  normed(layer_norm, "weight", "bias"), same),
        "matmul rms": (cp.matmul_all_reduce_rms_norm, {k: v for k, v in sums.items() if k != "bias"}
                       | more, {"eps": 1e-5}, normed(rms_norm, "norm_weight", ""), same),
        "matmul layer": (cp.matmul_all_reduce_layer_norm, {k: v for k, v in sums.items()
                         if k != "bias"} | more | {"norm_bias": ((N,), same)}, {},
                         normed(layer_norm, "norm_weight", "norm_bias"), same),
    }  # fmt: skip


def each(tree: Any, change: Callable[[Any], Any]) -> Any:
    return [change(t) for t in tree] if isinstance(tree, list) else change(tree)


def leaves(given: Given) -> list[Any]:
    return [t for tree in given.values() for t in (tree if isinstance(tree, list) else [tree])]


def distributed(whole: Tensor, placement: Placement, mesh: Any) -> DTensor:
    """Parts of a tensor that all ranks have; of a sum they are multiples of it."""
    if not placement.is_partial():
        return spread(whole, mesh, [placement])
    share = 2 * (mesh.get_local_rank() + 1) / mesh.size() / (mesh.size() + 1)
    return DTensor.from_local(whole * share, mesh, [placement])


def results(y: Any) -> list[Any]:
    return [*y] if isinstance(y, list | tuple) else [y]


def off(got: Tensor, plain: Tensor, want: Tensor) -> bool:
    """Whether it is worse than twice what torch makes of the whole matrices in fp32."""
    floor = torch.finfo(torch.float32).eps * want.abs().max()
    return bool((got - want).abs().max() > 2 * (plain - want).abs().max() + 4 * floor)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("m", [8, 7, 3])
@on_ranks(4)
def test_results_and_gradients_are_those_of_the_whole(rank: int, ranks: int, m: int) -> list[str]:
    mesh, wrong = init_device_mesh("cpu", (ranks,)), list[str]()
    for name, (op, tensors, settings, reference, placement) in of(m).items():
        torch.manual_seed(len(name))
        whole = {k: each(v, lambda t: torch.randn(t[0], requires_grad=True))
                 for k, v in tensors.items()}  # fmt: skip
        exact = {k: each(v, lambda t: t.detach().double().requires_grad_())
                 for k, v in whole.items()}  # fmt: skip
        places = leaves(tensors)
        flat = [distributed(t.detach(), p, mesh).requires_grad_()
                for t, (_, p) in zip(leaves(whole), places, strict=True)]  # fmt: skip
        ahead = iter(flat)
        given = {k: each(v, lambda _, ahead=ahead: next(ahead)) for k, v in whole.items()}
        ys, plain, wants = (results(y) for y in (
            op(**given, **settings), reference(whole), reference(exact)))  # fmt: skip
        dys = [torch.randn(want.shape) for want in wants]
        torch.autograd.backward(ys, [spread(dy, mesh, [placement]) for dy in dys])
        torch.autograd.backward(plain, dys)
        torch.autograd.backward(wants, [dy.double() for dy in dys])
        for i, (y, near, want) in enumerate(zip(ys, plain, wants, strict=True)):
            if y.placements != (placement,) or y.shape != want.shape:
                wrong.append(f"{name}: result {i} is {y.placements} {tuple(y.shape)}")
            elif off(y.full_tensor(), near, want):
                wrong.append(f"{name}: result {i}")
        at = zip(flat, leaves(whole), leaves(exact), places, strict=True)
        for i, (t, near, want, (_, p)) in enumerate(at):
            like = Replicate() if p.is_partial() else p
            if t.grad is None or t.grad.placements != (like,) or t.grad.shape != want.shape:
                wrong.append(f"{name}: gradient {i} is {t.grad}")
            elif off(t.grad.full_tensor(), near.grad, want.grad):
                wrong.append(f"{name}: gradient {i}")
    return wrong


@on_ranks(2)
def test_parts_that_are_plain_stand_for_this_ranks(rank: int, ranks: int):
    mesh = init_device_mesh("cpu", (ranks,))
    x, w = torch.randn(6, K), torch.randn(K, N)
    own = w.chunk(ranks, 1)[rank].clone().requires_grad_()
    y: Any = cp.all_gather_matmul(spread(x, mesh, [Shard(0)]), own)
    torch.testing.assert_close(y.full_tensor(), x @ w)
    y.sum().backward()
    assert type(own.grad) is Tensor


@on_ranks(2, 4)
def test_the_group_is_that_of_the_mesh(rank: int, ranks: int) -> list[str]:
    """Of pairs of ranks: without `group` the mesh says it."""
    pairs = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh = pairs["tp"]
    x, w = torch.randn(6, K), torch.randn(K, N)
    sharded, columns = spread(x, mesh, [Shard(0)]), spread(w, mesh, [Shard(1)])
    for group in (None, mesh.get_group()):
        y: Any = cp.all_gather_matmul(sharded, columns, group=group)
        assert y.device_mesh == mesh
        torch.testing.assert_close(y.full_tensor(), x @ w)
    both = DTensor.from_local(x, pairs, [Replicate(), Shard(0)])
    wrong = refused(lambda: cp.all_gather_matmul(both, w), "all_gather_matmul: x must be on a mesh "
                    "of one axis, got a DTensor on one of 2", "pass x.to_local(), or a DTensor "
                    "on one axis of it, a slice of the mesh")  # fmt: skip
    if ranks == 4:
        wrong += refused(
            lambda: cp.all_gather_matmul(sharded, columns, group=dist.group.WORLD),
            f"group must be of the ranks {mesh.mesh.tolist()} of the mesh, got the ranks [0, 1, 2",
        )
    return wrong


def refused(call: Callable[[], Any], *texts: str) -> list[str]:
    with pytest.raises(cp.InputError) as info:
        call()
    said = str(info.value)
    return [f"{text!r} is not in {said}" for text in texts if text not in said]


@on_ranks(2)
def test_other_placements_are_refused(rank: int, ranks: int) -> list[str]:
    mesh = init_device_mesh("cpu", (ranks,))
    other = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
    x, w, b = torch.randn(6, K), torch.randn(K, N), torch.randn(N)
    tall, odd = torch.randn(6, K + 1), torch.randn(K, N + 1)
    gather, scatter, reduce = cp.all_gather_matmul, cp.matmul_reduce_scatter, cp.matmul_all_reduce

    def on(t: Tensor, placement: Placement) -> Any:
        return spread(t, mesh, [placement])

    rows, cols, same = Shard(0), Shard(1), Replicate()
    scaled = cp.Scaled(on(x, rows).to(torch.float8_e4m3fn), torch.ones(1))
    # fmt: off
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: gather(on(x, cols), on(w, cols)),
         "all_gather_matmul: x must be a DTensor of [Shard(0)], got a DTensor of "
         "[Shard(1)]; redistribute it, or pass its own part, x.to_local()"),
        (lambda: gather(on(x, rows), on(w, same)), "w must be a DTensor of [Shard(1)]"),
        (lambda: gather(on(x, rows), [on(w, cols), on(w, rows)]), "w[1] must be a DTensor of"),
        (lambda: gather(on(x, rows), on(w, cols), bias=on(b, same)), "bias must be a DTensor of"),
        (lambda: gather(x, on(w, cols)), "x must be a DTensor as w, got Tensor; pass w.to_local()"),
        (lambda: gather(on(x, rows), on(w, cols), rows=[3, 3]), "rows must be None where x is"),
        (lambda: gather(on(x, rows), on(w, cols), gather_dim=2), "gather_dim must be a dim of x"),
        (lambda: gather(on(x, rows), on(odd, cols)),
         "w must be of equal shards of dim 1, got 13 over 2 ranks; pad it"),
        (lambda: gather(on(x, rows), spread(w, other, [same, cols])), "w must be on a mesh of one"),
        (lambda: gather(on(x, rows), DTensor.from_local(w, other["b"], [cols])), "w must be on the "
         "mesh of x, got another mesh"),
        (lambda: gather(scaled, scaled), "x.data must be a Tensor of this rank, got"),
        (lambda: scatter(on(x, rows), on(w, rows)), "x must be a DTensor of [Shard(1)]"),
        (lambda: scatter(on(tall, cols), w), "x must be of equal shards of dim 1, got 9 over 2"),
        (lambda: scatter(on(x, cols), None, scatter_dim=1), "w must be a Tensor, got NoneType"),
        (lambda: reduce(on(x, cols), on(w, rows), bias=on(b, rows)), "bias must be a DTensor of"),
        (lambda: cp.all_reduce_rms_norm(on(x, same), None, torch.ones(K)),
         "x must be a DTensor of [Partial(sum)], got a DTensor of [Replicate()]"),
        (lambda: cp.all_reduce_rms_norm(x, on(x, same), torch.ones(K)),
         "x must be a DTensor as residual, got Tensor"),
        (lambda: cp.all_gather_attention(*[on(torch.randn(1, 8, 2, 4), cols)] * 3),
         "all_gather_attention: q must be a Tensor of this rank, got a DTensor of [Shard(1)]; "
         "pass its own part, q.to_local()"),
        (lambda: cp.exchange_counts(on(torch.ones(4).long(), rows)), "counts must be a Tensor of"),
        (lambda: cnn.ColumnParallelLinear(K, N)(on(x, rows)), "ColumnParallelLinear: x must be a "
         "Tensor of this rank, got a DTensor of [Shard(0)]; pass its own part, x.to_local()"),
    ]
    # fmt: on
    wrong = [text for call, said in cases for text in refused(call, said)]
    y: Any = gather(on(x, rows), on(w, cols))  # nothing had run: the group goes on
    torch.testing.assert_close(y.full_tensor(), x @ w)
    return wrong


@on_ranks(2)
def test_a_change_in_place_before_the_backward_is_seen(rank: int, ranks: int):
    mesh = init_device_mesh("cpu", (ranks,))
    for name, kind, trained in (("x", "x", "w"), ("x", "x", "xw"), ("w", "list", "xw"),
                                ("w", "w", "xw")):  # fmt: skip
        x = spread(torch.ones(8, K), mesh, [Shard(0)]).requires_grad_("x" in trained)
        w = spread(torch.ones(K, N), mesh, [Shard(1)]).requires_grad_("w" in trained)
        y = cp.all_gather_matmul(x, [w, w])[0] if kind == "list" else cp.all_gather_matmul(x, w)
        loss = y.to_local().square().sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            (x if name == "x" else w).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_ranks(2)
def test_all_ranks_hear_what_one_refuses(rank: int, ranks: int):
    mesh = init_device_mesh("cpu", (ranks,))
    x, w = spread(torch.randn(6, K), mesh, [Shard(0)]), torch.randn(K, N)
    cp.all_gather_matmul(x, w)
    with pytest.raises(cp.InputError, match="x must be a DTensor of"):
        cp.all_gather_matmul(x, w, gather_dim=rank)


@on_ranks(2)
def test_fake_and_compiled(rank: int, ranks: int):
    mesh = init_device_mesh("cpu", (ranks,))
    x, w = torch.randn(7, K), torch.randn(K, N)
    sharded = spread(x, mesh, [Shard(0)]).requires_grad_()
    columns = spread(w, mesh, [Shard(1)])
    compiled: Any = torch.compile(
        lambda x, w: cp.all_gather_matmul(x * 2, w) * 3, backend="aot_eager"
    )
    for _ in range(2):
        sharded.grad = None
        y = compiled(sharded, columns)
        assert y.placements == (Shard(1),)
        torch.testing.assert_close(y.full_tensor(), 6 * x @ w)
        y.sum().backward()
        grad: Any = sharded.grad
        torch.testing.assert_close(grad.full_tensor(), 6 * torch.ones(7, N) @ w.t())
    told: Any = torch.compile(cp.all_gather_matmul, backend="aot_eager")
    with pytest.raises(
        cp.InputError, match=r"x must be a DTensor of \[Shard\(0\)\], got a DTensor of"
    ):
        told(spread(x, mesh, [Replicate()]), columns)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = DTensor.from_local(torch.empty(4, K), mesh, [Shard(0)])
        part = DTensor.from_local(torch.empty(K, N // ranks), mesh, [Shard(1)])
        z: Any = cp.all_gather_matmul(fake, part)
        assert z.shape == (4 * ranks, N)
        assert z.placements == (Shard(1),)
