"""Copies between GPUs, by size, by number and by how they are submitted; and transports side by
side.

Each rank copies to, or from, its peers in ring order, slot by slot: no two copies of a case touch
the same bytes. "Ahead": all is submitted before it starts, so that only the GPU counts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.declare import Arms, Bench, Benchmark, Call, Case, Section, all_gather
from benchmarks.pictures import Axis, curves, place, shown
from benchmarks.rows import Row
from benchmarks.tables import measured, of_most, us
from benchmarks.transports import ALIGN_BYTES, TRANSPORTS, missing, open_transport
from counterpoint.gpu.driver import Copy, copy_async, copy_batch_async, no_batches
from counterpoint.measure.timing import captured

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COUNTS = (1, 4, 8, 56)
GATHERED = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # by a transport, on each rank
DIRECTIONS: tuple[Literal["push", "pull"], ...] = ("push", "pull")
WAYS = {"torch copy_": "`copy_` of torch, one by one", "driver": "calls of the driver, one by one",
        "batch": "one batch", "graph": "a graph of single copies"}  # fmt: skip
BARRED = (MIB, 56)  # size and number of the copies that a batch is judged by
BARS = {"torch copy_": 2.5, "graph": 1.25}  # speedups of a batch over each way, at least


def cases(_: int) -> list[Case]:
    """Copies of each size."""
    return [
        Case(f"submission {size(n)}", {"question": "submission", "num_bytes": n}) for n in SIZES
    ]


class Slots:
    """Memory of all ranks that copies read and write, and a stream for them."""

    def __init__(self, room: int, bench: Bench) -> None:
        self.bench, self.room = bench, room
        (self.source, sources), (self.target, targets) = (
            bench.opened(room, torch.uint8) for _ in "ab"
        )
        self.source.random_()
        self.sources, self.targets = (
            [handle.get_buffer(r, (room,), torch.uint8) for r in range(bench.ranks)]
            for handle in (sources, targets)
        )
        self.others = [(bench.rank + d) % bench.ranks for d in range(1, bench.ranks)]
        # batches refuse the default stream
        self.stream = torch.cuda.Stream(bench.device, priority=-1)

    def ends(self, count: int, direction: str) -> list[tuple[int, int]]:
        """Of each copy the rank that it reads, and that it writes."""
        peers = [self.others[i % len(self.others)] for i in range(count)]
        return [
            (self.bench.rank, q) if direction == "push" else (q, self.bench.rank) for q in peers
        ]

    def sender(self, i: int, direction: str) -> int:
        """Whose bytes the i-th copy brings here: who pushes to this rank, or is pulled from."""
        step = 1 + i % (self.bench.ranks - 1)
        return (self.bench.rank + (step if direction == "pull" else -step)) % self.bench.ranks

    def ways(self, num_bytes: int, count: int, direction: str) -> dict[str, Call | str]:
        """The ways to submit copies of slot i to, or from, the i-th peer."""
        ends = self.ends(count, direction)
        slots = [slice(i * num_bytes, (i + 1) * num_bytes) for i in range(count)]
        pairs = [(self.targets[to][s], self.sources[at][s])
                 for (at, to), s in zip(ends, slots, strict=True)]  # fmt: skip
        copies = [
            Copy(t.data_ptr(), num_bytes, s.data_ptr(), num_bytes, num_bytes, 1) for t, s in pairs
        ]

        def by_torch(_: int) -> None:
            with torch.cuda.stream(self.stream):
                for target, source_ in pairs:
                    target.copy_(source_)

        singly = partial(one_by_one, copies)
        found: dict[str, Call | str] = {
            "torch copy_": self.forked(by_torch),
            "driver": self.forked(singly),
        }
        batch = partial(copy_batch_async, copies)
        found["batch"] = no_batches() or self.forked(batch)
        return found | {"graph": self.graph(singly)}

    def forked(self, submit: Callable[[int], object]) -> Call:
        """On the side stream, between what comes before and what comes after."""

        def arm(_: int) -> None:
            main = torch.cuda.current_stream()
            self.stream.wait_stream(main)
            submit(self.stream.cuda_stream)
            main.wait_stream(self.stream)

        return arm

    def graph(self, submit: Callable[[int], object]) -> Call:
        """The same, captured."""
        replay, _ = captured(self.forked(submit), 1)
        return lambda _: replay()


def one_by_one(copies: Sequence[Copy], stream: int) -> None:
    """One call of the driver for each."""
    for copy in copies:
        copy_async(copy, stream)


def arms(case: Case, bench: Bench) -> Arms:
    """Every number, direction and way."""
    each = case["num_bytes"]
    slots = Slots(each * max(COUNTS), bench)
    calls: dict[str, Call | str] = {}
    about: dict[str, Row] = {}
    for count, direction in product(COUNTS, DIRECTIONS):
        for way, call in slots.ways(each, count, direction).items():
            name = f"{count} {direction} {way}"
            calls[name] = call
            about[name] = {"count": count, "direction": direction, "way": way}

    def check(name: str, _: Any) -> list[float]:
        count, direction, *_ = name.split()
        bench.meet()
        for i in range(int(count)):
            place = slice(i * each, (i + 1) * each)
            if not torch.equal(
                slots.target[place], slots.sources[slots.sender(i, direction)][place]
            ):
                return [torch.inf]
        return [0.0]

    return Arms(calls, check, baseline="1 push driver", about=about,
                outputs=(slots.target.view(torch.bfloat16),))  # fmt: skip


def transport_cases(_: int) -> list[Case]:
    """Both collectives at each size."""
    return [Case(f"{op} {size(n)}", {"question": "transport", "op": op, "num_bytes": n})
            for op, n in product(("all_gather", "all_to_all"), GATHERED)]  # fmt: skip


def transport_arms(case: Case, bench: Bench) -> Arms:
    """One collective by each transport that is here; NCCL's bytes are what the others have to
    bring."""
    part = case["num_bytes"] // bench.ranks // ALIGN_BYTES * ALIGN_BYTES
    gathers, whole = case["op"] == "all_gather", part * bench.ranks
    drawn = torch.randint(
        0, 255, (whole,), dtype=torch.uint8, device=bench.device, generator=bench.draw
    )
    sent = drawn[:part] if gathers else drawn
    want = torch.empty(whole, dtype=torch.uint8, device=bench.device)
    if gathers:
        all_gather(want, sent, group=bench.group)
    else:
        dist.all_to_all_single(want, sent, group=bench.group)
    calls: dict[str, Call | str] = {}
    opened: dict[str, Any] = {}
    for name, way in TRANSPORTS.items():
        if why := missing(name, bench.group, bench.device):
            calls[way.label] = why
            continue
        opened[way.label] = transport = open_transport(name, bench.group, bench.device, whole)
        transport.source[: len(sent)].copy_(sent)
        move = getattr(transport, case["op"])(part)
        calls[way.label] = lambda _, move=move: move()

    def check(name: str, _: Any) -> list[float]:
        bench.meet()
        return [0.0 if torch.equal(opened[name].target[:whole], want) else torch.inf]

    targets = [transport.target.view(torch.bfloat16) for transport in opened.values()]
    about = {label: {"transport": label} for label in calls}

    def close() -> None:
        for transport in opened.values():
            transport.check()
            transport.close()

    return Arms(
        calls, check, baseline=next(iter(opened)), about=about, outputs=targets, close=close
    )


# ---- what is said of the rows


def size(num_bytes: int) -> str:
    """In MiB, or in KiB where it is less."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def rate(row: Row) -> float:
    """GB/s that a rank sends, and gets."""
    return row["num_bytes"] * row.get("count", 1) / row["seconds"] / 1e9


def asked(rows: Sequence[Row]) -> list[Row]:
    """Rows of copies, each with `seconds` and whether all was submitted before it started."""
    found: list[Row] = []
    for row in (r for r in rows if r["question"] == "submission" and "refused" not in r):
        if "ahead" in row:  # of before there was one runner
            found.append(row)
            continue
        found.append(row | {"ahead": True, "seconds": row["median_s"]})
        if row["way"] != "torch copy_" and "plain_eager_s" in row:
            found.append(row | {"ahead": False, "seconds": row["plain_eager_s"]})
        elif "plain_eager_s" in row:  # its host is never ahead
            found[-1] |= {"ahead": False, "seconds": row["plain_eager_s"]}
    return found


def rates(rows: list[Row], *, ahead: bool) -> str:
    """A line for each way, direction and number of copies, a column for each size."""
    some = [row for row in asked(rows) if row["ahead"] == ahead]
    found = {(r["way"], r["direction"], r["count"], r["num_bytes"]): r for r in some}
    sizes = sorted({key[3] for key in found})
    keys = sorted(dict.fromkeys(key[:3] for key in found), key=lambda key: list(WAYS).index(key[0]))
    lines: list[tuple[list[str], list[Row]]] = []
    for key in keys:
        own = [found[(*key, n)] for n in sizes]
        cells = [WAYS[key[0]], key[1], str(key[2]), *(f"{rate(row):.0f}" for row in own)]
        lines.append((cells, own))
    return measured(["submitted by", "direction", "copies", *map(size, sizes)], lines, "GB/s.")


def submission(rows: list[Row]) -> str:
    """Eager."""
    picture = shown("copies", "Rates of copies, by size, number and how they are submitted")
    return f"{picture}\n\n{rates(rows, ahead=False)}"


def batch(rows: list[Row]) -> str:
    """Speedups of a batch over the other ways, and what they should be."""
    lines: list[tuple[list[str], list[Row]]] = []
    for direction in DIRECTIONS:
        found = {
            r["way"]: r
            for r in asked(rows)
            if (r["num_bytes"], r["count"], r["direction"], r["ahead"])
            == (*BARRED, direction, False)
        }
        for way, row in found.items():
            if way != "batch" and "batch" in found:
                seconds, batch_s = row["seconds"], found["batch"]["seconds"]
                speedup, least = seconds / batch_s, BARS.get(way)
                bar = f"{least:.2f}: {'met' if speedup >= least else 'missed'}" if least else "-"
                cells = [
                    direction,
                    WAYS[way],
                    us(seconds, 0),
                    us(batch_s, 0),
                    f"{speedup:.2f}",
                    bar,
                ]
                lines.append((cells, [row, found["batch"]]))
    head = ["direction", "beside", "us", "the batch, us", "speedup", "at least"]
    return measured(head, lines) or "This machine has no batches."


def transports(rows: list[Row]) -> str:
    """A line for each collective and transport."""
    found = {(r["op"], r["transport"], r["num_bytes"]): r for r in rows
             if r["question"] == "transport" and "refused" not in r}  # fmt: skip
    sizes = sorted({n for *_, n in found})
    keys = sorted(dict.fromkeys(key[:2] for key in found), key=lambda key: key[0])
    own = {key: [found[(*key, n)] for n in sizes] for key in keys}
    lines = [([*key, *(us(row["median_s"], 0) for row in own[key])], own[key]) for key in keys]
    why = {r.get("transport", r.get("arm")): r["refused"] for r in rows if "refused" in r}
    parts = [shown("transports", "Rates of transports, by size"),
             *(f"{name} was missing: {reason}." for name, reason in why.items()),
             measured(["op", "transport", *map(size, sizes)], lines, "Microseconds.")]  # fmt: skip
    return "\n\n".join(parts)


AXIS = Axis("size of each copy", "GB/s (higher is better)", x_text=lambda x: size(int(x)))


def pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Rates of pushes, of the most GPUs."""
    rows = next(iter(found.values()))
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in asked(rows):
        if r["direction"] == "push" and not r["ahead"]:
            panel = panels.setdefault("one copy" if r["count"] == 1 else f"{r['count']} copies", {})
            panel.setdefault(WAYS[r["way"]].replace("`", ""), []).append((r["num_bytes"], rate(r)))
    curves(panels, images / "copies.svg", AXIS, source=place(rows),
           title="Small copies to peers: rates depend on how they are submitted")  # fmt: skip


def transport_pictures(found: Mapping[int, list[Row]], images: Path) -> None:
    """Rates of transports, of the most GPUs."""
    rows = next(iter(found.values()))
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in (r for r in rows if r["question"] == "transport" and "refused" not in r):
        received = r["num_bytes"] * (r["ranks"] - 1) / r["ranks"]
        panel = panels.setdefault(r["op"].replace("_", "-"), {}).setdefault(r["transport"], [])
        panel.append((r["num_bytes"], received / r["median_s"] / 1e9))
    axis = AXIS._replace(x_label="size on each rank")
    curves(panels, images / "transports.svg", axis, source=place(rows),
           title="Collectives by transport: what each rank receives per second")  # fmt: skip


EVERY = [f"{c} {d} {w}" for c in COUNTS for d in DIRECTIONS for w in WAYS]
COPIES = Benchmark(
    "copies",
    cases,
    arms,
    calls=0,
    rounds=7,
    every_eager=True,
    eager=EVERY,
    host=False,
    soak_s=0.05,
    backlog_cycles=2_000_000,
    pictures=pictures,
    short=lambda case: case.name == "submission 1 MiB",
    moved=lambda case, _: case["num_bytes"],
    sections=(
        Section("docs/results/transports.md", "submission", of_most(submission)),
        Section(
            "docs/results/transports.md", "ahead", of_most(lambda rows: rates(rows, ahead=True))
        ),
        Section("docs/results/transports.md", "batch", of_most(batch)),
    ),
)
TRANSPORT = Benchmark(
    "transports",
    transport_cases,
    transport_arms,
    calls=4,
    rounds=7,
    soak_s=0.05,
    pictures=transport_pictures,
    short=lambda case: case.name == "all_gather 16 MiB",
    moved=lambda case, ranks: case["num_bytes"] * (ranks - 1) // ranks,
    sections=(Section("docs/results/transports.md", "transports", of_most(transports)),),
)
