"""What came out of the claims of three papers: each read from committed rows, or computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean
from typing import NamedTuple

from benchmarks import paper_resources, residency, sharing
from benchmarks.rows import Row, Timed, results, taken
from counterpoint import presets
from counterpoint.gpu.limits import limits_of
from counterpoint.gpu.occupancy import beside, feasible, window
from counterpoint.measure import tune_resources
from counterpoint.resources import search

CONFIRMED, CONTRADICTED, IN_PART = "confirmed", "contradicted", "in part"
ELSEWHERE, NOT_YET, ADDED = "not testable here", "not measured", "added"


class Found(NamedTuple):
    """What came out, what that makes of the claim, and the rows that it is of."""

    text: str
    verdict: str
    rows: Sequence[Row] = ()


def less(ours_s: float, theirs_s: float) -> float:
    """The share of their time that ours does not take: what the papers call less time."""
    return 1 - ours_s / theirs_s


def verdict_of(holds: bool) -> str:
    """Confirmed or contradicted."""
    return CONFIRMED if holds else CONTRADICTED


def never(verdict: str, text: str = "-") -> Callable[[], Found]:
    """What no rows can say."""
    return lambda: Found(text, verdict)


def most(name: str) -> list[Row]:
    """Rows of the most GPUs."""
    return next(iter(results(name).values()))


def measured_rows(name: str) -> list[Row]:
    """Rows of the most GPUs, if there are any."""
    return next(iter(results(name).values()), [])


# ---- A. resource-aware overlap


def _pairs() -> list[Timed]:
    return sharing.in_graph(most("resources"))


def both_controls() -> Found:
    """Whether both controls reach kernels as they are."""
    rows = [r for r in most("resources") if r.get("arm") == "shapes"]
    shaped = [r for r in rows if not r["unshaped"]]
    errors = [r["error"] for c in _pairs() for r in c.rows if "shaping" in r["arm"]]
    return Found(
        f"{len({r['pair'] for r in shaped})} loops of unmodified kernels at {len(shaped)} settings "
        f"of both; shaped results off by {max(errors):.1e} against fp64 at most",
        CONFIRMED, rows,
    )  # fmt: skip


def _least_of(case: Timed) -> float:
    """Seconds of the best of the paper's two controls."""
    return min(case.s(a) for a in ("priority", "shaping", "shaping, priority") if a in case)


def up_to() -> Found:
    """The most that the two controls save over plain overlap."""
    cases = [c for c in _pairs() if c.head["kernel"] != "cuBLAS"]
    saved = {c.head["pair"]: less(_least_of(c), c.s(sharing.PLAIN)) for c in cases}
    peak = max(saved, key=saved.__getitem__)
    return Found(
        f"up to {saved[peak]:.1%} ({peak}), mean {fmean(saved.values()):.1%} of {len(saved)} "
        "Triton pairs, by the same two controls",
        verdict_of(saved[peak] >= 0.255), [r for c in cases for r in c.rows],
    )  # fmt: skip


def shaping_alone() -> Found:
    """What shaping saves by itself, and with priority."""
    alone: list[float] = []
    on_top: list[float] = []
    urgent: list[float] = []
    rows = sharing.sweep_of(most("resources"))
    for pair in dict.fromkeys(r["pair"] for r in rows):
        own = [r for r in rows if r["pair"] == pair]

        def least(priority: bool, unshaped: bool, own: list[Row] = own) -> float:
            return min(r["time_ratio"] for r in own
                       if (r["priority"], r["unshaped"]) == (priority, unshaped))  # fmt: skip

        alone.append(less(least(False, False), least(False, True)))
        on_top.append(less(least(True, False), least(True, True)))
        urgent.append(less(least(True, True), least(False, True)))
    return Found(
        f"the best shape saves {fmean(alone):.1%} of plain overlap's time, priority "
        f"{fmean(urgent):.1%}, the best shape on top of that {fmean(on_top):.1%}; "
        f"{len(alone)} Triton pairs, means",
        f"{IN_PART}: here it is priority that gains", rows,
    )  # fmt: skip


def resident_together() -> Found:
    """Whether room beside a block of NCCL's helps: the same arm with fewer threads of NCCL.

    Of the pairs whose blocks have fewer threads then: NCCL starts its all-to-all with as many as
    ever.
    """
    rows = [
        r
        for r in measured_rows("paper_resources")
        if r.get("arm") == "priority" and "time_ratio" in r
    ]
    by: dict[int, dict[str, Row]] = {}
    for row in rows:
        by.setdefault(row["nccl_threads"], {})[row["pair"]] = row
    few = max((threads for threads in by if threads), default=0)
    both = [pair for pair, row in by.get(0, {}).items()
            if by[few].get(pair, row)["comm_threads"] < row["comm_threads"]]  # fmt: skip
    if not both:
        return _room()
    room = {n: max((by[n][p]["beside_blocks"] for p in both if by[n][p]["kernel"] == "64x64x32"),
                   default=0) for n in (0, few)}  # fmt: skip
    as_is, less_threads = (geometric_mean(by[n][p]["time_ratio"] for p in both) for n in (0, few))
    return Found(
        f"{room[few]} blocks of a 64x64x32 matmul beside one of NCCL's with {few} threads, "
        f"{room[0]} as it is: TimeRatio {less_threads:.2f} and {as_is:.2f}, priority, "
        f"{len(both)} pairs",
        CONFIRMED if less_threads < as_is else f"{CONTRADICTED}: room does not help", rows,
    )  # fmt: skip


def stamped() -> Found:
    """Whether blocks of our own all-gather were on an SM beside blocks of a matmul."""
    newest = {r["blocks_per_sm"]: r for r in measured_rows("paper_co_residency")
              if r.get("arm") == "matmul first" and "pairs" in r}  # fmt: skip
    rows = [*newest.values()]
    if not rows:
        return Found("-", NOT_YET)
    told = "; ".join(
        f"of {r['blocks_per_sm']}, {r['blocks_beside']} of {r['comm_blocks']}, "
        f"{r['share_beside']:.0%}, {r['baseline_over_arm'][0]:.2f}x"
        for r in rows
    )
    return Found(
        "by blocks of a 64x64x32 matmul, launched first, that an SM may hold: blocks of the "
        "all-gather on an SM with one, the share of their time, the speedup over one after the "
        f"other: {told}",
        verdict_of(any(r["pairs"] for r in rows)), rows,
    )  # fmt: skip


def _room() -> Found:
    """What an SM has room for, by arithmetic."""
    limits = limits_of(presets.H200.device)
    compute, _ = residency.block_of("64x64x32")
    comm, _ = residency.NCCL["all_reduce"]
    room: list[str] = []
    padded: set[int] = set()
    for threads in (256, 288, 544, 640):
        other = replace(comm, threads=threads)
        room.append(f"{beside(compute, other, limits).blocks} at {threads}")
        found = {k: window(compute, other, limits, k) for k in feasible(compute, limits)}
        padded |= {k for k, at in found.items() if at and not at.other_limit}
    return Found(
        "by arithmetic, blocks of a 64x64x32 matmul beside one of NCCL's, by NCCL's threads: "
        f"{', '.join(room)}; it is launched with 544 or 640. Shared memory that limits the matmul "
        f"to k blocks takes that room itself, but for k = {', '.join(map(str, sorted(padded)))}",
        NOT_YET,
    )  # fmt: skip


def rates() -> Found:
    """How much of the time both kernels run."""
    rows = [r for r in measured_rows("paper_resources") if "overlap_rate" in r]
    if not rows:
        return Found("-", NOT_YET)
    peak = max(rows, key=lambda r: r["overlap_rate"])
    return Found(
        f"up to {peak['overlap_rate']:.0%} ({peak['pair']}, {peak['arm']}), mean "
        f"{fmean(r['overlap_rate'] for r in rows if r['arm'] == 'priority'):.0%} with priority",
        verdict_of(peak["overlap_rate"] >= 0.85), rows,
    )  # fmt: skip


def behind() -> str:
    """Where a short search took less than the best of the paper's arms; "" without rows."""
    rows = [r for r in measured_rows("paper_resources") if r["arm"] != "shapes"]
    cases = taken(rows, "case")
    lost = {c.head["case"]: c.s("tuned") / _least_of(c) - 1 for c in cases}
    slow = {name: share for name, share in lost.items() if share > search.TIE}
    if not slow:
        return ""
    worst = max(slow, key=slow.__getitem__)
    return (
        f"\n\n*Tuned* searched for {paper_resources.SEARCH_S:g} seconds, by default it is "
        f"{tune_resources.BUDGET_S:g}. In {len(slow)} of {len(lost)} cases that takes more than "
        f"{search.TIE:.0%} longer than the best of priority and shaping, {slow[worst]:.0%} at most "
        f"({worst})."
    )


def figure() -> Found:
    """TimeRatio over thread blocks."""
    rows = [r for r in measured_rows("paper_thread_blocks") if "time_ratio" in r]
    if not rows:
        return Found("[predicted](sharing.md#who-is-resident-modelled)", NOT_YET)
    most_blocks = max(r["blocks"] for r in rows)

    def mean(arm: str, few: bool) -> float:
        some = [r for r in rows if (r["blocks"] <= 132 if few else r["blocks"] == most_blocks)]
        return geometric_mean(r["time_ratio"] for r in some if r["arm"] == arm)

    ends = [mean("overlap", few) for few in (True, False)]
    urgent = mean("overlap, priority", False)
    return Found(
        f"TimeRatio {ends[0]:.2f} up to 132 blocks, {ends[1]:.2f} at {most_blocks}; there "
        f"{urgent:.2f} with priority",
        verdict_of(ends[0] < ends[1] and urgent < ends[1]), rows,
    )  # fmt: skip


def decays() -> Found:
    """TimeRatio of grids with many blocks."""
    rows = [r for r in sharing.sweep_of(most("resources")) if r["unshaped"]]
    ratios = {urgent: [r["time_ratio"] for r in rows if r["priority"] is urgent]
              for urgent in (False, True)}  # fmt: skip
    return Found(
        f"TimeRatio of {len(ratios[False])} unshaped Triton pairs, 4096 blocks and more: "
        f"{geometric_mean(ratios[False]):.2f} without priority, {geometric_mean(ratios[True]):.2f} "
        "with it",
        verdict_of(geometric_mean(ratios[False]) > 0.95), rows,
    )  # fmt: skip


def model() -> Found:
    """The regret of picks by the residency model."""
    pairs = residency.swept(residency.fitted_on())
    held = [p for p in pairs if not p.fitted]
    constants = residency.fit([p for p in pairs if p.fitted])
    regret = fmean(p.pick(constants)[1] for p in held)
    return Found(
        f"{regret:.2%} on {len(held)} pairs held out, our law of residency in its place "
        "([scores](sharing.md#who-is-resident-modelled))",
        verdict_of(regret <= 0.0322), [r for p in pairs for r in p.rows],
    )  # fmt: skip


def other_controls() -> Found:
    """What controls bring that the paper does not have."""
    cases = _pairs()
    two, tuned = (
        geometric_mean(c.s(sharing.PLAIN) / s for c, s in zip(cases, times, strict=True))
        for times in ([_least_of(c) for c in cases], [c.s(sharing.TUNED) for c in cases])
    )
    return Found(
        f"launch order, granularity and copy engines: {tuned:.2f}x over plain overlap, where the "
        f"paper's two reach {two:.2f}x; {len(cases)} pairs, geometric means",
        ADDED, [r for c in cases for r in c.rows],
    )  # fmt: skip
