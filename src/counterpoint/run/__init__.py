"""One executor for all plans, on CPU ranks and on GPUs, and the one launcher of kernels."""
