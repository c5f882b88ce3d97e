"""Processes that are ranks: start some on this host, join them in a group, look at them.

`spawn` is for a demo or a test on one CPU host; real jobs start their ranks with torchrun.
"""

import io
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, Literal, NamedTuple, TextIO, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from counterpoint.errors import CounterpointError, InputError, PeerTimeoutError, UnsupportedError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# a failed rank closes its connections, so its peers fail within milliseconds of it
GRACE_S = 2.0


def check_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to use, the default one for None.

    Raises:
        InputError: there is no group, or this rank is not in it.
    """
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        fix = "start ranks with torchrun and call torch.distributed.init_process_group"
        raise InputError(op, "group", want="an initialised process group", got=group, fix=fix)
    # a rank outside of a new group gets a placeholder in its place
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(op, "group", want="a ProcessGroup that has this rank", got=group)
    return group


class RankProcess(NamedTuple):
    """A process that is a rank, and the pipe on which its outcome arrives."""

    process: BaseProcess
    connection: Connection


class Outcome(NamedTuple):
    """How one rank's call ended; value is its result, its traceback or its exit code."""

    status: Literal["ok", "error", "dead"]
    value: Any


def spawn(
    fn: Callable[[int, int, *Ts], T], num_ranks: int, *args: *Ts, timeout_s: float,
    op: str = "spawn",
) -> list[T]:  # fmt: skip
    """Run `fn(rank, num_ranks, *args)` in `num_ranks` new processes on this host.

    In each, the default process group is a gloo group of all of them. The cores are shared
    out evenly. No process outlives the call, whatever way it ends.

    Args:
        fn: a module-level function; the new processes import it by name. Of a notebook's own
            functions nobody can: processes are then copies of this one, and it may be any function.
        num_ranks: how many processes.
        args: picklable; each rank gets a copy.
        timeout_s: for everything, the start of the processes (seconds) included.
        op: whom errors name.

    Returns:
        The results in rank order, copied by pickle.

    Raises:
        InputError: `fn` cannot be imported by name, an argument cannot be pickled, `num_ranks` or
            `timeout_s` is too small, or a rank that imports the script calls this.
        UnsupportedError: a process that has used its GPU cannot be copied.
        CounterpointError: a rank raised or died; the message holds all tracebacks.
        PeerTimeoutError: a rank did not return in time.
    """
    if is_importing():
        fix = 'a new process imports the script: put the call behind `if __name__ == "__main__":`'
        raise InputError(op, "call", want="made by the script alone", got="one at import", fix=fix)
    if num_ranks < 1:
        raise InputError(op, "num_ranks", want=">= 1", got=num_ranks)
    if timeout_s <= 0:
        raise InputError(op, "timeout_s", want="> 0", got=timeout_s)
    name, notebook = fn.__qualname__, _is_of_a_notebook(op, fn)
    call = _Call(op, fn, args)
    ranks: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
        place = (f"{folder}/store", timeout_s)
        try:
            with interrupts_held_back():  # until each process is one of those that are ended
                for rank in range(num_ranks):
                    ranks.append(_started(notebook, place, call, rank, num_ranks))
            outcomes = collect(ranks, timeout_s=timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                end(rank)

    missing = sorted(set(range(num_ranks)) - set(outcomes))
    _refuse_failures(op, name, outcomes, missing)
    if missing:
        raise PeerTimeoutError(
            f"{op}: ranks {missing} did not return from {name} within {timeout_s:g} s",
            rank=missing[0],
            step=name,
        )
    return [outcomes[rank].value for rank in range(num_ranks)]


def _is_of_a_notebook(op: str, fn: Callable[..., object]) -> bool:
    """Whether no file has `fn`; refused where a new process can have it in no way."""
    file = getattr(sys.modules["__main__"], "__file__", "")
    if fn.__module__ == "__main__" and not os.path.isfile(file):
        if torch.cuda.is_initialized():
            why = "this notebook has used its GPU, and such a process cannot be copied"
            fix = f"restart it, or put {fn.__qualname__} into a file and import it"
            raise UnsupportedError(f"{op}: {why}; {fix}")
        return True
    if "<" in fn.__qualname__:
        raise InputError(op, "fn", want="a module-level function", got=fn.__qualname__)
    return False


class _Call:
    """What ranks are to call. A rank unpickles it itself, and so tells what is wrong with it."""

    def __init__(self, op: str, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        self.op, self.given, self.pickled = op, (fn, *args), b""
        self.main = sys.modules["__main__"]
        # as multiprocessing would import it, before a rank could tell what that raises
        data = multiprocessing.spawn.get_preparation_data("rank")
        self.script = {key: data[key] for key in data if key.startswith("init_main_from_")}

    def __getstate__(self) -> dict[str, Any]:
        """Of a process that is being started: some values can be pickled for one alone."""
        sys.modules["__main__"] = self.main
        try:
            pickled = bytes(ForkingPickler.dumps(self.given))
        except Exception as error:
            name = next(filter(self._unpicklable, range(len(self.given))), 0)
            name = f"args[{name - 1}]" if name else "fn"
            raise InputError(self.op, name, want="picklable", got=error) from error
        return {**self.__dict__, "given": (), "main": None, "pickled": pickled}

    def _unpicklable(self, i: int) -> bool:
        try:
            ForkingPickler.dumps(self.given[i])
        except Exception:
            return True
        return False

    def loaded(self) -> tuple[Any, ...]:
        """The function and its arguments, for which the script is imported.

        Raises:
            InputError: this process cannot import them, or unpickle an argument.
        """
        if self.pickled:
            process: Any = current_process()
            process._inheriting = True
            try:
                multiprocessing.spawn.prepare(self.script)
            finally:
                del process._inheriting
            try:
                self.given = pickle.loads(self.pickled)
            except Exception as error:
                want = "what a new process can import, and arguments that it can unpickle"
                raise InputError(self.op, "fn", want=want, got=error) from error
        return self.given


def is_importing() -> bool:
    """Whether this is a new process that still imports the script that has started it."""
    return getattr(current_process(), "_inheriting", False)


def _started(
    notebook: bool, place: tuple[str, float], call: _Call, rank: int, num_ranks: int
) -> RankProcess:
    """A process that is a rank: of a notebook a copy, whose one thread is all that a copy has."""
    fork, fresh = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    context = fork if notebook else fresh
    num_threads = 1 if notebook else max(1, len(os.sched_getaffinity(0)) // num_ranks)
    receiver, sender = context.Pipe(duplex=False)
    given = sender, *place, num_threads, call, rank, num_ranks
    process = context.Process(target=_rank_main, args=given)
    # the script is left out of what multiprocessing has a process import before it runs
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = call.main
    # the rank's own end must be the last one, else its death is no end of file
    sender.close()
    return RankProcess(process, receiver)


@contextmanager
def interrupts_held_back() -> Generator[None]:
    """Raise an interrupt behind what is done here; it reaches no process that is begun here."""
    # it would let signals through once it is started, as it is with the first process
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # the mask is for the new processes: here another thread may get the signal, and the main thread
    # would raise while a new process still reads what it is to do
    held: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if in_main else 0
    try:
        yield
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if held:
            signal.raise_signal(signal.SIGINT)


def _refuse_failures(
    op: str, name: str, outcomes: Mapping[int, Outcome], missing: Sequence[int]
) -> None:
    failures = describe_failures(outcomes)
    if failures:
        killed = f"\n--- ranks {missing} were killed" if missing else ""
        raise CounterpointError(f"{op}: {name} failed\n{failures}{killed}")


class _WholeLines(io.TextIOBase):
    """The output of a rank in a notebook, which mixes the pieces that ranks write."""

    def __init__(self, target: TextIO) -> None:
        self.target, self.begun = target, ""

    def write(self, s: str) -> int:
        *lines, self.begun = (self.begun + s).split("\n")
        if lines:
            self.target.write("\n".join([*lines, ""]))
        return len(s)

    def flush(self) -> None:
        if self.begun:
            self.target.write(self.begun)
            self.begun = ""
        self.target.flush()


def _rank_main(
    connection: Connection,
    store_path: str,
    timeout_s: float,
    num_threads: int,
    call: _Call,
    rank: int,
    num_ranks: int,
) -> None:
    exit_with_parent()
    if not isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _WholeLines(sys.stdout)
    torch.set_num_threads(num_threads)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)  # for what this rank loads or starts

    def body() -> object:
        try:
            fn, *args = call.loaded()
            with gloo_group(rank, num_ranks, store_path, timeout_s=timeout_s):
                return fn(rank, num_ranks, *args)
        finally:  # the caller, once it has the outcome, kills this process
            sys.stdout.flush()

    report(connection, body)


@contextmanager
def gloo_group(rank: int, num_ranks: int, store_path: str, *, timeout_s: float) -> Generator[None]:
    """Be `rank` of a gloo group of `num_ranks` processes of this host.

    Args:
        rank: this process.
        num_ranks: how many processes meet at the same `store_path`.
        store_path: a file that does not exist yet, fresh for each group.
        timeout_s: of the caller. The group's own is 3/4 of it, so that a rank which waits
            for a lost peer reports it before it is itself killed for being late.
    """
    # all ranks are on this host, and its name need not resolve to an address
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=0.75 * timeout_s),
    )
    try:
        # a rank is done connecting before its peers are: if it died now, they could not join
        dist.barrier()
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def report(connection: Connection, body: Callable[[], object]) -> None:
    """Send the `Outcome` of `body()`, whatever it is; `collect` receives it."""
    # plain pickle: torch's own would send a tensor as a handle that dies with this process.
    # BaseException: a process boundary, and pytest's own outcomes derive from it
    try:
        value = body()
        try:
            outcome = pickle.dumps(Outcome("ok", value))
        except Exception as error:
            raise CounterpointError(f"the result cannot be pickled: {error}") from error
    except BaseException:
        outcome = pickle.dumps(Outcome("error", traceback.format_exc()))
    connection.send_bytes(outcome)


def collect(
    ranks: Sequence[RankProcess], *, timeout_s: float, expect_dead: Collection[int] = ()
) -> dict[int, Outcome]:
    """Wait for the outcome of each rank, but only `GRACE_S` after the first failure.

    Args:
        ranks: in rank order; each calls `report` once.
        timeout_s: how long to wait in all.
        expect_dead: ranks whose death is no failure.

    Returns:
        The outcomes by rank. A rank that is still at it has none.
    """
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(outcomes) < len(ranks):
        pending = {r.connection: i for i, r in enumerate(ranks) if i not in outcomes}
        # a death closes the pipe, so the pipes alone tell both
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending[connection]
            outcomes[rank] = outcome = _receive(ranks[rank])
            if outcome.status == "error" or (outcome.status == "dead" and rank not in expect_dead):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _receive(rank: RankProcess) -> Outcome:
    try:
        said = rank.connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        rank.process.join()
        return Outcome("dead", rank.process.exitcode)
    try:
        return pickle.loads(said)
    except Exception as error:  # a process boundary: the result may do anything here
        return Outcome("error", f"a result that cannot be unpickled: {error!r}")


def describe_failures(outcomes: Mapping[int, Outcome]) -> str:
    """All tracebacks and exit codes of the ranks that failed, "" if none did."""
    lines: list[str] = []
    for rank, outcome in sorted(outcomes.items()):
        if outcome.status == "error":
            lines.append(f"--- rank {rank} raised\n{outcome.value}".rstrip())
        elif outcome.status == "dead":
            lines.append(f"--- rank {rank} died with exit code {_exit(outcome.value)}")
    return "\n".join(lines)


def _exit(code: int) -> str:
    """An exit code, and what it says of the process."""
    if code < 0:
        known = -code in set(signal.Signals)
        return f"{code}: killed by {signal.Signals(-code).name if known else 'a signal'}"
    return f"{code}: it ended before it returned"


def end(rank: RankProcess) -> None:
    """Kill the process if it still runs, and give back what this process holds of it."""
    if rank.process.pid is not None:
        rank.process.kill()
        rank.process.join()
    rank.connection.close()


def exit_with_parent() -> None:
    """End this process as soon as the process that started it is gone, even if it hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "exit_with_parent is for processes that multiprocessing started"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="exit_with_parent", daemon=True).start()


def describe_process(pid: int) -> str:
    """Say of a process of this host whether it lives: "pid 123 is stopped".

    Returns:
        "pid N is dead", "pid N is stopped" (by a signal or a debugger) or "pid N is alive".
    """
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # the name before it may hold spaces and parentheses
            state = stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "X"
    word = {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(state, "alive")
    return f"pid {pid} is {word}"


def gather_object(value: T, group: dist.ProcessGroup) -> list[T]:
    """All-gather a picklable value: no rank returns before each has called it."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The timeout of a process group in seconds; torch's default where it does not say."""
    # private, as torch has no public way to it; only used here
    try:
        options: Any = group._get_backend(device).options  # pyright: ignore[reportPrivateUsage]
        found: timedelta = options._timeout
    except (AttributeError, RuntimeError):
        found = dist.default_pg_timeout
    return found.total_seconds()


def group_of(name: str) -> dist.ProcessGroup:
    """Find the process group of this name.

    Custom operators get their group by name: a string survives compilation and caching.

    Raises:
        InputError: no live group has this name.
        UnsupportedError: this torch keeps no groups by name.
    """
    # private, as torch has no public way from a name to its group; only used here
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    if resolve is None:
        raise UnsupportedError(f"group_of: torch {torch.__version__} has no groups by name")
    try:
        return resolve(name)
    except RuntimeError as error:
        raise InputError(
            "group_of",
            "name",
            want="the group_name of a live process group",
            got=repr(name),
            fix="pass group.group_name, after init_process_group or new_group "
            "and before destroy_process_group",
        ) from error


def ranks_of_groups() -> dict[str, tuple[int, ...]] | None:
    """The ranks of each group of this process by its name, in its order, this rank's own first.

    None where this torch does not say it.
    """
    # private, as torch has no public list of groups
    known: Any = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_group_ranks", None)
    if known is None:
        return None
    here = dist.get_rank() if dist.is_initialized() else 0
    return {
        group.group_name: (here, *sorted(ranks, key=ranks.__getitem__))
        for group, ranks in known.items()
        if isinstance(group, dist.ProcessGroup)
    }
