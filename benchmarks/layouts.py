"""Which layout of experts wins: a row for each expert of a token, or a token once to each rank.

Both are predicted, each by its fastest plan, of balanced experts on one machine."""

from collections.abc import Mapping
from itertools import product

import counterpoint as cp
from benchmarks.expert_tensors import MODELS, Model
from benchmarks.rows import Row
from benchmarks.tables import grid
from counterpoint.machine_of import machine_of
from counterpoint.problem import Counts, Problem

RANKS, TOKENS = (2, 4, 8), (256, 4096)
KNOWN: dict[str, tuple[Counts, Counts]] = {
    "on the GPU": ("device", "device_routed"), "on the host": ("host", "routed")
}  # fmt: skip
OPS = {"dispatch": "all_to_all_matmul", "combine": "matmul_all_to_all"}
NOTE = (
    "Predicted speedup of routes, where a token goes once to each rank, over counts, where a row "
    "goes to each expert: on 2, 4 and 8 H200s, at 256 and 4096 tokens of a rank. Above 1.00x, use "
    "routes. For combine, the time of routes includes the weighted sum of the rows of each token. "
    "The time of counts does not include it."
)


def seconds(op: str, model: Model, tokens: int, ranks: int, counts: Counts) -> float:
    """What the fastest plan takes."""
    n, k = (2 * model.ffn, model.hidden) if op == OPS["dispatch"] else (model.hidden, model.ffn)
    top = model.top if "routed" in counts else 0
    problem = Problem(op, tokens * model.top, n, k, ranks, experts=model.experts, counts=counts,
                      top_k=top)  # fmt: skip
    table = cp.choose(problem, machine_of("layouts", f"h200-{ranks}")).table
    return min(c.seconds for c in table if c.basis != "refused")


def speedups(op: str, model: Model, rows: Counts, routes: Counts) -> list[float]:
    """Of routes over rows, on all machines and at all sizes."""
    return [
        seconds(op, model, tokens, ranks, rows) / seconds(op, model, tokens, ranks, routes)
        for ranks, tokens in product(RANKS, TOKENS)
    ]


def layouts(_: Mapping[int, list[Row]]) -> str:
    """docs/experts.md."""
    lines: list[list[str]] = []
    for (known, counts), (direction, op) in product(KNOWN.items(), OPS.items()):
        each = [speedups(op, model, *counts) for model in MODELS]
        lines.append([known, direction, *(f"{min(s):.2f}x to {max(s):.2f}x" for s in each)])
    head = ["known", "direction", *(model.name for model in MODELS)]
    return f"{grid(head, lines)}\n\n{NOTE}"
