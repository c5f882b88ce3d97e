"""Layers of real models at which the chooser is scored.

Sizes are those of one rank of eight (tensor parallel), bf16; tokens are M over all ranks. The forms
of the model, the rule and few of the constants were found at the 16 scenarios of `FITTED` and the
rows of `characterize`; margins and ties of the chooser also at shapes of `LOOKED_AT`. The other 40
are what it is scored by. Source: the models' configurations.
"""

from typing import NamedTuple

from counterpoint.problem import Op, Problem

TOKENS = (64, 512, 2048, 8192)
FITTED = "Llama-3-70B"
LOOKED_AT = "Llama-3.1-405B"
# N, K of one rank
LAYERS: dict[str, dict[str, tuple[Op, int, int]]] = {
    "Qwen3-32B": {
        "qkv": ("all_gather_matmul", 1280, 5120),
        "gate+up": ("all_gather_matmul", 6400, 5120),
        "o": ("matmul_reduce_scatter", 5120, 1024),
        "down": ("matmul_reduce_scatter", 5120, 3200),
    },
    "Llama-3-70B": {
        "qkv": ("all_gather_matmul", 1280, 8192),
        "gate+up": ("all_gather_matmul", 7168, 8192),
        "o": ("matmul_reduce_scatter", 8192, 1024),
        "down": ("matmul_reduce_scatter", 8192, 3584),
    },
    "Llama-3.1-405B": {
        "qkv": ("all_gather_matmul", 2304, 16384),
        "gate+up": ("all_gather_matmul", 13312, 16384),
        "o": ("matmul_reduce_scatter", 16384, 2048),
        "down": ("matmul_reduce_scatter", 16384, 6656),
    },
    "DeepSeek-V3 dense": {
        "qkv": ("all_gather_matmul", 3072, 1536),
        "gate+up": ("all_gather_matmul", 4608, 7168),
        "o": ("matmul_reduce_scatter", 7168, 2048),
        "down": ("matmul_reduce_scatter", 7168, 2304),
    },
    "GPT-OSS-120B": {
        "qkv": ("all_gather_matmul", 640, 2880),
        "o": ("matmul_reduce_scatter", 2880, 512),
    },
}


class Scenario(NamedTuple):
    """One layer at a number of tokens."""

    model: str
    layer: str
    problem: Problem

    @property
    def name(self) -> str:
        """As text: "Llama-3-70B qkv, 2048 tokens"."""
        return f"{self.model} {self.layer}, {self.problem.m} tokens"


def scenarios(ranks: int) -> tuple[Scenario, ...]:
    """All of them on so many ranks, few tokens first: what takes long comes last."""
    return tuple(
        Scenario(model, layer, Problem(op, tokens, n, k, ranks))
        for tokens in TOKENS
        for model, layers in LAYERS.items()
        for layer, (op, n, k) in layers.items()
    )
