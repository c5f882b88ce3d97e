"""Activations of products in memory and their gradients: interpreted against fp64, compiled."""

from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor

from counterpoint.kernels.activation import activation_gradient_kernel, activation_kernel
from counterpoint.ops.activations import NAMES
from counterpoint.runtime.activated import FUNCTIONS
from counterpoint.testing.ptx import CAPABILITIES, compiled

NUMBERS = 1000  # no multiple of a block


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
    forward: Any = activation_kernel
    backward: Any = activation_gradient_kernel
    torch.manual_seed(0)
    for name in NAMES:
        h, up, dy = (torch.randn(NUMBERS).mul(3).to(dtype) for _ in range(3))
        h[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0]).to(dtype)
        gated = name.endswith("_mul")
        fixed = {"NAME": name.removesuffix("_mul"), "GATED": gated, "BLOCK": 128}
        second = up if gated else None
        y, dh, dup = (torch.full((NUMBERS + 8,), float("nan"), dtype=dtype) for _ in range(3))
        with np.errstate(over="ignore"):  # exp(60) is infinite, as it should be
            forward[(-(-NUMBERS // 128),)](h, up, y, NUMBERS, **fixed)
            backward[(-(-NUMBERS // 128),)](h, up, dy, dh, dup, NUMBERS, **fixed)
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
    forward: Any = activation_kernel
    for name in NAMES:
        h, y = torch.tensor([float("nan"), 1.0, float("inf"), 2.0]), torch.empty(4)
        fixed = {"NAME": name.removesuffix("_mul"), "GATED": False, "BLOCK": 4}
        with np.errstate(all="ignore"):
            forward[(1,)](h, h, y, 4, **fixed)
        assert y.isnan().tolist() == [True, False, False, False], name
        assert y[2] == float("inf")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("gradient", [False, True], ids=["values", "gradients"])
def test_it_loads_16_bytes_at_a_time(capability: int, gradient: bool):
    names = ["h_ptr", "up_ptr", *(["dy_ptr", "dh_ptr", "dup_ptr"] if gradient else ["y_ptr"])]
    kernel = activation_gradient_kernel if gradient else activation_kernel
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        constants = {"NAME": name, "GATED": True, "BLOCK": 4096}
        types = dict.fromkeys(names, "*bf16") | {"N": "i32"}
        found = compiled(kernel, capability, types, constants, num_warps=8, aligned=tuple(types))
        assert not found.spills
        assert "ld.global.v4.b32" in found.ptx and "st.global.v4.b32" in found.ptx
