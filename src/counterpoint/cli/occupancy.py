"""`counterpoint occupancy`: how a kernel shares an SM, by arithmetic and for any GPU.

It imports no torch, and nothing is run.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from counterpoint.errors import InputError
from counterpoint.machine import KIB, DeviceSpec
from counterpoint.presets import A40, A100, B200, H100, H200, MI250X, MI300X
from counterpoint.runtime.limits import SmLimits, limits_of
from counterpoint.runtime.occupancy import (
    Kernel,
    beside,
    dynamic_bytes_for,
    feasible,
    occupancy,
    window,
)

DEVICES: dict[str, DeviceSpec] = {
    machine.name.partition("-")[0]: machine.device
    for machine in (A40, A100, H100, H200, B200, MI250X, MI300X)
}
# 4xH200, torch 2.11, 2026-11: as its NCCL launches them, at 2^26 elements
NCCL = {
    "ring": Kernel(544, 96, static_shared_bytes=21568, dynamic_shared_bytes=82240),
    "send/recv": Kernel(640, 96, static_shared_bytes=21568, dynamic_shared_bytes=82240),
}
BASIS = "predicted by arithmetic, not measured"
NOTES = (
    "bytes: static + dynamic shared memory of a block, the least for so few blocks",
    "beside: how many remain, at these bytes, with one block of communication",
    "window: KiB at which shared memory has room for both, and what else has not",
)
ASSUMED = "NCCL's blocks are an H200's: elsewhere assumed, and RCCL's differ; say --beside"
TOO_LARGE = "no block of communication fits an SM, with or without others"


def occupancies(
    *, threads: int, registers: int, shared: int, machine: str, comm: str, as_json: bool
) -> int:
    """Print how many blocks of a kernel an SM holds, alone and beside communication; 0.

    Args:
        threads: of a block of the kernel.
        registers: per thread.
        shared: bytes of a block, static and dynamic together.
        machine: kinds of GPU with commas, or "all".
        comm: "nccl", or threads, registers and shared bytes of another block.
        as_json: facts in bytes instead of a table.

    Raises:
        InputError: a kind of GPU is unknown, `comm` is not three numbers, or the block fits none
            of the GPUs.
    """
    kernel = Kernel(threads, registers, dynamic_shared_bytes=shared)
    others = _others(comm)
    devices = _devices(machine)
    found = [_facts(name, device, kernel, others) for name, device in devices.items()]
    if not any(facts["feasible"] for facts in found):
        occupancy(kernel, limits_of(next(iter(devices.values()))))  # raises, and says why
    if as_json:
        blocks = {name: asdict(block) for name, block in others.items()}
        about = {"basis": BASIS, "kernel": asdict(kernel), "beside": blocks}
        print(json.dumps(about | {"machines": found}, indent=2))
        return 0
    console = Console(highlight=False)
    block = f"{threads} threads, {registers} registers, {shared} bytes"
    console.print(_table(f"occupancy, {BASIS}\nof a block of {block}", found, list(others)))
    reasons = [f"{facts['machine']}: {facts['too_large']}" for facts in found if facts["too_large"]]
    notes = [*reasons, *NOTES, *([ASSUMED] if others is NCCL else [])]
    console.print(*notes, sep="\n", style="dim", markup=False)
    return 0


def _devices(machine: str) -> dict[str, DeviceSpec]:
    if machine == "all":
        return DEVICES
    names = machine.split(",")
    if unknown := [name for name in names if name not in DEVICES]:
        want = f"all, or of {', '.join(DEVICES)}"
        raise InputError("occupancy", "--machine", want=want, got=repr(unknown[0]))
    return {name: DEVICES[name] for name in names}


def _others(comm: str) -> Mapping[str, Kernel]:
    if comm == "nccl":
        return NCCL
    parts = comm.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts) or not int(parts[0]):
        want = "nccl, or threads (above 0), registers and shared bytes as T,R,S"
        raise InputError("occupancy", "--beside", want=want, got=repr(comm))
    threads, registers, shared = map(int, parts)
    return {comm: Kernel(threads, registers, dynamic_shared_bytes=shared)}


def _facts(
    name: str, device: DeviceSpec, kernel: Kernel, others: Mapping[str, Kernel]
) -> dict[str, Any]:
    """What an SM holds, by each number of blocks that shared memory can bring it to."""
    limits = limits_of(device)
    fitting = {other: block for other, block in others.items() if not _refusal(block, limits)}
    levels: list[dict[str, Any]] = []
    too_large = _refusal(kernel, limits)
    for blocks in () if too_large else feasible(kernel, limits):
        shared = dynamic_bytes_for(kernel, limits, blocks)
        shaped = replace(kernel, dynamic_shared_bytes=shared)
        next_to: dict[str, Any] = dict.fromkeys(others)
        for other, block in fitting.items():
            between = window(kernel, block, limits, blocks)
            next_to[other] = asdict(beside(shaped, block, limits))
            next_to[other]["window"] = asdict(between) if between else None
        alone = asdict(occupancy(shaped, limits))
        levels.append(alone | {"shared_bytes": shared, "beside": next_to})
    return {
        "machine": name, "device": device.name, "feasible": levels,
        "too_large": too_large or ("" if fitting else TOO_LARGE),
    }  # fmt: skip


def _refusal(block: Kernel, limits: SmLimits) -> str:
    """Why an SM cannot hold even one; "" if it can."""
    try:
        occupancy(block, limits)
    except InputError as error:
        return str(error)
    return ""


def _table(title: str, found: list[dict[str, Any]], others: list[str]) -> Table:
    """A row for each number of blocks per SM of each machine; it fits 80 columns."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("machine", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for other in others:
        table.add_column(f"beside {other}")
    table.add_column("window", no_wrap=True)
    for facts in found:
        name = facts["machine"]
        for level in facts["feasible"]:
            table.add_row(
                name, str(level["blocks"]), level["bound_by"], str(level["shared_bytes"]),
                *(f"{b['blocks']} {b['bound_by']}" if b else "-" for b in level["beside"].values()),
                _window(level["beside"].values()), style="bold" if name else "",
            )  # fmt: skip
            name = ""
        if not facts["feasible"]:
            table.add_row(name, "-", "does not fit")
        table.add_section()
    return table


def _window(next_to: Iterable[dict[str, Any] | None]) -> str:
    """The bytes that leave room for each of the blocks, and on a line each what else does not."""
    windows = [b["window"] for b in next_to if b and b["window"]]
    if not windows:
        return "-"
    low = max(window["low_bytes"] for window in windows) / KIB
    high = min(window["high_bytes"] for window in windows) / KIB
    apart = dict.fromkeys(w["other_limit"] for w in windows if w["other_limit"])
    return "\n".join([f"{low:.1f}-{high:.1f}", *apart])
