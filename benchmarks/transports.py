"""What carries bytes between the ranks of a group, side by side behind one interface.

| name | on a GPU | on CPU ranks |
|---|---|---|
| `nccl` | NCCL's collectives: kernels on SMs | gloo |
| `nccl_zero_cta` | NCCL by copy engines, of memory registered with it | gloo, a group of its own |
| `sm` | a Triton kernel that stores to the peers | that, where it is interpreted, or copies |
| `copy_engine` | DMA copies to the peers, in ring order | copies to the peers' shared memory |

NCCL brings its ranks together by itself. The last two stand between a meeting of all ranks, which
says that every target may be written, and the arrival of what the others send.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_moves import ByCopies, ByCpuCopies, ByKernel, ByTriton, Move, Peers
from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import driver, zero_cta
from counterpoint.gpu.device_limits import refused_on
from counterpoint.group import symmetric_cuda
from counterpoint.run import compute

ALIGN_BYTES = 16


class Transport:
    """Moves equal parts between the ranks of a group, from `source` to `target`.

    All ranks make their moves, and call them, in one order. A move runs on the current stream and
    may be captured in a CUDA graph after one call.

    Attributes:
        name: in TRANSPORTS.
        source: uint8 [num_bytes], what this rank sends.
        target: uint8 [num_bytes], what all ranks write to on this one.
    """

    def __init__(self, name: str, carrier: "_Library | Peers") -> None:
        self.name = name
        self._carrier = carrier
        self.source, self.target = carrier.source, carrier.target

    def all_gather(self, part_bytes: int, *, meets: bool = True) -> Move:
        """What puts source[:part] of rank r into target[r * part :][:part] of all ranks.

        Args:
            part_bytes: of each rank, a multiple of 16, equal on all ranks.
            meets: False: ranks neither meet before it nor is what they send waited for, that is
                the caller's business, as a plan's. NCCL and gloo always do both.

        Raises:
            InputError: parts do not fit the memory, or are no multiple of 16 bytes.
        """
        self._check(part_bytes)
        return self._carrier.move(part_bytes, scatters=False, meets=meets)

    def all_to_all(self, part_bytes: int, *, meets: bool = True) -> Move:
        """What puts source[q * part :][:part] of rank r into target[r * part :][:part] of rank q.

        Arguments and errors are those of `all_gather`.
        """
        self._check(part_bytes)
        return self._carrier.move(part_bytes, scatters=True, meets=meets)

    def check(self) -> None:
        """Raise what a wait for peers has found, if one has given up.

        Raises:
            PeerTimeoutError: names the ranks that did not come within COUNTERPOINT_TIMEOUT_S.
        """
        self._carrier.check()

    def close(self) -> None:
        """Give its memory back; all ranks call this when no move of it will run again."""
        self._carrier.close()

    def _check(self, part_bytes: int) -> None:
        most = self.target.numel() // self._carrier.ranks
        if not 0 < part_bytes <= most or part_bytes % ALIGN_BYTES:
            want = f"a multiple of {ALIGN_BYTES} from {ALIGN_BYTES} to {most}"
            raise InputError(f"transport {self.name}", "part_bytes", want=want, got=part_bytes)


class _Library:
    """Collectives of NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        self.group, self.ranks = group, group.size()
        self.source, self.target = self.memory(group, device, num_bytes)

    def memory(
        self, group: dist.ProcessGroup, device: torch.device, num_bytes: int
    ) -> tuple[Tensor, Tensor]:
        """Source and target."""
        return (
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
        )

    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        """The library meets whether asked or not."""
        whole = self.target[: self.ranks * part_bytes]
        if scatters:
            source = self.source[: self.ranks * part_bytes]
            return lambda: _ignore(dist.all_to_all_single(whole, source, group=self.group))
        part = self.source[:part_bytes]
        return lambda: _ignore(compute.all_gather(whole, part, group=self.group))

    def check(self) -> None:
        """The library watches its ranks by itself."""

    def close(self) -> None:
        """Its memory is torch's."""


class _ZeroCta(_Library):
    """NCCL's own copy-engine collectives."""

    def memory(
        self, group: dist.ProcessGroup, device: torch.device, num_bytes: int
    ) -> tuple[Tensor, Tensor]:
        own = zero_cta.ZeroCta(group, device)
        self.group = own.group
        source, target = (own.empty(num_bytes, dtype=torch.uint8) for _ in range(2))
        self._side, self._edge = torch.cuda.Stream(device), torch.cuda.Event()
        return source, target

    def move(self, part_bytes: int, *, scatters: bool, meets: bool) -> Move:
        """Its copies are batches, which the legacy default stream refuses: then beside it."""
        move = super().move(part_bytes, scatters=scatters, meets=meets)

        def run() -> None:
            current = torch.cuda.current_stream()
            if current.cuda_stream:
                move()
                return
            self._edge.record(current)
            self._side.wait_event(self._edge)
            with torch.cuda.stream(self._side):
                move()
            self._edge.record(self._side)
            current.wait_event(self._edge)

        return run


class _SecondGloo(_Library):
    """What stands for it on CPU ranks: a group of its own of the same ranks.

    It ends with the process group: a later one of the same ranks would have its name, and meet
    under the addresses of the old one.
    """

    def memory(
        self, group: dist.ProcessGroup, device: torch.device, num_bytes: int
    ) -> tuple[Tensor, Tensor]:
        made = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), "a rank of a group makes a group with its ranks"
        self.group = made
        return super().memory(group, device, num_bytes)


def _ignore(_: Any) -> None:
    pass


def _lacks_nccl(group: dist.ProcessGroup, device: torch.device) -> str:
    if not dist.is_nccl_available():
        return "this torch has no NCCL; install one that is built for CUDA"
    if "nccl" not in (has := dist.get_backend_config(group)):
        return f"the group's backend is {has}; make it by init_process_group('nccl')"
    return ""


def _lacks_zero_cta(group: dist.ProcessGroup, device: torch.device) -> str:
    return _lacks_nccl(group, device) or zero_cta.missing(device)


def _lacks_peers(group: dist.ProcessGroup, device: torch.device) -> str:
    if why := refused_on(device):
        return why
    try:
        symmetric_cuda.torch_symmetric_memory()
    except UnsupportedError as error:
        return str(error)
    here = torch.cuda.current_device()
    visible = torch.cuda.device_count()
    if visible == group.size():  # else the peers' numbers are not known here
        far = [
            i for i in range(visible)
            if i != here and not torch.cuda.can_device_access_peer(here, i)
        ]  # fmt: skip
        if far:
            fix = "NVLink or PCIe peer access would do, see `nvidia-smi topo -p2p n`"
            return f"GPU {here} does not reach GPUs {far}; {fix}"
    return ""


def _lacks_copy_engine(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        if not driver.num_copy_engines(torch.cuda.current_device()):
            return f"{torch.cuda.get_device_name(device)} has no copy engine"
    except UnsupportedError as error:
        return str(error)
    return _lacks_peers(group, device)


class _Way(NamedTuple):
    """A transport: its name in tables, why a GPU lacks it, what carries it there and on CPUs."""

    label: str
    lacks: Callable[[dist.ProcessGroup, torch.device], str]
    cuda: type[_Library] | type[Peers]
    cpu: type[_Library] | type[Peers]


TRANSPORTS: dict[str, _Way] = {
    "nccl": _Way("NCCL", _lacks_nccl, _Library, _Library),
    "nccl_zero_cta": _Way("NCCL, zero-CTA", _lacks_zero_cta, _ZeroCta, _SecondGloo),
    "sm": _Way("SM copies", _lacks_peers, ByKernel, ByTriton),
    "copy_engine": _Way("copy engine", _lacks_copy_engine, ByCopies, ByCpuCopies),
}


def missing(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """Why this machine lacks a transport, and what would provide it; '' if it is there.

    Args:
        name: in TRANSPORTS.
        group: whose ranks it would be between.
        device: of this rank. CPU ranks have a stand-in for each.

    Raises:
        InputError: there is no transport of that name.
    """
    if name not in TRANSPORTS:
        raise InputError("transport", "name", want=f"one of {', '.join(TRANSPORTS)}", got=name)
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"ranks are on cpu or cuda, not on {device.type}"
    return TRANSPORTS[name].lacks(group, device)


def open_transport(
    name: str, group: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> Transport:
    """Set a transport up; all ranks of `group` call this, in the same order as others.

    Args:
        name: in TRANSPORTS.
        group: of the ranks.
        device: of this rank.
        num_bytes: of its source and of its target, equal on all ranks.

    Raises:
        InputError: there is no transport of that name, or `num_bytes` is no multiple of 16.
        UnsupportedError: this machine lacks it; says why and what would provide it.
        torch.OutOfMemoryError: a rank is out of memory.
    """
    if why := missing(name, group, device):
        raise UnsupportedError(f"transport {name}: {why}")
    if num_bytes < 1 or num_bytes % ALIGN_BYTES:
        want = f"a multiple of {ALIGN_BYTES} above 0"
        raise InputError(f"transport {name}", "num_bytes", want=want, got=num_bytes)
    way = TRANSPORTS[name]
    carrier = (way.cuda if device.type == "cuda" else way.cpu)(group, device, num_bytes)
    return Transport(name, carrier)
