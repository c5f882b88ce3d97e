"""matmul_all_reduce on CPU ranks, beyond what it shares with the others; and the norm behind it."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rank_bodies import by_reference

import counterpoint as cp


@on_ranks(2)
def test_ranks_that_disagree_later_are_told_so(rank: int, ranks: int):
    """Both sizes have been called before; gloo would end the process that gets the other one."""
    w = torch.randn(16, 8)
    text = r"x.shape must be equal on all ranks, \(2, 16\) as on rank 0, got \(4, 16\) on rank 1"
    with by_reference():
        for m in (4, 2):
            cp.matmul_all_reduce(torch.randn(m, 16), w, plan="fused")
        with pytest.raises(cp.InputError, match=text):
            cp.matmul_all_reduce(torch.randn(4 if rank else 2, 16), w, plan="fused")


@pytest.mark.shows("matmul_all_reduce_rms_norm", "forward", "bf16 fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_the_residual_and_the_norm_that_follow(rank: int, ranks: int, dtype: torch.dtype):
    x, w = torch.randn(2, 3, 8).to(dtype), torch.randn(8, 20).to(dtype)
    residual, weight = torch.randn(2, 3, 20).to(dtype), torch.randn(20).to(dtype)
    for t in (residual, weight):
        dist.broadcast(t, 0)
    with by_reference():
        got, total = cp.matmul_all_reduce_rms_norm(
            x, w, residual=residual, norm_weight=weight, eps=1e-5, plan="fused"
        )
        want_total = residual + cp.matmul_all_reduce(x, w, plan="fused")
    want = torch.nn.functional.rms_norm(want_total.double(), (20,), weight.double(), 1e-5)
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= 2 * torch.finfo(dtype).eps and torch.equal(total, want_total)


@on_ranks(2)
def test_ranks_that_differ_in_the_norm_are_told(rank: int, ranks: int) -> list[str]:
    """Nothing of it is a fact of the product; a group goes on behind it."""
    x, w, found = torch.randn(2, 8), torch.randn(8, 20), list[str]()
    residual, ones, one = torch.zeros(2, 20), torch.ones(20), torch.tensor(0.5)
    fp8 = {"out_dtype": torch.float8_e4m3fn}

    def rms(**given: Any) -> Any:
        options: dict[str, Any] = {"residual": residual, "norm_weight": ones, "eps": 1e-3, **given}
        return cp.matmul_all_reduce_rms_norm(x, w, **options)

    def layer(**given: Any) -> Any:
        options: dict[str, Any] = {"residual": residual, "norm_weight": ones, "eps": 1e-3, **given}
        return cp.matmul_all_reduce_layer_norm(x, w, **options)

    pairs: list[tuple[Any, Any, str]] = [
        (rms, lambda: rms(eps=0.1), "eps must be equal on all ranks, 0.001 as on rank 0, got 0.1"),
        (rms, layer, "norm must be equal on all ranks, rms as on rank 0, got layer"),
        (rms, lambda: rms(residual=None), "residual must .*, True as on rank 0, got False"),
        (layer, lambda: layer(norm_bias=ones), "norm_bias must .*, False as on rank 0, got True"),
        (
            rms,
            lambda: rms(**fp8),
            "out_dtype must be equal on all ranks, None as on rank 0, got torch.float8_e4m3fn",
        ),
        (lambda: rms(**fp8), lambda: rms(**fp8, scale=one), "scale must .*, got True on rank 1"),
        (lambda: cp.matmul_all_reduce(x, w), rms, "norm must .*, none as on rank 0, got rms"),
        (rms, lambda: cp.matmul_all_reduce(x, w), "norm must .*, rms as on rank 0, got none"),
    ]
    for one_call, other, text in pairs:
        try:
            (other if rank else one_call)()
            found.append(f"not told: {text}")
        except cp.InputError as error:
            if not re.search(text, str(error)):
                found.append(f"{text}: {error}")
    for call in (rms, layer, lambda: cp.matmul_all_reduce(x, w)):
        call()
    return found


@on_ranks(2)
def test_known_norms_that_differ_are_told(rank: int, ranks: int):
    x, w, ones = torch.randn(2, 8), torch.randn(8, 20), torch.ones(20)

    def call(eps: float) -> None:
        cp.matmul_all_reduce_rms_norm(x, w, residual=None, norm_weight=ones, eps=eps)

    for eps in (0.1, 0.2, 0.1, 0.2):
        call(eps)
    with pytest.raises(cp.InputError, match=r"eps must be equal on all ranks, 0\.1 as on rank 0"):
        for eps in (0.1, 0.1) if rank == 0 else (0.2, 0.2):
            call(eps)
