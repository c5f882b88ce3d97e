"""The kernel of an all-reduce and a norm compiled for three generations, without a GPU."""

import re

import pytest
import triton.language as tl

from counterpoint.kernels.add_norm import OPTIONS, add_norm_kernel
from counterpoint.kernels.all_reduce_norm import all_reduce_norm_kernel
from counterpoint.ops.norms import QUANTIZED
from counterpoint.plan.all_reduce_norm import row_words, settings_in
from counterpoint.plan.families import build
from counterpoint.plan.fused_sum import padded
from counterpoint.problem import Problem
from counterpoint.testing.ptx import ACQUIRE, RELEASE, Compiled, compiled, lines_with

GIVEN = ("residual_ptr", "weight_ptr", "bias_ptr", "h_ptr")
OTHERS = {
    "x_ptr": "*i32", "scale_ptr": "*fp32", "scales_ptr": "*fp32", "words_ptr": "*i64",
    "state_ptr": "*i32", "fault_ptr": "*i64",
}  # fmt: skip
NUMBERS = {
    "M": "i32", "N": "i32", "part": "i32", "eps": "fp32", "half_bytes": "i32", "rank": "i32",
    "tag": "i32", "timeout_ns": "i64",
}  # fmt: skip


def kernel(capability: int, p: Problem, spec: str) -> Compiled:
    settings = settings_in(build(p, spec).steps[0])
    two = settings.shots == "two_shot"
    constants = {
        "WORLD": p.ranks, "TWO_SHOT": two, "LAYER": p.norm == "layer",
        "HAS_RESIDUAL": p.residual, "HAS_BIAS": p.bias, "FP8": QUANTIZED[p.quantized],
        "DTYPE": tl.bfloat16, "BLOCK": padded(row_words(p) // (p.ranks if two else 1)),
        "NUM_WARPS": settings.num_warps, "IN_ORDER": p.invariant,
    }  # fmt: skip
    types = OTHERS | dict.fromkeys(GIVEN, "*bf16")
    types["y_ptr"] = "*fp8e4nv" if p.quantized else "*bf16"
    return compiled(
        all_reduce_norm_kernel, capability, types | NUMBERS, constants,
        num_warps=settings.num_warps, aligned=(*types, "N", "part", "half_bytes"), options=OPTIONS,
    )  # fmt: skip


@pytest.mark.shows(
    "all_reduce_rms_norm all_reduce_layer_norm", "compiled for", "sm_80 sm_90 sm_100"
)
@pytest.mark.parametrize("n", [4096, 8192, 16384])
@pytest.mark.parametrize(("capability", "ranks"), [(80, 8), (90, 2), (90, 4), (90, 8), (100, 8)])
def test_rows_arrive_whole_and_stay_in_registers(capability: int, ranks: int, n: int):
    """4 words are one element of each store and poll; polls are never cached, nothing is fenced."""
    p = Problem("all_reduce_norm", 1, n, ranks=ranks, residual=True)
    found = kernel(capability, p, "fused")
    polls = re.findall(r"\bld\.volatile\S*", found.ptx)
    assert polls and all(name.endswith("v4.b32") for name in polls), polls
    # words to the peers, the emptied ones, h and y
    assert len(lines_with(found.ptx, r"\bst\.global\.v4\.b32")) >= 4
    assert not lines_with(found.ptx, RELEASE) and not lines_with(found.ptx, ACQUIRE)
    # what is spilled are a few numbers of the whole kernel, on many ranks alone
    assert found.spills <= (0 if ranks < 8 else 12)


@pytest.mark.parametrize("quantized", ["tensor", "rows"])
@pytest.mark.parametrize("spec", ["fused one_shot", "fused two_shot"])
def test_a_layer_norm_in_fp8_does_so_too(spec: str, quantized: str):
    p = Problem(
        "all_reduce_norm", 1, 8192, ranks=2, norm="layer", bias=True, residual=True,
        quantized=quantized,  # type: ignore[arg-type]
    )  # fmt: skip
    found = kernel(90, p, spec)
    assert not found.spills and re.search(r"cvt\.rn\.satfinite\.e4m3x2", found.ptx)
    assert all(name.endswith("v4.b32") for name in re.findall(r"\bld\.volatile\S*", found.ptx))


def alone(p: Problem) -> Compiled:
    """The kernel of rows that are in memory, as it is launched."""
    constants = {
        "LAYER": p.norm == "layer", "HAS_RESIDUAL": p.residual, "HAS_BIAS": p.bias,
        "FP8": QUANTIZED[p.quantized], "WHOLE": True, "BLOCK": padded(p.n),
    }  # fmt: skip
    types = dict.fromkeys(("x_ptr", "y_ptr", *GIVEN), "*bf16")
    types |= {"scale_ptr": "*fp32", "scales_ptr": "*fp32"}
    return compiled(
        add_norm_kernel, 90, types | {"N": "i32", "eps": "fp32"}, constants,
        num_warps=max(1, min(16, padded(p.n) // 512)), aligned=(*types, "N"), options=OPTIONS,
    )  # fmt: skip


def pairs(found: Compiled) -> list[str]:
    """What sums of pairs are of, in order: [2, n] or [n, 2]."""
    sums = re.findall(r"tt\.reduce.*?\}\) : \(tensor<(\d+x\d+)xf32", found.ttgir, re.DOTALL)
    return [shape for shape in sums if "2" in shape.split("x")]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    ("n", "shots"), [(4096, "one_shot"), (5120, "one_shot"), (16384, "two_shot")]
)
def test_a_row_is_added_up_in_one_order_by_both_kernels(norm: str, n: int, shots: str):
    """Threads have other columns; no product is added before it is rounded."""
    p = Problem(
        "all_reduce_norm", 8, n, ranks=4, norm=norm, residual=True, bias=norm == "layer",  # type: ignore[arg-type]
        invariant=True,
    )  # fmt: skip
    both = kernel(90, p, "fused"), alone(p)
    one, other = map(pairs, both)
    assert one == other and len(one) == (padded(n).bit_length() - 1) * (1 + (norm == "layer"))
    assert not any(re.search(r"\bfma\.", found.ptx) for found in both)
