"""The kernel of a norm without peers: interpreted against torch, and compiled."""

from itertools import product
from typing import Any

import pytest
import torch
from rankpool import RankPool

from counterpoint.kernels.add_norm import add_norm_kernel
from counterpoint.ops import norms
from counterpoint.ops.norms import FP8, Norm
from counterpoint.testing.ptx import CAPABILITIES, compiled, lines_with

SHAPES = [(1, 16), (3, 20), (2, 1), (2, 33)]
TENSORS = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "h_ptr")


def forget() -> None:
    """Compile anew."""
    norms.launch_of.cache_clear()
    norms.compiled.cache_clear()


def errors(rank: int, ranks: int, most_columns: int) -> list[float]:
    """Of y, where rows have as many blocks as it takes; h is to the bit."""
    found: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "MAX_BLOCK", most_columns)
        forget()
        for (rows, n), kind, given in product(SHAPES, ("rms", "layer"), (True, False)):
            x, residual, weight, bias = (torch.randn(rows, n) for _ in range(4))
            # far from 0: a variance by squares alone would lose its digits
            x, weight, bias = x + 100 * (kind == "layer"), weight[0], bias[0]
            extra = {"residual": residual, "bias": bias if kind == "layer" else None}
            tensors: dict[str, Any] = {"x": x, "weight": weight, **(extra if given else {})}
            y, h = (torch.full_like(x, torch.nan) for _ in range(2))
            norms.run(Norm(kind, 1e-3), tensors, [y, h])
            assert torch.equal(h, x + residual if given else x)
            h = h.double()
            if kind == "layer":
                wide = bias.double() if given else None
                want = torch.nn.functional.layer_norm(h, (n,), weight.double(), wide, 1e-3)
            else:
                want = torch.nn.functional.rms_norm(h, (n,), weight.double(), 1e-3)
            found.append(((y - want).norm() / want.norm().clamp(min=1e-3)).item())
    forget()
    return found


@pytest.mark.parametrize("most_columns", [1 << 14, 8])
def test_it_is_the_norm_of_its_rows(pool: RankPool, most_columns: int):
    (found,) = pool.run(errors, 1, most_columns, group=False)
    assert len(found) == 16 and max(found) < 2e-5


def scaled(rank: int, ranks: int, most_columns: int) -> None:
    """Rows of zeros and of tiny values have a scale, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "MAX_BLOCK", most_columns)
        forget()
        x = torch.randn(4, 24)
        x[1], x[2] = 0, 1e-36
        y, h = torch.zeros(4, 24, dtype=FP8), torch.full_like(x, torch.nan)
        scales = torch.full((4, 1), torch.nan)
        norms.run(Norm("rms", 1e-3, fp8=True), {"x": x, "weight": torch.ones(24)}, [y, h, scales])
        norm = torch.nn.functional.rms_norm(x, (24,), torch.ones(24), 1e-3)
        assert torch.allclose(scales * 448, norm.abs().amax(1, keepdim=True), atol=1e-29)
        assert (y[1].float() == 0).all() and y.float().isfinite().all()
        assert (y[[0, 3]].float().abs().amax(1) == 448).all()
    forget()


@pytest.mark.parametrize("most_columns", [1 << 14, 8])
def test_a_row_has_a_scale_whatever_it_holds(pool: RankPool, most_columns: int):
    pool.run(scaled, 1, most_columns, group=False)


def spoilt(rank: int, ranks: int) -> None:
    """A row with a number that is none has no scale, and spoils no other's."""
    x = torch.randn(3, 24)
    x[:2, 5] = torch.nan
    y, h, scales = torch.zeros(3, 24, dtype=FP8), x.clone(), torch.zeros(3, 1)
    norms.run(Norm("rms", 1e-3, fp8=True), {"x": x, "weight": torch.ones(24)}, [y, h, scales])
    assert scales[:2].isnan().all() and scales[2].isfinite().all()


def test_what_is_no_number_is_seen(pool: RankPool):
    pool.run(spoilt, 1, group=False)


@pytest.mark.parametrize("quantized", [1, 2])
def test_what_is_no_number_is_not_clamped(quantized: int):
    """On a GPU a plain maximum leaves NaN out."""
    types = dict.fromkeys(TENSORS, "*bf16") | {
        "y_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "scales_ptr": "*fp32", "N": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {"LAYER": False, "HAS_RESIDUAL": True, "HAS_BIAS": False, "FP8": quantized,
                 "WHOLE": True, "BLOCK": 1024}  # fmt: skip
    ptx = compiled(add_norm_kernel, 90, types, constants, num_warps=4).ptx
    assert lines_with(ptx, r"max\.NaN\.f32") and lines_with(ptx, r"min\.NaN\.f32")
    assert bool(lines_with(ptx, r"setp\.(nan|neu?|num)\.f32")) == (quantized == 2)


@pytest.mark.shows("matmul_all_reduce_rms_norm", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("n", [4096, 16384])
def test_a_row_stays_in_registers(capability: int, n: int):
    types = dict.fromkeys(TENSORS, "*bf16") | {
        "y_ptr": "*bf16", "scale_ptr": "*fp32", "scales_ptr": "*fp32", "N": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "LAYER": False, "HAS_RESIDUAL": True, "HAS_BIAS": False, "FP8": 0, "WHOLE": True,
        "BLOCK": n,
    }  # fmt: skip
    found = compiled(
        add_norm_kernel, capability, types, constants, num_warps=min(16, n // 512),
        aligned=(*TENSORS, "y_ptr", "N"),
    )  # fmt: skip
    assert not found.spills
    loads = lines_with(found.ptx, r"ld\.global\.v4\.[bu]32")
    # x, the residual and the weight once each, of 8 elements a load
    assert len(loads) == 3 * n // (32 * min(16, n // 512)) // 8
