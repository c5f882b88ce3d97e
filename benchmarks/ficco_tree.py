"""A rule of static sizes as the paper has it: a small decision tree, grown where one may fit.

It picks one of the paper's four plans from a gather's M, N, K, traffic and op-to-byte ratio. The
paper's own thresholds are not known. A split is the one with the most picks right behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import NamedTuple

from benchmarks.score import RIGHT, Measured
from counterpoint.problem import Problem

THEIRS = ("uniform_fused_1d", "hetero_fused_1d", "hetero_unfused_1d", "uniform_fused_2d")
LEAST = 2  # scenarios of a leaf
DEPTHS = (1, 2, 3)
CLAIMED, COSTLY = 0.81, 0.17  # of the paper; 14 % and what rounding and noise add


def _traffic(p: Problem) -> float:
    return p.m * p.k + p.n * p.k + p.m * p.n


SIZES: dict[str, Callable[[Problem], float]] = {
    "M": lambda p: p.m, "N": lambda p: p.n, "K": lambda p: p.k, "traffic": _traffic,
    "op-to-byte": lambda p: p.m * p.n * p.k / _traffic(p),
}  # fmt: skip


class Split(NamedTuple):
    """A comparison of one size, and what is picked on each side of it."""

    size: str
    at: float
    below: "Split | str"
    above: "Split | str"


def ratio(m: Measured, plan: str) -> float:
    """The time of a plan over that of the best of the four."""
    return m.times[f"{plan} ring"] / min(m.times[f"{each} ring"] for each in THEIRS)


class Picks(NamedTuple):
    """A scenario, and the plans that are right for it."""

    problem: Problem
    right: frozenset[str]


def grown(measured: Sequence[Measured], depth: int) -> Split | str:
    """The tree of these scenarios, of so many comparisons one after another."""
    return _grown([Picks(m.problem, frozenset(p for p in THEIRS if ratio(m, p) <= RIGHT))
                   for m in measured], depth)  # fmt: skip


def _grown(some: Sequence[Picks], depth: int) -> Split | str:
    splits = list(_splits(some)) if depth else []
    if not splits:
        return max(THEIRS, key=lambda plan: _right(some, plan))
    size, at, below, above = max(splits, key=lambda s: _most_right(s[2]) + _most_right(s[3]))
    return Split(size, at, _grown(below, depth - 1), _grown(above, depth - 1))


def _splits(some: Sequence[Picks]) -> Iterator[tuple[str, float, list[Picks], list[Picks]]]:
    for name, of in SIZES.items():
        for low, high in pairwise(sorted({of(each.problem) for each in some})):
            at = sqrt(low * high)
            below = [each for each in some if of(each.problem) < at]
            above = [each for each in some if of(each.problem) >= at]
            if min(len(below), len(above)) >= LEAST:
                yield name, at, below, above


def _right(some: Sequence[Picks], plan: str) -> int:
    return sum(plan in each.right for each in some)


def _most_right(some: Sequence[Picks]) -> int:
    return max(_right(some, plan) for plan in THEIRS)


def pick(tree: Split | str, problem: Problem) -> str:
    """The plan that a tree takes."""
    while isinstance(tree, Split):
        tree = tree.below if SIZES[tree.size](problem) < tree.at else tree.above
    return tree


class Scored(NamedTuple):
    """How a tree picks: shares within 2 % and exactly right, and what a wrong pick costs."""

    right: float
    exact: float
    cost: float


def scored(picks: Callable[[Problem], str], measured: Sequence[Measured]) -> Scored:
    """Among the four plans."""
    ratios = [ratio(m, picks(m.problem)) for m in measured]
    wrong = [each - 1 for each in ratios if each > RIGHT]
    return Scored(fmean(r <= RIGHT for r in ratios), fmean(r == 1 for r in ratios),
                  fmean(wrong) if wrong else 0.0)  # fmt: skip


def by_depth(
    fit: Sequence[Measured], unseen: Sequence[Measured]
) -> dict[int, tuple[Scored, Scored]]:
    """Depth -> scores where the tree was grown, and where it was not."""
    trees = {depth: grown(fit, depth) for depth in DEPTHS}
    return {
        depth: (scored(partial(pick, tree), fit), scored(partial(pick, tree), unseen))
        for depth, tree in trees.items()
    }


def margin(share: float, number: int) -> float:
    """Half of the interval that a share of so many cases has, nineteen times of twenty."""
    return 1.96 * sqrt(share * (1 - share) / number)


def told(tree: Split | str) -> str:
    """A tree of one comparison in words."""
    if isinstance(tree, str):
        return f"`{tree}`"
    return f"{tree.size} below {tree.at:.4g}: {told(tree.below)}, else {told(tree.above)}"


def of_sizes(
    fit: Sequence[Measured], unseen: Sequence[Measured], known: Callable[[Problem], str]
) -> tuple[list[str], list[str]]:
    """Two claims, what came out of each, and its verdict.

    Args:
        fit: where trees are grown.
        unseen: where they are scored.
        known: the paper's own rule, as far as it is known.
    """
    trees = by_depth(fit, unseen)
    chosen = max(trees, key=lambda depth: trees[depth][0].right)
    plus = [margin(s.right, len(unseen)) for _, s in trees.values()]
    each = ", ".join(f"{s.right:.0%} ({s.exact:.0%})" for _, s in trees.values())
    costs = [s.cost for _, s in trees.values()]
    paper = scored(known, unseen)
    reached = [s.right + m >= CLAIMED for (_, s), m in zip(trees.values(), plus, strict=True)]
    verdict = "contradicted" if not any(reached) else "in part: not at all depths"
    return [
        "a rule of static sizes is right in 81 %",
        f"of {len(unseen)} unseen gathers, among the paper's four plans, within 2 % of the best "
        f"(exactly the best): trees of 1, 2 and 3 comparisons {each}, each +- {max(plus):.0%}. "
        f"The first: {told(grown(fit, 1))}. The {len(fit)} gathers that trees were grown on would "
        f"have chosen {chosen} comparisons ({trees[chosen][0].right:.0%} of them); the unseen ones "
        f"were looked at for all. The paper's own, reconstructed: {paper.right:.0%} "
        f"({paper.exact:.0%}).",
        "confirmed: static sizes suffice" if all(reached) else verdict,
    ], [
        "a wrong pick costs about 14 %",
        f"of the same gathers by the same trees {', '.join(f'{cost:.0%}' for cost in costs)}; "
        f"reconstructed {paper.cost:.0%}",
        "confirmed" if min(costs) < COSTLY else "contradicted: more here",
    ]  # fmt: skip
