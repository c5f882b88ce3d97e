"""What a decomposed operation loses, and one beside another: DIL and CIL of FiCCO.

DIL, decomposition: the chunks of an operation one after another / the whole of it. CIL, contention:
an operation beside another that lasts a little less / alone. A plan finer than serial hides
communication behind computation and pays these. Source: FiCCO, arXiv 2512.10236."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section
from benchmarks.pictures import Axis, curves, layer_name, place
from benchmarks.rows import Row
from benchmarks.tables import measured, of_most, us
from benchmarks.transports import TRANSPORTS, missing, open_transport
from counterpoint.measure.timing import relative_error

MIB = 1 << 20
# rows, n, k: of Llama-3-70B at 8 ranks, and a GEMM of tall tiles alone
MATMULS = ((8192, 7168, 8192), (2048, 7168, 8192), (8192, 1280, 8192), (8192, 8192, 1024))
CHUNKS = (1, 2, 4, 8, 16, 64)
TOTALS = (16 * MIB, 64 * MIB)  # gathered, on each rank
# by zeros tensor cores draw little power: what is left then is no loss of clock
BESIDE = {
    "compute-bound": (8192, 8192, 8192, 1.0), "compute-bound, of zeros": (8192, 8192, 8192, 0.0),
    "memory-bound": (64, 28672, 8192, 1.0),
}  # fmt: skip
BESIDE_S = 12e-3  # of the longer one: clocks change within less
MATMUL, GATHER, CONTENDED = (
    "matmul in chunks",
    "communication in chunks",
    "beside",
)  # as rows have it


def cases(_: int) -> list[Case]:
    """Matmuls and all-gathers in chunks, and both beside one another."""
    found = [Case(f"matmul {m},{n},{k}", {"question": MATMUL, "rows": m, "n": n, "k": k})
             for m, n, k in MATMULS]  # fmt: skip
    found += [Case(f"all-gather {total // MIB} MiB", {"question": GATHER, "num_bytes": total})
              for total in TOTALS]  # fmt: skip
    return found + [Case(f"beside a {kind} matmul", {"question": CONTENDED, "matmul": kind})
                    for kind in BESIDE]  # fmt: skip


def arms(case: Case, bench: Bench) -> Arms:
    """Of one question."""
    return {MATMUL: matmul_arms, GATHER: gather_arms, CONTENDED: beside_arms}[case["question"]](
        case, bench
    )


def matmul_arms(case: Case, bench: Bench) -> Arms:
    """One matmul in as many chunks of rows, columns or K; chunks of K are accumulated in fp32."""
    m, n, k = case["rows"], case["n"], case["k"]
    weights = [bench.normal(n, k).t() for _ in range(bench.sets(2 * n * k, 8))]
    x = bench.normal(m, k)
    calls: dict[str, Call] = {}
    about: dict[str, Row] = {}
    for chunks in CHUNKS:
        for along in ("rows", "columns", "K") if chunks > 1 else ("rows",):
            name = f"{along} {chunks}"
            calls[name] = chunked(x, weights, along, chunks, bench)
            about[name] = {"along": along, "chunks": chunks}
    sample = bench.sample(m)
    want = x[sample].double() @ weights[0].double()

    def check(name: str, parts: list[Tensor]) -> list[float]:
        rows = torch.cat(parts, 1 if name.startswith("columns") else 0)[sample]
        return [relative_error(rows, want)]

    return Arms(
        calls, check, baseline="rows 1", about=about, sets=len(weights), nan_bytes=4 * m * n
    )


def chunked(x: Tensor, weights: Sequence[Tensor], along: str, chunks: int, bench: Bench) -> Call:
    """A call that gives the result's chunks."""
    m, n = x.shape[0], weights[0].shape[1]
    if along == "K":
        total, wide = bench.empty(m, n, dtype=torch.float32), torch.float32

        def accumulate(i: int) -> list[Tensor]:
            parts = zip(x.chunk(chunks, 1), weights[i % len(weights)].chunk(chunks), strict=True)
            for j, (x_part, w_part) in enumerate(parts):
                if j:
                    torch.addmm(total, x_part, w_part, wide, out=total)
                else:
                    torch.mm(x_part, w_part, wide, out=total)
            return [total]

        return accumulate
    by_rows = along == "rows"
    outs = [bench.empty(m // chunks, n) if by_rows else bench.empty(m, n // chunks)
            for _ in range(chunks)]  # fmt: skip

    def multiply(i: int) -> list[Tensor]:
        w = weights[i % len(weights)]
        xs, ws = (
            (x.chunk(chunks), (w,) * chunks) if by_rows else ((x,) * chunks, w.chunk(chunks, 1))
        )
        for x_part, w_part, out in zip(xs, ws, outs, strict=True):
            torch.mm(x_part, w_part, out=out)
        return outs

    return multiply


def opened(num_bytes: int, bench: Bench) -> dict[str, Any]:
    """The transports that are here, by their label; a text of those that are not."""
    found: dict[str, Any] = {}
    for name, way in TRANSPORTS.items():
        found[way.label] = why = missing(name, bench.group, bench.device)
        if not why:
            found[way.label] = transport = open_transport(
                name, bench.group, bench.device, num_bytes
            )
            transport.source.random_()
    return found


def gather(transport: Any, total: int, bench: Bench) -> Callable[[], None]:
    """Peers' copies are signalled and not waited for: as in a plan, whose steps wait where they
    read."""
    return transport.all_gather(total // bench.ranks, meets=False)


def gather_arms(case: Case, bench: Bench) -> Arms:
    """An all-gather in as many, by each transport."""
    total, calls, about = case["num_bytes"], dict[str, Call | str](), dict[str, Row]()
    found = opened(total, bench)
    for label, transport in found.items():
        for chunks in CHUNKS:
            name = f"{label} {chunks}"
            about[name] = {"transport": label, "chunks": chunks}
            if isinstance(transport, str):
                calls[name] = transport
            else:
                calls[name] = repeated(gather(transport, total // chunks, bench), chunks)
    return Arms(calls, lambda *_: [0.0], baseline="", parts=tuple(calls), about=about,
                close=partial(closed, found))  # fmt: skip


def closed(transports: Mapping[str, Any]) -> None:
    """Give their memory back."""
    for transport in transports.values():
        if not isinstance(transport, str):
            transport.close()


def repeated(move: Callable[[], object], times: int) -> Call:
    """A call that moves so often."""

    def run(_: int) -> None:
        for _ in range(times):
            move()

    return run


def beside_arms(case: Case, bench: Bench) -> Arms:
    """Each of two lasts a little longer than the other, in turn; it is the one that counts."""
    m, n, k, scale = BESIDE[case["matmul"]]
    weights = [bench.normal(n, k, scale=scale).t() for _ in range(bench.sets(2 * n * k, 8))]
    x, y, side = bench.normal(m, k, scale=scale), bench.empty(m, n), torch.cuda.Stream(priority=-1)

    def multiply(i: int) -> None:
        torch.mm(x, weights[i % len(weights)], out=y)

    def both(matmuls: int, move: Callable[[], object], moves: int) -> Call:
        def run(_: int) -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(moves):
                    move()
            for i in range(matmuls):
                multiply(i)
            main.wait_stream(side)

        return run

    calls, about = dict[str, Call | str](), dict[str, Row]()
    found = opened(TOTALS[-1], bench)
    for label, transport in found.items():
        if isinstance(transport, str):
            calls[label] = transport
            continue
        move = gather(transport, TOTALS[-1], bench)
        # as many in a row as below: copies of ranks that are out of step meet on a link
        alone = bench.quick_s({"matmul": multiply}, 8) | bench.quick_s(
            {"move": repeated(move, 1)}, 64
        )
        for which, longer, shorter in (
            ("matmul", "matmul", "move"),
            ("transport", "move", "matmul"),
        ):
            own = max(2, ceil(BESIDE_S / alone[longer]))
            other = max(1, int(0.85 * own * alone[longer] / alone[shorter]))
            matmuls, moves = (own, other) if which == "matmul" else (other, own)
            first = which == "matmul"
            each = {"beside": (matmuls, moves), "alone": (matmuls * first, moves * (not first)),
                    "other": (matmuls * (not first), moves * first)}  # fmt: skip
            for kind, (a, b) in each.items():
                name = f"{label}, {which} {kind}"
                calls[name] = both(a, move, b)
                about[name] = {
                    "transport": label,
                    "which": which,
                    "kind": kind,
                    "rows": m,
                    "n": n,
                    "k": k,
                }
    return Arms(calls, lambda *_: [0.0], baseline="", parts=tuple(calls), about=about,
                close=partial(closed, found))  # fmt: skip


# ---- what is said of the rows


def shape_of(row: Row) -> str:
    """Of a matmul, or of what is gathered."""
    if row["question"] == MATMUL:
        return f"{row['rows']}, {row['n']}, {row['k']}"
    return f"{row['num_bytes'] // MIB} MiB"


def in_chunks(rows: Sequence[Row], question: str) -> dict[tuple[str, str], dict[int, float]]:
    """(shape, dim or transport) -> number of chunks -> seconds; 1: the whole."""
    some = [r for r in rows if r["question"] == question and "median_s" in r]
    kind = "along" if question == MATMUL else "transport"
    found: dict[tuple[str, str], dict[int, float]] = {}
    for r in (r for r in some if r["chunks"] > 1):
        found.setdefault((shape_of(r), r[kind]), {})[r["chunks"]] = r["median_s"]
    for (shape, which), times in found.items():
        # the whole of a matmul is the same along all of its dims
        times[1] = next(r["median_s"] for r in some if r["chunks"] == 1 and shape_of(r) == shape
                        and (question == MATMUL or r[kind] == which))  # fmt: skip
    return found


def chunk_table(rows: Sequence[Row], question: str) -> str:
    """A line for each shape and kind, a column for each number of chunks."""
    kind = "along" if question == MATMUL else "transport"
    of: dict[tuple[str, str], list[Row]] = {}
    for row in (row for row in rows if row["question"] == question and "median_s" in row):
        of.setdefault((shape_of(row), row[kind]), []).append(row)
    lines = [
        ([*key, us(times[1], 0), *(f"{times[n] / times[1]:.2f}" for n in CHUNKS[1:])], of[key])
        for key, times in in_chunks(rows, question).items()
    ]
    head = ("M, N, K", "along") if question == MATMUL else ("gathered", "transport")
    return measured([*head, "whole, us", *(f"{n} chunks" for n in CHUNKS[1:])], lines)


def contended(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """(matmul, transport) -> which of them -> time beside the other, and one after the other."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for r in (r for r in rows if r["question"] == CONTENDED and "median_s" in r):
        found = times.setdefault((r["matmul"], r["transport"], r["which"]), {})
        if "kind" in r:
            found[r["kind"]] = r["median_s"]
        else:  # a row had all three
            found |= {"beside": r["median_s"], "alone": r["alone_s"], "other": r["other_s"]}
    found_: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for (matmul, transport, which), t in times.items():
        longer = max(t["alone"], t["other"])
        ratios = t["beside"] / longer, (t["alone"] + t["other"]) / longer
        found_.setdefault((matmul, transport), {})[which] = ratios
    return found_


def beside_table(rows: list[Row]) -> str:
    """What each takes of the longer one's time."""
    head = ["matmul", "beside", "the matmul takes", "one after the other", "the transport takes",
            "one after the other"]  # fmt: skip
    some = [row for row in rows if row["question"] == CONTENDED and "median_s" in row]
    lines = [
        ([*key, *(f"{ratio:.2f} x" for which in ("matmul", "transport") for ratio in each[which])],
         [row for row in some if (row["matmul"], row["transport"]) == key])
        for key, each in contended(rows).items()
    ]  # fmt: skip
    return measured(head, lines)


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Chunks over whole, of the most GPUs."""
    rows = next(iter(found.values()))
    names = {shape_of({"question": MATMUL, "rows": m, "n": n, "k": k}): layer_name(m, n, k)
             for m, n, k in MATMULS}  # fmt: skip
    axis = Axis(
        "number of chunks",
        "time / that of the whole\n(lower is better)",
        y_text="{:g}x".format,
        y_most=8.0,
        at_one=True,
    )
    for question, name, title in (
        (MATMUL, "matmul", "A matmul in up to 8 chunks of rows costs little more than the whole"),
        (GATHER, "gather", "An all-gather in chunks: what starting each chunk costs"),
    ):
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for (shape, which), times in in_chunks(rows, question).items():
            panel, curve = f"chunks of {which}", names.get(shape, "")
            if question == GATHER:
                panel, curve = f"{shape} gathered", which.replace("ours", "counterpoint")
            points = [(n, t / times[1]) for n, t in times.items()]
            panels.setdefault(panel, {})[curve] = points
        curves(panels, images / f"losses-{name}.svg", axis, title=title, source=place(rows))


LOSSES = Benchmark(
    "losses", cases, arms, calls=2, rounds=7, pictures=pictures,
    short=lambda case: case.name in ("matmul 2048,7168,8192", "all-gather 16 MiB"),
    moved=lambda case, ranks: case.facts.get("num_bytes", 0) * (ranks - 1) // ranks,
    sections=(
        Section("docs/results/losses.md", "dil-matmul",
                of_most(lambda rows: chunk_table(rows, MATMUL))),
        Section("docs/results/losses.md", "dil-communication",
                of_most(lambda rows: chunk_table(rows, GATHER))),
        Section("docs/results/losses.md", "cil", of_most(beside_table)),
    ),
)  # fmt: skip
