"""What torch has around operators and layers: torch.func, copies, fake tensors, counts of flops."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import counterpoint as cp
from counterpoint import nn as cnn
from counterpoint.operators import IMPLEMENTED, implementation
from counterpoint.ops.register import register

IDS = torch.arange(8).view(4, 2) % 4
TOKENS = torch.full((2, 4), 1)


def bare() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Operators of tensors alone, and what they take."""
    x, w, down = torch.randn(4, 8), torch.randn(8, 4), torch.randn(2, 4, 8)
    q, stacked, shares = torch.randn(1, 4, 2, 8), torch.randn(2, 8, 4), torch.rand(4, 2)

    def routed(x: Tensor, w: Tensor, shares: Tensor) -> Tensor:
        routes = cp.exchange_routes(IDS, shares, num_experts=4)
        return cp.matmul_all_to_all(cp.all_to_all_matmul(x, w, counts=routes), down, counts=routes)

    def sums(x: Tensor, w: Tensor, shares: Tensor) -> Tensor:
        return cp.matmul_all_to_all(x, w, counts=TOKENS, sum_of=(IDS % 4, shares))

    return {
        "gather": (cp.all_gather_matmul, [x, w]),
        "gather several": (lambda x, w, v: sum(cp.all_gather_matmul(x, [w, v])), [x, w, w + 1]),
        "gather gated": (lambda x, w, v: cp.all_gather_matmul(x, [w, v], activation="silu_mul"),
                         [x, w, w + 1]),
        "gather K": (lambda x, w: cp.all_gather_matmul(x, w, gather_dim=-1), [x[:, :4], w]),
        "scatter": (lambda x, w, b: cp.matmul_reduce_scatter(x, w, bias=b), [x, w, w[0]]),
        "scatter columns": (lambda x, w: cp.matmul_reduce_scatter(x, w, scatter_dim=-1), [x, w]),
        "reduce": (cp.matmul_all_reduce, [x, w]),
        "attention": (cp.all_gather_attention, [q, q + 1, q - 1]),
        "norm": (lambda x, h, w: sum(cp.all_reduce_rms_norm(x, h, w)), [x, x + 1, w[:, 0]]),
        "product and norm": (lambda x, w, h, b: cp.matmul_all_reduce_layer_norm(
            x, w, residual=h, norm_weight=b)[0], [x, w, torch.randn(4, 4), w[0]]),
        "dispatch": (lambda x, w: cp.all_to_all_matmul(x, w, counts=TOKENS), [x, stacked]),
        "combine": (lambda x, w: cp.matmul_all_to_all(x, w, counts=TOKENS), [x, stacked]),
        "sums": (sums, [x, stacked, shares]),
        "routes": (routed, [x, stacked, shares]),
        "copied": (lambda b: cnn.copy_to_group(b) * torch.arange(8.0), [w[:, 0]]),
    }  # fmt: skip


def layers() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Layers, and what they take."""
    x = torch.randn(4, 8)
    return {
        "column": (cnn.ColumnParallelLinear(8, 8), (x,)),
        "row": (cnn.RowParallelLinear(16, 4), (x,)),
        "sharded": (cnn.FullyShardedLinear(8, 8), (x,)),
        "fp8": (cnn.to_fp8(cnn.ColumnParallelLinear(16, 32)), (torch.randn(4, 16),)),
        "fp8 row": (cnn.to_fp8(cnn.RowParallelLinear(32, 16)), (torch.randn(4, 16),)),
        "experts": (cnn.ExpertParallelMLP(8, 16, 4), (x, IDS, torch.rand(4, 2))),
        "bags": (cnn.ShardedEmbeddingBags([(10, 4)] * 2), (torch.arange(4), torch.arange(4))),
    }


def loss(y: Tensor) -> Tensor:
    return (y.float() * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum()


@on_ranks(2)
def test_gradients_by_torch_func(rank: int, ranks: int) -> list[str]:
    """Those of torch.autograd.grad, of every operand."""
    wrong: list[str] = []
    for name, (call, given) in bare().items():
        plain = [t.clone().requires_grad_() for t in given]
        want = torch.autograd.grad(loss(call(*plain)), plain)
        every = tuple(range(len(given)))
        got = grad(lambda *args, call=call: loss(call(*args)), argnums=every)(*given)
        _, pull = vjp(lambda *args, call=call: loss(call(*args)), *given)
        for by, found in (("grad", got), ("vjp", pull(torch.tensor(1.0)))):
            for i, (one, other) in enumerate(zip(found, want, strict=True)):
                if not torch.equal(one, other):
                    wrong.append(
                        f"{name} by {by}: gradient {i} is off by {(one - other).abs().max()}"
                    )
    return wrong


@on_ranks(2)
def test_gradients_of_layers_by_torch_func(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []
    for name, (layer, given) in layers().items():
        named = dict(layer.named_parameters())
        want = torch.autograd.grad(loss(layer(*given)), [*named.values()])
        plain = {key: p.detach() for key, p in named.items()}

        def of(p: dict[str, Tensor], layer: Any = layer, given: Any = given) -> Tensor:
            return loss(functional_call(layer, p, given))

        for one, other in zip(grad(of)(plain).values(), want, strict=True):
            if not torch.equal(one, other):
                wrong.append(f"{name}: {(one - other).abs().max()}")
    return wrong


@on_ranks(2)
def test_other_transforms_are_told(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []

    def told(name: str, text: str, run: Callable[[], object]) -> None:
        try:
            found: object = run()
        except cp.UnsupportedError as error:
            found = error
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if not (isinstance(found, cp.UnsupportedError) and text in str(found)):
            wrong.append(f"{name}: {found}")

    def forward_mode(call: Any, given: list[Tensor]) -> object:
        with forward_ad.dual_level():
            return call(*(forward_ad.make_dual(t, t) for t in given))

    warnings.filterwarnings("ignore", ".*torch.jit.script")  # of what forward_ad loads
    for name, (call, given) in bare().items():
        many = [t.expand(3, *t.shape) for t in given]
        told(name, "vmap over", lambda call=call, many=many: vmap(call)(*many))
        if name != "copied":  # it is its parameter then
            call(*given)
            both = tuple(given), tuple(given)
            told(name, "forward-mode", lambda call=call, both=both: jvp(call, *both))
            told(name, "forward-mode", lambda call=call, both=both: forward_mode(call, both[0]))
    for name, (layer, given) in layers().items():
        x, *rest = given
        told(name, "vmap over", lambda layer=layer, x=x, rest=rest: vmap(
            lambda x: layer(x, *rest))(x.expand(3, *x.shape)))  # fmt: skip
    return wrong


@pytest.mark.parametrize("change", [None, "weight_norm", "spectral_norm"])
@on_ranks(2)
def test_copies_of_layers(rank: int, ranks: int, change: str | None):
    for name, (layer, given) in layers().items():
        if change is not None and name in ("experts", "bags"):
            continue
        if change is not None:
            getattr(parametrizations, change)(layer)
        layer.eval()  # a power iteration of spectral_norm changes the layer
        other: Any = copy.deepcopy(layer)
        assert other is not layer and other.group is layer.group
        assert torch.equal(other(*given), layer(*given))
        with torch.no_grad():
            next(iter(other.parameters())).zero_()
        assert not torch.equal(other(*given), layer(*given))
        if change is None:
            assert torch.equal(pickle.loads(pickle.dumps(layer))(*given), layer(*given))


@on_ranks(2)
def test_layers_in_fully_shard(rank: int, ranks: int):
    mesh = init_device_mesh("cpu", (ranks,))
    for name, (layer, given) in layers().items():
        if name in ("bags", "sharded"):  # each rank has parameters of its own
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(layer, mesh=mesh)
            layer(*given).float().sum().backward()
        said = [str(each.message) for each in caught if "view" in str(each.message)]
        assert not said, f"{name}: {said}"


@on_ranks(2)
def test_dtensors_are_told(rank: int, ranks: int) -> list[str]:
    """Each argument by itself; those that are taken: test_dtensors.py."""
    mesh, wrong = init_device_mesh("cpu", (ranks,)), list[str]()
    for name, (call, given) in {**bare(), **layers()}.items():
        for i, t in enumerate(given):
            first = [*given[:i], DTensor.from_local(t, mesh, [Replicate()]), *given[i + 1 :]]
            with pytest.raises(cp.InputError) as info:
                call(*first)
            if not re.search(r"got a DTensor of \[Replicate|must be a DTensor as", str(info.value)):
                wrong.append(f"{name}, argument {i}: {info.value}")
        local: Any = call(*given)
        assert isinstance(local, Tensor), name
    return wrong


@on_ranks(1)
def test_shapes_of_fake_tensors_in_a_fake_group(rank: int, ranks: int):
    """As of 8 ranks, of which there is one; and what needs values is told."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    x, w = torch.randn(4, 8), torch.randn(8, 16)
    for _ in range(2):
        with pytest.raises(cp.UnsupportedError, match="torch's fake process group has no other"):
            cp.all_gather_matmul(x, w)
    column, row = cnn.ColumnParallelLinear(8, 16), cnn.RowParallelLinear(16, 8)
    sharded, bags = cnn.FullyShardedLinear(8, 16), cnn.ShardedEmbeddingBags([(10, 4)] * 8)
    mlp = cnn.ExpertParallelMLP(8, 16, 8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, w = mode.from_tensor(x), mode.from_tensor(w)
        y: Any = cp.all_gather_matmul(x, w)
        assert y.shape == (32, 16)
        assert cp.matmul_reduce_scatter(y, w.t()).shape == (4, 8)
        assert row(column(x)).shape == (4, 8) and sharded(x).shape == (4, 16)
        assert cp.all_reduce_rms_norm(x, x, w[:, 0])[0].shape == x.shape
        q = torch.empty(1, 4, 2, 8)
        assert cp.all_gather_attention(q, q, q).shape == q.shape
        assert bags(torch.arange(16), torch.arange(16)).shape == (2, 32)
        assert cp.exchange_counts(torch.ones(8, dtype=torch.int64)).shape == (8, 8)
        with pytest.raises(cp.UnsupportedError, match="fake tensors have no values"):
            mlp(x, mode.from_tensor(IDS), torch.rand(4, 2))


def counted(run: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def test_a_counter_counts_operators_that_are_loaded_within_it(monkeypatch: pytest.MonkeyPatch):
    """At the first call of a process; their formulas are not there when the counter is made."""
    op = "all_gather_matmul_activated"
    found, of = implementation(op), getattr(torch.ops.counterpoint, op)
    monkeypatch.setitem(IMPLEMENTED, op, found)
    monkeypatch.delitem(flop_registry, of)
    with FlopCounterMode(display=False) as counter:
        assert of not in counter.flop_registry
        register(op, found.run, found.fake, flops=lambda *_, **__: 7)
    assert counter.flop_registry[of]() == 7


@on_ranks(2)
def test_flops_are_those_of_the_same_matmuls(rank: int, ranks: int):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 6, requires_grad=True)
    whole = torch.randn(8, 8, requires_grad=True)
    v, b = torch.randn(8, 6, requires_grad=True), torch.randn(6)
    long, tall = torch.randn(16, 6, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    stacked = torch.randn(2, 8, 6, requires_grad=True)

    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: cp.all_gather_matmul(x, w, bias=b), lambda: whole @ w + b),
        (lambda: cp.all_gather_matmul(x.detach(), w), lambda: whole.detach() @ w),
        (lambda: cp.all_gather_matmul(x, w.detach()), lambda: whole @ w.detach()),
        (lambda: sum(cp.all_gather_matmul(x, [w, v])), lambda: whole @ w + whole @ v),
        (lambda: cp.all_gather_matmul(x, [w, v], activation="silu_mul"),
         lambda: (whole @ w) * (whole @ v)),
        (lambda: cp.all_gather_matmul(x, long, gather_dim=-1), lambda: tall @ long),
        (lambda: cp.matmul_reduce_scatter(x, w), lambda: x @ w),
        (lambda: cp.matmul_reduce_scatter(x.detach(), w), lambda: x.detach() @ w),
        (lambda: cp.matmul_reduce_scatter(x, w, scatter_dim=-1), lambda: x @ w),
        (lambda: cp.matmul_all_reduce(x, w), lambda: x @ w),
        (lambda: cp.all_to_all_matmul(x, stacked, counts=TOKENS),
         lambda: torch.cat([x[:2] @ stacked[0], x[2:] @ stacked[1]])),
        (lambda: cp.matmul_all_to_all(x, stacked, counts=TOKENS),
         lambda: torch.cat([x[:2] @ stacked[0], x[2:] @ stacked[1]])),
    ]  # fmt: skip
    for i, (ours, torchs) in enumerate(pairs):
        assert counted(ours) == counted(torchs) > 0, i
    sizes = (1, 2, 4, 8), (1, 2, 8, 8), (1, 2, 8, 8)
    want = sdpa_flop_count(*sizes) + sdpa_backward_flop_count(sizes[0], *sizes)
    assert counted(lambda: cp.all_gather_attention(q, q, q)) == want
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cp.all_gather_matmul(x, [w, v], activation="silu_mul")
    assert counter.get_total_flops() == 2 * 2 * 8 * 8 * 6
