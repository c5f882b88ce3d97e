"""Triton kernels only: no host logic, no torch.distributed. Inline assembly is in assembly.py."""
