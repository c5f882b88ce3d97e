"""Layers for torch models, tensor, sequence and data parallel, with overlapped communication."""

from counterpoint.nn.embedding import ShardedEmbeddingBags
from counterpoint.nn.fully_sharded import FullyShardedLinear
from counterpoint.nn.linear import ColumnParallelLinear, RowParallelLinear, gather_once
from counterpoint.nn.replicated import copy_to_group

__all__ = [
    "ColumnParallelLinear",
    "FullyShardedLinear",
    "RowParallelLinear",
    "ShardedEmbeddingBags",
    "copy_to_group",
    "gather_once",
]
