"""What a machine is in numbers: limits and peak rates of its GPUs, their links, what work costs.

`counterpoint.presets` has machines as their datasheets state them; what a machine reaches is
lower: its `costs` say so, measured on it or, where nobody has measured, derived from the peaks.
"""

import json
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NoReturn

from counterpoint.costs import Costs, Sms
from counterpoint.errors import InputError
from counterpoint.ranges import check, plain

KIB, MIB = 2**10, 2**20
BY_HAND = "numbers given by hand"
# compute capabilities of GPUs that kernels of this library run on
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3")

Topology = Literal["switch", "mesh", "pcie"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Limits and peaks of one GPU (of one GCD, where a package holds two), in SI base units.

    Peaks are dense (no structured sparsity) and per GPU. SM stands for CU on AMD. The limits of an
    SM, which only occupancy asks for, are those of Hopper and Blackwell unless given.

    Args:
        name: Marketing name and form factor.
        num_sms: SMs that are enabled, 1 to 4096.
        max_threads_per_sm: Resident threads, 1 to 65,536.
        max_warps_per_sm: Resident warps (waves), 1 to 4096.
        max_blocks_per_sm: Resident blocks (workgroups), 1 to 4096.
        registers_per_sm: 32-bit registers, 1024 to 2**24.
        shared_bytes_per_sm: Shared memory (LDS) of an SM, 1 KiB to 1 GiB.
        shared_bytes_per_block: Most that one block may use, static and dynamic together; likewise.
        shared_reserved_bytes_per_block: What the system takes for itself from each block, up to
            1 MiB.
        shared_granule_bytes: Shared memory of a block is rounded up to a multiple of this, 1 byte
            to 1 MiB.
        bf16_flop_per_s: Dense matrix rate with fp32 accumulation, 1e9 to 1e18.
        fp32_flop_per_s: Vector rate, an FMA counted as two, 1e9 to 1e18.
        hbm_bytes_per_s: Device memory, reads and writes together, 1e8 to 1e16.
        hbm_bytes: Device memory, 1e9 to 1e15; the datasheet's GB read as 1e9, a little less than
            there is.
        l2_bytes: All L2 slices, 512 KiB to 1 TiB; a memory-side cache behind them is not counted.
        source: Where the numbers come from.
        capability: Compute capability, "9.0"; "" where nobody has said it.

    Raises:
        InputError: A number is of another kind or out of its range, as it is where its unit has
            slipped.
    """

    name: str
    num_sms: int
    max_threads_per_sm: int = 2048
    max_warps_per_sm: int = 64
    max_blocks_per_sm: int = 32
    registers_per_sm: int = 64 * KIB
    shared_bytes_per_sm: int = 228 * KIB
    shared_bytes_per_block: int = 227 * KIB
    shared_reserved_bytes_per_block: int = KIB
    shared_granule_bytes: int = 128
    bf16_flop_per_s: float
    fp32_flop_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    l2_bytes: int
    source: str = BY_HAND
    capability: str = ""

    def __post_init__(self) -> None:
        check(f"DeviceSpec {self.name}", self)
        if self.max_threads_per_sm < self.max_warps_per_sm:
            want = f"at least one for each of {self.max_warps_per_sm} warps"
            got = self.max_threads_per_sm
            raise InputError(f"DeviceSpec {self.name}", "max_threads_per_sm", want=want, got=got)

    @property
    def warp_size(self) -> int:
        """Threads per warp: 32, or 64 on AMD."""
        return self.max_threads_per_sm // self.max_warps_per_sm

    @property
    def one_at_a_time(self) -> bool:
        """Whether kernels take turns in the order of a plan: there is room for one block."""
        return self.num_sms == self.max_blocks_per_sm == 1


def kernels_refused(capability: str) -> str:
    """Why kernels of this library do not run on GPUs of a compute capability; "" if they do."""
    if not capability or capability in CAPABILITIES:
        return ""
    *some, last = CAPABILITIES
    known = f"{', '.join(some)} and {last}"
    return f"kernels of counterpoint run on compute capabilities {known}, not on {capability}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """How the GPUs of one node reach each other.

    4xH200, torch 2.11, 2026-11: a copy engine pulls 359 and pushes 378 GB/s of the 450 that the
    datasheet states (64 MiB a copy); of the 9 us of a 1 MiB copy, 6 are overhead.

    Args:
        name: Generation and form.
        bytes_per_s: Per GPU and per direction, over all its links to GPUs of the node, 1e6 to
            1e15. Datasheets often state the sum of both directions: pass half of it.
        latency_s: From a store to its being visible at the peer, 0 to 0.1.
        topology: "switch": one pair may use all of `bytes_per_s`; "mesh": each pair has its own
            link, an equal part of it; "pcie": like switch, through the host.
        copy_overhead_s: Cost of one copy-engine copy beside its bytes, on the GPU, 0 to 0.1.
        source: Where the numbers come from.
        collective_bytes_per_s: What collectives of the library reach, where that was measured
            apart, as of NICs; None: `bytes_per_s`.

    Raises:
        InputError: A number is out of its range, as it is where its unit has slipped, or the
            topology is unknown.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 2e-6
    topology: Topology = "switch"
    copy_overhead_s: float = 5.5e-6
    source: str = BY_HAND
    collective_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check(f"LinkSpec {self.name}", self)

    def pair_bytes_per_s(self, num_devices: int) -> float:
        """Return what one GPU can send to one peer, in bytes per second and direction.

        Switch and pcie: all of `bytes_per_s`. Mesh: `bytes_per_s / (num_devices - 1)`.

        Args:
            num_devices: GPUs of the node, those that do not communicate included.

        Raises:
            InputError: There are fewer than two GPUs.
        """
        if num_devices < 2:
            op = "LinkSpec.pair_bytes_per_s"
            raise InputError(op, "num_devices", want="at least 2", got=num_devices)
        return self.bytes_per_s / (num_devices - 1) if self.topology == "mesh" else self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal GPUs of one node, or island, and the links between them.

    `choose`, `estimate` and `build` take one, and so they do its name, its JSON and a file of that.

    Args:
        name: e.g. "h200-8".
        device: One of its GPUs.
        link: Of each of its GPUs.
        num_devices: GPUs of the node, 1 to 65,536.
        gemm_tile: Rows and columns of the output tile of the vendor's large GEMM, each 1 to 4096,
            for wave counts.
        measured: What the parts of a plan cost, measured on such a machine; None if nobody has.
        source: Where the numbers come from.
        nic: What reaches other islands from each of its GPUs, at the rate that it is used at; None:
            nothing is known of it.

    Raises:
        InputError: A field is of another kind or out of its range.

    Example:
        >>> import counterpoint as cp
        >>> device = cp.DeviceSpec(
        ...     name="GH200", num_sms=132, bf16_flop_per_s=989e12, fp32_flop_per_s=67e12,
        ...     hbm_bytes_per_s=4e12, hbm_bytes=96e9, l2_bytes=60 * 2**20)
        >>> link = cp.LinkSpec(name="NVLink 4", bytes_per_s=450e9)
        >>> mine = cp.Machine(name="mine", device=device, link=link, num_devices=4)
        >>> layer = cp.Problem("all_gather_matmul", m=8192, n=7168, k=8192, ranks=4)
        >>> choice = cp.choose(layer, mine)
        >>> choice.spec
        'graded 1/1/2 xor'
        >>> cp.choose(layer, mine.to_json()) == choice
        True
    """

    name: str
    device: DeviceSpec
    link: LinkSpec
    num_devices: int
    gemm_tile: tuple[int, int] = (128, 256)
    measured: Costs | None = None
    source: str = BY_HAND
    nic: LinkSpec | None = None

    def __post_init__(self) -> None:
        check(f"Machine {self.name}", self)

    @property
    def costs(self) -> Costs:
        """What the parts of a plan cost: as measured, or else derived from the datasheet."""
        return self.measured or _from_datasheet(self.device, self.link)

    @property
    def sms(self) -> Sms:
        """What a matmul runs on."""
        return Sms(self.device.num_sms, self.gemm_tile, self.device.l2_bytes)

    def of_ranks(self, ranks: int) -> "Machine":
        """Return the machine of so many of its GPUs: on a mesh each of them has fewer links.

        Args:
            ranks: GPUs that communicate.
        """
        if self.link.topology != "mesh" or not 1 < ranks < self.num_devices:
            return self
        links = self.num_devices - 1
        rates = "copy_bytes_per_s", "collective_bytes_per_s", "direct_bytes_per_s"
        each = {name: getattr(self.costs, name) / links * (ranks - 1) for name in rates}
        link_bytes_per_s = self.link.pair_bytes_per_s(self.num_devices) * (ranks - 1)
        return replace(
            self, num_devices=ranks, link=replace(self.link, bytes_per_s=link_bytes_per_s),
            measured=self.measured and replace(self.measured, **each),
        )  # fmt: skip

    def to_json(self) -> str:
        """Return all fields as JSON; `from_json` gives an equal machine back."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read what `to_json` wrote.

        Raises:
            InputError: `text` is not the JSON of a machine, or a value in it is refused.
        """
        if not isinstance(text, str):
            _refuse(got=type(text).__name__)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            _refuse(got="no JSON")
        values = _fields_of(cls, values, "a machine")
        values["device"] = DeviceSpec(**_fields_of(DeviceSpec, values["device"], "device"))
        values["link"] = LinkSpec(**_fields_of(LinkSpec, values["link"], "link"))
        if values.get("nic") is not None:
            values["nic"] = LinkSpec(**_fields_of(LinkSpec, values["nic"], "nic"))
        values["gemm_tile"] = plain(values.get("gemm_tile", cls.gemm_tile))
        if values.get("measured") is not None:
            values["measured"] = Costs(**_fields_of(Costs, values["measured"], "measured"))
        return cls(**values)


def _fields_of(kind: Any, values: Any, what: str) -> dict[str, Any]:
    """The object that JSON has of a dataclass: with its fields and no others."""
    if not isinstance(values, dict):
        _refuse(got=f"{what} that is no object")
    given: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType]
    known = {field.name: field.default is MISSING for field in fields(kind)}
    missing = [name for name, needed in known.items() if needed and name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        is_wrong = "without" if missing else "with the unknown field"
        _refuse(got=f"{what} {is_wrong} {', '.join(missing or unknown)}")
    return given


def _refuse(*, got: str) -> NoReturn:
    raise InputError("Machine.from_json", "text", want="JSON written by Machine.to_json", got=got)


@cache
def _from_datasheet(device: DeviceSpec, link: LinkSpec) -> Costs:
    """The fractions of its peaks and the fixed times that 4xH200 showed, 2026-11, bf16."""
    return Costs(
        gemm_flop_per_s=0.8 * device.bf16_flop_per_s,
        gemm_settled=1.16,
        gemm_settling_s=0.4e-3,
        hbm_bytes_per_s=0.8 * device.hbm_bytes_per_s,
        kernel_s=1.5e-6,
        copy_bytes_per_s=0.86 * link.bytes_per_s,
        copy_overhead_s=link.copy_overhead_s,
        barrier_s=2 * link.latency_s,
        collective_bytes_per_s=0.7 * link.bytes_per_s,
        all_gather_s=30e-6,
        reduce_scatter_s=22e-6,
        collective_small_s=10e-6,
        direct_bytes_per_s=0.7 * link.bytes_per_s,
        direct_s=3 * link.latency_s,
        matmul_beside_copy=1.2,
        copy_beside_matmul=1.1,
        host_call_s=40e-6,
        host_step_s=15e-6,
    )
