"""Every constant of a prediction at scale that is no fact of a model, a layout or a datasheet.

Most were written down, with where they come from, before any published step was compared.
COLLECTIVE_SMS, now BESIDE, and ROUTED_* came after the first comparison; AMPERE_SETTLED, BESIDE,
UNCOUNTED, STRAGGLER_CV, FSDP_*, ROUTING_*, COUNTS_S and EXPERT_CV after errors by paper were known:
A100s were 1 to 6 % too slow, H100s 3 to 10 % too fast. None is fitted to one. What matmuls, kernels
and collectives of one node cost are `Machine.costs`: measured, or derived from the datasheet as
they are everywhere in the library.
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
    0.9,
    "of the datasheet's rate",
    "assumed",
    "NCCL's large messages over InfiniBand or RoCE; DeepEP's dispatch to 16 and to 256 ranks "
    "differs by as many bytes at 0.9",
)
NIC_LATENCY_S = Constant(5e-6, "s", "assumed", "one message between two nodes, NCCL over RDMA")
AMPERE_SETTLED = Constant(
    1.08, "time of long matmuls against short ones, A100", "assumed",
    "clocks: 1410 MHz at most, 1305 MHz at the power limit in HPL (NVIDIA, by "
    "glennklockwood.com/garden/peak-FLOPS); other GPUs as measured on 4xH200",
)  # fmt: skip
BESIDE = Constant(
    0.34, "of a hidden collective's time, lost by computation", "measured",
    "FSDP2 steps of Llama-8B layers on 2 and 4 H200 (fsdp-*.jsonl); between nodes as within one",
)  # fmt: skip
UNCOUNTED = Constant(
    0.04, "of computation, beside it", "measured",
    "the same layers alone on one H200, eager and compiled, take 1.03 to 1.08 of what is counted: "
    "gaps, small kernels, strided copies",
)  # fmt: skip
STRAGGLER_CV = Constant(
    0.015, "of computation, standard deviation over GPUs", "assumed",
    "arXiv 2208.11035: 8 % from slowest to fastest GPU of a cluster, read as a box plot's 5.4 "
    "standard deviations; a step waits for the slowest GPU",
)  # fmt: skip
FSDP_COPIED_BYTES = Constant(
    4, "bytes a parameter and gather, before computation", "counted",
    "FSDP2 copies what was gathered into parameters (read 2, write 2)",
)  # fmt: skip
FSDP_PACKED_BYTES = Constant(
    12.6, "bytes a parameter, after its backward", "measured",
    "chunk_cat of gradients, bf16 to fp32: 2.1 of its 6 bytes on 2 and 4 H200",
)  # fmt: skip
FSDP_CAST_BYTES = Constant(
    10, "bytes a parameter of a shard, before a gather", "counted",
    "fp32 to bf16 (read 4, write 2), then into the collective's buffer (read 2, write 2)",
)  # fmt: skip
FSDP_CALLS = Constant(
    100, "operators' host calls a layer", "measured",
    "host time of FSDP2's layers, eager, on 2 and 4 H200: a layer takes no less",
)  # fmt: skip
FSDP_EXPERT_CALLS = Constant(
    150, "operators' host calls a layer of experts, besides", "measured",
    "a Qwen3-MoE of transformers, eager, on 2 H200 (transformers-experts-*.jsonl): 250 in all by "
    "4096 tokens; where the host waits for counts, these are on top of what GPUs take, as 8192 "
    "tokens show",
)  # fmt: skip
ROUTING_S = Constant(
    60e-6, "s a layer of experts", "measured",
    "torch's routing, 14 to 35 kernels, one H200 (expert-layer-1x-h200.jsonl): 62 to 81 us of 256 "
    "tokens",
)  # fmt: skip
ROUTING_TOKEN_S = Constant(20e-9, "s a token, likewise", "measured", "125 to 173 us of 4096 tokens")
COUNTS_S = Constant(
    0.5e-3, "s a layer of experts, forward and backward", "measured",
    "the host waits for counts of rows, then launches again: torch with and without known counts, "
    "4096 tokens a rank, 2xH200 (steps-2x-h200.jsonl): 0.48 to 0.56 ms",
)  # fmt: skip
EXPERT_CV = Constant(
    0.215, "of an expert's rows, standard deviation over experts", "assumed",
    "arXiv 2408.15664, table 2: with an auxiliary loss the fullest of 64 experts has 0.52 to 0.72 "
    "more rows than the mean; independent, so that a rank's excess shrinks with its experts",
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
TORCH_ROWS_BYTES = Constant(
    40, "bytes a number of a routed row, forward", "counted",
    "torchtitan's DeepSeek-V3: gather (4), a padding row behind all (4), sort (4) and back (4), "
    "scores in fp32 (6 + 8 + 6), scatter_add (4). On 2 H100 (steps-2x-h100.jsonl) 34 to 42 by what "
    "4096 tokens take longer than 1024, beside matmuls and exchanges",
)  # fmt: skip
TORCH_ROWS_BACKWARD_BYTES = Constant(
    64, "bytes a number of a routed row, backward", "counted",
    "the same: scatter_add (4), scores (36), slice (6), sorts (4 + 8), gather (6). There 66 to 71 "
    "of 8 experts a token, 28 of 2",
)  # fmt: skip
MEGATRON_ROWS_BYTES = Constant(
    24, "bytes a number of a routed row, forward", "counted",
    "Megatron-Core's all-to-all dispatcher, not fused: index_select (4), chunks sorted twice (8), "
    "index_copy (6), scores (4), sum (2)",
)  # fmt: skip
MEGATRON_ROWS_BACKWARD_BYTES = Constant(
    28, "bytes a number of a routed row, backward", "counted",
    "the same: scores (4) and their gradient (6), index_select (4), chunks (8), index_add (6)",
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

# what puts rows in the order of experts and back: bytes, forward and backward
ROWS_BYTES = {
    "torch": (TORCH_ROWS_BYTES, TORCH_ROWS_BACKWARD_BYTES),
    "megatron": (MEGATRON_ROWS_BYTES, MEGATRON_ROWS_BACKWARD_BYTES),
    "fused": (ROUTED_BYTES, ROUTED_BACKWARD_BYTES),
}
CONSTANTS = {name.lower(): c for name, c in list(globals().items()) if isinstance(c, Constant)}
