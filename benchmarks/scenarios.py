"""Layers of real models at which the chooser is scored.

Sizes are those of one rank of eight (tensor parallel), bf16; tokens are M over all ranks. The forms
of the model, the rule and few of the constants were found at the 16 scenarios of `FITTED` and the
rows of `characterize`; margins and ties of the chooser also at shapes of `LOOKED_AT`. The other 40
are what it is scored by. Source: the models' configurations.

Layers of experts are a group of their own: the experts of one rank of eight (expert parallel),
tokens are those of a rank, and every expert gets equally many rows. Their constants were read off
measurements of the same sizes on 4 GPUs.
"""

from typing import NamedTuple

from benchmarks.experts import MODELS
from counterpoint.problem import Problem

TOKENS = (64, 512, 2048, 8192)
FITTED = "Llama-3-70B"
LOOKED_AT = "Llama-3.1-405B"
# N, K of one rank
LAYERS: dict[str, dict[str, tuple[str, int, int]]] = {
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
EXPERT_TOKENS = (256, 1024, 4096)  # of a rank


class Scenario(NamedTuple):
    """One layer at a number of tokens.

    Args:
        top: rows of x for each token.
    """

    model: str
    layer: str
    problem: Problem
    top: int = 1

    @property
    def tokens(self) -> int:
        """Over all ranks; with experts, of a rank."""
        return self.problem.m // self.top

    @property
    def name(self) -> str:
        """As text: "Llama-3-70B qkv, 2048 tokens"."""
        return f"{self.model} {self.layer}, {self.tokens} tokens"


def scenarios(ranks: int) -> tuple[Scenario, ...]:
    """All without experts on so many ranks, few tokens first: what takes long comes last."""
    return tuple(
        Scenario(model, layer, Problem(op, tokens, n, k, ranks))
        for tokens in TOKENS
        for model, layers in LAYERS.items()
        for layer, (op, n, k) in layers.items()
    )


def expert_scenarios(ranks: int) -> tuple[Scenario, ...]:
    """All with experts, likewise: rows to the experts behind gate and up, back behind down."""
    found: list[Scenario] = []
    for tokens in EXPERT_TOKENS:
        for model, experts, hidden, ffn, top in MODELS:
            sizes: tuple[tuple[str, str, int, int], ...] = (
                ("experts gate+up", "all_to_all_matmul", 2 * ffn, hidden),
                ("experts down", "matmul_all_to_all", hidden, ffn),
            )
            for layer, op, n, k in sizes:
                problem = Problem(op, tokens * top, n, k, ranks, experts=experts)
                found.append(Scenario(model, layer, problem, top))
    return tuple(found)
