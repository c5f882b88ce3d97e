"""What came out of the claims of the third paper, on fused operators."""

from collections.abc import Sequence
from math import isinf
from statistics import fmean

from benchmarks import decode, embedding, experts, paper_fused, two_islands
from benchmarks.paper_findings import (
    CONFIRMED,
    CONTRADICTED,
    ELSEWHERE,
    IN_PART,
    NOT_YET,
    Found,
    less,
    measured_rows,
    most,
    verdict_of,
)
from benchmarks.rows import Row, taken
from counterpoint import presets
from counterpoint.scale.dlrm import DLRMS
from counterpoint.scale.dlrm_map import map_of
from counterpoint.scale.dlrm_step import DlrmStep
from counterpoint.scale.fabric import Fabric, Network
from counterpoint.scale.layout import Layout


def _spread(shares: Sequence[float]) -> str:
    return f"mean {fmean(shares):.0%}, {min(shares):.0%} to {max(shares):.0%}"


def pooled() -> Found:
    """Embedding bags with their all-to-all."""
    cases = embedding.said(most("embedding"))
    zero, copy = ([less(s, c.serial_s) for c, s in zip(cases, times, strict=True)]
                  for times in ([c.fused_s for c in cases], [c.copy_s for c in cases]))  # fmt: skip
    return Found(
        f"{_spread(zero)} of {len(cases)} sizes into buffers of peers; {_spread(copy)} with a copy "
        "out of them; against the best of four baselines",
        verdict_of(fmean(copy) >= 0.2), [r for c in cases for r in c.case.rows],
    )  # fmt: skip


def one_token() -> Found:
    """Matrix times vector with an all-reduce."""
    cases = [c for c in decode.shapes_of(most("decode")) if c.head["m"] == 1 and "fused" in c]
    saved = [less(c.s("fused"), c.s("serial")) for c in cases]
    return Found(f"{_spread(saved)} of {len(saved)} layers, one token",
                 verdict_of(fmean(saved) >= 0.13), [r for c in cases for r in c.rows])  # fmt: skip


def combined() -> Found:
    """Grouped matmul with an all-to-all."""
    cases = [c for c in experts.said(most("experts")) if c.combines and not isinf(c.ours_s)]
    saved = [less(c.ours_s, c.pair_s) for c in cases]
    text = f"{_spread(saved)} of {len(saved)} layers, against grouped matmul + all-to-all"
    return Found(text, verdict_of(fmean(saved) >= 0.12), [r for c in cases for r in c.case.rows])


def always_fused() -> Found:
    """Where the fused kernel loses."""
    few = [c for c in decode.shapes_of(most("decode")) if "fused" in c]
    layers = experts.said(most("experts"))
    slow = sum(c.s("fused") > min(c.s(a) for a in ("serial", "direct") if a in c) for c in few)
    slower = sum(c.ours_s > c.pair_s for c in layers)
    return Found(
        f"fused loses to the library or to a kernel after the matmul in {slow} of {len(few)} "
        f"decode shapes, and to the library in {slower} of {len(layers)} layers of experts; "
        "`plan=\"auto\"` chooses",
        CONTRADICTED if slow + slower else CONFIRMED,
        [r for c in few for r in c.rows] + [r for c in layers for r in c.case.rows],
    )  # fmt: skip


def between_nodes() -> Found:
    """Embedding bags with their all-to-all between two islands of one host."""
    rows = [r for r in measured_rows("two_islands") if r.get("op") == two_islands.BAGS]
    saved = sorted(less(c.s("auto"), c.s("serial")) for c in taken(rows, "case"))
    if not saved:
        return Found("-", NOT_YET)
    return Found(
        f"{saved[0]:.0%} to {saved[-1]:.0%} of {len(saved)} cases on one host, whose 2 GPUs NCCL "
        "joins by sockets",
        f"{IN_PART}: there is no second node here", rows,
    )  # fmt: skip


def dlrm() -> Found:
    """The simulated step of a recommendation model."""
    network = Network(presets.preset("h100-1"), Fabric(nic_bytes_per_s=25e9))
    found = map_of(DlrmStep(DLRMS["dlrm-paper"], Layout(dp=128, micro_batch=512), network, "ours"))
    place = next(p for p in found.places if p.label == found.title)
    return Found(
        f"at most {place.bound:.0%}, simulated at 200 Gb/s, with assumed sizes; "
        f"{max(p.bound for p in found.at_rates):.0%} at any link rate "
        "([why](../scale.md#recommendation-models))",
        f"{ELSEWHERE}: no sizes are known",
    )  # fmt: skip


def _experiment(name: str) -> dict[str, Row]:
    """Rows of one of the third paper's experiments, in a graph, by arm."""
    rows = [r for r in measured_rows("paper_fused") if r.get("experiment") == name]
    return {r["arm"]: r for r in rows if "median_s" in r and r["mode"] == "graph"}


def order_of_tasks() -> Found:
    """How far ranks end apart, by the order of tasks, with a rank that is late."""
    rows = _experiment("order of remote tasks")
    if not rows:
        return Found("-", NOT_YET)
    late = max(int(n.split(", ")[1].split()[0]) for n in rows if ", " in n)
    apart = {order: rows[f"{order}, {late} % late"] for order in ("own first", "remote first")}
    skews = {order: r["skew_s"] / r["median_s"] for order, r in apart.items()}
    slower = apart["remote first"]["median_s"] / apart["own first"]["median_s"]
    return Found(
        f"one rank {late} % late: ranks end {skews['own first']:.1%} apart with own tasks first, "
        f"{skews['remote first']:.1%} with remote ones, which take {slower:.2f} times as long",
        verdict_of(skews["remote first"] < skews["own first"]), [*rows.values()],
    )  # fmt: skip


def occupancy_cost() -> Found:
    """What fewer resident programs cost the fused kernel, and whether it still wins."""
    rows = _experiment("programs")
    if not rows:
        return Found("-", NOT_YET)
    base_s = rows[paper_fused.BASELINE]["median_s"]
    over = {n: base_s / r["median_s"] for n, r in rows.items() if n.endswith("per SM")}
    told = ", ".join(f"{n.split()[0]}: {ratio:.2f}x" for n, ratio in over.items())
    full = base_s / rows[paper_fused.FULL_GRID]["median_s"]
    return Found(
        f"over lookup + all-to-all, by programs per SM of a persistent grid: {told}; by a grid "
        f"with a program per task: {full:.2f}x",
        verdict_of(max(over.values()) > 1), [*rows.values()],
    )  # fmt: skip


def slices() -> Found:
    """Whether a flag for each slice beats one for all."""
    rows = {n: r for n, r in _experiment("slices").items() if n.endswith("slices")}
    if not rows:
        return Found("-", NOT_YET)
    whole_s = rows["1 slices"]["median_s"]
    best = min(rows, key=lambda n: rows[n]["median_s"])
    return Found(
        f"of {', '.join(n.split()[0] for n in rows)}, {best.split()[0]} are fastest, "
        f"{whole_s / rows[best]['median_s']:.3f}x over one",
        verdict_of(whole_s > 1.01 * rows[best]["median_s"]), [*rows.values()],
    )  # fmt: skip
