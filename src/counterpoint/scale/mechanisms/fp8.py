"""Forward matmuls of tensor-parallel layers in fp8, as `counterpoint.nn.to_fp8` computes them.

The backward stays as it is, in bf16.
"""

from counterpoint.costs import FP8_RATE
from counterpoint.machine import DeviceSpec
from counterpoint.scale.constants import Constant

LEAST_CAPABILITY = (8, 9)
FP8_CAST_BYTES = Constant(
    3.5, "bytes a number of x and of the weight, each forward", "measured",
    "counterpoint.nn.to_fp8 under torch.compile: rows are read, once or twice, and written in fp8: "
    "median of ten sizes, 2xH100 (benchmarks/results/fp8-2x-h100.jsonl); eager casts have 25",
)  # fmt: skip
FP8_MATMULS = Constant(
    FP8_RATE, "of the bf16 rate", "measured", "scales of rows, torch 2.11 and cuBLAS 13.0 on H200"
)
CONSTANTS = {"fp8_cast_bytes": FP8_CAST_BYTES, "fp8_matmuls": FP8_MATMULS}


def multiplies_fp8(device: DeviceSpec) -> bool:
    """Whether a GPU has fp8 matmuls."""
    major, _, minor = device.capability.partition(".")
    return device.capability != "" and (int(major), int(minor)) >= LEAST_CAPABILITY
