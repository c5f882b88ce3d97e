"""What runs when, as data: a Plan is a tuple of Steps on Lanes, over named Buffers.

A plan is the same on all ranks: a peer is an offset (ring), a mask (XOR), or an offset of islands
and one within them (grid), relative to the rank that reads the plan. `bind` makes it concrete,
`validate` proves it, `runtime.execute` runs it.
"""

from dataclasses import dataclass
from typing import Literal

from counterpoint.errors import PlanError
from counterpoint.problem import GATED, Problem

Peer = tuple[int, ...]  # offset per mesh axis, outermost first; () = me
ME: Peer = ()

Kind = Literal["copy", "matmul", "move", "reduce", "spread", "fold", "barrier", "collective",
               "exchange", "fused", "opaque", "attention", "attention_backward"]  # fmt: skip
Space = Literal["input", "output", "scratch", "symmetric", "words", "flags", "turns"]
OWN_PROTOCOL: tuple[Space, ...] = ("words", "flags", "turns")
COUNTS = "counts"  # the operand that says how many rows there are
ROUTES = "routes"  # the one that says which rows of tokens go where
VARYING = (COUNTS, ROUTES)  # operands of which steps have no boxes


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named 2-D memory area that each rank has one of.

    Args:
        shape: (rows, columns); all blocks of a split buffer together.
        space: input and output are the user's; symmetric memory is mapped by all ranks. So are
            words, flags and turns, of which each call has one of two instances in turn, and which
            the protocol of a fused kernel keeps in order: words are 4 bytes of data that are their
            own flag (low-latency words), flags say that what was stored before them is there, and
            turns hold what they speak of.
        split: dim 0 is partitioned over the ranks, by `Problem.rows`; what a fused kernel's
            protocol keeps in order, equally, unless it has all M rows.
        holds: of a split buffer, a rank stores "all" blocks, those of its "peers" or of its
            "island", its "own" block, or in "slots" one copy of its own block for each rank that
            may write there.
        chunks: of a split buffer of several blocks: stored chunk-major, part 0 of every block
            before part 1, so that a part of every block is one box.
    """

    name: str
    shape: tuple[int, int]
    dtype: str
    space: Space
    split: bool = False
    holds: Literal["all", "peers", "island", "own", "slots"] = "all"
    chunks: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """A part of `buffer` on rank me + at.

    Of a split buffer: the blocks (or the slots) of ranks me + shards, all that there are where
    `shards` is empty; of each block part chunk[0] of chunk[1]. Of another buffer: rows
    [start, stop). `cols` [start, stop) of either; None means all; "own" those of the tables of rank
    me + of: their place in a buffer that has all columns; another has room for the widest rank's,
    and holds them without gaps.
    """

    buffer: str
    at: Peer = ME
    shards: tuple[Peer, ...] = ()
    chunk: tuple[int, int] = (0, 1)
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | Literal["own"] | None = None
    of: Peer = ME


@dataclass(frozen=True, slots=True)
class Signal:
    """A word on a rank's signal pad: `at` is whom I post to, or from whom I wait.

    One post per (slot, call, receiving rank); the waiter reads its own pad only. The value is the
    call's epoch, which lives in device memory, so that a replayed graph counts on.
    """

    slot: int
    at: Peer = ME


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a lane does.

    Kinds, with what they read and write, paired in order:
        copy        reads[i] -> writes[i], bytes as they are; the only kind that may reach a peer
        move        reads[0] -> writes[0] on an SM, changing dtype where they differ; + bias
        matmul      reads x, w (, up) (, the scales of each) (+ a sum to add to, the target or
                    another) (+ bias) -> writes y = x w; where it contracts over rows, y = x^T w, of
                    one box each; where its activation is gated, y = activation(x w) * (x up)
        spread      reads[i] -> writes[i] on an SM: by routes, a row for each place that it goes to
        fold        its transpose: by routes, the sum of these rows in fp32, rounded once
        reduce      sum of reads (+ bias) in the order listed, in fp32, rounded once -> writes[0]
        collective  a library collective, named by args: reads[0] -> writes[0]
        exchange    reads[0] goes to the rank of my place in the island that is "to" islands on;
                    what comes from the one that is as many islands back -> writes[0]. It ends when
                    both have come to it and all has been sent and received: it needs no signal
        barrier     posts, then waits; moves no data
        fused       one kernel of ours that computes and communicates, args "kernel" and its
                    settings: what it reads and writes is declared, and tests compare that with
                    the bytes that it writes; one that does not spin and writes one region is a
                    lookup, and as a move
        attention, attention_backward    q, k, v, ... -> y, lse, or dq, dk, dv: see attended.py
        opaque      a call of the user's own, by the step's name: what it reads and writes is known,
                    and not what it computes; any number of regions, of a "pipeline" only
    Every other kind waits first and posts last. A step that reads the operand "counts" takes as
    many rows as that says, and one that reads "routes" those that it says: its boxes are those of
    equal counts, and of one expert for each token.

    Args:
        after: names of earlier steps of this rank that must have ended.
        args: "bias": 1, the last read is a [1, N] row that is added; "activation": of what a matmul
            or a move would write, see activated.py; "scales": their kind, of a matmul; "to":
            islands, of an exchange; "contract": "rows", of a matmul; "collective": its name;
            "transport": "words", by a kernel of our own; "kernel": of a fused step, the operator
            whose kernel it is; "batch": a number that matmuls one after the other on a lane share
            where they may be one launch; others: see attended.py and `resources.rewrites`.
        spins: it waits for its peers in a kernel, which then has to be resident on every rank.
    """

    name: str
    lane: str
    kind: Kind
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    after: tuple[str, ...] = ()
    waits: tuple[Signal, ...] = ()
    posts: tuple[Signal, ...] = ()
    args: tuple[tuple[str, int | str], ...] = ()
    spins: bool = False

    def arg(self, name: str, default: int | str = 0) -> int | str:
        """The value of argument `name`, or `default`."""
        return dict(self.args).get(name, default)

    @property
    def counted(self) -> bool:
        """Whether an operand says how many rows the step has."""
        return any(region.buffer in VARYING for region in self.reads)

    @property
    def routed(self) -> bool:
        """Whether the operand "routes" says which rows they are."""
        return any(region.buffer == ROUTES for region in self.reads)

    @property
    def weights(self) -> int:
        """How many weights a matmul multiplies x by: two where its activation is gated."""
        return 1 + str(self.arg("activation")).endswith(GATED)

    @property
    def looks_up(self) -> bool:
        """Whether the step is a kernel of ours that has no peers and one result: a lookup."""
        return self.kind == "fused" and not self.spins and len(self.writes) == 1

    @property
    def sums(self) -> bool:
        """Whether the step is a collective that sums over ranks."""
        return self.arg("collective") in ("all_reduce", "reduce_scatter")

    @property
    def accumulates(self) -> bool:
        """Whether the step adds to what its target holds, or a matmul to what it reads last."""
        if self.kind != "matmul":
            return self.kind.startswith("attention") and self.writes[0] in self.reads
        operands = sum(region.buffer not in VARYING for region in self.reads)
        factors = (1 + self.weights) * (1 + bool(self.arg("scales")))
        return operands > factors + bool(self.arg("bias"))


def same_batch(a: Step, b: Step) -> bool:
    """Whether two neighbours on a lane may be one launch."""
    return a.lane == b.lane and dict(a.args).get("batch", a) == dict(b.args).get("batch", b)


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of steps: a stream (or a thread) on one kind of engine, in tuple order.

    Args:
        priority: more negative runs first, as in CUDA.
        num_sms: SMs that its kernels run on, no others: a green context; None: all.
        blocks_per_sm: most resident blocks of its kernels; None: as they are. Held by whoever
            captures or launches the plan, see `resources.run`.
    """

    name: str
    engine: Literal["sm", "copy", "nic"]
    priority: int = 0
    num_sms: int | None = None
    blocks_per_sm: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Immutable and the same on all ranks. Tuple order of steps = lane order = launch order.

    `family` and `variant` together are the plan's spec: `families.build(problem, plan.spec)` makes
    the same plan again, where the plan came from a family.
    """

    problem: Problem
    family: str
    variant: str
    peers: Literal["ring", "xor", "grid"]
    buffers: tuple[Buffer, ...]
    lanes: tuple[Lane, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> str:
        """The plan as JSON text, the same text for equal plans."""
        from counterpoint.plan.serialize import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote, checked field by field; an op proves it before it runs.

        Args:
            text: what `to_json` returned.

        Raises:
            PlanError: not JSON, another format, or a field that is missing, unknown or wrong.
        """
        from counterpoint.plan.serialize import from_json

        return from_json(text, Plan)

    def __rshift__(self, other: "Plan") -> "Plan":
        """This plan, then the other: see `compose.in_order`."""
        from counterpoint.plan.compose import in_order

        return in_order(self, other) if isinstance(other, Plan) else NotImplemented

    def __or__(self, other: "Plan") -> "Plan":
        """This plan and the other at the same time: see `compose.side_by_side`."""
        from counterpoint.plan.compose import side_by_side

        return side_by_side(self, other) if isinstance(other, Plan) else NotImplemented

    @property
    def spec(self) -> str:
        """Family and variant in one string."""
        return f"{self.family} {self.variant}".strip()

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name; PlanError where there is none."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise PlanError(self.spec, f"no buffer {name!r}")

    def lane(self, name: str) -> Lane:
        """The lane of that name; PlanError where there is none."""
        for lane in self.lanes:
            if lane.name == name:
                return lane
        raise PlanError(self.spec, f"no lane {name!r}")

    def resolve(self, peer: Peer, rank: int) -> int:
        """The absolute rank of `peer` as seen from `rank`; PlanError where there is none."""
        if not peer:
            return rank
        if len(peer) != (axes := 1 + (self.peers == "grid")):
            raise PlanError(self.spec, f"peer {peer} has {len(peer)} axes, the plan has {axes}")
        ranks = self.problem.ranks
        if self.peers == "grid":
            size = ranks // self.problem.islands
            island, place = divmod(rank, size)
            return (island + peer[0]) % self.problem.islands * size + (place + peer[1]) % size
        if self.peers == "ring":
            return (rank + peer[0]) % ranks
        if ranks & (ranks - 1):
            raise PlanError(self.spec, f"XOR peers need a power of two of ranks, got {ranks}")
        if not 0 <= peer[0] < ranks:
            raise PlanError(self.spec, f"XOR peer {peer[0]} is outside {ranks} ranks")
        return rank ^ peer[0]

    def met(self, step: Step, rank: int) -> tuple[int, int]:
        """Whom an exchange of `rank` sends to, and from whom what it gets is."""
        to = int(step.arg("to"))
        return self.resolve((to, 0), rank), self.resolve((-to, 0), rank)

    @property
    def num_slots(self) -> int:
        """Words of signal pad that the plan uses."""
        return max((s.slot for step in self.steps for s in step.waits + step.posts), default=-1) + 1

    def num_bytes(self, *spaces: Space) -> int:
        """Bytes of those spaces on the rank that holds most; of what is used in turns, of both."""
        held = (b for b in self.buffers if b.space in spaces)
        return sum(self.buffer_bytes(b) * (1 + (b.space in OWN_PROTOCOL)) for b in held)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all that is not the user's."""
        return self.num_bytes("scratch", "symmetric", *OWN_PROTOCOL)

    def buffer_bytes(self, buffer: Buffer) -> int:
        """Bytes of one buffer on the rank that holds most."""
        from counterpoint.plan.extents import buffer_bytes

        return buffer_bytes(self, buffer)

    def __str__(self) -> str:
        from counterpoint.plan.printed import printed

        return printed(self)
