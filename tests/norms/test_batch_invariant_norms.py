"""Batch-invariant sums over ranks with their norm, on CPU ranks: bits of a row, whatever M is."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
from counterpoint import InputError, PlanError, Problem, build, choose, validate
from counterpoint.norms.norms import Norm, by_torch
from counterpoint.plan.steps import Plan

MOST, K, N, EPS = 8192, 24, 40, 1e-5
ROWS = (1, 2, 3, 7, 16, 33, 64, 65, 128, 1000, MOST)
FEW = (1, 2, 5, 9)
FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Rows:
    """What all ranks sum and normalise, and what each row of the results has to be."""

    def __init__(
        self, rank: int, ranks: int, dtype: torch.dtype, layer: bool, fp8: bool, n: int = N,
        most: int = MOST,
    ) -> None:  # fmt: skip
        def normal(*shape: int, seed: int) -> Tensor:
            return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

        xs = [normal(most, n, seed=r) for r in range(ranks)]
        self.x, self.residual = xs[rank], normal(most, n, seed=90)
        self.weight, self.bias = normal(n, seed=91), normal(n, seed=92) if layer else None
        self.layer, self.fp8 = layer, fp8
        total = torch.zeros(most, n)
        for x in xs:
            total += x
        self.want = by_torch(Norm("layer" if layer else "rms", EPS, fp8), {
            "x": total.to(dtype), "residual": self.residual, "weight": self.weight,
            "bias": self.bias,
        })  # fmt: skip

    def call(self, m: int, plan: str | Plan, first: int = 0) -> Sequence[Tensor]:
        x, residual = (t[first : first + m] for t in (self.x, self.residual))
        options: dict[str, Any] = {"eps": EPS, "plan": plan, "out_dtype": FP8 if self.fp8 else None}
        if self.layer:
            return cp.all_reduce_layer_norm(x, residual, self.weight, self.bias, **options)
        return cp.all_reduce_rms_norm(x, residual, self.weight, **options)


def differ(found: Sequence[Tensor], want: Sequence[Tensor]) -> int:
    """Rows that differ in a bit of some result."""
    bad = [(a.view(torch.uint8) != b.view(torch.uint8)).any(1) if a.dtype == FP8 else
           (a != b).any(1) for a, b in zip(found, want, strict=True)]  # fmt: skip
    return int(torch.stack(bad).any(0).sum())


def takes(spec: str, m: int, ranks: int, dtype: torch.dtype, n: int = N) -> bool:
    kept = str(dtype).removeprefix("torch.")
    p = Problem("all_reduce_norm", m, n, ranks=ranks, dtype=kept, invariant=True)  # type: ignore[arg-type]
    try:
        return spec == "auto" or bool(build(p, spec))
    except InputError:
        return False


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("layer", "fp8"), [(False, False), (True, False), (True, True)])
@on_ranks(1, 2, 3, 4, 8)
def test_bits_of_a_row_depend_neither_on_m_nor_on_the_plan(
    rank: int, ranks: int, layer: bool, fp8: bool, draw: Draw
) -> list[str]:
    found, met = list[str](), set[str]()
    for dtype in draw(DTYPES, 1):
        rows = Rows(rank, ranks, dtype, layer, fp8)
        for spec in ("auto", "serial", "direct", "fused"):
            for m in draw([m for m in ROWS if takes(spec, m, ranks, dtype)], 6, spec):
                met.add(spec)
                with by_reference():
                    results = rows.call(m, f"{spec} invariant")
                if bad := differ(results, [t[:m] for t in rows.want]):
                    found.append(f"{spec} {dtype} M{m}: {bad} rows differ")
    assert met == {"auto", "serial"} | ({"direct", "fused"} if ranks != 3 else set[str]())
    return found


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layer", [False, True])
@on_ranks(2, 4)
def test_kernels_have_the_same_bits_at_any_place(rank: int, ranks: int, layer: bool) -> list[str]:
    """Interpreted. Also where a kernel has more columns than the row, and where a row is long."""
    found, met = list[str](), set[tuple[str, int]]()
    for dtype, fp8 in ((torch.float16, False), (torch.float32, False), (torch.float32, True)):
        for n in (40, 64, 6000) if dtype == torch.float16 else (64,):
            rows = Rows(rank, ranks, dtype, layer, fp8, n, max(FEW))
            whole = rows.call(max(FEW), "serial invariant")
            for spec in ("serial", "direct", "fused one_shot", "fused two_shot"):
                for m in FEW if n < 100 else FEW[:1]:
                    if takes(spec, m, ranks, dtype, n):
                        met.add((spec, n))
                        first = max(FEW) - m
                        results = rows.call(m, f"{spec} invariant", first)
                        if bad := differ(results, [t[first:] for t in whole]):
                            found.append(f"{spec} {dtype} M{m} N{n}: {bad} rows differ")
    assert met >= {("fused one_shot", n) for n in (40, 64, 6000)} | {("fused two_shot", 64)}
    return found


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_long_row_has_the_same_bits_by_itself(kind: Any) -> None:
    """Torch sums a single long row by several threads."""
    before, draw = torch.get_num_threads(), torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, 65_536, generator=draw), torch.randn(65_536, generator=draw)
    torch.set_num_threads(2)
    try:
        whole, *alone = (
            by_torch(Norm(kind, EPS), {"x": rows, "weight": weight})[0] for rows in (x, *x.split(1))
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(alone), whole)


@on_ranks(4)
def test_without_the_mode_bits_depend_on_the_plan(rank: int, ranks: int) -> None:
    """Else the tests above would show nothing: parts of 10 words are summed in another order."""
    rows = Rows(rank, ranks, torch.float32, False, False, most=16)
    assert differ(rows.call(16, "fused two_shot"), rows.call(16, "serial invariant"))


def sums(rank: int, ranks: int, layer: bool) -> Callable[[int], Sequence[Tensor]]:
    """A matmul, its sum over ranks and its norm, of so many rows."""
    own = torch.Generator().manual_seed(rank)
    x, w = torch.randn(MOST, K, generator=own).half(), torch.randn(K, N, generator=own).half()
    alike = torch.Generator().manual_seed(99)
    residual, weight = torch.randn(MOST, N, generator=alike).half(), torch.ones(N).half()
    bias = torch.randn(N, generator=alike).half()

    def call(m: int) -> Sequence[Tensor]:
        given: dict[str, Any] = {"residual": residual[:m], "norm_weight": weight, "bias": bias}
        if layer:
            return cp.matmul_all_reduce_layer_norm(x[:m], w, norm_bias=bias, **given)
        return cp.matmul_all_reduce_rms_norm(x[:m], w, **given)

    return call


@pytest.mark.parametrize("layer", [False, True])
@on_ranks(2)
def test_a_norm_behind_a_matmul(rank: int, ranks: int, layer: bool) -> list[str]:
    call = sums(rank, ranks, layer)
    with cp.batch_invariant(), by_reference():
        whole = call(MOST)
        bad = {m: differ(call(m), [t[:m] for t in whole]) for m in ROWS}
    return [f"M{m}: {number} rows differ" for m, number in bad.items() if number]


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2)
def test_ways_to_ask(rank: int, ranks: int, inside: bool) -> None:
    """The bias of a LayerNorm is no bias of the sum: no way leaves it out."""
    rows = Rows(rank, ranks, torch.float32, True, False)
    p = Problem("all_reduce_norm", 4, N, ranks=ranks, dtype="float32", bias=True, norm="layer",
                residual=True, eps=EPS, invariant=True)  # fmt: skip
    with cp.batch_invariant() if inside else nullcontext(), by_reference():
        for plan in ("auto invariant", "direct invariant", build(p, "serial")):
            assert not differ(rows.call(4, plan), [t[:4] for t in rows.want]), plan


@on_ranks(2)
def test_parts_of_a_row_in_another_order_are_refused(rank: int, ranks: int) -> None:
    rows = Rows(rank, ranks, torch.float16, False, False)
    with pytest.raises(InputError, match="plan must be a spec of one_shot for such rows"):
        rows.call(4, "fused two_shot invariant")
    x = rows.x[:4].clone().requires_grad_()
    y, _ = cp.all_reduce_rms_norm(x, None, rows.weight, plan="serial invariant")
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    first = dx.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, dx)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_plans_are_proved_and_a_choice_is_among_them(ranks: int):
    p = Problem("all_reduce_norm", 8, 4096, ranks=ranks, residual=True, invariant=True)
    for spec in ("serial", "direct", "fused one_shot", "fused two_shot"):
        validate(build(p, spec))
    uneven = Problem("all_reduce_norm", 8, 5120, ranks=ranks, residual=True)
    plain = build(uneven, "fused two_shot")
    with pytest.raises(PlanError, match="is not batch-invariant: it adds up the columns of a row"):
        validate(Plan(replace(uneven, invariant=True), *(
            getattr(plain, name) for name in Plan.__dataclass_fields__ if name != "problem"
        )))  # fmt: skip
    asked = {m: Problem("all_reduce_norm", m, 4096, ranks=ranks, residual=True, invariant=True)
             for m in (1, 64, 8192)}  # fmt: skip
    families = {
        (m, by): choose(each, "h200-8", by=by).plan.family  # type: ignore[arg-type]
        for m, each in asked.items() for by in ("model", "rule")
    }  # fmt: skip
    assert {by: families[1, by] for by in ("model", "rule")} == {"model": "fused", "rule": "fused"}
    assert families[8192, "model"] == families[8192, "rule"] == "direct"


def test_a_long_row_of_uneven_parts_takes_two_kernels():
    """Of 8 ranks a program cannot hold all of it, and parts are in another order."""
    p = Problem("all_reduce_norm", 8, 5120, ranks=8, residual=True, invariant=True)
    with pytest.raises(InputError, match=r"rows that ranks share evenly in 1, 2, 4, \.\.\. words"):
        build(p, "fused")
    assert choose(p, "h200-8").plan.family != "fused"
    few = Problem("all_reduce_norm", 8, 3000, ranks=8, residual=True, invariant=True)
    assert build(few, "fused").steps[0].arg("shots") == "one_shot"
