"""How a pipeline's computation and communication share the GPU: one value of each control.

Pure: what the controls are, how they are written, and where each has a way in. Files of the same
names carry them out.
"""

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, Literal, get_args

from counterpoint.errors import InputError

Mode = Literal["graph", "eager"]
Along = Literal["m", "n"]
Transport = Literal["sm", "copy_engine", "zero_cta"]
MODES: tuple[Mode, ...] = get_args(Mode)
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
MAX_CHUNKS = 16
MAX_DELAY_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """One setting of all controls; as it comes, communication simply overlaps.

    Args:
        overlap: False: every stage waits for the one before it.
        priority: Communication on the most urgent stream (eager), its nodes likewise (graph).
            Implied by "copy_engine", whose only kernels are warps that wait.
        blocks_per_sm: Resident blocks of the compute kernels, by shared memory that they are
            launched with and do not use. None: as they are.
        carve_out: The compute kernels ask for all of an SM's shared memory and use no more of it
            than before: what shaping does besides limiting the blocks.
        delay_s: Compute after a collective starts this much later, so that the collective has its
            SMs first. A bounded guess: nothing says when it has them.
        chunks: Launches that each matmul of a compute stage is cut into.
        along: The dim that is cut.
        transport: "sm": the library's kernels; "copy_engine": copies and signals of ours, for
            all-reduce after a reduce-scatter by the library; "zero_cta": the library's copy-engine
            collectives.
        max_ctas: Blocks of a collective of the library, at most; 0: as it likes.
        num_sms: SMs that the matmul library is told it has (graph and eager); 0: all.
        green_sms: SMs of a green context that compute runs in (eager only); 0: none.

    Raises:
        InputError: A number is out of range, or controls contradict each other.
    """

    overlap: bool = True
    priority: bool = False
    blocks_per_sm: int | None = None
    carve_out: bool = False
    delay_s: float = 0.0
    chunks: int = 1
    along: Along = "m"
    transport: Transport = "sm"
    max_ctas: int = 0
    num_sms: int = 0
    green_sms: int = 0

    def __post_init__(self) -> None:
        def check(holds: bool, field: str, want: str, fix: str = "") -> None:
            if not holds:
                raise InputError("Controls", field, want=want, got=getattr(self, field), fix=fix)

        for field in ("overlap", "priority", "carve_out"):
            check(type(getattr(self, field)) is bool, field, "True or False")
        for field in ("chunks", "max_ctas", "num_sms", "green_sms"):
            check(type(getattr(self, field)) is int, field, "a whole number")
        check(self.blocks_per_sm is None or type(self.blocks_per_sm) is int, "blocks_per_sm",
              "None or a whole number")  # fmt: skip
        check(isinstance(self.delay_s, int | float), "delay_s", "seconds")
        check(1 <= self.chunks <= MAX_CHUNKS, "chunks", f"from 1 to {MAX_CHUNKS}")
        check(self.along in ("m", "n"), "along", "'m' or 'n'")
        check(self.chunks > 1 or self.along == "m", "along", "'m' where nothing is cut")
        check(self.transport in TRANSPORTS, "transport", f"one of {', '.join(TRANSPORTS)}")
        check(0 <= self.delay_s <= MAX_DELAY_S, "delay_s", f"from 0 to {MAX_DELAY_S:g} s")
        check(self.blocks_per_sm is None or self.blocks_per_sm >= 1, "blocks_per_sm", ">= 1")
        for field in ("max_ctas", "num_sms", "green_sms"):
            check(getattr(self, field) >= 0, field, ">= 0")
        check(not (self.priority and self.transport == "copy_engine"), "priority",
              "unset with copy_engine", "it is implied")  # fmt: skip
        check(not (self.max_ctas and self.transport == "copy_engine"), "max_ctas",
              "unset with copy_engine", "it is the budget of the library's kernels")  # fmt: skip
        check(not (self.carve_out and self.blocks_per_sm), "carve_out", "without blocks_per_sm",
              "shaping implies the carve-out")  # fmt: skip
        if not self.overlap:
            alone = all(getattr(self, f.name) == f.default for f in fields(self)[1:])
            check(alone, "overlap", "True, with other controls", "a sequence shares nothing")

    @property
    def spec(self) -> str:
        """The controls as text: "overlap priority chunks=4 along=n"."""
        if not self.overlap:
            return "sequential"
        words = ["overlap"]
        if self.transport != "sm":
            words.append(self.transport)
        if self.priority:
            words.append("priority")
        if self.blocks_per_sm:
            words.append(f"blocks_per_sm={self.blocks_per_sm}")
        if self.carve_out:
            words.append("carve_out")
        if self.delay_s:
            words.append(f"delay={Decimal(repr(self.delay_s)).scaleb(6).normalize():f}us")
        if self.chunks > 1:
            words.append(f"chunks={self.chunks}" + (" along=n" if self.along == "n" else ""))
        words += [f"{f}={getattr(self, f)}" for f in ("max_ctas", "num_sms", "green_sms")
                  if getattr(self, f)]  # fmt: skip
        return " ".join(words)

    @classmethod
    def parse(cls, spec: str) -> "Controls":
        """Read what `spec` wrote.

        Raises:
            InputError: a word is none of these.
        """
        kind, *words = spec.split() or [""]
        if kind == "sequential" and not words:
            return cls(overlap=False)
        numbers = {"blocks_per_sm", "chunks", "max_ctas", "num_sms", "green_sms"}
        values: dict[str, Any] = {}
        for word in words if kind == "overlap" else [kind]:
            name, _, value = word.partition("=")
            if word in ("priority", "carve_out"):
                found: tuple[str, Any] | None = (word, True)
            elif word in TRANSPORTS:
                found = ("transport", word)
            elif name == "along":
                found = (name, value)
            elif name == "delay" and re.fullmatch(r"[0-9]+(\.[0-9]+)?us", value):
                found = ("delay_s", float(f"{value[:-2]}e-6"))
            elif name in numbers and re.fullmatch("[0-9]+", value):
                found = (name, int(value))
            else:
                found = None
            if found is None or kind != "overlap" or found[0] in values:
                want = (
                    "'sequential', or 'overlap' and words such as priority, delay=5us, chunks=4, "
                    "along=n, blocks_per_sm=2, carve_out, copy_engine, zero_cta, max_ctas=16"
                )
                raise InputError("Controls.parse", "spec", want=want, got=f"{word!r} in {spec!r}")
            values[found[0]] = found[1]
        return cls(**values)

    @property
    def num_set(self) -> int:
        """How many controls differ from plain overlap: of two equally fast settings, less is more.

        `along` is no control by itself.
        """
        return sum(getattr(self, f.name) != f.default for f in fields(self) if f.name != "along")

    def way_in(self, mode: Mode) -> dict[str, str]:
        """How each control that is set reaches the kernels in this mode.

        Raises:
            InputError: a control has no way in.
        """
        ways: dict[str, str] = {}
        for name in ("priority", "blocks_per_sm", "carve_out", "delay_s", "chunks", "max_ctas",
                     "num_sms", "green_sms"):  # fmt: skip
            if getattr(self, name) != getattr(OFF, name):
                way = WAYS_IN[name].get(mode)
                if way is None:
                    want = f"unset in mode {mode!r}"
                    raise InputError("Controls", name, want=want, got=getattr(self, name))
                ways[name] = way
        if self.transport != "sm":
            ways["transport"] = WAYS_IN[self.transport][mode]
        return ways


WAYS_IN: dict[str, dict[Mode, str]] = {
    "priority": {"graph": "priority of graph nodes", "eager": "priority of the stream"},
    "blocks_per_sm": {
        "graph": "dynamic shared memory of graph nodes",
        "eager": "dynamic shared memory in Triton's launch tuple",
    },
    "carve_out": {
        "graph": "carve-out preference of graph nodes",
        "eager": "carve-out preference of the function",
    },
    "delay_s": {
        "graph": "a kernel that waits, in the graph",
        "eager": "a kernel that waits, on the stream",
    },
    "chunks": {"graph": "TorchDispatchMode at capture", "eager": "TorchDispatchMode"},
    "copy_engine": {"graph": "memcpy nodes", "eager": "copies on a stream"},
    "zero_cta": {"graph": "process-group options", "eager": "process-group options"},
    "max_ctas": {"graph": "process-group options", "eager": "process-group options"},
    "num_sms": {
        "graph": "torch's SM carve-out of the matmul library, at capture",
        "eager": "torch's SM carve-out of the matmul library",
    },
    "green_sms": {"eager": "a stream of a green context"},
}

OFF = Controls()  # plain overlap: what a pipeline is without us
SEQUENTIAL = Controls(overlap=False)
