"""The batch-invariant matmul: interpreted against fp64, and compiled for an H200 tile by tile."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from on_ranks import on_ranks

from counterpoint.kernels.invariant_matmul import few_rows_matmul_kernel, invariant_matmul_kernel
from counterpoint.kernels.reduce import sum_of_parts
from counterpoint.run import invariant_matmul
from counterpoint.run.invariant_matmul import (
    FEW_ROWS,
    WAVES,
    Tile,
    by_kernel,
    by_torch,
    gated_tile,
    tile_of,
)
from counterpoint.testing.ptx import Compiled, compiled

SMS = 132
ROWS = (1, 17, 33, 64, 65, 256, 512, 1024, 4096, 8192)
COLUMNS = (768, 3072, 8192, 28672)
TILES = sorted({tile_of(m, n, SMS, torch.bfloat16) for m in ROWS for n in COLUMNS})
GATED = sorted({gated_tile(m, 2 * n, SMS, torch.bfloat16) for m in ROWS[2:] for n in COLUMNS})
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k(\d+)\.f32\.(\w+)\.(\w+)")


@cache
def code(
    tile: Tile, dtype: str, *, described: bool, by_columns: bool, bias: bool, activation: str = "",
    gated: bool = False,
) -> Compiled:  # fmt: skip
    """As a launch on operands that are multiples of 16 would compile it for an H200."""
    block_m, block_n, block_k, num_warps, num_stages, _, halves = tile
    w_block = (block_n, block_k) if by_columns else (block_k, block_n)
    halves, width = halves and not gated, block_n // (1 + gated)
    blocks = {"x": (block_m, block_k), "w": w_block, "y": (block_m, width // (1 + halves))}
    blocks |= {"w": (2, width, block_k)} if gated else {}
    types = dict.fromkeys(("x", "w", "bias_ptr", "y"), f"*{dtype}")
    if described:
        types |= {name: f"tensordesc<{dtype}{[*block]}>" for name, block in blocks.items()}
    types |= dict.fromkeys(("M", "N", "K", "stride_xm", "stride_ym"), "i32")
    aligned = tuple(name for name, kind in types.items() if "[" not in kind)
    dense, pitch = ("stride_wk", "stride_wn") if by_columns else ("stride_wn", "stride_wk")
    constants = {"BLOCK_N": block_n, "BLOCK_K": block_k, "HAS_BIAS": bias, dense: 1}
    constants |= {"ACTIVATION": activation}
    if few := block_m <= FEW_ROWS:
        types = {f"{n}_ptr" if n in blocks else n: kind for n, kind in types.items()}
        aligned = tuple(types)
        constants |= {"ROWS": block_m, "EVEN_N": True, "EVEN_K": True, "STAGES": num_stages}
    else:
        constants |= {"BLOCK_M": block_m, "GROUP_M": 8, "DESCRIPTORS": described}
        constants |= {"W_BY_COLUMNS": by_columns, "HALVES": halves, "GATED": gated}
        types |= {"up_first": "i32"}
    return compiled(
        few_rows_matmul_kernel if few else invariant_matmul_kernel, 90, types | {pitch: "i32"},
        constants, num_warps=num_warps, num_stages=num_stages, aligned=(*aligned, pitch),
    )  # fmt: skip


def fits(found: Compiled) -> bool:
    """Nothing spills, and a block has room on an SM."""
    return not found.spills and found.shared_bytes + found.dynamic_bytes <= 227 * 1024


def test_all_tiles_are_in_use():
    assert {*WAVES} < {*TILES} and len(TILES) == len(WAVES) + 2


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("dtype", "by_columns"), [("bf16", True), ("fp16", False)])
@pytest.mark.parametrize(
    ("tile", "described"), [(t, d) for t in TILES for d in (False, True)[: 1 + (t[0] > FEW_ROWS)]]
)
def test_every_tile_multiplies_16_numbers_at_a_time(
    tile: Tile, described: bool, dtype: str, by_columns: bool
):
    found = code(tile, dtype, described=described, by_columns=by_columns, bias=True)
    steps = {match.groups() for match in WGMMA.finditer(found.ptx)}
    assert steps == {("16", *({"bf16": "bf16", "fp16": "f16"}[dtype],) * 2)}
    assert not re.search(r"mma\.sync|fma\.rn\.f32", found.ptx) and fits(found)
    assert ("cp.async.bulk.tensor" in found.ptx) == described


@pytest.mark.drawn(3)
@pytest.mark.parametrize("tile", GATED)
def test_gate_and_up_are_one_operand(tile: Tile):
    """As many tensor core instructions as of one weight, of all of its columns."""
    gated, plain = (
        code(tile, "bf16", described=True, by_columns=True, bias=False, activation="silu" * both,
             gated=both) for both in (True, False)
    )  # fmt: skip
    shapes = [re.findall(r"wgmma\.mma_async\S+", found.ptx) for found in (gated, plain)]
    assert shapes[0] == shapes[1] != [] and fits(gated)
    assert "cp.async.bulk.tensor.3d" in gated.ptx


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", ["relu", "silu", "gelu_tanh"])
@pytest.mark.parametrize("tile", TILES)
def test_an_activation_spills_nothing(tile: Tile, name: str):
    assert fits(code(tile, "bf16", described=tile.block_m > FEW_ROWS, by_columns=True, bias=True,
                     activation=name))  # fmt: skip


def test_fp32_is_multiplied_on_ordinary_cores():
    tile = tile_of(64, 512, SMS, torch.float32)
    found = code(tile, "fp32", described=True, by_columns=True, bias=False)
    assert "fma.rn.f32" in found.ptx and "mma" not in found.ptx
    assert not found.spills


def launched(
    x: Any, w: Any, bias: Any, m: int, tile: Tile, described: bool, *more: Any
) -> torch.Tensor:
    answers: dict[str, Callable[[object], int]] = {
        "num_sms": lambda _: 3, "_has_descriptors": lambda _: described
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(invariant_matmul, name, answer)
        y = torch.full((m, w.shape[1]), float("nan"), dtype=x.dtype)
        by_kernel(x[:m], w, bias, y, tile, *more)
    return y


TILES_HERE = (Tile(16, 32, 64, 4, 3), Tile(32, 64, 32, 4, 2), Tile(64, 64, 32, 4, 2, halves=True))
HOW = [
    (tile, m) for tile in TILES_HERE for m in (1, 13, 32, 150)
    if m <= tile.block_m or tile.block_m > FEW_ROWS
]  # fmt: skip
EITHER = pytest.mark.parametrize("described", [True, False])


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("tile", "m"), HOW)
@EITHER
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(88, 72, torch.float16), (37, 65, torch.float32), (200, 32, torch.float16)],
)
@on_ranks(1)
def test_it_multiplies(
    rank: int, ranks: int, n: int, k: int, dtype: torch.dtype, layout: str, described: bool,
    tile: Tile, m: int,
):  # fmt: skip
    """Sizes that no tile divides, of all layouts, with more tiles than programs."""
    x, bias, plain = (torch.randn(*s).to(dtype) for s in ((150, k), (1, n), (k, n)))
    w = {"rows": plain, "columns": plain.t().contiguous().t(),
         "gaps": torch.stack([plain, plain], 2)[:, :, 0]}[layout]  # fmt: skip
    want, added = x.double() @ plain.double(), bias if m == 13 else None
    want = want if added is None else want + added.double()
    y = launched(x, w, added, m, tile, described)
    reference = torch.empty_like(y)
    by_torch(x[:m], w, added, reference)
    own, least = ((t.double() - want[:m]).norm() for t in (y, reference))
    assert own <= 1.1 * least + 1e-6 * want.norm()


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("tile", "m"), [how for how in HOW if how[1] != 13])
@EITHER
@pytest.mark.parametrize(("n", "k", "dtype"), [(88, 72, torch.float16), (40, 64, torch.float32)])
@on_ranks(1)
def test_it_ends_in_an_activation(
    rank: int, ranks: int, n: int, k: int, dtype: torch.dtype, described: bool, tile: Tile, m: int
) -> list[str]:
    """Of products that are rounded; gate before up in memory, and behind it."""
    found, functional = list[str](), torch.nn.functional
    x, bias = torch.randn(150, k).to(dtype), torch.randn(1, n).to(dtype)
    every = torch.randn(3, n, k).to(dtype)
    gate, _, up = (w.t() for w in every)
    how = m, tile, described
    y = launched(x, gate, bias, *how, "gelu")
    product = launched(x, gate, bias, *how)
    if not torch.allclose(y.float(), functional.gelu(product.float()), 2e-3, 1e-5):
        found.append("gelu")
    if not described or tile.block_m <= FEW_ROWS:
        return found
    products = [launched(x, w, None, *how).float() for w in (gate, up)]
    for first, second in ((0, 1), (1, 0)):
        y = launched(x, (gate, up)[first], None, *how, "silu", (gate, up)[second])
        want = functional.silu(products[first]) * products[second]
        if not torch.allclose(y.float(), want, 2e-3, 1e-5):
            found.append(f"silu_mul, {first=}")
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
@on_ranks(1)
def test_ranks_are_summed_in_order(rank: int, ranks: int, parts: int):
    """Numbers whose sum depends on the order."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr: Any, y_ptr: Any, WORLD: tl.constexpr, N: tl.constexpr):
        at, offs = tl.arange(0, WORLD)[:, None], tl.arange(0, N)
        tl.store(y_ptr + offs, sum_of_parts(tl.load(x_ptr + at * N + offs[None, :]), True))

    x, y = torch.randn(parts, 64) * 10.0 ** torch.randint(-3, 4, (parts, 64)), torch.empty(64)
    cast(Any, kernel)[(1,)](x, y, parts, 64)
    assert torch.equal(y, sum(x, torch.zeros(64)))
