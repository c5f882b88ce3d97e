"""Machines by name: what datasheets of A100, A40, H100, H200, B200, GB200, MI250X, MI300X state."""

import re
from dataclasses import replace

from counterpoint.errors import InputError
from counterpoint.machine import DeviceSpec, LinkSpec, Machine

KIB, MIB = 2**10, 2**20
GIGA, TERA = 1e9, 1e12

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
        capability="8.0",
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
        capability="8.6",
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
        capability="9.0",
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
        capability="9.0",
    ),
    link=replace(
        H100.link,
        source="NVIDIA H200 datasheet; copy overhead as measured on 4xH200 (5.4 us), 2026-11, 8 "
        "have not been measured; latency is a placeholder until calibrated",
    ),
    source="datasheet peaks of HGX H200 with 8 GPUs",
)

B200 = replace(
    H100,
    name="b200-8",
    device=replace(  # an SM holds as much
        H100.device,
        name="B200 SXM",
        num_sms=148,
        bf16_flop_per_s=2250 * TERA,  # DGX B200: 36 Pflop/s of 8 GPUs is with sparsity
        fp32_flop_per_s=75 * TERA,
        hbm_bytes_per_s=8 * TERA,
        hbm_bytes=180 * GIGA,
        l2_bytes=126 * MIB,
        source="NVIDIA DGX B200 datasheet; Blackwell tuning guide, compute capability 10.0",
        capability="10.0",
    ),
    link=replace(
        H100.link,
        name="NVLink 5, NVSwitch",
        bytes_per_s=900 * GIGA,  # 1.8 TB/s is the sum of both directions
        source=f"NVIDIA DGX B200 datasheet; {_PLACEHOLDERS}",
    ),
    source="datasheet peaks of DGX B200 with 8 GPUs",
)

GB200 = replace(
    B200,
    name="gb200-72",
    device=replace(
        B200.device,
        name="GB200",
        bf16_flop_per_s=2500 * TERA,  # NVL72: 360 Pflop/s of 72 GPUs is with sparsity
        fp32_flop_per_s=80 * TERA,
        hbm_bytes=186 * GIGA,
        source="NVIDIA GB200 NVL72 datasheet; SMs and their limits as of B200",
    ),
    link=replace(B200.link, source=f"NVIDIA GB200 NVL72 datasheet; {_PLACEHOLDERS}"),
    num_devices=72,
    source="datasheet peaks of GB200 NVL72: 72 GPUs on one NVLink switch",
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

MI300X = replace(
    MI250X,
    name="mi300x-8",
    device=replace(  # a CU holds as much
        MI250X.device,
        name="MI300X OAM",
        num_sms=304,
        bf16_flop_per_s=1307.4 * TERA,
        fp32_flop_per_s=163.4 * TERA,
        hbm_bytes_per_s=5.3 * TERA,
        hbm_bytes=192 * GIGA,
        l2_bytes=32 * MIB,  # 4 MiB in each of 8 XCDs; the 256 MB Infinity Cache is behind them
        source="AMD Instinct MI300X datasheet; CDNA 3 white paper",
    ),
    link=replace(
        MI250X.link,
        name="Infinity Fabric 4, one x16 link to each of 7 peers",
        bytes_per_s=448 * GIGA,  # 7 x 64 GB/s; "896 GB/s" is the sum of both directions
        source=f"AMD Instinct MI300X platform datasheet; {_PLACEHOLDERS}",
    ),
    source="datasheet peaks of the MI300X platform with 8 GPUs",
)

PRESETS = {
    machine.name.partition("-")[0]: machine
    for machine in (A100, A40, H100, H200, B200, GB200, MI250X, MI300X)
}


def named(name: object) -> tuple[str, int] | None:
    """The base name and the number of GPUs that a name says, if there is such a machine."""
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d?)", name) if isinstance(name, str) else None
    if match is None or match[1] not in PRESETS:
        return None
    num_devices = int(match[2])
    most = max(PRESETS[match[1]].num_devices, 8)
    return (match[1], num_devices) if num_devices <= most else None


def preset(name: str) -> Machine:
    """Return the datasheet machine called `name`: a base name and a number of GPUs, "h200-4".

    A mesh has one link per pair of GPUs, so with fewer GPUs each of them has fewer links:
    `link.bytes_per_s` of "mi300x-4" is 3/7 of that of "mi300x-8".

    Args:
        name: A base name (a100, a40, h100, h200, b200, gb200, mi250x, mi300x), "-", and 1 to 8
            GPUs; of gb200 up to 72.

    Raises:
        InputError: The base name or the number is not one of these; the message lists them.

    Example:
        >>> preset("h200-4").device.num_sms
        132
    """
    found = named(name)
    if found is None:
        names = ", ".join(machine.name for machine in PRESETS.values())
        want = f"one of {names}, or these with 1 to 8 GPUs (gb200: to 72)"
        raise InputError("preset", "name", want=want, got=repr(name))
    base, num_devices = found
    full = PRESETS[base]
    return replace(full.of_ranks(num_devices), name=name, num_devices=num_devices)


def driver_name(base: str) -> str:
    """The name that the driver gives a GPU of a preset: "h100" -> "NVIDIA H100 80GB HBM3"."""
    return {"h100": "NVIDIA H100 80GB HBM3"}.get(base, f"NVIDIA {base.upper()}")


def preset_of(device_name: str, num_devices: int) -> Machine | None:
    """The preset of a GPU by the name its driver gives it, such as "NVIDIA H200"; None if none."""
    words = device_name.lower().replace("-", " ").split()
    base = next((base for base in PRESETS if base in words), None)
    return preset(f"{base}-{num_devices}") if base else None
