"""Layers of real models at which the chooser is scored.

Sizes are those of one rank of eight (tensor parallel), bf16; tokens are M over all ranks. The forms
of the model, the rule and few of the constants were found at the 16 scenarios of `FITTED` and the
rows of `characterize`; margins and ties of the chooser also at shapes of `LOOKED_AT`. What was
wrong at the other 40 was known, too, when the model was changed. Source: configurations of models.

Layers of experts are a group of their own: the experts of one rank of eight (expert parallel),
tokens are those of a rank, and every expert gets equally many rows. Their constants were read off
measurements of the same sizes on 4 GPUs.

`held_out` is what the chooser is scored by: models that nothing was looked at before, cut over the
ranks that there are. The list was frozen on 2026-11-22, by the commit that added it and before its
first run. It is scored once; a test holds it as it was frozen.
"""

from typing import NamedTuple

from benchmarks.expert_tensors import MODELS, Model
from counterpoint.problem import Problem

TOKENS = (64, 512, 2048, 8192)
FITTED = "Llama-3-70B"
LOOKED_AT = "Llama-3.1-405B"
EXPERT_TOKENS = (256, 1024, 4096)  # of a rank
HELD_OUT = "held-out"  # begins the names of these


class Dense(NamedTuple):
    """Sizes of a whole model: columns of q, k and v, of what o takes, and inside its gated MLP."""

    hidden: int
    qkv: int
    heads: int
    ffn: int
    tokens: tuple[int, ...]  # over all ranks
    latent: int = 0  # columns of what q, k and v are made of, where these are not `hidden`


TP = 8  # ranks that models looked at are cut over, whatever the number of ranks here
DENSE = {
    "Qwen3-32B": Dense(5120, 10240, 8192, 25600, TOKENS),
    "Llama-3-70B": Dense(8192, 10240, 8192, 28672, TOKENS),
    "Llama-3.1-405B": Dense(16384, 18432, 16384, 53248, TOKENS),
    "DeepSeek-V3 dense": Dense(7168, 24576, 16384, 18432, TOKENS, latent=1536),
    "GPT-OSS-120B": Dense(2880, 5120, 4096, 0, TOKENS),  # its MLP is one of experts
}
HELD_OUT_DENSE = {
    "MiniCPM-2B": Dense(2304, 6912, 2304, 5760, (256, 16384)),
    "Qwen2.5-7B": Dense(3584, 4608, 3584, 18944, (128, 4096)),
    "Gemma-3-12B": Dense(3840, 8192, 4096, 15360, (1024, 8192)),
    "Gemma-2-27B": Dense(4608, 8192, 4096, 36864, (256, 4096)),
    "Qwen2.5-32B": Dense(5120, 7168, 5120, 27648, (128, 1024)),
    "Mistral-Large-2": Dense(12288, 14336, 12288, 28672, (1024, 4096)),
}
# with the experts of all ranks
HELD_OUT_EXPERTS = (
    Model("Qwen3-30B-A3B", 128, 2048, 768, 8),
    Model("Phi-3.5-MoE", 16, 4096, 6400, 2),
)
HELD_OUT_EXPERT_TOKENS = (512, 2048)  # of a rank


class Scenario(NamedTuple):
    """One layer at a number of tokens.

    Args:
        experts: the model whose layer of experts it is; None of others.
    """

    model: str
    layer: str
    problem: Problem
    experts: Model | None = None

    @property
    def top(self) -> int:
        """Rows of x for each token."""
        return self.experts.top if self.experts else 1

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
        each
        for tokens in TOKENS
        for model, d in DENSE.items()
        for each in _of_dense(model, d, tokens, TP, ranks)
    )


def _of_dense(name: str, d: Dense, tokens: int, cut: int, ranks: int) -> list[Scenario]:
    """The layers of a model that is cut over so many ranks; none of an MLP that it lacks."""
    layers: tuple[tuple[str, str, int, int], ...] = (
        ("qkv", "all_gather_matmul", d.qkv // cut, d.latent or d.hidden),
        ("gate+up", "all_gather_matmul", 2 * d.ffn // cut, d.hidden),
        ("o", "matmul_reduce_scatter", d.hidden, d.heads // cut),
        ("down", "matmul_reduce_scatter", d.hidden, d.ffn // cut),
    )
    return [Scenario(name, layer, Problem(op, tokens, n, k, ranks))
            for layer, op, n, k in layers if n and k]  # fmt: skip


def expert_scenarios(ranks: int) -> tuple[Scenario, ...]:
    """All with experts, likewise: rows to the experts behind gate and up, back behind down."""
    return tuple(each for tokens in EXPERT_TOKENS for model in MODELS
                 for each in _of_experts(model, model.name, tokens, ranks))  # fmt: skip


def _of_experts(model: Model, name: str, tokens: int, ranks: int) -> list[Scenario]:
    sizes: tuple[tuple[str, str, int, int], ...] = (
        ("experts gate+up", "all_to_all_matmul", 2 * model.ffn, model.hidden),
        ("experts down", "matmul_all_to_all", model.hidden, model.ffn),
    )
    m = tokens * model.top
    return [Scenario(name, layer, Problem(op, m, n, k, ranks, experts=model.experts), model)
            for layer, op, n, k in sizes]  # fmt: skip


def held_out(ranks: int) -> tuple[Scenario, ...]:
    """All of models never looked at, cut over 2 or 4 ranks; none of other numbers."""
    found: list[Scenario] = []
    if ranks not in (2, 4):
        return ()
    for model, d in HELD_OUT_DENSE.items():
        for tokens in d.tokens:
            found += _of_dense(f"{HELD_OUT} {model}", d, tokens, ranks, ranks)
    for model in HELD_OUT_EXPERTS:
        own = model._replace(experts=model.experts // ranks)
        for tokens in HELD_OUT_EXPERT_TOKENS:
            found += _of_experts(own, f"{HELD_OUT} {model.name}", tokens, ranks)
    return tuple(found)
