"""Batch-invariant calls on CPU ranks: the bits of a row, whatever M, the plan and the way to ask.

Legend: M rows in all; each rank has about an equal share of them, so that who owns a row changes
with M.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
from counterpoint import InputError, Problem, build
from counterpoint.measure.timing import relative_error
from counterpoint.plan.families import families

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MOST, K, N = 1000, 72, 40
ROWS = (1, 2, 3, 7, 16, 33, 64, 65, 128, MOST)
FEW = (1, 2, 5, 16, 33, 64)


class Layer:
    """One operator with weights of this rank, and what each row of its result has to be."""

    def __init__(self, op: str, rank: int, ranks: int, dtype: torch.dtype) -> None:
        def normal(*shape: int, seed: int) -> Tensor:
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

        self.op, self.rank, self.ranks = op, rank, ranks
        sums = op != "all_gather_matmul"
        everyone = range(ranks) if sums else [rank]
        self.xs = [normal(MOST, K, seed=r if sums else 99) for r in range(ranks)]
        self.ws = [normal(K, N, seed=100 + r) for r in range(ranks)]
        self.exact = torch.stack([self.xs[r].double() @ self.ws[r].double() for r in everyone])
        total = torch.zeros(MOST, N)
        for product in self.exact:
            total += product.to(dtype)
        self.want = total.to(dtype)

    def shares(self, m: int) -> list[int]:
        return [(m + r) // self.ranks for r in range(self.ranks)]

    def kept(self, m: int) -> slice:
        """The rows of this rank."""
        start = sum(self.shares(m)[: self.rank])
        return slice(start, start + self.shares(m)[self.rank])

    def call(self, m: int, plan: Any, **options: Any) -> Tensor:
        x, rows = self.xs[self.rank][:m], {"rows": self.shares(m)}
        if self.op == "all_gather_matmul":
            x = x[self.kept(m)]
        if self.op == "matmul_all_reduce":
            rows = {}
        with by_reference():
            return getattr(cp, self.op)(x, self.ws[self.rank], plan=plan, **rows, **options)

    def wrong(self, m: int, plan: Any, say: str = "") -> list[str]:
        """What is wrong with the rows of one call."""
        rows = self.kept(m) if self.op == "matmul_reduce_scatter" else slice(0, m)
        y = self.call(m, plan)
        differ = int((y != self.want[rows]).any(1).sum())
        return [f"{self.op} {plan} M{m} {say}: {differ} of {len(y)} rows"] if differ else []


def specs(op: str, ranks: int) -> list[str]:
    """A spec of each family that may be asked for."""
    varying = ("islands", "running_sum")
    found = [name for name in families(op) if name not in varying and not name.endswith("2d")]
    if op == "matmul_reduce_scatter":
        found += ["uniform_fused_2d", "hetero_fused_2d", "graded 1/" + "/".join("1" * (ranks - 1))]
    if op == "all_gather_matmul":
        found += [f"graded {ranks}"]
    return [*found, "shard_p2p ring chunks=2"]


def takes(op: str, spec: str, m: int, ranks: int, dtype: torch.dtype) -> bool:
    rows = () if op == "matmul_all_reduce" else tuple((m + r) // ranks for r in range(ranks))
    name = str(dtype).removeprefix("torch.")
    problem = Problem(op, m, N, K, ranks, name, rows, invariant=True)  # type: ignore[arg-type]
    family = problem.operation.family(spec.split()[0])
    return spec == "auto" or (family is not None and not family.refusal(problem))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS)
@on_ranks(2, 3, 4)
def test_bits_of_a_row_depend_neither_on_m_nor_on_the_plan(
    rank: int, ranks: int, op: str, dtype: torch.dtype, draw: Draw
) -> list[str]:
    layer = Layer(op, rank, ranks, dtype)
    met, found = set[str](), list[str]()
    for spec in ("auto", *specs(op, ranks)):
        some = ROWS if spec in ("auto", "serial") else FEW
        for m in draw([m for m in some if takes(op, spec, m, ranks, dtype)], len(some) // 2, spec):
            met.add(spec)
            found += layer.wrong(m, f"{spec} invariant")
    powers = not ranks & (ranks - 1)
    left_out = {"direct", "fused"} & set(specs(op, ranks))
    assert set(specs(op, ranks)) - met <= (left_out if not powers else {"fused"})
    return found


@on_ranks(2)
def test_every_number_of_rows_up_to_70(rank: int, ranks: int) -> list[str]:
    layer = Layer("matmul_all_reduce", rank, ranks, torch.bfloat16)
    with cp.batch_invariant():
        return [text for m in range(1, 71) for text in layer.wrong(m, "auto")]


@on_ranks(1)
def test_one_rank_alone(rank: int, ranks: int) -> list[str]:
    layers = [Layer(op, rank, ranks, torch.bfloat16) for op in OPS]
    return [text for each in layers for m in FEW for text in each.wrong(m, "shard_p2p invariant")]


@on_ranks(2)
def test_torchs_own_order_is_another(rank: int, ranks: int):
    """Else the tests above would show nothing."""
    layer = Layer("matmul_all_reduce", rank, ranks, torch.bfloat16)
    single = layer.call(1, "fused")
    assert not torch.equal(single, layer.want[:1]), "a single row is not rounded for the way"


@pytest.mark.parametrize("op", OPS)
@on_ranks(4)
def test_it_is_as_exact_as_without(rank: int, ranks: int, op: str):
    layer = Layer(op, rank, ranks, torch.bfloat16)
    exact = layer.exact.sum(0)
    rows = layer.kept(64) if op == "matmul_reduce_scatter" else slice(0, 64)
    own = relative_error(layer.call(64, "serial invariant"), exact[rows])
    assert own <= 1.1 * relative_error(layer.call(64, "serial"), exact[rows])


@on_ranks(2)
def test_ways_to_ask(rank: int, ranks: int) -> list[str]:
    """The context, also nested and around plans; the word; a Plan for such a problem."""
    layer, found = Layer("matmul_reduce_scatter", rank, ranks, torch.float16), list[str]()
    problem = Problem(layer.op, 5, N, K, ranks, "float16", (2, 3), invariant=True)
    mode = cp.batch_invariant()
    with mode:
        for plan in ("auto", "shard_p2p", "serial invariant", build(problem, "graded 1/1")):
            found += layer.wrong(5, plan, "in the mode")
        with mode:
            found += layer.wrong(5, "auto", "nested")
        found += layer.wrong(5, "auto", "behind the nested one")
    return found + layer.wrong(5, build(problem, "graded 1/1"), "outside")


@on_ranks(2)
def test_a_mode_ends_with_its_context(rank: int, ranks: int):
    """Also by an error; and a call that is known is not taken for one in the mode."""
    layer = Layer("matmul_all_reduce", rank, ranks, torch.bfloat16)
    before = [layer.call(1, "fused") for _ in range(2)][-1]
    inside = before
    with pytest.raises(ZeroDivisionError), cp.batch_invariant():
        inside = layer.call(1, "fused")
        raise ZeroDivisionError
    assert torch.equal(layer.call(1, "fused"), before)
    assert torch.equal(inside, layer.want[:1]) and not torch.equal(before, inside)


def refused(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


@on_ranks(2)
def test_what_is_refused(rank: int, ranks: int):
    gather, total = (Layer(op, rank, ranks, torch.float16) for op in OPS[::2])
    x, w = gather.xs[0][:4], gather.ws[0]
    assert refused(lambda: gather.call(8, "uniform_fused_2d invariant")) == (
        "all_gather_matmul: plan must be batch-invariant, got 'uniform_fused_2d'; "
        "it multiplies slices of K: bits depend on the rows beside"
    )
    plain = build(Problem("matmul_all_reduce", 4, N, K, ranks, "float16"), "serial")
    with cp.batch_invariant():
        text = refused(lambda: total.call(4, plain))
        assert "must be a Plan for a problem with invariant=True" in text
        bags = torch.zeros(4, dtype=torch.int64), torch.arange(4)
        for call in (
            lambda: cp.all_gather_attention(*(x.view(1, 4, 1, K),) * 3),
            lambda: cp.all_gather_matmul(x[:, : K // 2], w, gather_dim=-1),
            lambda: cp.all_to_all_matmul(x, w[None], counts=torch.full((2, 2), 2)),
            lambda: cp.embedding_bag_all_to_all([w], *bags),
        ):
            text = refused(call)
            assert "invariant must be False: the op has no batch-invariant plans" in text, text
    total.call(4, plain)  # and not outside


@on_ranks(2)
def test_ranks_that_are_not_in_the_mode_alike_are_told(rank: int, ranks: int):
    layer = Layer("matmul_all_reduce", rank, ranks, torch.float16)
    plan = "serial invariant" if rank else "serial"
    text = refused(lambda: layer.call(4, plan))
    assert "plan must be equal on all ranks, serial as on rank 0, got serial invariant" in text


@on_ranks(2)
def test_a_bias_of_one_rank_alone_is_told(rank: int, ranks: int):
    """Though it is added behind what they do together."""
    for op in OPS:
        layer = Layer(op, rank, ranks, torch.float16)
        bias = torch.ones(N, dtype=torch.float16)
        text = refused(lambda layer=layer, bias=bias: layer.call(  # type: ignore[misc]
            4, "serial invariant", bias=bias if rank else None
        ))  # fmt: skip
        assert "bias is None must be equal on all ranks, True as on rank 0, got False" in text, text


@on_ranks(2)
def test_a_bias_is_added_to_the_rounded_sum(rank: int, ranks: int):
    for op in OPS:
        layer = Layer(op, rank, ranks, torch.bfloat16)
        bias = torch.randn(N, generator=torch.Generator().manual_seed(5)).bfloat16()
        want = layer.want + bias
        if op == "all_gather_matmul":
            want = (layer.exact[0] + bias).bfloat16()
        for m in (1, 5):
            rows = layer.kept(m) if op == "matmul_reduce_scatter" else slice(0, m)
            for plan in ("serial invariant", "shard_p2p invariant"):
                assert torch.equal(layer.call(m, plan, bias=bias), want[rows])
        with pytest.raises(InputError, match=r"bias must be \[N=40\]"):
            layer.call(5, "serial invariant", bias=bias[:1])


@on_ranks(2)
def test_several_weights_and_columns(rank: int, ranks: int):
    layer = Layer("all_gather_matmul", rank, ranks, torch.float16)
    weights = list(layer.ws[rank].split([24, 16], 1))
    x = layer.xs[0][:5][layer.kept(5)]
    ys = cp.all_gather_matmul(x, weights, rows=layer.shares(5), plan="auto invariant")
    assert torch.equal(torch.cat(ys, 1), layer.want[:5])
    layer = Layer("matmul_reduce_scatter", rank, ranks, torch.float16)
    own = slice(rank * N // 2, (rank + 1) * N // 2)
    for m in (1, 5):
        x, w = layer.xs[rank][:m], layer.ws[rank]
        y = cp.matmul_reduce_scatter(x, w, plan="auto invariant", scatter_dim=-1)
        assert torch.equal(y, layer.want[:m, own])


def gradients(layer: Layer, plan: str) -> list[Tensor]:
    x = layer.xs[layer.rank][:6].clone().requires_grad_()
    w = layer.ws[layer.rank].clone().requires_grad_()
    y = getattr(cp, layer.op)(x, w, plan=plan)
    weight = torch.arange(y.numel()).view(y.shape).to(y.dtype) / y.numel()
    return list(torch.autograd.grad((y * weight).sum(), (x, w)))


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_gradients_are_as_always(rank: int, ranks: int, op: str):
    layer = Layer(op, rank, ranks, torch.float32)
    for plan in ("serial", "shard_p2p"):
        pairs = zip(gradients(layer, plan), gradients(layer, f"{plan} invariant"), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@on_ranks(2)
def test_layers_and_the_norm_obey_the_mode(rank: int, ranks: int):
    torch.manual_seed(3)
    column = cp.nn.ColumnParallelLinear(K, 2 * N, bias=True, dtype=torch.bfloat16)
    row = cp.nn.RowParallelLinear(2 * N, K, bias=True, dtype=torch.bfloat16)
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(7)).bfloat16()
    total = Layer("matmul_all_reduce", rank, ranks, torch.bfloat16)
    residual, norm = torch.randn(64, N).bfloat16(), torch.randn(N).bfloat16()

    def of(m: int) -> Sequence[Tensor]:
        y = row(column(x[:m][rank * m // 2 : (rank + 1) * m // 2]))
        where: Any = {"residual": residual[:m], "norm_weight": norm}
        return y, *cp.matmul_all_reduce_rms_norm(total.xs[rank][:m], total.ws[rank], **where)

    with cp.batch_invariant(), torch.no_grad(), by_reference():
        whole = of(64)
        for m in (2, 8, 30):
            y, normed, h = of(m)
            assert torch.equal(normed, whole[1][:m]) and torch.equal(h, whole[2][:m])
            parts = [torch.empty_like(each) for each in (y, whole[0]) for _ in range(2)]
            torch.distributed.all_gather(parts[:2], y)
            torch.distributed.all_gather(parts[2:], whole[0])
            assert torch.equal(torch.cat(parts[:2]), torch.cat(parts[2:])[:m])


@pytest.mark.shows("matmul_all_reduce", "compiled forward", "bf16")
@on_ranks(2)
def test_compiled_code_has_the_mode_that_it_is_called_in(rank: int, ranks: int):
    layer = Layer("matmul_all_reduce", rank, ranks, torch.bfloat16)

    def plain(x: Tensor) -> Tensor:
        return cp.matmul_all_reduce(x, layer.ws[rank], plan="fused") + 0

    def inside(x: Tensor) -> Tensor:
        with cp.batch_invariant():
            y = cp.matmul_all_reduce(x, layer.ws[rank], plan="fused")
        return y + 0

    x = layer.xs[rank][:1]
    with by_reference(), torch.no_grad():
        before = plain(x)
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), before)
        with cp.batch_invariant():
            assert torch.equal(compiled(x), layer.want[:1])
        assert torch.equal(compiled(x), before)
        compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), layer.want[:1])
        assert torch.equal(plain(x), before) and not torch.equal(before, layer.want[:1])
