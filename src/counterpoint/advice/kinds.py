"""What a GPU activity is, by its name, and by what the profiler says of it.

Names are those of NCCL and RCCL, torch's symmetric memory, vLLM, SGLang, FlashInfer, DeepEP,
NVSHMEM and this library, whose operators that do both at once count as computation.
"""

import re
from functools import lru_cache

COMPUTATION, COMMUNICATION, PACKING, HOST_COPY = range(4)

_NO_CASE = re.IGNORECASE
_LIBRARY = re.compile(
    r"nccl|rccl|nvshmem|cross_device_reduce|(one|two)_?shot|multimem_|lamport|deep_ep|userbuffers|"
    r"trtllm_(allreduce|mnnvl)|mscclpp|^(barrier|wait_signal|all_reduce_norm|collective|arrival|signal|send_sums)_kernel",
    _NO_CASE,
)
_COLLECTIVES = {
    "all-gather": r"all_?gather", "reduce-scatter": r"reduce_?scatter",
    "all-to-all": r"all_?to_?all|dispatch|combine",
    "all-reduce": r"all_?reduce|device_reduce|one_?shot|two_?shot|lamport",
    "send and receive": r"send|recv", "broadcast": r"broadcast", "reduce": r"reduce",
}  # fmt: skip
_PEER_COPY = re.compile(r"PtoP|Peer", _NO_CASE)
_TO_OR_FROM_HOST = re.compile(r"HtoD|DtoH|Host", _NO_CASE)
_PACKING = re.compile(r"chunk_cat|split_with_sizes_copy")
_FAMILIES = {
    "attention": r"flash|fmha|attention|attn|cudnn.*sdpa",
    "matmul": r"nvjet|gemm|cutlass|xmma|matmul|cublas|splitk|_mm_|triton_tem",
    "convolution": r"conv|wgrad|dgrad|winograd", "norm": r"norm", "embedding": r"embedding|bag",
    "copy": r"memcpy|copy", "optimizer": r"adam|sgd|multi_tensor_apply",
}  # fmt: skip


@lru_cache(100_000)
def kind_of(category: str, name: str) -> int:
    """COMPUTATION, COMMUNICATION, PACKING or HOST_COPY.

    Args:
        category: of the profiler, in lower case: "kernel", "gpu_memcpy" or "gpu_memset".
        name: of the kernel or the copy.
    """
    if "memcpy" in category:
        if _PEER_COPY.search(name):
            return COMMUNICATION
        return HOST_COPY if _TO_OR_FROM_HOST.search(name) else COMPUTATION
    if _LIBRARY.search(name):
        return COMMUNICATION
    return PACKING if _PACKING.search(name) else COMPUTATION


@lru_cache(100_000)
def collective_of(said: str, name: str) -> str:
    """Which collective a kernel is.

    Args:
        said: what the profiler says, "" for nothing: NCCL's before 2.18 names all-to-all SendRecv.
        name: of the kernel.
    """
    if _PEER_COPY.search(name) and not said:
        return "peer copy"
    for text in (said, name):
        for kind, pattern in _COLLECTIVES.items():
            if re.search(pattern, text, _NO_CASE):
                return kind
    return "other"


@lru_cache(100_000)
def family_of(name: str) -> str:
    """What a computation is, for a reader: "matmul", "norm", ..., "elementwise" for the rest."""
    found = (family for family, words in _FAMILIES.items() if re.search(words, name, _NO_CASE))
    return next(found, "elementwise")


# bytes of an element, by the profiler's name of its type
ITEM_BYTES = {
    "Float": 4, "BFloat16": 2, "Half": 2, "Byte": 1, "Char": 1, "Short": 2, "Int": 4, "Long": 8,
    "Double": 8, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Float8_e4m3fnuz": 1,
    "Float8_e5m2fnuz": 1,
}  # fmt: skip
