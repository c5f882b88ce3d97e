"""Gradients: against fp64, what is saved, and how torch's own machinery runs them."""

import warnings
from pathlib import Path

import pytest
import torch
from grad_bodies import GradCase, several_weights, wrong_grad_cases
from on_ranks import on_ranks
from rank_bodies import Case, device, world
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.operators import op_names
from counterpoint.ops.call import prepare
from counterpoint.ops.samples import operands, operator_of
from counterpoint.plan.operation import operation_of
from counterpoint.problem import Problem

OPS = ["all_gather_matmul", "matmul_reduce_scatter"]
GRADIENTS = [op for op in op_names() if "matmul" in op and op.endswith(("_backward", "_wgrad"))]


def cases(op: str, ranks: int) -> list[GradCase]:
    even, uneven = (5,) * ranks, (3, 0, 7, 1)[:ranks]
    if op == "matmul_all_reduce":
        return [
            GradCase(Case(op, "auto", even, 17, 12, torch.bfloat16, True, "transposed")),
            GradCase(Case(op, "serial" if ranks == 3 else "fused", (3,), 9, 6, inner=(2,))),
            GradCase(Case(op, "auto", (3,), 9, 6, bias=True), (True, False)),
        ]
    found = [
        GradCase(Case(op, plan, even, 17, 12, dtype, bias=True, layout=layout))
        for plan in ("auto", "graded", "shard_p2p")
        for dtype, layout in ((torch.float32, "plain"), (torch.bfloat16, "transposed"))
    ]
    for needs in ((True, False), (False, True)):
        for plan in ("serial", "graded"):
            found.append(GradCase(Case(op, plan, even, 9, 6, layout="strided"), needs))
    found.append(GradCase(Case(op, "graded", uneven, 16, 10, bias=True)))
    found.append(GradCase(Case(op, "serial", uneven, 16, 10, inner=(2,))))
    found.append(GradCase(Case(op, "graded", (2,) * ranks, 8, 4, inner=(3,))))
    return found


@pytest.mark.drawn(4)
@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter matmul_all_reduce", "backward", "bf16 fp32"
)
@pytest.mark.parametrize("op", [*OPS, "matmul_all_reduce"])
@on_ranks(1, 2, 3, 4)
def test_gradients_are_those_of_fp64(rank: int, ranks: int, op: str) -> list[str]:
    return wrong_grad_cases(rank, ranks, cases(op, ranks))


@pytest.mark.parametrize("plan", ["serial", "graded", "shard_p2p"])
@on_ranks(3)
def test_a_list_of_weights(rank: int, ranks: int, plan: str) -> list[str]:
    rows = ((4, 4, 4), (1, 5, 2))
    return sum((several_weights(rank, ranks, plan, r, torch.float32) for r in rows), [])


@pytest.mark.parametrize("op", GRADIENTS)
@on_ranks(2, 4)
def test_every_backward_plan(rank: int, world_size: int, op: str) -> list[str]:
    """Each plan computes the same as serial."""
    problem = Problem(op, 8 * world_size, 12, 20, world_size, "float32")  # type: ignore[arg-type]
    torch.manual_seed(rank)
    given = operands(problem, rank, device())
    problems: list[str] = []
    want: list[Tensor] = []
    for spec in operation_of(op).candidates(problem):
        got = prepare(operator_of(op), given, spec, [], world())(given)
        want = want or got
        for a, b in zip(got, want, strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                problems.append(f"{op} {spec}: off by {(a - b).abs().max()}")
    assert len(want) == 1 + (not op.endswith("wgrad"))
    return problems


@pytest.mark.parametrize("op", OPS)
@on_ranks(3)
def test_only_the_operands_are_saved(rank: int, world_size: int, op: str):
    """Bytes that autograd keeps are those of x and w."""
    x, w = torch.randn(6, 16), torch.randn(16, 8)
    x.requires_grad_()
    w.requires_grad_()
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = getattr(cp, op)(x, w, plan="graded")
    y.sum().backward()
    assert sum(kept.values()) == x.untyped_storage().nbytes() + w.untyped_storage().nbytes()


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.relu(cp.all_gather_matmul(x, up.t(), plan="graded"))
    return cp.matmul_reduce_scatter(hidden, down.t(), plan="graded")


def layer(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(rank)
    tensors = [torch.randn(6, 16), torch.randn(8, 16), torch.randn(16, 8)]
    return [t.to(dtype).requires_grad_() for t in tensors]


def trained(call, given: list[Tensor]) -> list[Tensor]:
    y = call(*given)
    y.square().sum().backward()
    grads = [t.grad for t in given]
    assert all(g is not None for g in grads)
    return [y.detach(), *(g for g in grads if g is not None)]


@pytest.mark.shows(
    "all_gather_matmul matmul_reduce_scatter", "compiled forward, compiled backward", "fp32"
)
@pytest.mark.parametrize("how", ["checkpoint", "aot_eager"])
@on_ranks(2)
def test_checkpointing_and_compilation(rank: int, world_size: int, how: str, tmp_path: Path):
    want = trained(mlp, layer(rank))
    if how == "checkpoint":
        got = trained(lambda *a: checkpoint(mlp, *a, use_reentrant=False), layer(rank))
    else:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
            warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports warn
            compiled = torch.compile(mlp, fullgraph=True, backend=how)
            got = trained(compiled, layer(rank))
            got = trained(compiled, layer(rank))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@on_ranks(2)
def test_autocast(rank: int, world_size: int):
    given = layer(rank)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(*given)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    for t in given:
        assert t.grad is not None
        assert t.grad.dtype == torch.float32
    # the mixture that a master weight is: refused without autocast, cast with it
    with torch.autocast("cpu", torch.bfloat16):
        cp.all_gather_matmul(torch.randn(2, 4).bfloat16(), torch.randn(4, 3))


@pytest.mark.parametrize("op", [*GRADIENTS, "matmul_reduce_scatter_sum"])
@on_ranks(2)
def test_opcheck_of_the_gradients(rank: int, world_size: int, op: str):
    """Those of gathers with one weight and with two."""
    where = ["serial", [], world().group_name, world_size, rank]
    rows, n, k = 4 * world_size, 6, 10
    x, dy, dy_2, w, w_2 = (
        torch.randn(*shape) for shape in ((4, k), (rows, n), (rows, 3), (k, n), (k, 3))
    )
    args = {
        "all_gather_matmul_wgrad": [[x, dys, True] for dys in ([dy], [dy, dy_2])],
        "all_gather_matmul_backward": [[[dy], x, [w]], [[dy, dy_2], x, [w, w_2]]],
        "matmul_reduce_scatter_backward": [[torch.randn(4, n), torch.randn(rows, k), w]],
        "matmul_reduce_scatter_sum": [[[dy, dy_2], [w.t(), w_2.t()]]],
    }[op]
    # without test_autograd_registration: a gradient of these is refused, which it takes for one
    tests = ("test_schema", "test_faketensor")
    op_of = getattr(torch.ops.counterpoint, op).default
    for each in args:
        found = torch.library.opcheck(op_of, [*each, *where], test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}


@on_ranks(2, 3)
def test_dim_1_of_an_activation(rank: int, world_size: int):
    batch, seq, k, n = 3, 4, 10, 6
    torch.manual_seed(0)
    whole = torch.randn(batch, seq * world_size, k)
    weights = [torch.randn(k, n) for _ in range(world_size)]
    mine = slice(rank * seq, (rank + 1) * seq)
    x = whole[:, mine].clone().requires_grad_()
    y = cp.all_gather_matmul(x, weights[rank], gather_dim=1, plan="graded")
    torch.testing.assert_close(y, whole @ weights[rank])
    y.sum().backward()
    total = sum(w.sum(1) for w in weights)
    assert isinstance(total, Tensor)
    torch.testing.assert_close(x.grad, total.expand(batch, seq, k))

    parts = [torch.randn(batch, seq * world_size, k) for _ in range(world_size)]
    for dim in (1, -2):
        z = cp.matmul_reduce_scatter(parts[rank], weights[rank], scatter_dim=dim, plan="graded")
        both = sum(p @ w for p, w in zip(parts, weights, strict=True))
        assert isinstance(both, Tensor)
        torch.testing.assert_close(z, both[:, mine])
    rows = [1, *[seq * world_size - 1] * 1, *[0] * (world_size - 2)]
    z = cp.matmul_reduce_scatter(parts[rank], weights[rank], scatter_dim=1, rows=rows)
    assert z.shape == (batch, rows[rank], n)


@on_ranks(3)
def test_inference_mode_then_training(rank: int, world_size: int):
    """Memory that a call in inference mode has made serves calls in every mode."""
    given = layer(rank)
    with torch.inference_mode():
        first = mlp(*given).clone()
    want = trained(mlp, layer(rank))
    torch.testing.assert_close(first, want[0])
    for got, expected in zip(trained(mlp, given), want, strict=True):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(mlp(*given), want[0])
