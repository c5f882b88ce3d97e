"""Transformer blocks in plain PyTorch, sharded by torch's own `parallelize_module`.

Nothing here knows of this library: the blocks are what its compiler pass meets in models of users.
By name, of `NAMES`:

    llama              RMSNorm, grouped-query attention with rotary embedding, SwiGLU
    llama checkpoint   the same, all but attention computed again in the backward
    llama selective    the same, all but attention and matmuls computed again
    mixtral            the attention of llama, and experts that compute all tokens
    gpt2               LayerNorm, attention and GELU MLP, all with biases

Activations between blocks are sharded by their sequence (sequence parallelism). Under a name that
ends in " tp" they are replicated, and an all-reduce stands behind each half of a block. "llama
decode tp" is llama with one new token per sequence and a cache of keys and values.

Shapes: B batch, S sequence of all ranks, D width, H heads, C columns of a head.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from counterpoint.errors import InputError

aten = torch.ops.aten
ROTARY_BASE = 500_000.0  # of Llama 3
TP = " tp"


class Width(NamedTuple):
    """Sizes of one block."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    experts: int = 4


WIDTHS = {
    "toy": Width(128, 16, 8, 256),
    "8B": Width(4096, 32, 8, 14336),  # Llama-3-8B
    "70B": Width(8192, 64, 8, 28672),  # Llama-3-70B
}


class Rotary(nn.Module):
    """Turns pairs of columns by the position of their token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, columns: int, start: int, end: int) -> None:
        super().__init__()
        at = torch.arange(start, end, dtype=torch.float64)
        rates = ROTARY_BASE ** -(torch.arange(0, columns, 2, dtype=torch.float64) / columns)
        angles = torch.outer(at, rates).repeat(1, 2).float()
        self.register_buffer("cos", angles.cos(), persistent=False)  # [S, C]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, H, S, C]
        low, high = x.chunk(2, -1)
        turned = torch.cat((-high, low), -1)
        return (x * self.cos + turned * self.sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; heads of keys and values are shared if there are fewer of them."""

    def __init__(self, width: Width, *, bias: bool = False) -> None:
        super().__init__()
        self.columns = width.dim // width.heads
        shared = width.kv_heads * self.columns
        self.wq = nn.Linear(width.dim, width.dim, bias=bias)
        self.wk = nn.Linear(width.dim, shared, bias=bias)
        self.wv = nn.Linear(width.dim, shared, bias=bias)
        self.wo = nn.Linear(width.dim, width.dim, bias=bias)
        self.rotary: nn.Module = nn.Identity()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H, S, C] of each, k and v with fewer heads -> [B, H, S, C]."""
        k, v = (shared_by(x, q.shape[1]) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.columns).transpose(1, 2)
                   for w in (self.wq, self.wk, self.wv))  # fmt: skip
        y = self.attend(self.rotary(q), self.rotary(k), v)
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))


class CachedAttention(Attention):
    """Attention of one new token per sequence to all before it; the cache is sharded by heads.

    The cache is written in place and read as it is, as servers do: neither is a copy of it made for
    the new token, nor one for the heads that share it.
    """

    keys: Tensor
    values: Tensor
    place: Tensor

    def __init__(self, width: Width, batch: int, context: int, ranks: int) -> None:
        super().__init__(width)
        shape = (batch, width.kv_heads // ranks, context, self.columns)
        self.register_buffer("keys", torch.empty(shape), persistent=False)
        self.register_buffer("values", torch.empty(shape), persistent=False)
        self.register_buffer("place", torch.tensor([context - 1]), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.index_copy_(2, self.place, k)
        self.values.index_copy_(2, self.place, v)
        return functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)


def shared_by(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values for the heads of queries that share it."""
    b, own, s, c = x.shape
    return x[:, :, None].expand(b, own, heads // own, s, c).reshape(b, heads, s, c)


class SwiGlu(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.w1 = nn.Linear(width.dim, width.hidden, bias=False)
        self.w3 = nn.Linear(width.dim, width.hidden, bias=False)
        self.w2 = nn.Linear(width.hidden, width.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Gelu(nn.Module):
    """w2(gelu(w1 x)), with biases."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.w1 = nn.Linear(width.dim, 4 * width.dim)
        self.w2 = nn.Linear(4 * width.dim, width.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.gelu(self.w1(x), approximate="tanh"))


class Experts(nn.Module):
    """Sum of all experts' results, weighted."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.each = nn.ModuleList(SwiGlu(width) for _ in range(width.experts))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # weights [B, S, experts]
        results = (expert(x) * w for expert, w in zip(self.each, weights.split(1, -1), strict=True))
        return sum(results, torch.zeros((), dtype=weights.dtype, device=weights.device))


class TopTwo(nn.Module):
    """Experts of which two count for each token; all compute it."""

    def __init__(self, width: Width) -> None:
        super().__init__()
        self.router = nn.Linear(width.dim, width.experts, bias=False)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        best = logits.topk(2, -1)
        weights = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
        return self.experts(x, weights)


class Block(nn.Module):
    """x + attention(norm(x)), and that + feed_forward(norm(that))."""

    def __init__(
        self, attention: Attention, feed_forward: nn.Module, norm: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.ffn_norm, self.feed_forward = norm(), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Layers(nn.Module):
    """Blocks one behind the other.

    Args:
        blocks: one or more.
        kept: operators whose results the backward does not compute again; None if it computes
            nothing again.
    """

    def __init__(self, blocks: list[Block], kept: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.contexts = None if kept is None else partial(
            create_selective_checkpoint_contexts, partial(_policy, kept)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x


def _policy(kept: Sequence[Any], _: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


# torch 2.13 compiles no sharded module whose attention is computed again: an assertion fails
ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
KEPT = {
    "llama checkpoint": ATTENTION,
    "llama selective": (*ATTENTION, aten.mm.default, aten.addmm.default),
}
FORMS = ("llama", "llama checkpoint", "llama selective", "mixtral", "gpt2")
DECODE = f"llama decode{TP}"
NAMES = (*FORMS, *(f"{form}{TP}" for form in FORMS), DECODE)


class Sizes(NamedTuple):
    """What a model is made for: `sequence` of all ranks; in a decode, what its cache holds."""

    width: Width = WIDTHS["toy"]
    layers: int = 1
    batch: int = 1
    sequence: int = 16


def whole(name: str, sizes: Sizes, *, ranks: int = 1) -> Layers:
    """A model that is not sharded yet, in fp32 on the default device.

    Args:
        name: of `NAMES`.
        sizes: of the model and its input.
        ranks: that share the heads of a decode's cache; its attention is for that many.

    Raises:
        InputError: there is no such model.
    """
    if name not in NAMES:
        raise InputError("blocks", "name", want=f"one of {', '.join(NAMES)}", got=repr(name))
    form = name.removesuffix(TP)
    width, s = sizes.width, sizes.sequence
    columns = width.dim // width.heads

    def block() -> Block:
        if form == "gpt2":
            attention = Attention(width._replace(kv_heads=width.heads), bias=True)
            return Block(attention, Gelu(width), partial(nn.LayerNorm, width.dim))
        if name == DECODE:
            attention = CachedAttention(width, sizes.batch, s, ranks)
            attention.rotary = Rotary(columns, s - 1, s)
        else:
            attention = Attention(width)
            attention.rotary = Rotary(columns, 0, s)
        mlp = TopTwo(width) if form == "mixtral" else SwiGlu(width)
        return Block(attention, mlp, partial(nn.RMSNorm, width.dim))

    model = Layers([block() for _ in range(sizes.layers)], KEPT.get(form))
    # behind the weights, which are then those of "llama"
    for cache in model.buffers():
        if cache.dim() > 2:
            cache.normal_()
    return model


def shard(model: Layers, name: str, mesh: DeviceMesh) -> Layers:
    """Shard a model of `whole` over a mesh of one axis, in place, as its name says."""
    plan = _replicated(name) if name.endswith(TP) else _by_sequence(name)
    for block in model.blocks:
        parallelize_module(block, mesh, dict(plan))
    return model


def _linears(name: str, row: RowwiseParallel) -> dict[str, ParallelStyle]:
    """All matmuls of a block: columns first, then rows."""
    inner = "feed_forward.experts.each.*" if name.startswith("mixtral") else "feed_forward"
    gate = {} if name.startswith("gpt2") else {f"{inner}.w3": ColwiseParallel()}
    columns = {f"attention.w{letter}": ColwiseParallel() for letter in "qkv"} | gate
    return {
        **columns, f"{inner}.w1": ColwiseParallel(), "attention.wo": row, f"{inner}.w2": row,
    }  # fmt: skip


def _replicated(name: str) -> Mapping[str, ParallelStyle]:
    return _linears(name, RowwiseParallel())


def _by_sequence(name: str) -> Mapping[str, ParallelStyle]:
    norm = SequenceParallel(use_local_output=True)
    plan = _linears(name, RowwiseParallel(output_layouts=Shard(1)))
    plan |= {"attention_norm": norm, "ffn_norm": norm}
    plan["attention"] = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    )
    if name.startswith("mixtral"):
        # the router sees this rank's tokens, and weighs what the experts have scattered
        plan["feed_forward.router"] = norm
        plan["feed_forward.experts"] = PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        )
    else:
        plan["feed_forward"] = plan["attention"]
    return plan


def made(
    name: str, sizes: Sizes, mesh: DeviceMesh, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Layers, Tensor]:
    """A sharded model and its input on this rank; all ranks of the mesh call this.

    Weights are equal to those of `whole` after `torch.manual_seed(seed)` on the same device.

    Args:
        name: of `NAMES`.
        sizes: of the model and its input.
        mesh: of one axis.
        dtype: of weights, input and tables.
        seed: of weights and input.

    Returns:
        The model, and its input: [B, S / ranks, D] where sharded by sequence, [B, S, D] equal on
        all ranks where replicated, [B, 1, D] of a decode.

    Raises:
        InputError: there is no such model.
    """
    ranks = mesh.size()
    with torch.device(_device(mesh)):
        torch.manual_seed(seed)
        model = whole(name, sizes, ranks=ranks).to(dtype)
        x = inputs(name, sizes, seed=seed).to(dtype)
    if not name.endswith(TP):
        x = x.chunk(ranks, 1)[mesh.get_local_rank()].clone()
    return shard(model, name, mesh), x


def inputs(name: str, sizes: Sizes, *, seed: int = 0) -> Tensor:
    """The input of all ranks, in fp32 on the default device."""
    torch.manual_seed(seed + 1)
    rows = 1 if name == DECODE else sizes.sequence
    return torch.randn(sizes.batch, rows, sizes.width.dim)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
