"""Activations in memory and their gradients, of all or counted rows: against fp64, and compiled."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels.activation import activation_gradient_kernel, activation_kernel
from counterpoint.ops.activations import NAMES, swiglu
from counterpoint.runtime import activated
from counterpoint.runtime.activated import FUNCTIONS
from counterpoint.testing.ptx import CAPABILITIES, compiled, lines_with

NUMBERS = 9001  # no multiple of a block, and more than two of them
ROOM = 12
UNTOUCHED = 7.0
# counts of all ranks, this rank, N
CASES: dict[str, tuple[list[list[int]] | None, int, int]] = {
    "all rows": (None, 0, 20),
    "uneven": ([[1, 4, 2, 0], [3, 0, 1, 2]], 0, 20),
    "experts without rows": ([[5, 4, 0, 3, 9, 9], [3, 0, 0, 2, 9, 9], [0, 0, 0, 3, 0, 0]], 1, 33),
    "no rows": ([[4, 4, 0], [3, 1, 0], [2, 2, 0]], 2, 20),
    "one takes all": ([[0, 0, 6, 0], [0, 0, 6, 0]], 1, 600),
    "more than there is room for": ([[9, 9], [9, 9]], 1, 8),
    "one column": ([[2], [3]][:1], 0, 1),
}


def gradients(name: str, h: Tensor, up: Tensor | None, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """In fp64, by torch."""
    given = [t.double().requires_grad_() for t in (h, up) if t is not None]
    y = FUNCTIONS[name.removesuffix("_mul")](given[0])
    y = y if up is None else y * given[1]
    return y.detach(), list(torch.autograd.grad(y, given, dy.double()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@on_ranks(1)
def test_values_and_gradients(rank: int, ranks: int, dtype: torch.dtype) -> list[str]:
    found = list[str]()
    torch.manual_seed(0)
    for name in NAMES:
        h, up, dy = (torch.randn(NUMBERS).mul(3).to(dtype) for _ in range(3))
        h[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0]).to(dtype)
        second = up if name.endswith("_mul") else None
        y, dh, dup = (torch.full((NUMBERS + 8,), float("nan"), dtype=dtype) for _ in range(3))
        with np.errstate(over="ignore"):  # exp(60) is infinite, as it should be
            activated.launch(name, (h, up, y), False, None, rank)
            activated.launch(name, (h, up, dy, dh, dup), False, None, rank)
        want, grads = gradients(name, h, second, dy)
        for what, got, exact in zip(("y", "dh", "dup"), (y, dh, dup), (want, *grads), strict=False):
            off = (got[:NUMBERS].double() - exact).abs()
            bound = torch.finfo(dtype).eps * exact.abs() + 2e-6 * (1 + up.double().abs())
            if not (off <= bound * (1 + dy.double().abs())).all():
                found.append(f"{name} {what}: {off.max():.3g}")
            if not got[NUMBERS:].isnan().all():
                found.append(f"{name} {what}: wrote behind its end")
    return found


@on_ranks(1)
def test_nan_stays_nan(rank: int, ranks: int):
    for name in NAMES:
        h, y = torch.tensor([float("nan"), 1.0, float("inf"), 2.0]), torch.empty(4)
        with np.errstate(all="ignore"):
            activated.launch(name, (h, torch.ones(4), y), False, None, rank)
        assert y.isnan().tolist() == [True, False, False, False], name
        assert y[2] == float("inf")


def rows_of(counts: list[list[int]] | None, rank: int) -> int:
    if counts is None:
        return ROOM
    local = len(counts[0]) // len(counts)
    return min(ROOM, sum(sum(row[rank * local : (rank + 1) * local]) for row in counts))


def drawn(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """dy, gate_up, counts, rank, rows; what lies beyond the rows is NaN."""
    table, rank, n = CASES[name]
    rows = rows_of(table, rank)
    dy, gate_up = (3 * torch.randn(ROOM, width) for width in (n, 2 * n))
    gate_up[0, :n] = (40 * gate_up[0, :n]).clamp(-80, 80)  # where the sigmoid is 0 or 1
    dy[rows:], gate_up[rows:] = torch.nan, torch.nan
    counts = None if table is None else torch.tensor(table)
    return dy.to(dtype), gate_up.to(dtype), counts, rank, rows


def want_of(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd in fp64."""
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    y = F.silu(gate) * up
    return y.detach(), torch.autograd.grad(y, exact, dy.double())[0]


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    most = want.abs().max() if want.numel() else 0
    bound = 1e-6 * most + 2 * torch.finfo(dtype).eps * want.abs()
    return got.dtype == dtype and bool(((got.double() - want).abs() <= bound).all())


def wrong(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for dtype in (torch.float32, torch.float16):
        for name in CASES:
            dy, gate_up, counts, at, rows = drawn(name, dtype)
            for table in (counts, None if counts is None else counts.int()):
                y, dgate_up = (torch.full_like(t, UNTOUCHED) for t in (dy, gate_up))
                given = (gate_up, gate_up, dy, dgate_up, dgate_up)
                activated.launch("silu_mul", (gate_up, gate_up, y), True, table, at)
                activated.launch("silu_mul", given, True, table, at)
                want, dwant = want_of(dy[:rows], gate_up[:rows])
                if not near(y[:rows], want, dtype):
                    found.append(f"{name} {dtype}: y")
                if not near(dgate_up[:rows], dwant, dtype):
                    found.append(f"{name} {dtype}: gradient")
                if not all((t[rows:] == UNTOUCHED).all() for t in (y, dgate_up)):
                    found.append(f"{name} {dtype}: rows beyond are written")
    return found


def test_rows_of_experts_are_computed_and_no_others_touched(pool: RankPool):
    assert pool.run(wrong, 1, group=False) == [[]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_computes_the_same(dtype: torch.dtype):
    for name in CASES:
        dy, gate_up, counts, rank, rows = drawn(name, dtype)
        given = gate_up.clone().requires_grad_()
        y = swiglu(given, counts, rank)
        (found,) = torch.autograd.grad(y, given, dy)
        want, dwant = want_of(dy[:rows], gate_up[:rows])
        assert near(y.detach()[:rows], want, dtype) and near(found[:rows], dwant, dtype), name
    op = torch.ops.counterpoint
    whole, dy = torch.randn(5, 12).to(dtype).requires_grad_(), torch.randn(5, 6).to(dtype)
    given = (None, "silu_mul", torch.tensor([[2, 3]]), 0)
    torch.library.opcheck(op.activated, (whole, *given))
    torch.library.opcheck(op.activated_gradient, (dy, whole.detach(), *given))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("rows", [False, True], ids=["all", "rows"])
def test_it_moves_16_bytes_at_a_time(capability: int, rows: bool):
    numbers = activated.ROW_BLOCK if rows else activated.BLOCK
    num_warps = activated.ROW_WARPS if rows else activated.NUM_WARPS
    each = numbers // (8 * 32 * num_warps)  # times that a thread moves 16 bytes
    for name in ("silu",) if rows else ("silu", "gelu", "gelu_tanh", "relu"):
        constants = {"NAME": name, "GATED": True, "SIDE": rows, "BLOCK": numbers}
        constants |= {"WORLD": 4, "EXPERTS": 64} if rows else {"WORLD": 1, "EXPERTS": 0}
        for kernel, loads in ((activation_kernel, 2), (activation_gradient_kernel, 3)):
            types = {
                arg: "*i32" if arg == "counts_ptr" else "*bf16" if arg.endswith("ptr") else "i32"
                for arg in kernel.arg_names if arg not in constants
            }  # fmt: skip
            aligned = tuple(arg for arg in types if arg.endswith("ptr") or arg == "N")
            found = compiled(
                kernel, capability, types, constants, num_warps=num_warps, aligned=aligned
            )
            assert len(lines_with(found.ptx, r"ld\.global\.v4\.b32")) == loads * each
            assert len(lines_with(found.ptx, r"st\.global\.v4\.b32")) == (loads - 1) * each
            assert not found.spills
