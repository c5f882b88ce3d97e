"""What attention takes on a GPU, forward and backward: a call of the library, and a rank."""

from counterpoint.machine import Machine
from counterpoint.problem import Problem

# of the rate of the matmul library: cuDNN's kernels at 128 columns a head, one H200
ATTENTION_RATE, BACKWARD_RATE = 0.85, 0.7
# what a call of its backward takes beside matmuls: a tail, and passes over bf16 dy and y and a dq
# that is summed in fp32, then rounded, for each element of q; the same GPU, 8k tokens
BACKWARD_CALL_S, BACKWARD_PASSES = 25e-6, 14  # bytes
BACKWARD_MATMULS = 5  # for the two of a forward


def attention_s(
    machine: Machine, queries: int, keys: float, cols: int, *, backward: bool = False
) -> float:
    """Seconds of a call of the library.

    Args:
        keys: that a query attends to, in the mean.
        cols: of the queries, of all heads.
    """
    costs, elements = machine.costs, queries * cols
    if not backward:
        return costs.kernel_s + 4 * elements * keys / (ATTENTION_RATE * costs.gemm_flop_per_s)
    flop = 2 * BACKWARD_MATMULS * elements * keys
    passes_s = BACKWARD_CALL_S + costs.memory_s(BACKWARD_PASSES * elements)
    return passes_s + flop / (BACKWARD_RATE * costs.gemm_flop_per_s)


def computed_s(p: Problem, machine: Machine, *, backward: bool = False) -> float:
    """Seconds of all attention of a rank."""
    return attention_s(machine, p.rows[0], p.m / (1 + p.causal), p.n, backward=backward)
