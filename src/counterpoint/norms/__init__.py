"""Sum over ranks, residual and norm, alone or behind a matmul."""
