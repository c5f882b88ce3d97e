"""Run the kernels of all ranks in one process, their programs in turn, in seeded orders.

Triton's interpreter runs the programs of a grid one after the other, each to its end. Here each
program is a greenlet, and so is each rank. A seeded draw says who goes on at each atomic and at
each volatile or L2 (".cg") load, so programs may wait for one another in any order. If nobody can
go on, that is found at once, and the error says where every program stands.

Plain stores of a program wait in a buffer of its own. They land in parts, at random times, in any
order. What a release of that program publishes has landed; what a relaxed atomic publishes may not
have. So a missing release shows as a wrong result. A missing acquire does not show, because loads
are in order: `counterpoint.testing.ptx` looks for that.

    def run(rank, ranks):
        my_kernel[(2,)](x[rank], out[rank], **peers[rank])

    peers = local_peers(my_kernel, 4, payload_bytes=4096, num_flags=8)
    Interleaved(seed).run([partial(run, rank, 4) for rank in range(4)])

The process must interpret (TRITON_INTERPRET=1); the memory of the ranks is plain CPU tensors. Use
`counterpoint.testing.ranks.interpreted_ranks(test, 1)` for such a process. It takes greenlet:
`pip install greenlet`.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.runtime.interpreter as interpreter

from counterpoint.errors import UnsupportedError
from counterpoint.run.bounds import resolved
from counterpoint.run.launch import INTERPRETED
from counterpoint.run.peer_kernel import Layout

try:
    import greenlet
except ImportError as error:
    raise UnsupportedError(
        "counterpoint.testing.interleave: greenlet is not installed; pip install greenlet"
    ) from error

INTERPRETER: Any = interpreter  # most of what follows is private
BUILDER, RAW = INTERPRETER.InterpreterBuilder, INTERPRETER._interpreter
SEM = INTERPRETER._ir.MEM_SEMANTIC
# as Triton up to 3.8 says it to the builder of a load, and from 3.9
CACHED_IN_L2 = (INTERPRETER._ir.CACHE_MODIFIER.CG, "cg")
NOT_SHOWN = (__file__, str(Path(triton.__file__).parent), "<")
IDLE_TURNS = 60  # of each that is left, without anything new in memory: nobody can go on


class DeadlockError(AssertionError):
    """Nobody can go on; the message says where everyone stands."""


@dataclass
class Program:
    """A program of a grid, or a rank that launches some."""

    name: str
    body: Callable[[], None]
    place: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # its indices, and the grid's
    stores: list[tuple[Any, Any, Any]] = field(default_factory=list[tuple[Any, Any, Any]])
    ended: bool = False
    thread: Any = None

    @property
    def rank(self) -> str:
        """The rank that has launched it."""
        return self.name.partition(",")[0]


def local_peers(
    kernel: Any, num_ranks: int, *, payload_bytes: int = 0, num_flags: int = 0, num_words: int = 0
) -> list[dict[str, Any]]:
    """What `counterpoint.device.PeerKernel` would give a kernel, for ranks of this process.

    Args:
        kernel: made by `triton.jit`.
        num_ranks: how many.
        payload_bytes: as for `PeerKernel`.
        num_flags: as for `PeerKernel`.
        num_words: as for `PeerKernel`.

    Returns:
        Arguments by name, of each rank. Waits never give up, and `fault_ptr` stays 0.
    """
    layout = Layout(payload_bytes, num_flags, num_words)
    memory = torch.zeros(num_ranks, 2 * layout.half_bytes, dtype=torch.uint8)
    for each in memory:
        layout.empty(each)
    peers = layout.checked_arguments(memory.unbind(), kernel.__name__)
    found: list[dict[str, Any]] = []
    for rank in range(num_ranks):
        state, fault = torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        given = peers | {"state_ptr": state, "fault_ptr": fault, "rank": rank}
        given |= {"tag": 0, "timeout_ns": 1 << 60}
        given = {name: value for name, value in given.items() if name in kernel.arg_names}
        found.append(given)
    return found


class Interleaved:
    """One run of the kernels of some ranks.

    Args:
        seed: of the order. The same seed gives the same run.
        buffered: plain stores land late and out of order.
        landing: how likely a store lands at each turn, 0 to 1.
        slots: programs that a GPU has room for at once; others wait, in the order of launches. 0:
            there is room for all.

    Raises:
        UnsupportedError: this process does not interpret kernels.
    """

    def __init__(
        self, seed: int, *, buffered: bool = True, landing: float = 0.4, slots: int = 0
    ) -> None:
        if not INTERPRETED:
            raise UnsupportedError(
                "Interleaved: this process compiles kernels; set TRITON_INTERPRET=1 before triton "
                "is imported, or use counterpoint.testing.ranks.interpreted_ranks"
            )
        self.slots, self.queues = slots, dict[str, list[Program]]()
        self.draw = random.Random(seed)
        self.buffered, self.landing = buffered, landing
        self.left: list[Program] = []
        self.idle = 0
        self.turns = 0
        self.launched = set[str]()
        self.gpu_of = dict[str, str]()
        self.fast = ""

    def run(self, ranks: Sequence[Callable[[], None]], gpus: Sequence[int] = ()) -> None:
        """Run all ranks to their end.

        Args:
            ranks: what each does: launches of kernels. A launch returns when its grid has ended.
            gpus: the GPU of each of `ranks`, where several of them are streams of one GPU; those
                launch in the order of `ranks`. Empty: one GPU each.

        Raises:
            DeadlockError: nobody can go on.
        """
        self.main = greenlet.getcurrent()
        with ExitStack() as undo:
            self.scopes: list[Any] = []
            undo.callback(lambda: [scope.restore() for scope in reversed(self.scopes)])
            for name in ("create_atomic_rmw", "create_masked_store", "create_masked_load"):
                patched = getattr(self, f"_{name}")(getattr(BUILDER, name))
                undo.enter_context(mock.patch.object(BUILDER, name, patched))
            cached = mock.patch.object(BUILDER, "get_cache_policy", _modifier, create=True)
            undo.enter_context(cached)
            launch = self._launch

            def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
                launch(executor, args, kwargs)

            undo.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launched))
            # with every other seed one rank runs ahead of the others
            ahead = self.draw.randrange(2 * len(ranks))
            self.fast = f"rank {ahead}" if ahead < len(ranks) else ""
            for i, body in enumerate(ranks):
                before = [f"rank {j}" for j in range(i) if gpus and gpus[j] == gpus[i]]
                self._start(Program(f"rank {i}", self._behind(body, before)))
            self.gpu_of = {f"rank {i}": f"{gpus[i] if gpus else i}" for i in range(len(ranks))}
            while self.left:
                self._turn()

    def _behind(self, body: Callable[[], None], before: Sequence[str]) -> Callable[[], None]:
        """`body`, once all of `before` have launched something."""

        def run() -> None:
            while not self.launched.issuperset(before):
                self._give_way()
            body()

        return run

    def _room(self, gpu: str) -> None:
        """Start the programs that have room on a GPU, in order."""
        queue = self.queues.setdefault(gpu, [])
        running = sum(p.place is not None and self.gpu_of[p.rank] == gpu for p in self.left)
        while queue and (not self.slots or running < self.slots):
            self._start(queue.pop(0))
            running, self.idle = running + 1, 0

    def _start(self, program: Program) -> Program:
        def run() -> None:
            program.body()
            while program.stores:  # they may land long after the last instruction
                self._give_way()
            program.ended = True
            self.left.remove(program)
            self.idle = 0
            if program.place is not None:
                self._room(self.gpu_of[program.rank])

        program.thread = greenlet.greenlet(run, parent=self.main)
        program.thread.program = program
        self.left.append(program)
        return program

    def _turn(self) -> None:
        """One of those left goes on to its next atomic; now and then a store lands first."""
        self.turns += 1
        waiting = [program for program in self.left if program.stores]
        if waiting and self.draw.random() < self.landing:
            program = self.draw.choice(waiting)
            self._land(program, self.draw.randrange(len(program.stores)))
        self.idle += 1
        if self.idle > IDLE_TURNS * len(self.left):
            if not waiting:
                stands = "\n".join(f"  {p.name}: {_where(p)}" for p in self.left)
                raise DeadlockError(f"nobody can go on:\n{stands}")
            for program in waiting:
                self._flush(program)
        program = self.draw.choice(self.left)
        if self.fast and self.draw.random() < 0.8:
            ahead = [p for p in self.left if p.name.startswith(self.fast)]
            program = self.draw.choice(ahead or self.left)
        if program.place:
            builder: Any = interpreter.interpreter_builder
            builder.grid_idx, builder.grid_dim = program.place
        program.thread.switch()

    def _give_way(self) -> None:
        self.main.switch()

    def _land(self, program: Program, which: int) -> None:
        RAW.store(*program.stores.pop(which))
        self.idle = 0

    def _flush(self, program: Program) -> None:
        while program.stores:
            self._land(program, 0)

    def _launch(self, executor: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """In place of the interpreter's loop: every program of the grid at once."""
        names = inspect.getfullargspec(executor.fn).args
        self.scopes.append(INTERPRETER._patch_lang(executor.fn))
        given = {name: value for name, value in kwargs.items() if name in names}
        values = inspect.getcallargs(executor.fn, *args, **given)
        values = {
            n: v if n in executor.constexprs else INTERPRETER._implicit_cvt(v)
            for n, v in values.items()
        }
        grid = (*executor.grid, 1, 1)[:3]
        caller = _current()
        programs = [
            Program(f"{caller.name}, program {place}", lambda: executor.fn(**values), (place, grid))
            for place in np.ndindex(*grid)
        ]
        gpu = self.gpu_of[caller.rank]
        self.queues.setdefault(gpu, []).extend(programs)
        self.launched.add(caller.rank)
        self._room(gpu)
        while not all(program.ended for program in programs):
            self._give_way()

    def _create_atomic_rmw(self, plain: Any) -> Any:
        def atomic(builder: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any):
            self._give_way()
            ptr = resolved(ptr, mask, "atomic")
            if sem in (SEM.RELEASE, SEM.ACQUIRE_RELEASE):
                self._flush(_current())
            before = plain(builder, op, ptr, value, mask, sem, scope)
            now = RAW.load(ptr.data, mask.data, before.data, before.data.dtype)
            if (now != before.data).any():
                self.idle = 0
            return before

        return atomic

    def _create_masked_store(self, plain: Any) -> Any:
        def store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any):
            ptrs = resolved(ptrs, mask, "store")
            if not self.buffered:
                self.idle = 0
                return plain(builder, ptrs, value, mask, *rest)
            shape = ptrs.data.shape
            where, what, some = (
                np.array(np.broadcast_to(h.data, shape)) for h in (ptrs, value, mask)
            )
            # its elements land at several times: some here, some there
            parts = np.array([self.draw.randrange(3) for _ in range(where.size)]).reshape(shape)
            for part in range(3):
                here = some.astype(bool) & (parts == part)
                if here.any():
                    _current().stores.append((where, what, here))
            return None

        return store

    def _create_masked_load(self, plain: Any) -> Any:
        def load(builder: Any, ptrs: Any, mask: Any, other: Any, *how: Any, **named: Any):
            ptrs = resolved(ptrs, mask, "load")
            cached, *_, is_volatile = *how, *named.values()
            if is_volatile or cached in CACHED_IN_L2:  # somebody else may have written it
                self._give_way()
            program = _current()
            wanted = set(ptrs.data.ravel().tolist())
            if any(wanted & set(to[some].tolist()) for to, _, some in program.stores):
                self._flush(program)  # a program sees what it has stored itself
            return plain(builder, ptrs, mask, other, *how, **named)

        return load


def _modifier(builder: Any, modifier: Any, eviction: Any) -> Any:
    """What Triton 3.9 asks its builder to say of how a load is cached."""
    return modifier


def _current() -> Program:
    thread: Any = greenlet.getcurrent()
    return thread.program


def _where(program: Program) -> str:
    """The lines that a program stands in, innermost first: of kernels and of who launches them."""
    frame, found = program.thread.gr_frame, list[str]()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(NOT_SHOWN) and frame.f_code.co_name != "<lambda>":
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "waits for its programs"
