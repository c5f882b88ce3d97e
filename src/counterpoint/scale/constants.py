"""Every constant of a prediction at scale that is no fact of a model, a layout or a datasheet.

They were written down, with where they come from, before any published step was compared, but for
COLLECTIVE_SMS and ROUTED_*, which came an hour after the first comparison and moved Megatron-Core's
error from 11.1 to 10.3 %. None is fitted to one. What matmuls, kernels and collectives of one node
cost are `Machine.costs`: measured, or derived from the datasheet as they are everywhere in the
library.
"""

from typing import Literal, NamedTuple

Basis = Literal["datasheet", "measured", "counted", "assumed"]


class Constant(NamedTuple):
    """One number and what it stands on.

    "counted": from the reads and writes of the kernels that are named.
    """

    value: float
    unit: str
    basis: Basis
    source: str


NIC_SHARE = Constant(
    0.9, "of the datasheet's rate", "assumed", "NCCL's large messages over InfiniBand or RoCE"
)
NIC_LATENCY_S = Constant(5e-6, "s", "assumed", "one message between two nodes, NCCL over RDMA")
COLLECTIVE_SMS = Constant(
    24, "SMs beside computation", "measured",
    "blocks of an NCCL 2.28 ring on 4xH200, read from captured graphs; nothing fits beside one",
)  # fmt: skip
FLASH_SHARE = Constant(
    0.5, "of the bf16 peak", "assumed",
    "arXiv 2407.08608: 0.35 (FlashAttention-2) to 0.75 (version 3) on H100; between them",
)  # fmt: skip
FLASH_BACKWARD = Constant(
    2.5, "of the forward's products", "counted", "arXiv 2307.08691: five matmuls against two"
)
SDPA_SHARE = Constant(
    0.3, "of the bf16 peak", "measured",
    "cuDNN's attention with a mask that is given, no score left out: transformers on one H200",
)  # fmt: skip
SCORE_BYTES = Constant(
    13, "bytes a score, forward", "counted",
    "arXiv 2205.05198 section 4.1, unfused: q k (write 2), masked softmax (read 2, write 2), "
    "dropout (read 2, write 2 + 1), times v (read 2)",
)  # fmt: skip
SCORE_BACKWARD_BYTES = Constant(
    21, "bytes a score, backward", "counted",
    "the same: dv (read 2), dp (write 2), dropout (read 2 + 1, write 2), softmax (read 2 + 2, "
    "write 2), dq and dk (read 2 + 2), the mask's scale (2)",
)  # fmt: skip
SCORE_MATMUL_BYTES = Constant(4, "of these, of the matmuls themselves", "counted", "q k and p v")
SCORE_MATMUL_BACKWARD_BYTES = Constant(
    8, "of these, of the matmuls themselves", "counted", "dv, dp, dq and dk"
)
REPLICATED_BYTES = Constant(
    22, "bytes a number of the hidden state, forward", "counted",
    "two norms (read 2, write 2 each), two additions with dropout (read 2 + 2, write 2 + 1 each)",
)  # fmt: skip
BACKWARD_BYTES = Constant(
    1.5, "of the forward's bytes", "counted",
    "norm: read dy and x, write dx; activation: read dy and x, write dx; dropout: read dy and mask",
)  # fmt: skip
ACTIVATION_BYTES = Constant(
    2, "bytes a number, read or written", "counted", "bf16; one kernel for bias and activation"
)
ROUTED_BYTES = Constant(
    6, "bytes a number of a routed row, forward", "counted",
    "rows into the order of their experts (read 2, write 2), weighted sum (read 2)",
)  # fmt: skip
ROUTED_BACKWARD_BYTES = Constant(
    8, "bytes a number of a routed row, backward", "counted",
    "the sum's rows (write 2) and weights (read 2), rows into the order of their tokens (read 2), "
    "a token's rows read again for the sum (read 2)",
)  # fmt: skip
ROUTED_WEIGHTS_BYTES = Constant(
    4, "bytes a number of a row by routes, backward", "counted",
    "gradients that go to experts times the weights of their rows (read 2, write 2); of a number "
    "between an expert's matmuls that, and the weights' own gradient (read 2 + 2)",
)  # fmt: skip
LOSS_BYTES = Constant(
    60, "bytes a logit, both ways", "counted",
    "Megatron-LM's vocab_parallel_cross_entropy in fp32: cast, max, subtract, exp, sum, divide; "
    "backward: copy, scale, cast",
)  # fmt: skip
GRADIENT_BYTES = Constant(
    4, "bytes a parameter", "assumed", "gradients are summed and reduced in fp32, as Megatron does"
)
PARAMETER_BYTES = Constant(2, "bytes a parameter", "assumed", "parameters are gathered in bf16")
OPTIMIZER_BYTES = Constant(
    38, "bytes a parameter", "counted",
    "Adam in fp32: zero the gradient (4), its norm (4), read it (4), weights (8), moments (16), "
    "write bf16 (2)",
)  # fmt: skip
LOSS_MEMORY_BYTES = Constant(
    12, "bytes a logit, at the loss", "counted",
    "torch's cross_entropy in fp32: log-softmax (4), its gradient (4), the gradient that comes (4)",
)  # fmt: skip
SHARED_LOSS_MEMORY_BYTES = Constant(
    16, "bytes a logit of a rank, at the loss", "counted",
    "torch's loss_parallel in fp32: log-softmax (4), its exponentials (4), two gradients (4 + 4)",
)  # fmt: skip
RESERVED = Constant(
    1.06, "of the tensors' bytes", "measured",
    "what torch's allocator reserves: torchtitan's Llama 3.1 8B on 128 H100s, with and without "
    "compile, is 1.10 and 1.01 of what is counted here",
)  # fmt: skip

CONSTANTS = {name.lower(): c for name, c in list(globals().items()) if isinstance(c, Constant)}
