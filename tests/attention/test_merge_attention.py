"""The merge of two attentions: interpreted against fp64."""

import warnings
from typing import Any

import torch
from on_ranks import on_ranks

from counterpoint.attention.kernel_merge import merge_attention_kernel


@on_ranks(1)
def test_it_is_the_attention_of_both(rank: int, ranks: int) -> list[str]:
    """Some rows of larger tensors, whose other rows stay; log-sum-exps far from one another too."""
    found: list[str] = []
    torch.manual_seed(0)
    for rows, heads, dim, dtype in ((9, 3, 5, torch.float32), (32, 1, 16, torch.float16),
                                    (1, 2, 1, torch.float32)):  # fmt: skip
        whole, sums = torch.randn(rows + 4, heads, dim).to(dtype), torch.randn(heads, rows + 4) * 40
        other = torch.randn(heads, rows, dim).to(dtype).transpose(0, 1)
        lse_other = torch.randn(heads, rows) * 40
        y, lse = whole[2 : rows + 2], sums[:, 2 : rows + 2]
        pair = torch.stack([lse, lse_other]).double()
        weights = pair.softmax(0).transpose(1, 2)[..., None]
        want = weights[0] * y.double() + weights[1] * other.double()
        before, total = whole.clone(), pair.logsumexp(0)
        kernel: Any = merge_attention_kernel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            kernel[(-(-rows // 8), heads)](
                y, lse, other, lse_other, rows, y.stride(0), y.stride(1), lse.stride(0),
                other.stride(0), other.stride(1), lse_other.stride(0), HEAD_DIM=dim, BLOCK_ROWS=8,
                BLOCK_DIM=1 << (dim - 1).bit_length(),
            )  # fmt: skip
        bound = 1e-5 + torch.finfo(dtype).eps * want.abs()
        if not ((y.double() - want).abs() <= bound).all():
            found.append(f"{rows} {heads} {dim} {dtype}: y")
        if not torch.allclose(lse.double(), total, atol=1e-4, rtol=1e-6):
            found.append(f"{rows} {heads} {dim} {dtype}: lse")
        if not torch.equal(whole[:2], before[:2]) or not torch.equal(whole[-2:], before[-2:]):
            found.append(f"{rows} {heads} {dim} {dtype}: other rows")
    return found
