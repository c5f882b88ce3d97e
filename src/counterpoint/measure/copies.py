"""How fast copies between GPUs are, by size, by number and by how they are submitted.

Each rank copies to, or from, its peers in ring order, slot by slot: no two copies of a row touch
the same bytes. What is timed has been checked first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError
from counterpoint.measure import record
from counterpoint.measure.timing import Arm, captured, rotate
from counterpoint.resources.order import Delay
from counterpoint.runtime.driver import Copy, copy_async, copy_batch_async, no_batches
from counterpoint.runtime.peer_moves import ByCopies, Run, ring
from counterpoint.runtime.symmetric import SymmetricMemory, allocate
from counterpoint.runtime.transports import ALIGN_BYTES, TRANSPORTS, missing, open_transport

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
COUNTS = (1, 4, 8, 56)
GATHERED = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # by a transport, on each rank
CHECKED = (MIB, 8)  # size and number of the copies that are looked at
STRIDED = 4 * MIB  # bytes to each peer
STRIDED_ROWS = (STRIDED, 8 * KIB, 2 * KIB)  # bytes of a row; the first is one row
PITCH = 8  # rows lie so many times their width apart
LATE_COPY, LATE_ROUNDS = 16 * MIB, 4
LATENESS = (0.0, 0.5, 1.0, 2.0)  # in times of a copy
AHEAD_CYCLES = 2_000_000  # about a millisecond: all is submitted before it starts
EAGER_CYCLES = 1  # nothing is: the host's time shows
CALLS = 4  # of a transport in a graph

Direction = Literal["push", "pull"]
Submit = Callable[[int], object]  # onto the stream of a handle
Row = dict[str, Any]


def measure_copies(
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Rows of all four questions; all ranks of `group` call this, and all get them.

    Each row has `question` ("submission", "strided", "late rank" or "transport"), what was copied
    and how, and `seconds` of the slowest rank; a transport that is missing has `refused` instead.

    Raises:
        CounterpointError: a copy has moved other bytes than it should.
        UnsupportedError: the GPUs do not reach each other.
    """
    bench, rows = _Copies(group, device, rounds), list[Row]()
    bench.verify()
    for question in (bench.submission, bench.strided, bench.late_rank, bench.transports):
        progress(question.__name__.replace("_", " "))
        rows += question()
    facts = {"table": "copies", "ranks": bench.ranks} | record.environment()
    return [row | facts for row in rows]


class _Copies:
    """The questions, each a method that returns rows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, rounds: int) -> None:
        self.group, self.device, self.rounds = group, device, rounds
        self.ranks, self.rank = group.size(), group.rank()
        self.others = ring(self.rank, self.ranks)
        room = max(SIZES) * max(COUNTS)
        self.source = allocate(room, group, device)
        self.target = allocate(room, group, device)
        self.source.local().random_()
        # batches refuse the default stream
        self.stream = torch.cuda.Stream(device, priority=-1)

    def copies(self, num_bytes: int, count: int, direction: Direction) -> list[Copy]:
        """Slot i goes to, or comes from, the i-th peer in ring order, again and again."""
        return [
            Copy(target.buffer_ptrs[to] + i * num_bytes, num_bytes,
                 source.buffer_ptrs[at] + i * num_bytes, num_bytes, num_bytes, 1)
            for i, (source, at, target, to) in enumerate(self.ends(count, direction))
        ]  # fmt: skip

    def ends(
        self, count: int, direction: Direction
    ) -> list[tuple[SymmetricMemory, int, SymmetricMemory, int]]:
        """Memory and rank that each copy reads, and that it writes."""
        peers = [self.others[i % len(self.others)] for i in range(count)]
        pairs = [(self.rank, q) if direction == "push" else (q, self.rank) for q in peers]
        return [(self.source, at, self.target, to) for at, to in pairs]

    def sender(self, i: int, direction: Direction) -> int:
        """Whose bytes the i-th copy brings here: who pushes to this rank, or is pulled from."""
        step = 1 + i % (self.ranks - 1)
        return (self.rank + (step if direction == "pull" else -step)) % self.ranks

    def ways(self, num_bytes: int, count: int, direction: Direction) -> dict[str, Submit]:
        """The ways to submit them eagerly."""
        copies = self.copies(num_bytes, count, direction)
        pairs = [
            tuple(memory.peer(rank)[i * num_bytes : (i + 1) * num_bytes]
                  for memory, rank in ((target, to), (source, at)))
            for i, (source, at, target, to) in enumerate(self.ends(count, direction))
        ]  # fmt: skip

        def by_torch(_: int) -> None:
            with torch.cuda.stream(self.stream):
                for target, source in pairs:
                    target.copy_(source)

        found: dict[str, Submit] = {"torch copy_": by_torch, "driver": partial(singly, copies)}
        if not no_batches():
            found["batch"] = partial(copy_batch_async, copies)
        return found

    def forked(self, submit: Submit) -> Arm:
        """On the side stream, between what comes before and what comes after."""

        def arm() -> None:
            main = torch.cuda.current_stream()
            self.stream.wait_stream(main)
            submit(self.stream.cuda_stream)
            main.wait_stream(self.stream)

        return arm

    def graph(self, submit: Submit) -> Arm:
        arm = self.forked(submit)
        return captured(lambda _: arm(), 1)[0]

    def timed(self, arms: dict[str, Arm], cycles: int) -> dict[str, float]:
        """Median seconds of each."""
        times = rotate(arms, group=self.group, device=self.device, rounds=self.rounds, soak_s=0.05,
                       backlog_cycles=cycles)  # fmt: skip
        return {name: t.median_s for name, t in times.items()}

    def verify(self) -> None:
        """Every way moves the bytes that it should, to where they belong.

        Raises:
            CounterpointError: one does not.
        """
        size, count = CHECKED
        for direction in ("push", "pull"):
            for way, submit in self.ways(size, count, direction).items():
                self.target.local()[: size * count].fill_(0)
                self.meet()
                self.forked(submit)()
                self.meet()
                for i in range(count):
                    slot = slice(i * size, (i + 1) * size)
                    sent = self.source.peer(self.sender(i, direction))[slot]
                    if not torch.equal(self.target.local()[slot], sent):
                        raise CounterpointError(f"copies: {way}, {direction}: slot {i} is wrong")
                self.meet()

    def meet(self) -> None:
        """All ranks' GPUs are done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)
        torch.cuda.synchronize(self.device)

    def submission(self) -> list[Row]:
        rows: list[Row] = []
        directions: tuple[Direction, ...] = ("push", "pull")
        for size in SIZES:
            arms: dict[tuple[int, Direction, str], Arm] = {}
            for count, direction in product(COUNTS, directions):
                ways = self.ways(size, count, direction)
                for way, submit in ways.items():
                    arms[count, direction, way] = self.forked(submit)
                arms[count, direction, "graph"] = self.graph(ways["driver"])
            for ahead in (False, True):
                named = {
                    " ".join(map(str, key)): arm for key, arm in arms.items()
                    if not ahead or key[2] != "torch copy_"
                }  # fmt: skip
                times = self.timed(named, AHEAD_CYCLES if ahead else EAGER_CYCLES)
                rows += [
                    {"question": "submission", "num_bytes": size, "count": count, "way": way,
                     "direction": direction, "ahead": ahead,
                     "seconds": times[f"{count} {direction} {way}"]}
                    for count, direction, way in arms if f"{count} {direction} {way}" in times
                ]  # fmt: skip
        return rows

    def strided(self) -> list[Row]:
        arms: dict[str, Arm] = {}
        for width, direction in product(STRIDED_ROWS, ("push", "pull")):
            room = STRIDED * PITCH
            pitch = width * (1 if width == STRIDED else PITCH)
            copies: list[Copy] = []
            for i, (source, at, target, to) in enumerate(self.ends(self.ranks - 1, direction)):
                ends = target.buffer_ptrs[to] + i * room, source.buffer_ptrs[at] + i * room
                copies.append(Copy(ends[0], pitch, ends[1], pitch, width, STRIDED // width))
            arms[f"{width} {direction}"] = self.graph(partial(singly, copies))
        times = self.timed(arms, AHEAD_CYCLES)
        return [
            {"question": "strided", "num_bytes": STRIDED, "count": self.ranks - 1,
             "row_bytes": int(name.split()[0]), "direction": name.split()[1], "seconds": seconds}
            for name, seconds in times.items()
        ]  # fmt: skip

    def late_rank(self) -> list[Row]:
        """The last rank begins late. Seconds count from there, until all ranks are done."""
        if self.ranks < 3:
            return []  # one peer: nobody else is on the way to it
        rounds_of = {
            "ring": self.others,
            # who is met there at once: all begin with the same rank
            "the same for all": [r for r in range(self.ranks) if r != self.rank],
        }
        meeting, delay = ByCopies(self.group, self.device, 16), Delay(self.device)
        graphs = {name: self.graph(self.rounds_to(peers)) for name, peers in rounds_of.items()}
        meets = self.rounds_to(self.others, meeting.meeting()[0])
        graphs["ring, a meeting before each copy"] = self.graph(meets)
        alone = self.timed({"ring": graphs["ring"]}, AHEAD_CYCLES)["ring"]
        copies = LATE_ROUNDS * (self.ranks - 1)
        lateness = [part * alone / copies for part in LATENESS]

        def late(graph: Arm, late_s: float) -> Arm:
            def arm() -> None:
                if self.rank == self.ranks - 1:
                    delay(late_s)
                graph()

            return arm

        keys = list(product(graphs, range(len(LATENESS))))
        arms = {f"{order} {i}": late(graphs[order], lateness[i]) for order, i in keys}
        times = self.timed(arms, AHEAD_CYCLES)
        meeting.close()
        return [
            {"question": "late rank", "order": order, "num_bytes": LATE_COPY, "count": copies,
             "late_copies": LATENESS[i], "late_s": lateness[i],
             "seconds": times[f"{order} {i}"] - lateness[i]}
            for order, i in keys
        ]  # fmt: skip

    def rounds_to(self, peers: Sequence[int], meet: Run | None = None) -> Submit:
        """Pushes to each of `peers` in turn, several times."""

        def submit(stream: int) -> None:
            for i, peer in product(range(LATE_ROUNDS), peers):
                if meet is not None:
                    meet(self.stream)
                at = self.source.buffer_ptrs[self.rank] + i * LATE_COPY
                to = self.target.buffer_ptrs[peer] + (self.rank * LATE_ROUNDS + i) * LATE_COPY
                copy_async(Copy(to, LATE_COPY, at, LATE_COPY, LATE_COPY, 1), stream)

        return submit

    def transports(self) -> list[Row]:
        rows: list[Row] = []
        arms: dict[tuple[str, str, int], Arm] = {}
        opened: list[Any] = []
        for name, way in TRANSPORTS.items():
            if why := missing(name, self.group, self.device):
                rows.append({"question": "transport", "transport": way.label, "refused": why})
                continue
            transport = open_transport(name, self.group, self.device, max(GATHERED))
            transport.source.random_()
            opened.append(transport)
            for op, size in product(("all_gather", "all_to_all"), GATHERED):
                part = size // self.ranks // ALIGN_BYTES * ALIGN_BYTES
                move = getattr(transport, op)(part)
                arms[way.label, op, size] = captured(lambda _, move=move: move(), CALLS)[0]
                if size == min(GATHERED):
                    self.compare(transport, op, move, part)
        self.meet()
        named = {" ".join(map(str, key)): arm for key, arm in arms.items()}
        times = self.timed(named, AHEAD_CYCLES)
        for transport in opened:
            transport.check()
        rows += [
            {"question": "transport", "transport": label, "op": op, "num_bytes": size,
             "seconds": times[f"{label} {op} {size}"] / CALLS}
            for label, op, size in arms
        ]  # fmt: skip
        arms.clear()
        named.clear()
        for transport in opened:
            transport.close()
        return rows

    def compare(self, transport: Any, op: str, move: Arm, part: int) -> None:
        """Raise where a transport moves other bytes than the library does."""
        whole = part * self.ranks
        want = torch.empty(whole, dtype=torch.uint8, device=self.device)
        sent = transport.source[: part if op == "all_gather" else whole].clone()
        if op == "all_gather":
            dist.all_gather(list(want.chunk(self.ranks)), sent, group=self.group)
        else:
            dist.all_to_all_single(want, sent, group=self.group)
        transport.target.fill_(0)
        self.meet()
        move()
        if not torch.equal(transport.target[:whole], want):
            raise CounterpointError(f"copies: {transport.name}: {op} has moved other bytes")
        self.meet()


def singly(copies: Sequence[Copy], stream: int) -> None:
    """One call of the driver for each."""
    for copy in copies:
        copy_async(copy, stream)
