"""How many rows tokens are expected to have by routes, by which times are predicted.

Routes differ from call to call, and a plan's boxes are those of a row for each expert of a token.
What goes to a rank, or to an island, goes there once: of experts that are drawn uniformly and all
differ, a closed form says how many rows that is.
"""

from math import comb

from counterpoint.problem import Problem

ONCE_TO_A_RANK = ("sent", "received", "passing", "sums", "parts", "back")
ALONG_RAILS = ("rail", "got")  # see expert_islands.py
ONCE_TO_AN_ISLAND = ("out", "came", "gone", "got")


def reaches(p: Problem, ranks: int) -> float:
    """The probability that a token has an expert on one of so many ranks.

    k of all E experts are drawn, of which these ranks have s: 1 - C(E - s, k) / C(E, k).
    """
    every, here = p.experts * p.ranks, p.experts * ranks
    return 1 - comb(every - here, p.top_k) / comb(every, p.top_k)


def once(p: Problem, ranks: int) -> float:
    """Rows that go once to so many ranks, for each that goes there for an expert.

    1 where nothing is known of how many experts a token has. Of all ranks: tokens.
    """
    return reaches(p, ranks) * p.ranks / (p.top_k * ranks) if p.top_k else 1.0


def share(p: Problem, name: str) -> float:
    """Expected rows of a buffer of a routed plan, as a part of those of its boxes."""
    if p.counts == "device_routed" and p.islands > 1:
        tokens = name in ALONG_RAILS or (name == "x" and p.op == "all_to_all_matmul")
        return p.islands / p.top_k if tokens and p.top_k else 1.0  # all go to each island
    if name in ONCE_TO_AN_ISLAND:
        return once(p, p.ranks // p.islands)
    return once(p, 1) if name in ONCE_TO_A_RANK else 1.0
