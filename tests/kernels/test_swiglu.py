"""SwiGLU over the rows that there are: kernels interpreted against fp64, compiled; and by torch."""

import pytest
import torch
import torch.nn.functional as F
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels.swiglu import swiglu_gradient_kernel, swiglu_kernel
from counterpoint.ops import swiglu
from counterpoint.testing.ptx import CAPABILITIES, compiled, lines_with

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
            y, dgate_up = (torch.full_like(t, UNTOUCHED) for t in (dy, gate_up))
            for table in (counts, None if counts is None else counts.int()):
                swiglu.into(y, (gate_up,), table, at)
                swiglu.into(dgate_up, (dy, gate_up), table, at)
                want, dwant = want_of(dy[:rows], gate_up[:rows])
                if not near(y[:rows], want, dtype):
                    found.append(f"{name} {dtype}: y")
                if not near(dgate_up[:rows], dwant, dtype):
                    found.append(f"{name} {dtype}: gradient")
                if not all((t[rows:] == UNTOUCHED).all() for t in (y, dgate_up)):
                    found.append(f"{name} {dtype}: rows beyond are written")
    return found


def test_kernels_compute_the_rows_that_there_are_and_touch_no_others(pool: RankPool):
    assert pool.run(wrong, 1, group=False) == [[]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpu_computes_the_same(dtype: torch.dtype):
    for name in CASES:
        dy, gate_up, counts, rank, rows = drawn(name, dtype)
        given = gate_up.clone().requires_grad_()
        y = swiglu.swiglu(given, counts, rank)
        (found,) = torch.autograd.grad(y, given, dy)
        want, dwant = want_of(dy[:rows], gate_up[:rows])
        assert near(y.detach()[:rows], want, dtype) and near(found[:rows], dwant, dtype), name
    ops = torch.ops.counterpoint
    whole, dy = torch.randn(5, 12).to(dtype).requires_grad_(), torch.randn(5, 6).to(dtype)
    counts = torch.tensor([[2, 3]])
    torch.library.opcheck(ops.swiglu, (whole, counts, 0))
    torch.library.opcheck(ops.swiglu_gradient, (dy, whole.detach(), counts, 0))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_rows_are_moved_16_bytes_at_a_time(capability: int):
    constants = {"WORLD": 4, "EXPERTS": 64, "COUNTED": True, "BLOCK_N": swiglu.BLOCK_N}
    for kernel, loads in ((swiglu_kernel, 2), (swiglu_gradient_kernel, 3)):
        types = {
            name: "*i32" if name == "counts_ptr" else "*bf16" if name.endswith("ptr") else "i32"
            for name in kernel.arg_names if name not in constants
        }  # fmt: skip
        aligned = tuple(name for name in types if name.endswith("ptr") or name == "N")
        found = compiled(kernel, capability, types, constants, aligned=aligned, **swiglu.OPTIONS)
        assert len(lines_with(found.ptx, r"ld\.global\.v4\.b32")) == loads
        assert len(lines_with(found.ptx, r"st\.global\.v4\.b32")) == loads - 1 and not found.spills
