"""What the options of several commands have in common."""

from enum import StrEnum

M_N_K = "M over all ranks, N and K of one rank"


class Dtype(StrEnum):
    """Of every operand."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
