"""The residual and norm kernel: interpreted against torch, and compiled."""

from typing import Any

import pytest
import torch
from rankpool import RankPool

from counterpoint.kernels.rms_norm import add_rms_norm_kernel
from counterpoint.testing.ptx import CAPABILITIES, compiled


def errors(rank: int, ranks: int) -> list[float]:
    found: list[float] = []
    launch: Any = add_rms_norm_kernel
    for rows, n, block in [(1, 16, 16), (3, 20, 32), (2, 1, 1)]:
        y, residual, weight = torch.randn(rows, n), torch.randn(rows, n), torch.randn(n)
        out, total = torch.full_like(y, torch.nan), torch.full_like(y, torch.nan)
        launch[(rows,)](y, residual, weight, out, total, n, 1e-6, block)
        h = (y + residual).double()
        want = torch.nn.functional.rms_norm(h, (n,), weight.double(), 1e-6)
        found.append(((out - want).norm() / want.norm()).item())
        assert torch.equal(total, y + residual)
    return found


def test_it_is_rms_norm(pool: RankPool):
    ((one, odd, single),) = pool.run(errors, 1, group=False)
    assert max(one, odd, single) < 1e-6


@pytest.mark.shows("matmul_all_reduce_rms_norm", "compiled for", "sm_80 sm_90 sm_100")
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("n", [4096, 16384])
def test_a_row_stays_in_registers(capability: int, n: int):
    tensors = ("y_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr")
    types = dict.fromkeys(tensors, "*bf16") | {"N": "i32", "eps": "fp32"}
    found = compiled(
        add_rms_norm_kernel, capability, types, {"BLOCK": n}, num_warps=min(16, n // 512),
        aligned=(*tensors, "N"),
    )  # fmt: skip
    assert not found.spills
    assert found.ptx.count("ld.global.v4.b32") + found.ptx.count("ld.global.v4.u32") >= 3
