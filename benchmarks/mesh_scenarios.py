"""Layers of models on a mesh of eight, at which choices among finer plans are scored.

Sizes are those of one rank, bf16; rows are M over all ranks.

- dense: tensor and sequence parallel. Gathers before qkv and gate+up, scatters behind o and down.
- expert: one expert of a model, cut over the ranks, and the tokens that are routed to it.
- weights: data parallel with sharded weights. A weight is gathered and multiplied by a rank's own
  tokens; its gradient is scattered. M is what the weight is sharded along, N or K the tokens.
- context: the keys and values of a long context, of rows that are gathered for it.

`FITTED` are models that rules and the model may be fitted to. `HELD_OUT` are others, frozen on
2026-11-23 by the commit that added them, before any plan was measured at them, and scored once; a
test holds them as they were frozen. Source of sizes: configurations of models.
"""

from collections.abc import Iterator
from typing import NamedTuple

from counterpoint.problem import Problem

RANKS = 8
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
MOST_FLOP = 5e12  # of one rank: what takes long is no other question


class Sizes(NamedTuple):
    """Of a whole model.

    Args:
        hidden: columns of the residual stream.
        qkv: columns of q, k and v.
        heads: rows of o.
        ffn: columns inside its gated MLP, or an expert's.
        rows: tokens of all ranks.
        share: of the tokens that one expert gets; 0 where the MLP is dense.
    """

    hidden: int
    qkv: int
    heads: int
    ffn: int
    rows: tuple[int, ...]
    share: float = 0.0


FITTED = {
    "Llama-3-8B": Sizes(4096, 6144, 4096, 14336, (1024, 16384, 65536)),
    "Llama-3-70B": Sizes(8192, 10240, 8192, 28672, (512, 2048, 8192)),
    "Qwen3-32B": Sizes(5120, 10240, 8192, 25600, (4096, 32768)),
    "Mixtral-8x22B": Sizes(6144, 8192, 6144, 16384, (16384, 65536), 2 / 8),
    "Qwen3-235B": Sizes(4096, 9216, 8192, 1536, (65536,), 8 / 128),
}
HELD_OUT = {
    "Llama-3.1-405B": Sizes(16384, 18432, 16384, 53248, (512, 2048, 8192)),
    "Gemma-2-27B": Sizes(4608, 8192, 4096, 36864, (1024, 4096, 32768)),
    "Mistral-Large-2": Sizes(12288, 14336, 12288, 28672, (1024, 4096)),
    "Qwen2.5-7B": Sizes(3584, 4608, 3584, 18944, (2048, 16384, 65536)),
    "DBRX": Sizes(6144, 8192, 6144, 10752, (32768, 65536), 4 / 16),
    "Phi-3.5-MoE": Sizes(4096, 6144, 4096, 6400, (32768,), 2 / 16),
}
TOKENS = (2048, 8192)  # of one rank whose weights are gathered


class Scenario(NamedTuple):
    """One layer at a number of rows.

    Args:
        kind: dense, expert, weights or context.
    """

    name: str
    kind: str
    problem: Problem


def scenarios(models: dict[str, Sizes]) -> tuple[Scenario, ...]:
    """All layers of these models, once each."""
    found: dict[Problem, Scenario] = {}
    for name, sizes in models.items():
        for each in _of(name, sizes):
            p = each.problem
            if 2 * p.m * p.n * p.k <= MOST_FLOP:
                found.setdefault(p, each)
    return tuple(found.values())


def _of(model: str, s: Sizes) -> Iterator[Scenario]:
    def made(kind: str, layer: str, op: str, m: int, n: int, k: int) -> Scenario:
        return Scenario(f"{model} {layer}, {m} x {n} x {k}", kind, Problem(op, m, n, k, RANKS))

    for rows in s.rows:
        if not s.share or rows == s.rows[0]:
            yield made("dense", "qkv", GATHER, rows, s.qkv // RANKS, s.hidden)
            yield made("dense", "o", SCATTER, rows, s.hidden, s.heads // RANKS)
        kind, some = ("expert", int(rows * s.share)) if s.share else ("dense", rows)
        yield made(kind, "gate+up", GATHER, some, 2 * s.ffn // RANKS, s.hidden)
        yield made(kind, "down", SCATTER, some, s.hidden, s.ffn // RANKS)
    if s.share:
        return
    longest = 4 * s.rows[-1]
    kv = s.qkv - s.heads
    yield made("context", "kv", GATHER, min(longest, 65536), kv, s.hidden)
    for tokens in TOKENS:
        yield made("weights", "up, forward", GATHER, s.ffn, tokens, s.hidden)
        yield made("weights", "down, forward", GATHER, s.hidden, tokens, s.ffn)
        yield made("weights", "o, forward", GATHER, s.hidden, tokens, s.heads)
        yield made("weights", "up, gradient", SCATTER, s.ffn, s.hidden, tokens)
