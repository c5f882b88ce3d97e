"""Norms of vLLM's graphs behind an all-reduce, and graphs in which its own fusion has been."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor, nn
from vllm_parts import FP8, compiled, compiling

from counterpoint.adapters.vllm import DecodePass
from counterpoint.measure.timing import relative_error

ROWS, N = 5, 24
OPERATOR = "all_reduce_rms_norm"
ir: Any = torch.ops.vllm_ir
own: Any = torch.ops._C
vllm: Any = torch.ops.vllm


def summed(x: Tensor) -> Tensor:
    """Of what no matmul makes, as behind one in fp8."""
    return vllm.all_reduce(x.relu(), "tp:0")


def alone(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """The first norm, of an embedding, whose sum becomes the residual."""
    total = summed(x)
    return ir.rms_norm(total, weight, 1e-5), total + residual


def added(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return ir.fused_add_rms_norm(summed(x), residual, weight, 1e-5)


def alone_in_fp8(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = summed(x)
    y = torch.empty_like(total, dtype=FP8)
    own.rms_norm_static_fp8_quant(y, total, weight, scale, 1e-5)
    return y, total + residual


def added_in_fp8(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = summed(x)
    y, h = torch.empty_like(total, dtype=FP8), residual.clone()
    own.fused_add_rms_norm_static_fp8_quant(y, total, h, weight, scale, 1e-5)
    return y, h


def added_in_fp8_by_rows(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = summed(x)
    y, h = torch.empty_like(total, dtype=FP8), residual.clone()
    scales = torch.empty(x.shape[0], 1)
    own.rms_norm_dynamic_per_token_quant(y, total, weight, scales, 1e-5, None, h)
    return y, h, scales


def read_elsewhere(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = summed(x)
    return *ir.fused_add_rms_norm(total, residual, weight, 1e-5), total.sin()


def of_gemma(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """By 1 + weight, in fp32."""
    return ir.fused_add_rms_norm(summed(x.bfloat16()), residual.bfloat16(), 1 + weight, 1e-5)


def of_some_columns(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return ir.fused_add_rms_norm(summed(x), residual, weight, 1e-5, N // 2)


def of_one_weight_for_all(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    return ir.fused_add_rms_norm(summed(x), residual, None, 1e-5)


def by_one_scale_for_each(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    total = summed(x)
    y = torch.empty_like(total, dtype=FP8)
    own.rms_norm_static_fp8_quant(y, total, weight, scale * weight.abs(), 1e-5)
    return y, total + residual


def fused_by_vllm(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
    """What its fusion makes of one of two all-reduces; before the other stands a matmul."""
    given, h = x.relu(), residual.clone()
    vllm.flashinfer_trtllm_fused_allreduce_norm(
        given, h, weight, 1e-5, world_size=2, launch_with_pdl=True, fp32_acc=True,
        max_token_num=64, pattern_code=1,
    )  # fmt: skip
    return vllm.all_reduce(given @ given.T, "tp:0"), given, h


class Layer(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.run = forward

    def forward(self, *given: Tensor) -> Any:
        torch._check(given[0].shape[0] == given[1].shape[0])  # one number of tokens
        return self.run(*given)


def ran(layer: Callable[..., Any], rank: int, *, dynamic: bool = False) -> DecodePass:
    """The pass, whose graph has computed what the layer computes."""
    decoding = DecodePass()
    alike = torch.Generator().manual_seed(9)
    weight, residual = torch.randn(N, generator=alike), torch.randn(ROWS, N, generator=alike)
    torch.manual_seed(rank)
    given = torch.randn(ROWS, N), residual, weight, torch.tensor([0.02])
    inductor = torch._inductor.config.patch(enable_auto_functionalized_v2=False)  # as vLLM has it
    with compiling(8), by_reference(), torch.no_grad(), inductor:
        want = layer(*given)
        for one in given[:2] if dynamic else ():  # as vLLM has it: by tokens alone
            torch._dynamo.mark_dynamic(one, 0)
        got = compiled(Layer(layer), decoding, dynamic=None)(*given)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        # one that is rounded to fp8 may be so to the next
        bound = 1e-2 if one.dtype in (FP8, torch.bfloat16) else 1e-6
        assert relative_error(one.float(), other.float()) < bound
    return decoding


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", [alone, added, alone_in_fp8, added_in_fp8, added_in_fp8_by_rows])
@on_ranks(2)
def test_a_norm_of_vllms_goes_with_its_sum(
    rank: int, ranks: int, layer: Callable[..., Any], dynamic: bool
):
    (report,) = ran(layer, rank, dynamic=dynamic).reports
    assert [(one.operator, one.ranks) for one in report.found] == [(OPERATOR, 2)], str(report)
    assert bool(report.found[0].plans) != dynamic


@pytest.mark.parametrize("layer", [
    read_elsewhere, of_gemma, of_some_columns, of_one_weight_for_all, by_one_scale_for_each,
])  # fmt: skip
@on_ranks(2)
def test_another_norm_stays(rank: int, ranks: int, layer: Callable[..., Any]):
    (report,) = ran(layer, rank).reports
    (one,) = report.found
    assert not one.operator and one.reason == "no matmul, but relu stands before it"


@on_ranks(2)
def test_a_graph_that_vllm_has_fused_stays(rank: int, ranks: int):
    """What it says goes to vLLM's log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.counterpoint")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        (report,) = ran(fused_by_vllm, rank).reports
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [one.reason for one in report.found] == [
        "vLLM's flashinfer_trtllm_fused_allreduce_norm has it, with the norm",
        "vLLM's own fusion has taken others of its graph",
    ]
    assert said and said[0].startswith("counterpoint: 0 of 2 collectives")


@on_ranks(2)
def test_what_is_batch_invariant_stays(rank: int, ranks: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        (report,) = ran(added, rank).reports
    assert report.found[0].reason.startswith("VLLM_BATCH_INVARIANT is set")


@on_ranks(2)
def test_what_has_no_sizes_stays(rank: int, ranks: int):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(vllm.all_reduce.default, (graph.placeholder("x"), "tp:0")))
    decoding = DecodePass()
    with compiling(8):
        decoding(graph)
    assert [one.reason for one in decoding.reports[0].found] == ["its sizes are not known"]
