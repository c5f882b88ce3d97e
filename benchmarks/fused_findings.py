"""What came out of the claims of the third paper, on fused operators."""

from collections.abc import Sequence
from math import isinf
from statistics import fmean

import counterpoint
from benchmarks import decode, embedding, experts, paper_fused, two_islands
from benchmarks.paper_findings import (
    CONFIRMED,
    CONTRADICTED,
    ELSEWHERE,
    IN_PART,
    NOT_YET,
    Found,
    across,
    less,
    machines,
    measured_rows,
    most,
    verdict_of,
)
from benchmarks.rows import Row, taken
from counterpoint import device, presets
from counterpoint.scale.layout import Layout
from counterpoint.scale.mechanisms.chosen import ChosenDlrm
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.recommenders.dlrm import DLRMS
from counterpoint.scale.recommenders.map import place_of
from counterpoint.scale.recommenders.step import DlrmStep


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
    """Grouped matmul with an all-to-all, on each machine that has run it."""
    told: list[str] = []
    holds: dict[str, bool] = {}
    rows: list[Row] = []
    for where, some in machines("experts").items():
        cases = [c for c in experts.said(some) if c.combines and not isinf(c.ours_s)]
        saved = [less(c.ours_s, c.pair_s) for c in cases]
        even = [s for s, c in zip(saved, cases, strict=True) if c.head["routing"] == "uniform"]
        told.append(f"{_spread(saved)} of {len(saved)} layers on {where}, even routing "
                    f"{fmean(even):.0%}")  # fmt: skip
        holds[where] = fmean(saved) >= 0.12
        rows += [r for c in cases for r in c.case.rows]
    return Found(f"{'; '.join(told)}; against grouped matmul + all-to-all", across(holds), rows)


def zero_copy() -> Found:
    """Results that go straight to where the peer reads them, beside a copy out of buffers."""
    cases = embedding.said(most("embedding"))
    zero, copy = (fmean(less(s, c.serial_s) for c, s in zip(cases, times, strict=True))
                  for times in ([c.fused_s for c in cases], [c.copy_s for c in cases]))  # fmt: skip
    return Found(
        f"embedding + all-to-all, mean of {len(cases)} sizes: {zero:.0%} less time into buffers of "
        f"peers, {copy:.0%} with a copy out of them",
        verdict_of(zero > copy), [r for c in cases for r in c.case.rows],
    )  # fmt: skip


def at_most() -> Found:
    """The most that a fused operator saves."""
    cases = embedding.said(most("embedding"))
    zero, copy = (max(less(s, c.serial_s) for c, s in zip(cases, times, strict=True))
                  for times in ([c.fused_s for c in cases], [c.copy_s for c in cases]))  # fmt: skip
    verdict = f"{IN_PART}: without a copy" if copy < 0.58 <= zero else verdict_of(copy >= 0.58)
    return Found(
        f"embedding + all-to-all, {zero:.0%} into buffers of peers, {copy:.0%} with a copy out of "
        "them",
        verdict, [r for c in cases for r in c.case.rows],
    )  # fmt: skip


def in_torch() -> Found:
    """Whether the paper's three operators are functions on tensors of PyTorch."""
    names = ("embedding_bag_all_to_all", "matmul_all_reduce", "matmul_all_to_all")
    return Found(f"{', '.join(f'`cp.{name}`' for name in names)}, with gradients",
                 verdict_of({*names} <= {*counterpoint.__all__}))  # fmt: skip


def in_triton() -> Found:
    """What kernels of users can call."""
    return Found(f"`counterpoint.device`, {len(device.__all__)} names for kernels of one's own "
                 "([page](../kernels.md))", verdict_of(bool(device.__all__)))  # fmt: skip


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
    """The simulated step of a recommendation model, of one batch on more and more GPUs."""
    network = Network(presets.preset("h100-1"), Fabric(nic_bytes_per_s=25e9))
    model = DLRMS["dlrm-paper"]
    saved: dict[int, float] = {}
    put: dict[int, float] = {}
    for gpus in (16, 32, 64, 128):
        layout = Layout(dp=gpus, micro_batch=model.batch // gpus)
        ours_s, none_s = (DlrmStep(model, layout, network, way).run()[1].seconds
                          for way in ("ours", "none"))  # fmt: skip
        saved[gpus] = less(ours_s, none_s)
        found = DlrmStep(model, layout, network, "ours")
        posted = ChosenDlrm(model, layout, network, "none", frozenset({"puts"}))
        put[gpus] = less(posted.run()[1].seconds, none_s)
    told, posts = (
        ", ".join(f"{share:.1%} on {gpus}" for gpus, share in each.items()) for each in (saved, put)
    )
    return Found(
        f"predicted at 200 Gb/s with assumed sizes: {told} GPUs, {place_of(found).bound:.1%} at "
        "most, exchanges being started by the host. With puts that the GPU posts, as the paper's "
        f"are, which are not in this library: {posts} GPUs "
        "([other sizes](../scale.md#recommendation-models))",
        f"{ELSEWHERE}: no sizes are known",
    )  # fmt: skip


def _experiment(name: str) -> dict[str, Row]:
    """Rows of one of the third paper's experiments, in a graph, by arm."""
    rows = [r for r in measured_rows("paper_fused") if r.get("experiment") == name]
    return {r["arm"]: r for r in rows if "median_s" in r and r["mode"] == "graph"}


def order_of_tasks() -> Found:
    """Whether a punctual rank is held up by one that is late, by the order of tasks.

    What its lead is at the end of a graph, of all the lateness that the graph's calls had.
    """
    rows = _experiment("order of remote tasks")
    if not rows:
        return Found("-", NOT_YET)
    late = [n for n in rows if n.startswith("remote first") and rows[n].get("late_s", 0)]
    late = [n for n in late if int(n.split(", ")[1].split()[0]) >= 2]

    def lead(name: str) -> float:
        row = rows[name]
        return row["skew_s"] / (row["late_s"] * row["calls_per_graph"])

    told = ", ".join(f"{lead(n):.0%} at {n.split(', ')[1].removesuffix(' late')}" for n in late)
    own = max(lead(n.replace("remote", "own")) for n in late)
    slower = max(rows[n]["median_s"] / rows[n.replace("remote", "own")]["median_s"] for n in late)
    free = lead(late[0]) > 0.5 > own
    return Found(
        f"one rank late: of the lateness of {rows[late[0]]['calls_per_graph']} calls, the other "
        f"one's lead is {told} with remote tasks first, until double buffering holds it, and "
        f"{own:.0%} with own ones; remote ones first take up to {slower:.2f} times as long",
        f"{IN_PART}: the order works; between nodes it is not measured" if free else CONTRADICTED,
        [*rows.values()],
    )  # fmt: skip


def occupancy_cost() -> Found:
    """Whether the fused kernel wins, by resident programs; nothing says what registers cost."""
    rows = _experiment("programs")
    if not rows:
        return Found("-", NOT_YET)
    base_s = rows[paper_fused.BASELINE]["median_s"]
    over = {n: base_s / r["median_s"] for n, r in rows.items() if n.endswith("per SM")}
    told = ", ".join(f"{n.split()[0]}: {ratio:.2f}x" for n, ratio in over.items())
    full = base_s / rows[paper_fused.FULL_GRID]["median_s"]
    text = (
        f"over torch's lookup + all-to-all, by programs per SM of a persistent grid: {told}; by a "
        f"grid with a program per task: {full:.2f}x"
    )
    alone = _experiment("operators")
    if {"bags cat", "ours serial"} <= {*alone}:
        better = alone["bags cat"]["median_s"] / alone["ours serial"]["median_s"]
        text += f". With our own lookup the baseline is {better:.1f}x faster, of another size"
        rows |= alone
    won = max(over.values()) > 1
    return Found(text, f"{IN_PART}: it wins; the cost is not measured" if won else CONTRADICTED,
                 [*rows.values()])  # fmt: skip


def slices() -> Found:
    """Whether a flag for each slice beats one for all inside a node."""
    rows = {n: r for n, r in _experiment("slices").items() if n.endswith("slices")}
    if not rows:
        return Found("-", NOT_YET)
    whole_s = rows["1 slices"]["median_s"]
    best = min(rows, key=lambda n: rows[n]["median_s"])
    gain = whole_s / rows[best]["median_s"]
    return Found(
        f"inside a node, where the paper has none: of {', '.join(n.split()[0] for n in rows)}, "
        f"{best.split()[0]} {'is' if best == '1 slices' else 'are'} fastest, {gain:.3f}x over one",
        f"{IN_PART}: inside a node" if gain > 1.01 else f"{ELSEWHERE}: slices are for puts between "
        "nodes",
        [*rows.values()],
    )  # fmt: skip
