"""Layers for torch models over several ranks, with overlapped communication."""

from counterpoint.nn.embedding import ShardedEmbeddingBags
from counterpoint.nn.experts import ExpertParallelMLP
from counterpoint.nn.fully_sharded import FullyShardedLinear
from counterpoint.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_gated,
    gather_once,
    to_fp8,
)
from counterpoint.nn.replicated import copy_to_group

__all__ = [
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "FullyShardedLinear",
    "RowParallelLinear",
    "ShardedEmbeddingBags",
    "copy_to_group",
    "gather_gated",
    "gather_once",
    "to_fp8",
]
