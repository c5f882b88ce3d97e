"""Layers for torch models, sequence parallel and tensor parallel, with overlapped communication."""

from counterpoint.nn.linear import ColumnParallelLinear, RowParallelLinear, gather_once
from counterpoint.nn.replicated import copy_to_group

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "copy_to_group", "gather_once"]
