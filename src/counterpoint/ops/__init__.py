"""PyTorch operators, one file each: check, choose, run, differentiate."""

# each is the other's gradient, so both are there once one is
from counterpoint.ops import all_gather_matmul as all_gather_matmul
from counterpoint.ops import matmul_reduce_scatter as matmul_reduce_scatter
