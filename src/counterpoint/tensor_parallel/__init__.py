"""Matmuls with a gather, a reduce-scatter or an all-reduce."""
