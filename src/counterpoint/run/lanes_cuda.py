"""What the calls of one workspace share on its GPU: streams, epoch, fault words, tables."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import torch

from counterpoint.errors import PeerTimeoutError
from counterpoint.gpu import driver
from counterpoint.gpu.delay import Delay
from counterpoint.gpu.driver import Copy
from counterpoint.gpu.green import green_stream
from counterpoint.group.ranks import describe_process
from counterpoint.group.workspace import Workspace, refuse_capture
from counterpoint.plan.bind import Arrival, Program
from counterpoint.run.replay import Replays
from counterpoint.run.tables import Tables
from counterpoint.run.watchdog import Watchdog

MAX_STEPS = 1 << 12  # of a plan; a fault word holds a program's number and a step's
MAX_PROGRAMS = 1 << 16  # that are told apart; replayed graphs may hold old ones
Awaited = tuple[tuple[str, tuple[int, ...]], ...]  # of each step: its name, the ranks it waits for


def awaited_by(program: Program) -> Awaited:
    """What each step of a program waits for."""
    p = program.plan.problem
    size = p.ranks // p.islands
    first = program.rank // size * size
    mates = tuple(range(first, first + size))  # of a kernel that waits for its peers
    return tuple(
        (b.step.name, mates if b.step.spins else tuple(a.rank for a in b.waits))
        for b in program.steps
    )


# the handle of a device's current stream, in a tenth of the time that a torch.cuda.Stream takes;
# private, and what torch's own compiler emits: a feature test holds it
raw_stream = torch._C._cuda_getCurrentRawStream if torch.cuda.is_available() else lambda device: 0  # pyright: ignore
# whether a profiler is on: private, and typed so
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore


class _Captured(NamedTuple):
    """A stream of a capture, and the capture's number."""

    capture: int
    stream: torch.cuda.Stream

    def behind(self, last: "_Captured | None") -> "_Captured":
        """This one, which waits for the last one of the same capture."""
        if last is not None and last.capture == self.capture and last.stream != self.stream:
            self.stream.wait_stream(last.stream)
        return self


class CudaLanes:
    """Side streams by lane, the epoch, the word of a wait that gave up, constants of kernels.

    Attributes:
        stop: [1] int32 of the host, not 0 once kernels shall wait no more.
    """

    def __init__(self, workspace: Workspace) -> None:
        device = workspace.device
        self.workspace = workspace
        self.stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.epoch = self.words_and_stop(2)
        self.fault = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._last = (raw_stream(device.index), torch.cuda.current_stream(device))
        self._left = torch.cuda.Event()  # of the stream of the last call
        self._captured: _Captured | None = None
        self.fork = torch.cuda.Event()
        self._streams: dict[tuple[str, int, int | None], torch.cuda.Stream] = {}
        self._upload = torch.cuda.Stream(device)
        self.tables = Tables(workspace, self._upload.cuda_stream)
        torch.cuda.synchronize(device)  # the zeros above are there, whatever stream comes next
        self._awaited: dict[int, tuple[str, str, Awaited]] = {}
        self._num_programs = 0
        self.signals_compiled = False
        self.replays = Replays(device)
        words = self.fault.numpy()
        stop = partial(self.stop.numpy().fill, 1)
        self.watchdog = Watchdog(words, self.describe, workspace.board, stop)

    def words_and_stop(self, number: int) -> torch.Tensor:
        """Words of a kernel on the GPU, 0 at first, and behind them the address of `stop`.

        That is a word of the host, by which it ends waits without a call of CUDA, which may wait.

        Args:
            number: of words; even.
        """
        words = torch.zeros(number + 2, dtype=torch.int32)
        words[number:].view(torch.int64)[0] = self.stop.data_ptr()
        return words.to(self.workspace.device)

    def follow(self, spins: bool = False) -> None:
        """Let the current stream wait for the last call, where that was on another one.

        Args:
            spins: for the last of any group, too, that has kernels that wait for their peers.
        """
        raw = raw_stream(self.workspace.device.index)
        if spins and _turns.get(self.workspace.device, _NOBODY)[0] != raw:
            in_turn(self.workspace.device)
        if raw != self._last[0]:
            stream = torch.cuda.current_stream(self.workspace.device)
            self._left.record(self._last[1])
            stream.wait_event(self._left)
            self._last = (raw, stream)

    def follow_in_capture(self, spins: bool = False) -> None:
        """As `follow`, while a graph is captured: of the calls in that graph.

        Args:
            spins: as there.
        """
        device = self.workspace.device
        stream = torch.cuda.current_stream(device)
        here = _Captured(driver.capture_of(stream.cuda_stream), stream)
        self._captured = here.behind(self._captured)
        if spins:
            _captured_turns[device] = here.behind(_captured_turns.get(device))

    def stream(self, name: str, priority: int, num_sms: int | None = None) -> torch.cuda.Stream:
        """The side stream of a lane."""
        key, device = (name, priority, num_sms), self.workspace.device
        if key not in self._streams:
            self._streams[key] = (
                green_stream(device, num_sms)
                if num_sms
                else torch.cuda.Stream(device, priority=priority)
            )
        return self._streams[key]

    @cached_property
    def delay(self) -> Delay:
        """What holds a kernel back on its stream."""
        return Delay(self.workspace.device)

    def register(self, op: str, spec: str, steps: Awaited) -> int:
        """A number by which a fault word names one of `steps`: this plus the step's index."""
        self._num_programs = (self._num_programs + 1) % MAX_PROGRAMS
        self._awaited[self._num_programs] = op, spec, steps
        return self._num_programs * MAX_STEPS

    def describe(self, tag: int, late: int) -> PeerTimeoutError:
        """The error that a fault word stands for: a step's tag, and bits of its late waits."""
        op, spec, steps = self._awaited[tag // MAX_STEPS]
        name, sources = steps[tag % MAX_STEPS]
        ranks = [rank for i, rank in enumerate(sources) if late >> i % 32 & 1]
        return not_signalled(self.workspace, op, spec, name, ranks)

    def posted_words(self, posts: Sequence[Arrival]) -> torch.Tensor:
        """The addresses of those slots, on the pads of the ranks that are posted to."""
        return self.tables.of(
            [self.workspace.pads.buffer_ptrs[rank] + 4 * slot for slot, rank in posts]
        )

    def post_copies(self, posts: Sequence[Arrival]) -> list[Copy]:
        """The signals of a copy step: the epoch word, copied to those slots of those ranks."""
        epoch = self.epoch.data_ptr()
        return [
            Copy(self.workspace.pads.buffer_ptrs[rank] + 4 * slot, 4, epoch, 4, 4, 1)
            for slot, rank in posts
        ]

    def awaited_words(self, waits: Sequence[Arrival]) -> torch.Tensor:
        """The addresses of those slots, on the own pad."""
        pad = self.workspace.pads.buffer_ptrs[self.workspace.rank]
        return self.tables.of([pad + 4 * slot for slot, _ in waits])


def not_signalled(
    workspace: Workspace, op: str, spec: str, step: str, ranks: Sequence[int]
) -> PeerTimeoutError:
    """The error of a kernel's wait that has given up, and for whom it waited."""
    each = [describe_process(workspace.pads.peer_pids[r]) for r in ranks]
    gone = [r for r, state in zip(ranks, each, strict=True) if not state.endswith("alive")]
    within = "" if gone else f" within {workspace.timeout_s:g} s"
    return PeerTimeoutError(
        f"{op}: ranks {list(ranks)} did not signal step {step!r} of plan {spec} to rank "
        f"{workspace.rank}{within} ({', '.join(each)}); the group is unusable, restart its ranks "
        f"({workspace.board.bound} is the bound)",
        rank=next(iter([*gone, *ranks]), None),
        step=step,
    )


_NOBODY: tuple[int, None] = (-1, None)
_turns: dict[torch.device, tuple[int, torch.cuda.Stream]] = {}
_captured_turns: dict[torch.device, _Captured] = {}


@cache
def _left_on(device: torch.device) -> torch.cuda.Event:
    """The event of the stream of a GPU's last fused kernel."""
    return torch.cuda.Event()


def in_turn(device: torch.device) -> None:
    """Let the current stream wait for the last fused kernel, where that was on another one.

    Two grids that wait for peers may not fit a GPU together. Ranks launch them in one order, as
    they do collectives.
    """
    raw, last = raw_stream(device.index), _turns.get(device)
    if last is not None and last[0] == raw:
        return
    stream = torch.cuda.current_stream(device)
    if last is not None:
        left = _left_on(device)
        left.record(last[1])
        stream.wait_event(left)
    _turns[device] = raw, stream


def lanes_of(workspace: Workspace) -> CudaLanes:
    """The lanes of a workspace on a GPU; made at its first call.

    Raises:
        InputError: a graph is being captured, and they are not there yet.
    """
    if workspace.lanes is None:
        refuse_capture("none: this is the group's first call")
        workspace.lanes = CudaLanes(workspace)
    return workspace.lanes
