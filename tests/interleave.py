"""Kernels of all ranks in one process, their programs in turn: deadlocks and missing releases show.

Triton's interpreter runs the programs of a grid one after the other, to the end. Here each program
is a greenlet, as is each rank: a seeded draw says who goes on at each atomic and each volatile or
L2 load, so programs may wait for one another whatever their order. That nobody can go on is found
at once, and says where everyone stands.

Plain stores of a program wait in a buffer of its own and land in parts, at random times, in any
order: what a release of that program publishes has landed, what a relaxed atomic publishes has not.
An acquire that is missing does not show: loads are in order.

    def rank(r):
        my_kernel[(2,)](...)

    Interleaved(seed).run([lambda r=r: rank(r) for r in range(4)])

Needs an interpreting process (TRITON_INTERPRET=1); memory of the ranks is plain CPU tensors.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import greenlet
import numpy as np
import triton.runtime.interpreter as interpreter

BUILDER: Any = interpreter.InterpreterBuilder
SEM: Any = interpreter._ir.MEM_SEMANTIC  # type: ignore[attr-defined]
# as Triton up to 3.8 says it to the builder of a load, and from 3.9
CACHED_IN_L2: Any = (interpreter._ir.CACHE_MODIFIER.CG, "cg")  # type: ignore[attr-defined]
RAW: Any = interpreter._interpreter  # type: ignore[attr-defined]
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


class Interleaved:
    """One run of some ranks.

    Args:
        seed: of the order.
        buffered: plain stores land late and out of order.
        landing: how likely one lands at each turn.
        slots: programs that a GPU has at once; others wait, in the order of launches. 0: any.
    """

    def __init__(
        self, seed: int, *, buffered: bool = True, landing: float = 0.4, slots: int = 0
    ) -> None:
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
            gpus: of each of `ranks`, where several of them are streams of one GPU, that launch in
                their order here.

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
            # Triton 3.9 asks its builder what to say of how a load is cached
            cached = mock.patch.object(
                BUILDER, "get_cache_policy", lambda _, modifier, eviction: modifier, create=True
            )
            undo.enter_context(cached)
            launch = self._launch
            undo.enter_context(
                mock.patch.object(
                    interpreter.GridExecutor, "__call__",
                    lambda executor, *args, **kwargs: launch(executor, args, kwargs),
                )
            )  # fmt: skip
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
        self.scopes.append(interpreter._patch_lang(executor.fn))
        given = {name: value for name, value in kwargs.items() if name in names}
        values = inspect.getcallargs(executor.fn, *args, **given)
        convert: Any = interpreter._implicit_cvt
        values = {n: v if n in executor.constexprs else convert(v) for n, v in values.items()}
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
            cached, *_, is_volatile = *how, *named.values()
            if is_volatile or cached in CACHED_IN_L2:  # somebody else may have written it
                self._give_way()
            program = _current()
            wanted = set(ptrs.data.ravel().tolist())
            if any(wanted & set(to[some].tolist()) for to, _, some in program.stores):
                self._flush(program)  # a program sees what it has stored itself
            return plain(builder, ptrs, mask, other, *how, **named)

        return load


def _current() -> Program:
    thread: Any = greenlet.getcurrent()
    return thread.program


def _where(program: Program) -> str:
    """The kernel's lines that a program stands in, innermost first."""
    frame, found = program.thread.gr_frame, list[str]()
    while frame is not None:
        name = frame.f_code.co_filename
        if "/kernels/" in name or "test_" in name:
            found.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "waits for its programs"
