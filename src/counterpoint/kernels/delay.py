"""A kernel that only lets time pass, so that what is launched beside it gets its SMs first."""

import triton
import triton.language as tl

from counterpoint.kernels.clock import now_ns


@triton.jit(do_not_specialize=["delay_ns"])
def delay_kernel(
    out_ptr,  # [1] int64: the nanoseconds that have passed
    delay_ns,
):
    start_ns = now_ns()
    passed_ns = now_ns() - start_ns
    while passed_ns < delay_ns:
        passed_ns = now_ns() - start_ns
    tl.store(out_ptr, passed_ns)
