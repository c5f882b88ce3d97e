"""Triton kernels only: no host logic, no torch.distributed. All inline assembly is in clock.py."""
