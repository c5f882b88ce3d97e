"""From logits to rows by expert, as operators: by three kernels on GPUs, else by torch."""

from typing import Any

import torch
from torch import Tensor

from counterpoint.experts.routes import kernel_router
from counterpoint.gpu.device_limits import refused_on
from counterpoint.ops.register import refuse_double_matmul, register
from counterpoint.run.launch import launch_alone
from counterpoint.tensor_parallel.plan_fused_sum import padded

OPS: Any = torch.ops.counterpoint
NAME = "router"  # in errors
MOST_EXPERTS = 1 << 12  # that a program holds
LOGITS = 1 << 8  # that a program holds where a token has fewer
TOKENS = 16  # of a program, at most
WARP = 1 << 9  # logits that a warp holds at most
BLOCK = 128  # entries that are compared with one another
PROGRAMS = 128  # that share all entries: each reads the counts of all
COUNTS = 1 << 13  # that a program reads at a time
NUM_WARPS = 4  # of what counts and orders


def choose_experts(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of the largest logits of each token, in order, and their part of the softmax.

    NaN is above all. Of equal logits a GPU takes the first ones, a CPU any.

    Args:
        logits: floating point [tokens, E].
        top_k: 1 to E.
        renormalize: the weights of a token are divided by their sum.

    Returns:
        Weights and experts, fp32 and int32, both [tokens, top_k].
    """
    return OPS.choose_experts(logits, top_k, renormalize)


def order_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens, one for each expert of a token, sorted by expert, of one expert by token.

    Args:
        experts: int32 or int64 [tokens, top_k], 0 to num_experts - 1; others sort to an end, and
            are counted nowhere.

    Returns:
        All int32: rows of each expert [num_experts]; where the rows of a token lie
        [tokens, top_k]; the token of each row [tokens * top_k].
    """
    return OPS.order_by_expert(experts, num_experts)


def _by_kernels(tensor: Tensor, experts: int) -> bool:
    return tensor.is_cuda and experts <= MOST_EXPERTS and not refused_on(tensor.device)


def chosen(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`choose_experts` without torch's dispatcher."""
    if _by_kernels(logits, logits.shape[1]):
        shape = logits.shape[0], top_k
        experts = logits.new_empty(shape, dtype=torch.int32)
        weights = logits.new_empty(shape, dtype=torch.float32)
        choose_into(weights, experts, logits, renormalize)
        return weights, experts
    logits = logits.float()
    largest, experts = logits.topk(top_k)
    # the softmax of those chosen is that of all, divided by the sum of theirs
    weights = largest.softmax(-1) if renormalize else logits.softmax(-1).gather(-1, experts)
    return weights, experts.int()


def choose_into(weights: Tensor, experts: Tensor, logits: Tensor, renormalize: bool) -> None:
    """By the kernel."""
    tensors = (logits, weights, experts)
    _each_token(kernel_router.choose_experts_kernel, tensors, experts, logits.shape[1], renormalize)


def chosen_gradient(
    dweights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, renormalize: bool
) -> Tensor:
    """The gradient of the logits, without torch's dispatcher."""
    if _by_kernels(logits, logits.shape[1]):
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        choose_gradient_into(dlogits, dweights, weights, experts, logits, renormalize)
        return dlogits
    mean = (weights * dweights).sum(1, keepdim=True)
    if renormalize:
        dlogits, own = torch.zeros_like(logits, dtype=torch.float32), weights * (dweights - mean)
    else:
        dlogits, own = logits.float().softmax(-1) * -mean, weights * dweights
    return dlogits.scatter_add_(1, experts.long(), own).to(logits.dtype)


def choose_gradient_into(
    dlogits: Tensor, dweights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor,
    renormalize: bool,
) -> None:  # fmt: skip
    """By the kernel."""
    tensors = (dweights, weights, experts, logits, dlogits)
    kernel = kernel_router.choose_experts_gradient_kernel
    _each_token(kernel, tensors, experts, logits.shape[1], renormalize)


def _each_token(
    kernel: Any, tensors: tuple[Tensor, ...], experts: Tensor, every: int, renormalize: bool
) -> None:
    """Launch a kernel each program of which has some tokens, and all logits of these."""
    tokens, top_k = experts.shape
    if not tokens:
        return
    wide = padded(every)
    some = max(1, min(TOKENS, LOGITS // wide))
    fixed = (("E", every), ("TOP", top_k), ("RENORMALIZE", renormalize), ("TOKENS", some),
             ("EXPERTS", wide), ("CHOICES", padded(top_k)))  # fmt: skip
    launched = -(-tokens // some), max(1, wide // WARP)
    launch_alone(kernel, tensors, (tokens,), fixed, launched, NAME)


def _order(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if _by_kernels(experts, num_experts):
        counts = experts.new_empty(num_experts, dtype=torch.int32)
        places = experts.new_empty(experts.shape, dtype=torch.int32)
        tokens = experts.new_empty(experts.numel(), dtype=torch.int32)
        order_into(counts, places, tokens, experts)
        return counts, places, tokens
    ids, order = experts.flatten().sort(stable=True)
    starts = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    counts = torch.searchsorted(ids, starts).diff()
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return counts.int(), places.view(experts.shape).int(), (order // experts.shape[1]).int()


def order_into(counts: Tensor, places: Tensor, tokens: Tensor, experts: Tensor) -> None:
    """By the kernels."""
    entries, every = experts.numel(), len(counts)
    share = max(1, -(-entries // (BLOCK * PROGRAMS))) * BLOCK
    programs = max(1, -(-entries // share))
    found, begin = (counts.new_empty(programs, every) for _ in range(2))
    wide = max(32, padded(every))
    fixed = (("E", every), ("EXPERTS", wide), ("BLOCK", BLOCK))
    sizes, launched = (entries, share), (programs, NUM_WARPS)
    launch_alone(kernel_router.count_experts_kernel, (experts, found), sizes, fixed, launched, NAME)
    fixed += (("TOP", experts.shape[1]), ("BLOCKS", max(1, min(padded(PROGRAMS), COUNTS // wide))))
    tensors = (experts, found, begin, counts, places, tokens)
    launch_alone(kernel_router.place_rows_kernel, tensors, sizes, fixed, launched, NAME)


def _fake_choose(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    weights = logits.new_empty(shape, dtype=torch.float32)
    return weights, logits.new_empty(shape, dtype=torch.int32)


def _fake_gradient(
    dweights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, renormalize: bool
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_order(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (num_experts,), experts.shape, (experts.numel(),)
    counts, places, tokens = (experts.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return counts, places, tokens


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.renormalize = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, logits)


def _backward(ctx: Any, dweights: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if dweights is None:
        return None, None, None
    dlogits = OPS.choose_experts_gradient(dweights, *ctx.saved_tensors, ctx.renormalize)
    return dlogits, None, None


register("choose_experts", chosen, _fake_choose, _backward, _save)
register("choose_experts_gradient", chosen_gradient, _fake_gradient, refuse_double_matmul)
register("order_by_expert", _order, _fake_order)
