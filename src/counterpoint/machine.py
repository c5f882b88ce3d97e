"""Peak rates and limits of GPUs and their links: the constants of the performance model.

`preset("h200-8")` gives datasheet peaks. What a machine reaches is lower and is measured:
A `Machine` with `measured=True` holds those instead.
"""

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from counterpoint.errors import InputError

KIB, MIB = 2**10, 2**20
GIGA, TERA = 1e9, 1e12

Topology = Literal["switch", "mesh", "pcie"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Limits and peaks of one GPU (of one GCD, where a package holds two), in SI base units.

    Peaks are dense (no structured sparsity) and per GPU. SM stands for CU on AMD.

    Args:
        name: Marketing name and form factor.
        num_sms: SMs that are enabled.
        max_threads_per_sm: Resident threads.
        max_warps_per_sm: Resident warps (waves).
        max_blocks_per_sm: Resident blocks (workgroups).
        registers_per_sm: 32-bit registers.
        shared_bytes_per_sm: Shared memory (LDS) of an SM.
        shared_bytes_per_block: Most that one block may use, static and dynamic together.
        shared_reserved_bytes_per_block: What the system takes for itself from each block.
        shared_granule_bytes: Shared memory of a block is rounded up to a multiple of this.
        bf16_flop_per_s: Dense matrix rate with fp32 accumulation.
        fp32_flop_per_s: Vector rate, an FMA counted as two.
        hbm_bytes_per_s: Device memory, reads and writes together.
        hbm_bytes: Device memory; the datasheet's GB read as 1e9, a little less than there is.
        l2_bytes: All L2 slices; a memory-side cache behind them is not counted.
        source: Where the numbers come from.

    Raises:
        InputError: A number is not positive, or so small that its unit must have slipped.
    """

    name: str
    num_sms: int
    max_threads_per_sm: int
    max_warps_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    shared_reserved_bytes_per_block: int = KIB
    shared_granule_bytes: int = 128
    bf16_flop_per_s: float
    fp32_flop_per_s: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    l2_bytes: int
    source: str

    def __post_init__(self) -> None:
        for field in ("num_sms", "max_threads_per_sm", "max_warps_per_sm", "max_blocks_per_sm"):
            if getattr(self, field) < 1:
                raise InputError("DeviceSpec", field, want="at least 1", got=getattr(self, field))
        # no GPU in use is below these, so a smaller number carries a prefix that must go
        at_least = (
            ("registers_per_sm", KIB, "registers, not Ki"),
            ("shared_bytes_per_sm", KIB, "bytes, not KiB"),
            ("shared_bytes_per_block", KIB, "bytes, not KiB"),
            ("bf16_flop_per_s", TERA, "flop/s, not Tflop/s"),
            ("fp32_flop_per_s", TERA, "flop/s, not Tflop/s"),
            ("hbm_bytes_per_s", 10 * GIGA, "bytes/s, not GB/s"),
            ("hbm_bytes", GIGA, "bytes, not GB"),
            ("l2_bytes", MIB / 2, "bytes, not MiB"),
        )
        for field, floor, unit in at_least:
            _check_floor(f"DeviceSpec {self.name}", field, getattr(self, field), floor, unit)

    @property
    def warp_size(self) -> int:
        """Threads per warp: 32, or 64 on AMD."""
        return self.max_threads_per_sm // self.max_warps_per_sm


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """How the GPUs of one node reach each other.

    8xH200, torch 2.11, 2026-11: one copy engine pulls 368 GB/s and pushes 386 GB/s of the 450 GB/s
    below (256 MB a copy), SMs reach 306 and 337 GB/s, and each copy costs 5 to 6 us at every size.

    Args:
        name: Generation and form.
        bytes_per_s: Per GPU and per direction, over all its links to GPUs of the node.
        latency_s: From a store to its being visible at the peer.
        topology: "switch": one pair may use all of `bytes_per_s`; "mesh": each pair has its own
            link, an equal part of it; "pcie": like switch, through the host.
        copy_overhead_s: Cost of one copy-engine copy beside its bytes, on the GPU.
        source: Where the numbers come from.

    Raises:
        InputError: A number looks like GB/s or microseconds, or the topology is unknown.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    topology: Topology
    copy_overhead_s: float
    source: str

    def __post_init__(self) -> None:
        op = f"LinkSpec {self.name}"
        # 1 GB/s is below any link in use, so a smaller number is GB/s passed as bytes/s
        _check_floor(op, "bytes_per_s", self.bytes_per_s, GIGA, "bytes/s, not GB/s")
        # and no link takes a millisecond, so a larger number is microseconds passed as seconds
        for field in ("latency_s", "copy_overhead_s"):
            if not 0 <= getattr(self, field) < 1e-3:
                want = "seconds, from 0 to below 1e-3"
                fix = "pass seconds, not us"
                raise InputError(op, field, want=want, got=f"{getattr(self, field):g}", fix=fix)
        if self.topology not in TOPOLOGIES:
            want = f"one of {', '.join(TOPOLOGIES)}"
            raise InputError(op, "topology", want=want, got=repr(self.topology))

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
    """Equal GPUs of one node and the links between them.

    Args:
        name: e.g. "h200-8".
        device: One of its GPUs.
        link: Of each of its GPUs.
        num_devices: GPUs of the node.
        gemm_tile: Rows and columns of the output tile of the vendor's large GEMM, for wave counts.
        measured: True if the rates were measured on this machine, False for datasheet peaks.
        source: Where the numbers come from.

    Raises:
        InputError: There is no GPU, or the tile is empty.
    """

    name: str
    device: DeviceSpec
    link: LinkSpec
    num_devices: int
    gemm_tile: tuple[int, int] = (128, 256)
    measured: bool = False
    source: str

    def __post_init__(self) -> None:
        op = f"Machine {self.name}"
        if self.num_devices < 1:
            raise InputError(op, "num_devices", want="at least 1", got=self.num_devices)
        if len(self.gemm_tile) != 2 or min(self.gemm_tile) < 1:
            want = "two positive numbers (rows, columns)"
            raise InputError(op, "gemm_tile", want=want, got=self.gemm_tile)

    def to_json(self) -> str:
        """Return all fields as JSON; `from_json` gives an equal machine back."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Read what `to_json` wrote.

        Raises:
            InputError: `text` is not the JSON of a machine, or a value in it is refused.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            values["device"] = DeviceSpec(**values["device"])
            values["link"] = LinkSpec(**values["link"])
            values["gemm_tile"] = tuple(values["gemm_tile"])
            return cls(**values)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            want = "JSON written by Machine.to_json"
            raise InputError("Machine.from_json", "text", want=want, got=repr(error)) from error


def preset(name: str) -> Machine:
    """Return the datasheet machine called `name`: a base name and a number of GPUs, "h200-4".

    A mesh has one link per pair of GPUs, so with fewer GPUs each of them has fewer links:
    `link.bytes_per_s` of "mi300x-4" is 3/7 of that of "mi300x-8".

    Args:
        name: A base name (a100, a40, h100, h200, b200, mi250x, mi300x), "-", and 1 to 8 GPUs.

    Raises:
        InputError: The base name or the number is not one of these; the message lists them.

    Example:
        >>> preset("h200-4").device.num_sms
        132
    """
    match = re.fullmatch(r"([a-z0-9]+)-([1-8])", name)
    if match is None or match[1] not in _PRESETS:
        want = f"one of {', '.join(m.name for m in _PRESETS.values())}, or these with 1 to 8 GPUs"
        raise InputError("preset", "name", want=want, got=repr(name))
    full, num_devices = _PRESETS[match[1]], int(match[2])
    link = full.link
    if link.topology == "mesh" and num_devices > 1:
        pair_bytes_per_s = link.pair_bytes_per_s(full.num_devices)
        link = replace(link, bytes_per_s=pair_bytes_per_s * (num_devices - 1))
    return replace(full, name=name, link=link, num_devices=num_devices)


def preset_of(device_name: str, num_devices: int) -> Machine | None:
    """The preset of a GPU by the name its driver gives it, such as "NVIDIA H200"; None if none."""
    words = device_name.lower().replace("-", " ").split()
    base = next((base for base in _PRESETS if base in words), None)
    return preset(f"{base}-{num_devices}") if base else None


def _check_floor(op: str, field: str, value: float, floor: float, unit: str) -> None:
    # `not >=` also refuses NaN
    if not value >= floor:
        fix = f"pass {unit}"
        raise InputError(op, field, want=f"at least {floor:g}", got=f"{value:g}", fix=fix)


# latencies and copy overheads stand in no datasheet: those without a measurement are placeholders
_LATENCY_S = 2e-6
_COPY_OVERHEAD_S = 5.5e-6
_PLACEHOLDERS = "latency and copy overhead are placeholders until calibrated"

A100 = Machine(
    name="a100-8",
    device=DeviceSpec(
        name="A100 SXM 80GB",
        num_sms=108,
        max_threads_per_sm=2048,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=65536,
        shared_bytes_per_sm=164 * KIB,
        shared_bytes_per_block=163 * KIB,
        bf16_flop_per_s=312 * TERA,
        fp32_flop_per_s=19.5 * TERA,
        hbm_bytes_per_s=2.039 * TERA,
        hbm_bytes=80 * GIGA,
        l2_bytes=40 * MIB,
        source="NVIDIA A100 datasheet; CUDA C++ Programming Guide, compute capability 8.0",
    ),
    link=LinkSpec(
        name="NVLink 3, NVSwitch",
        bytes_per_s=300 * GIGA,  # 600 GB/s is the sum of both directions
        latency_s=_LATENCY_S,
        topology="switch",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"NVIDIA A100 datasheet; {_PLACEHOLDERS}",
    ),
    num_devices=8,
    source="datasheet peaks of HGX A100 with 8 GPUs",
)

A40 = Machine(
    name="a40-4",
    device=DeviceSpec(
        name="A40 PCIe",
        num_sms=84,
        max_threads_per_sm=1536,
        max_warps_per_sm=48,
        max_blocks_per_sm=16,
        registers_per_sm=65536,
        shared_bytes_per_sm=100 * KIB,
        shared_bytes_per_block=99 * KIB,
        bf16_flop_per_s=149.7 * TERA,
        fp32_flop_per_s=37.4 * TERA,
        hbm_bytes_per_s=696 * GIGA,  # GDDR6
        hbm_bytes=48 * GIGA,
        l2_bytes=6 * MIB,
        source="NVIDIA A40 datasheet; CUDA C++ Programming Guide, compute capability 8.6",
    ),
    link=LinkSpec(
        name="PCIe 4.0 x16, no NVLink bridge",
        bytes_per_s=31.5 * GIGA,  # 16 GT/s x 16 lanes x 128/130; "64 GB/s" sums both directions
        latency_s=_LATENCY_S,
        topology="pcie",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"PCIe 4.0; {_PLACEHOLDERS}",
    ),
    num_devices=4,
    source="datasheet peaks of a server with 4 A40 on PCIe",
)

H100 = Machine(
    name="h100-8",
    device=DeviceSpec(
        name="H100 SXM",
        num_sms=132,
        max_threads_per_sm=2048,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=65536,
        shared_bytes_per_sm=228 * KIB,
        shared_bytes_per_block=227 * KIB,
        bf16_flop_per_s=989 * TERA,
        fp32_flop_per_s=67 * TERA,
        hbm_bytes_per_s=3.35 * TERA,
        hbm_bytes=80 * GIGA,
        l2_bytes=50 * MIB,
        source="NVIDIA H100 datasheet; CUDA C++ Programming Guide, compute capability 9.0",
    ),
    link=LinkSpec(
        name="NVLink 4, NVSwitch",
        bytes_per_s=450 * GIGA,  # 900 GB/s is the sum of both directions
        latency_s=_LATENCY_S,
        topology="switch",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"NVIDIA H100 datasheet; {_PLACEHOLDERS}",
    ),
    num_devices=8,
    source="datasheet peaks of HGX H100 with 8 GPUs",
)

H200 = replace(
    H100,
    name="h200-8",
    device=replace(
        H100.device,
        name="H200 SXM",
        hbm_bytes_per_s=4.8 * TERA,
        hbm_bytes=141 * GIGA,
        l2_bytes=60 * MIB,  # as the device reports it; the datasheet does not say
        source="NVIDIA H200 datasheet; CUDA C++ Programming Guide, compute capability 9.0",
    ),
    link=replace(
        H100.link,
        source="NVIDIA H200 datasheet; copy overhead measured on 8xH200, 2026-11; latency is a "
        "placeholder until calibrated",
    ),
    source="datasheet peaks of HGX H200 with 8 GPUs",
)

B200 = Machine(
    name="b200-8",
    device=DeviceSpec(
        name="B200 SXM",
        num_sms=148,
        max_threads_per_sm=2048,
        max_warps_per_sm=64,
        max_blocks_per_sm=32,
        registers_per_sm=65536,
        shared_bytes_per_sm=228 * KIB,
        shared_bytes_per_block=227 * KIB,
        bf16_flop_per_s=2250 * TERA,  # DGX B200: 36 Pflop/s of 8 GPUs is with sparsity
        fp32_flop_per_s=75 * TERA,
        hbm_bytes_per_s=8 * TERA,
        hbm_bytes=180 * GIGA,
        l2_bytes=126 * MIB,
        source="NVIDIA DGX B200 datasheet; Blackwell tuning guide, compute capability 10.0",
    ),
    link=LinkSpec(
        name="NVLink 5, NVSwitch",
        bytes_per_s=900 * GIGA,  # 1.8 TB/s is the sum of both directions
        latency_s=_LATENCY_S,
        topology="switch",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"NVIDIA DGX B200 datasheet; {_PLACEHOLDERS}",
    ),
    num_devices=8,
    source="datasheet peaks of DGX B200 with 8 GPUs",
)

MI250X = Machine(
    name="mi250x-8",
    device=DeviceSpec(
        name="MI250X GCD",
        num_sms=110,
        max_threads_per_sm=2048,
        max_warps_per_sm=32,
        max_blocks_per_sm=32,
        registers_per_sm=131072,  # 512 KiB
        shared_bytes_per_sm=64 * KIB,
        shared_bytes_per_block=64 * KIB,
        shared_reserved_bytes_per_block=0,
        shared_granule_bytes=512,
        bf16_flop_per_s=191.5 * TERA,  # half of the package, as all rates here
        fp32_flop_per_s=23.9 * TERA,
        hbm_bytes_per_s=1.6384 * TERA,
        hbm_bytes=64 * GIGA,
        l2_bytes=8 * MIB,
        source="AMD Instinct MI250X datasheet, halved; CDNA 2 white paper",
    ),
    link=LinkSpec(
        # as a mesh of equal links this is a mean: a GCD has 4 links to the other one of its
        # package and 3 to other packages, and reaches some GCDs through others only
        name="Infinity Fabric 3, 7 links of a GCD to GCDs",
        bytes_per_s=350 * GIGA,  # 50 GB/s a link and direction
        latency_s=_LATENCY_S,
        topology="mesh",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"ROCm docs, MI250 microarchitecture; {_PLACEHOLDERS}",
    ),
    num_devices=8,
    source="datasheet peaks of a node with 4 MI250X, 8 GCDs",
)

MI300X = Machine(
    name="mi300x-8",
    device=DeviceSpec(
        name="MI300X OAM",
        num_sms=304,
        max_threads_per_sm=2048,
        max_warps_per_sm=32,
        max_blocks_per_sm=32,
        registers_per_sm=131072,  # 512 KiB
        shared_bytes_per_sm=64 * KIB,
        shared_bytes_per_block=64 * KIB,
        shared_reserved_bytes_per_block=0,
        shared_granule_bytes=512,
        bf16_flop_per_s=1307.4 * TERA,
        fp32_flop_per_s=163.4 * TERA,
        hbm_bytes_per_s=5.3 * TERA,
        hbm_bytes=192 * GIGA,
        l2_bytes=32 * MIB,  # 4 MiB in each of 8 XCDs; the 256 MB Infinity Cache is behind them
        source="AMD Instinct MI300X datasheet; CDNA 3 white paper",
    ),
    link=LinkSpec(
        name="Infinity Fabric 4, one x16 link to each of 7 peers",
        bytes_per_s=448 * GIGA,  # 7 x 64 GB/s; "896 GB/s" is the sum of both directions
        latency_s=_LATENCY_S,
        topology="mesh",
        copy_overhead_s=_COPY_OVERHEAD_S,
        source=f"AMD Instinct MI300X platform datasheet; {_PLACEHOLDERS}",
    ),
    num_devices=8,
    source="datasheet peaks of the MI300X platform with 8 GPUs",
)

_PRESETS = {
    machine.name.partition("-")[0]: machine
    for machine in (A100, A40, H100, H200, B200, MI250X, MI300X)
}
