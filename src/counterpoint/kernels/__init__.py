"""Triton kernels only: no host logic, no torch.distributed. All inline assembly is in clock.py."""

import triton

if triton.knobs.runtime.interpret:
    from counterpoint.kernels.interpreted import install

    install()
