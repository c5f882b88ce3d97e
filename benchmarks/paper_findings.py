"""What came out of the claims of three papers: each read from committed rows, or computed."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import fmean, geometric_mean
from typing import NamedTuple

from benchmarks import paper_resources, residency, sharing
from benchmarks.loop import alone_s
from benchmarks.residency_model import Setting
from benchmarks.rows import KINDS, Row, Timed, gpus_of, results, taken
from counterpoint.measure import tune_resources
from counterpoint.resources import search

CONFIRMED, CONTRADICTED, IN_PART = "confirmed", "contradicted", "in part"
ELSEWHERE, NOT_YET, ADDED = "not testable here", "not measured", "added"
SAME = 1.05  # a collective that takes longer than that is another one


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


def across(holds: Mapping[str, bool]) -> str:
    """Confirmed if it holds on all machines, contradicted if on none; else where it does not."""
    if all(holds.values()) or not any(holds.values()):
        return verdict_of(all(holds.values()))
    return f"{IN_PART}: not on {' and '.join(where for where, true in holds.items() if not true)}"


def never(verdict: str, text: str = "-") -> Callable[[], Found]:
    """What no rows can say."""
    return lambda: Found(text, verdict)


def most(name: str) -> list[Row]:
    """Rows of the most GPUs."""
    return next(iter(results(name).values()))


def measured_rows(name: str) -> list[Row]:
    """Rows of the most GPUs, if there are any."""
    return next(iter(results(name).values()), [])


def machines(name: str) -> dict[str, list[Row]]:
    """Rows of every machine, by what it is called: the most GPUs first."""
    found = [(n, kind, rows) for kind in KINDS for n, rows in results(name, gpu=kind).items()]
    return {gpus_of(rows): rows for _, _, rows in sorted(found, key=lambda each: -each[0])}


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


def unchanged() -> Found:
    """Whether kernels and libraries are as they were."""
    cases = _pairs()
    kernels = {c.head["kernel"] for c in cases}
    return Found(
        f"cuBLAS and {len(kernels - {'cuBLAS'})} Triton kernels, with NCCL; of cuBLAS priority "
        "alone is set, since its shared memory is its own",
        verdict_of("cuBLAS" in kernels), [r for c in cases for r in c.rows],
    )  # fmt: skip


def up_to() -> Found:
    """The most that the two controls save over plain overlap, on machines with several pairs."""
    told: list[str] = []
    holds: dict[str, bool] = {}
    rows: list[Row] = []
    found = [*machines("resources").items(), *machines("paper_resources").items()]
    for where, some in found:
        own = [r for r in some if r.get("arm") != "shapes" and not r.get("nccl_threads")]
        cases = [c for c in taken(own, "pair") if c.head["kernel"] != "cuBLAS"
                 and {sharing.PLAIN, "priority"} <= {*c.graph}]  # fmt: skip
        if len(cases) < 2:
            continue
        saved = {c.head["pair"]: less(_least_of(c), c.s(sharing.PLAIN)) for c in cases}
        peak = max(saved, key=saved.__getitem__)
        told.append(f"{saved[peak]:.1%} ({peak}), mean {fmean(saved.values()):.1%} of "
                    f"{len(saved)} Triton pairs on {where}")  # fmt: skip
        holds[where] = holds.get(where, False) or saved[peak] >= 0.255
        rows += [r for c in cases for r in c.rows]
    return Found(f"up to {'; '.join(told)}; by the same two controls", across(holds), rows)


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

    Of the Triton pairs whose blocks have fewer threads then: NCCL starts its all-to-all with as
    many as ever, and no block fits beside cuBLAS's. Fewer threads may slow the collective itself:
    then nothing says what room does.
    """
    rows = [r for r in measured_rows("paper_resources")
            if r.get("arm") == "priority" and "time_ratio" in r
            and r["kernel"] != "cuBLAS"]  # fmt: skip
    by: dict[int, dict[str, Row]] = {}
    for row in rows:
        by.setdefault(row["nccl_threads"], {})[row["pair"]] = row
    few = max((threads for threads in by if threads), default=0)
    both = [pair for pair, row in by.get(0, {}).items()
            if by[few].get(pair, row)["comm_threads"] < row["comm_threads"]]  # fmt: skip
    if not both:
        return Found("-", NOT_YET)

    def mean(of: str, n: int) -> float:
        return geometric_mean(by[n][p][of] for p in both)

    slower = mean("comm_sm_s", few) / mean("comm_sm_s", 0)
    verdict = verdict_of(mean("time_ratio", few) < mean("time_ratio", 0))
    if slower > SAME:
        verdict = f"{ELSEWHERE}: fewer threads slow the collective too"
    return Found(
        f"with {few} threads of NCCL {max(by[few][p]['beside_blocks'] for p in both)} blocks of a "
        f"matmul have room beside one of NCCL's, by arithmetic, and "
        f"{max(by[0][p]['beside_blocks'] for p in both)} as it is; the collective alone takes "
        f"{slower:.2f} times as long; TimeRatio {mean('time_ratio', few):.2f} and "
        f"{mean('time_ratio', 0):.2f}, priority, {len(both)} Triton pairs",
        verdict, rows,
    )  # fmt: skip


def stamped() -> Found:
    """Whether blocks of our own all-gather were on an SM beside blocks of a matmul."""
    orders: dict[str, dict[int, Row]] = {"matmul first": {}, "collective first": {}}
    for row in measured_rows("paper_co_residency"):
        if row.get("arm") in orders and "pairs" in row:  # what was measured once more counts
            orders[row["arm"]][row["blocks_per_sm"]] = row
    rows = [*orders["matmul first"].values()]
    if not rows:
        return Found("-", NOT_YET)
    every = [row for order in orders.values() for row in order.values()]
    whole = max(orders["matmul first"])
    unshaped_s, shaped_s = (min((r["median_s"] for r in every
                                 if (r["blocks_per_sm"] == whole) is as_is), default=inf)
                            for as_is in (True, False))  # fmt: skip
    told = "; ".join(
        f"of {r['blocks_per_sm']}, {r['blocks_beside']} of {r['comm_blocks']}, "
        f"{r['share_beside']:.0%}, {r['baseline_over_arm'][0]:.2f}x"
        for r in rows
    )
    return Found(
        "by blocks of a 64x64x32 matmul, launched first, that an SM may hold: blocks of the "
        "all-gather on an SM with one, the share of their time, the speedup over one after the "
        f"other: {told}. The best shape is {unshaped_s / shaped_s:.2f}x faster than the better "
        "unshaped order",
        verdict_of(any(r["pairs"] for r in rows) and shaped_s < unshaped_s), every,
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


def hidden() -> dict[tuple[str, str], float]:
    """(arm, how many blocks) -> the share hidden of what could be, of the pairs that can hide a
    tenth of their time and more; empty without rows.

    What could be hidden is sequential less `loop.alone_s`. A collective's time is of the experiment
    that timed it alone; a grid of an eighth of the size has an eighth of it.
    """
    alone = {r["pair"]: r["comm_sm_s"] for r in measured_rows("paper_resources")
             if r.get("arm") == "sequential" and not r["nccl_threads"]}  # fmt: skip
    grids: dict[tuple[str, int], dict[str, Row]] = {}
    for row in measured_rows("paper_thread_blocks"):
        if "time_ratio" in row and row["pair"] in alone:
            grids.setdefault((row["pair"], row["blocks"]), {})[row["arm"]] = row
    could: dict[tuple[str, int], float] = {}
    for (pair, blocks), arms in grids.items():
        head = arms["sequential"]
        comm_s = alone[pair] / head["scale"]
        gemm_s = head["median_s"] / head["iterations"] - comm_s
        could[pair, blocks] = head["median_s"] - alone_s(gemm_s, comm_s, head["iterations"])
    most_blocks = max((blocks for _, blocks in grids), default=0)
    enough = {pair for (pair, blocks), arms in grids.items() if blocks == most_blocks
              and could[pair, blocks] > 0.1 * arms["sequential"]["median_s"]}  # fmt: skip
    found: dict[tuple[str, str], float] = {}
    for many, low, high in ((FEW, 0, 16), (PERSISTENT, 256, 256), (MANY, 4096, most_blocks)):
        some = [key for key in grids if key[0] in enough and low <= key[1] <= high]
        for arm in ("overlap", "overlap, priority") if some else ():
            saved_s = sum((1 - grids[key][arm]["time_ratio"]) * grids[key]["sequential"]["median_s"]
                          for key in some)  # fmt: skip
            found[arm, many] = saved_s / sum(could[key] for key in some)
    return found


FEW, PERSISTENT, MANY = "4 and 16", "256", "4096 and more"


def _decays(share: Mapping[tuple[str, str], float]) -> bool:
    """Whether less is hidden at many blocks than at few, and more of it with priority."""
    few, many, urgent = (share[key] for key in (("overlap", FEW), ("overlap", MANY),
                                                ("overlap, priority", MANY)))  # fmt: skip
    return many < few and many < urgent


def figure() -> Found:
    """What is hidden of what could be, over thread blocks."""
    rows = [r for r in measured_rows("paper_thread_blocks") if "time_ratio" in r]
    share = hidden()
    if not share:
        return Found("[predicted](sharing.md#who-is-resident-modelled)", NOT_YET)
    plain = ", ".join(f"{share['overlap', many]:.0%} at {many}" for many in (FEW, PERSISTENT, MANY)
                      if ("overlap", many) in share)  # fmt: skip
    few = "2 or 3" if len({r["rounds"] for r in rows}) > 1 else rows[0]["rounds"]
    return Found(
        f"pairs that could hide a tenth of their time hide, of that, {plain} blocks; with priority "
        f"{share['overlap, priority', MANY]:.0%} there. What the others could is below the noise "
        f"of {few} rounds",
        f"{CONFIRMED}, where there is enough to hide" if _decays(share) else CONTRADICTED, rows,
    )  # fmt: skip


def decays() -> Found:
    """TimeRatio of grids with many blocks, beside what few hide."""
    rows = [r for r in sharing.sweep_of(most("resources")) if r["unshaped"]]
    ratios = {urgent: [r["time_ratio"] for r in rows if r["priority"] is urgent]
              for urgent in (False, True)}  # fmt: skip
    share = hidden()
    text = (
        f"TimeRatio of {len(ratios[False])} unshaped Triton pairs, 4096 blocks and more: "
        f"{geometric_mean(ratios[False]):.2f} without priority, {geometric_mean(ratios[True]):.2f} "
        "with it"
    )
    if not share:
        return Found(text, f"{IN_PART}: few blocks are not measured", rows)
    text += f"; few blocks hide {share['overlap', FEW]:.0%} of what they could (next line)"
    late = geometric_mean(ratios[False]) > 0.95
    return Found(text, verdict_of(late and _decays(share)), rows)


def model() -> Found:
    """The regret of picks by the residency model, beside that of one setting for all."""
    pairs = residency.swept(residency.fitted_on())
    held = [p for p in pairs if not p.fitted]
    constants = residency.fit([p for p in pairs if p.fitted])
    regret = fmean(p.pick(constants)[1] for p in held)
    always = fmean(p.regret(Setting(None, True)) for p in held)
    verdict = verdict_of(regret <= 0.0322)
    if regret <= 0.0322 and always <= 0.0322:
        verdict = f"{IN_PART}: here one setting reaches it too"
    return Found(
        f"{regret:.2%} on {len(held)} pairs held out, our law of residency in its place "
        f"([scores](sharing.md#who-is-resident-modelled)); priority alone, always: {always:.2%}. "
        "The paper picks blocks of a MoE kernel",
        verdict, [r for p in pairs for r in p.rows],
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
