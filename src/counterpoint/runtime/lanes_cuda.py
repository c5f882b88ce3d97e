"""What the calls of one workspace share on its GPU: streams, epoch, fault words, tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from counterpoint.errors import PeerTimeoutError, UnsupportedError
from counterpoint.plan.bind import Arrival
from counterpoint.runtime import driver
from counterpoint.runtime.driver import Copy
from counterpoint.runtime.ranks import describe_process
from counterpoint.runtime.watchdog import Watchdog
from counterpoint.runtime.workspace import Workspace

if TYPE_CHECKING:
    from counterpoint.runtime.execute_cuda import CudaCode

TABLE_WORDS = 1 << 16
MAX_STEPS = 1 << 12  # of a plan; a fault word holds a program's number and a step's
MAX_CODES = 1 << 18


class CudaLanes:
    """Side streams by lane, the epoch, the words of a wait that gave up, constants of kernels."""

    def __init__(self, workspace: Workspace) -> None:
        device = workspace.device
        self.workspace = workspace
        self.pad_ptrs = workspace.pads.buffer_ptrs
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.fault = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.last_stream = torch.cuda.current_stream(device)
        self.fork = torch.cuda.Event()
        self._streams: dict[tuple[str, int], torch.cuda.Stream] = {}
        self._pool = torch.zeros(TABLE_WORDS, dtype=torch.int64, device=device)
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self._used = 0
        self._upload = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # the zeros above are there, whatever stream comes next
        self.codes: WeakValueDictionary[int, CudaCode] = WeakValueDictionary()
        self.num_codes = 0
        self.watchdog = Watchdog(self.fault.numpy(), self.describe)

    def stream(self, name: str, priority: int) -> torch.cuda.Stream:
        """The side stream of a lane."""
        key = (name, priority)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.workspace.device, priority=priority)
        return self._streams[key]

    def table(self, words: Sequence[int]) -> torch.Tensor:
        """`words` in device memory, int64; equal tables are one. May be called in a capture."""
        key = tuple(words)
        if key not in self._tables:
            if self._used + len(key) > TABLE_WORDS:
                raise UnsupportedError(f"workspace: tables exceed {TABLE_WORDS} words")
            place = self._pool[self._used : self._used + max(len(key), 1)]
            host = torch.tensor(key or (0,), dtype=torch.int64)
            driver.upload(host, place.data_ptr(), self._upload.cuda_stream)
            self._used += -(-len(place) // 2) * 2  # 16-byte steps: one variant of each kernel
            self._tables[key] = place
        return self._tables[key]

    def register(self, code: "CudaCode") -> int:
        """A number by which a fault word names `code`."""
        self.num_codes = (self.num_codes + 1) % MAX_CODES
        self.codes[self.num_codes] = code
        return self.num_codes

    def describe(self, tag: int, late: int) -> PeerTimeoutError:
        """The error that the fault words (1 + tag, bits of the late waits) stand for."""
        code = self.codes.get(tag // MAX_STEPS)
        timeout = f"within {self.workspace.timeout_s:g} s"
        if code is None:
            return PeerTimeoutError(f"a plan no longer in use was not signalled {timeout}")
        bound = code.program.steps[tag % MAX_STEPS]
        ranks = [a.rank for i, a in enumerate(bound.waits) if late >> i & 1]
        states = ", ".join(describe_process(self.workspace.pads.peer_pids[r]) for r in ranks)
        plan, name = code.program.plan, bound.step.name
        return PeerTimeoutError(
            f"{plan.problem.op}: ranks {ranks} did not signal step {name!r} of plan {plan.spec} to "
            f"rank {self.workspace.rank} {timeout} ({states}); the group is unusable, restart its "
            "ranks",
            rank=ranks[0] if ranks else None,
            step=name,
        )

    def posted_words(self, posts: Sequence[Arrival]) -> torch.Tensor:
        """The addresses of those slots, on the pads of the ranks that are posted to."""
        return self.table([self.pad_ptrs[rank] + 4 * slot for slot, rank in posts])

    def post_copies(self, posts: Sequence[Arrival]) -> list[Copy]:
        """The signals of a copy step: the epoch word, copied to those slots of those ranks."""
        epoch = self.epoch.data_ptr()
        return [Copy(self.pad_ptrs[rank] + 4 * slot, 4, epoch, 4, 4, 1) for slot, rank in posts]

    def awaited_words(self, waits: Sequence[Arrival]) -> torch.Tensor:
        """The addresses of those slots, on the own pad."""
        pad = self.pad_ptrs[self.workspace.rank]
        return self.table([pad + 4 * slot for slot, _ in waits])
