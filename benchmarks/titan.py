"""A layer of experts as torchtitan writes it: its grouped-matmul path with expert parallelism.

Tokens are gathered by expert. Ranks exchange counts, and each host waits for its splits. Rows go by
all_to_all_single, and an index that a kernel fills sorts them by expert, each expert's rows padded
to `ALIGN`. Three grouped matmuls multiply them. Back at their tokens, scores multiply the rows and
scatter_add sums them.

Written after torchtitan's models/moe and expert_parallel.py (TokenReorderer, ExpertParallel,
_permute, generate_permute_indices), with score_before_experts=False as its DeepSeek-V3 has it.
Router and shared experts are left out, as in all other arms."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.experts_in_torch import Exchanged, grouped

ALIGN = 8  # TOKEN_GROUP_ALIGN_SIZE_M of bf16
BLOCK = 128


@triton.jit
def fill_indices_kernel(
    counts_ptr,  # [ranks, local]: rows of each source for each expert
    starts_ptr,  # [ranks, local]: where these rows begin, as they came
    edges_ptr,  # [local]: where the rows of each expert begin in the padded order
    indices_ptr,  # [padded rows] int32
    ranks,
    local,
    BLOCK: tl.constexpr,
):
    """A program an expert: its rows, one source after the other."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    edge = tl.load(edges_ptr + expert)
    for source in range(ranks):
        start = tl.load(starts_ptr + source * local + expert)
        count = tl.load(counts_ptr + source * local + expert)
        for first in range(0, count, BLOCK):
            at = first + lanes
            tl.store(indices_ptr + edge + at, (start + at).to(tl.int32), mask=at < count)
        edge += count


def permuted(counts: Tensor, local: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, of those that came sorted by source; each expert's are padded.

    Args:
        counts: int64 [ranks * local], rows of each source for each expert.
        local: experts of this rank.
        rows: how many came.

    Returns:
        Which row is at each place, -1 at padding: int32, with room for the most padding. And rows
        of each expert with its padding, int64 [local].
    """
    total = counts.view(-1, local).sum(0).clamp(min=ALIGN)
    padded = (total + ALIGN - 1) // ALIGN * ALIGN
    most = (rows + local * ALIGN + ALIGN - 1) // ALIGN * ALIGN
    index = torch.full((most,), -1, dtype=torch.int32, device=counts.device)
    starts, edges = counts.cumsum(0) - counts, padded.cumsum(0) - padded
    fill_indices_kernel[(local,)](
        counts, starts, edges, index, len(counts) // local, local, BLOCK=BLOCK
    )
    return index, padded


def mlp(rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Rows sorted by source through their experts, back in their order."""
    index, padded = permuted(counts, len(w2), len(rows))
    every = torch.vstack((rows, rows.new_zeros(rows.shape[1])))  # the last one is for padding
    x = every[index]
    h = F.silu(grouped(x, w1.transpose(1, 2), padded)) * grouped(x, w3.transpose(1, 2), padded)
    out = grouped(h, w2.transpose(1, 2), padded)
    back = out.new_empty(every.shape)
    back[index] = out
    return back[:-1]


def layer(
    x: Tensor, experts: Tensor, scores: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """Tokens through their experts, forward.

    Args:
        x: [tokens, dim].
        experts, scores: [tokens, top].
        w1, w3: gate and up, [experts of this rank, ffn, dim].
        w2: down, [experts of this rank, dim, ffn].
        group: of the ranks.
    """
    top, local = experts.shape[1], len(w2)
    every = group.size() * local
    # TokenReorderer
    counts = torch.histc(experts.view(-1).float(), bins=every, min=0, max=every).long()
    order = experts.view(-1).argsort(stable=True)
    by_token = (order // top)[:, None].expand(-1, x.shape[1])
    routed = torch.gather(x, 0, by_token)
    # ExpertParallel._token_dispatch
    told = torch.empty_like(counts)
    dist.all_to_all_single(told, counts, group=group)
    sent = counts.view(-1, local).sum(1).to("cpu", non_blocking=True)
    come = told.view(-1, local).sum(1).to("cpu").tolist()  # waits for both
    splits = come, sent.tolist()
    rows = Exchanged.apply(routed, *splits, group)
    y = mlp(rows, told, w1, w3, w2)
    y = Exchanged.apply(y, *reversed(splits), group)
    y = (y.float() * scores.view(-1)[order][:, None]).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, by_token, y)
