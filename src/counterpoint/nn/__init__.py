"""Layers for torch models over several ranks, with overlapped communication."""

from counterpoint.lazy import needing

with needing("counterpoint.nn"):
    from counterpoint.embedding.updates import SGD, RowWiseAdagrad
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

__all__ = [  # noqa: RUF022  (as sorted() has them)
    "ColumnParallelLinear",
    "ExpertParallelMLP",
    "FullyShardedLinear",
    "RowParallelLinear",
    "RowWiseAdagrad",
    "SGD",
    "ShardedEmbeddingBags",
    "copy_to_group",
    "gather_gated",
    "gather_once",
    "to_fp8",
]
