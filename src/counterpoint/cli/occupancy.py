"""`counterpoint occupancy`: how a kernel shares an SM, by arithmetic and for any GPU.

It imports no torch, and nothing is run.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from counterpoint.cli.shared.problems import machine_at
from counterpoint.cli.shared.show import table
from counterpoint.cli.shared.usage import meant
from counterpoint.errors import InputError
from counterpoint.gpu import occupancy as sm
from counterpoint.gpu.limits import SmLimits, limits_of
from counterpoint.machine import KIB, DeviceSpec
from counterpoint.presets import PRESETS

DEVICES = {name: machine.device for name, machine in PRESETS.items()}
# 4xH200, torch 2.11, 2026-11: as its NCCL launches them, at 2^26 elements
NCCL = {
    "ring": sm.Kernel(544, 96, static_shared_bytes=21568, dynamic_shared_bytes=82240),
    "send/recv": sm.Kernel(640, 96, static_shared_bytes=21568, dynamic_shared_bytes=82240),
}
BASIS = "predicted by arithmetic, not measured"
NOTES = (
    "bytes: static + dynamic shared memory of a block, the least for so few blocks",
    "beside: how many remain, at these bytes, with one block of communication",
    "window: KiB at which shared memory has room for both, and what else has not",
)
ASSUMED = "NCCL's blocks are an H200's: elsewhere assumed, and RCCL's differ; say --beside"
FEWER = "shown: the block as it is, and the first with a window; --all shows every row"
TOO_LARGE = "no block of communication fits an SM, with or without others"


def occupancy(
    threads: Annotated[int, typer.Option(min=1, show_default=False, help="Of a block.")],
    registers: Annotated[int, typer.Option(min=0, show_default=False, help="Per thread.")],
    shared: Annotated[
        int, typer.Option(min=0, show_default=False, help="Bytes of a block, static + dynamic.")
    ],
    machine: Annotated[
        str, typer.Option(help="Kinds of GPU, with commas; b200 and mi300x too, files, or all.")
    ] = "a40,a100,h100,h200,mi250x",
    beside: Annotated[
        str,
        typer.Option(
            metavar="T,R,S",
            help="Threads, registers and bytes of a block of communication; nccl: those of NCCL.",
        ),
    ] = "nccl",
    every: Annotated[
        bool, typer.Option("--all", help="Every number of blocks that shared memory can bring to.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Facts as JSON, in bytes.")] = False,
) -> None:
    """Predict how many blocks of a kernel an SM holds, alone and beside communication.

    By arithmetic, for any GPU and without one: what bounds them, how much shared memory brings
    them to fewer, and whether a block of communication then fits beside them. `counterpoint
    doctor --kernels` shows what a kernel takes.

    **Example:** `counterpoint occupancy --threads 128 --registers 64 --shared 16384`

    ```text
    machine blocks bound by       bytes beside ring beside send/recv window
    h200         8 registers      16384 0 registers 0 registers      -
                 1 shared memory 115713 0 registers 0 registers      113.0-124.6
    ```
    """
    kernel = sm.Kernel(threads, registers, dynamic_shared_bytes=shared)
    others = _others(beside)
    devices = _devices(machine)
    found = [_facts(name, device, kernel, others) for name, device in devices.items()]
    if not any(facts["feasible"] for facts in found):
        sm.occupancy(kernel, limits_of(next(iter(devices.values()))))  # raises, and says why
    if as_json:
        blocks = {name: asdict(block) for name, block in others.items()}
        about = {"basis": BASIS, "kernel": asdict(kernel), "beside": blocks}
        print(json.dumps(about | {"machines": found}, indent=2))
        return
    console = Console(highlight=False)
    block = f"{threads} threads, {registers} registers, {shared} bytes"
    console.print(_table(f"occupancy, {BASIS}\nof a block of {block}", found, list(others), every))
    reasons = [f"{facts['machine']}: {facts['too_large']}" for facts in found if facts["too_large"]]
    fewer = [] if every else [FEWER]
    notes = [*reasons, *NOTES, *([ASSUMED] if others is NCCL else []), *fewer]
    console.print(*notes, sep="\n", style="dim", markup=False)


def _devices(machine: str) -> dict[str, DeviceSpec]:
    if machine == "all":
        return DEVICES
    found: dict[str, DeviceSpec] = {}
    for name in machine.split(","):
        if name.endswith(".json"):
            own = machine_at("occupancy", name)
            found[own.name] = own.device
        elif name in DEVICES:
            found[name] = DEVICES[name]
        else:
            want = f"all, or of {', '.join(DEVICES)}, or files of a machine"
            fix = meant(name, [*DEVICES, "all"])
            raise InputError("occupancy", "--machine", want=want, got=repr(name), fix=fix)
    return found


def _others(comm: str) -> Mapping[str, sm.Kernel]:
    if comm == "nccl":
        return NCCL
    parts = comm.split(",")
    numbers = all(part.strip().isdecimal() and len(part) < 20 for part in parts)
    if len(parts) != 3 or not numbers or not int(parts[0]):
        want = "nccl, or threads (above 0), registers and shared bytes as T,R,S"
        raise InputError("occupancy", "--beside", want=want, got=repr(comm))
    threads, registers, shared = map(int, parts)
    return {comm: sm.Kernel(threads, registers, dynamic_shared_bytes=shared)}


def _facts(
    name: str, device: DeviceSpec, kernel: sm.Kernel, others: Mapping[str, sm.Kernel]
) -> dict[str, Any]:
    """What an SM holds, by each number of blocks that shared memory can bring it to."""
    limits = limits_of(device)
    fitting = {other: block for other, block in others.items() if not _refusal(block, limits)}
    levels: list[dict[str, Any]] = []
    too_large = _refusal(kernel, limits)
    for blocks in () if too_large else sm.feasible(kernel, limits):
        shared = sm.dynamic_bytes_for(kernel, limits, blocks)
        shaped = replace(kernel, dynamic_shared_bytes=shared)
        next_to: dict[str, Any] = dict.fromkeys(others)
        for other, block in fitting.items():
            between = sm.window(kernel, block, limits, blocks)
            next_to[other] = asdict(sm.beside(shaped, block, limits))
            next_to[other]["window"] = asdict(between) if between else None
        alone = asdict(sm.occupancy(shaped, limits))
        levels.append(alone | {"shared_bytes": shared, "beside": next_to})
    return {
        "machine": name, "device": device.name, "feasible": levels,
        "too_large": too_large or ("" if fitting else TOO_LARGE),
    }  # fmt: skip


def _refusal(block: sm.Kernel, limits: SmLimits) -> str:
    """Why an SM cannot hold even one; "" if it can."""
    try:
        sm.occupancy(block, limits)
    except InputError as error:
        return str(error)
    return ""


def _table(title: str, found: list[dict[str, Any]], others: list[str], every: bool) -> Table:
    """Rows of each machine by blocks per SM: every one, or those that tell; it fits 80 columns."""
    columns = (
        "machine",
        ">blocks",
        "bound by",
        ">bytes",
        *(f"beside {o}" for o in others),
        "window",
    )
    made = table(*columns, title=title)
    for facts in found:
        name = facts["machine"]
        for level in facts["feasible"] if every else _telling(facts["feasible"]):
            made.add_row(
                name, str(level["blocks"]), level["bound_by"], str(level["shared_bytes"]),
                *(f"{b['blocks']} {b['bound_by']}" if b else "-" for b in level["beside"].values()),
                _window(level["beside"].values()), style="bold" if name else "",
            )  # fmt: skip
            name = ""
        if not facts["feasible"]:
            made.add_row(name, "-", "does not fit")
        if every:
            made.add_section()
    return made


def _telling(levels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernel as it is, and with the most blocks that leave room for communication."""
    roomy = (level for level in levels[1:] if _window(level["beside"].values()) != "-")
    return [*levels[:1], *(level for level, _ in zip(roomy, range(1), strict=False))]


def _window(next_to: Iterable[dict[str, Any] | None]) -> str:
    """The bytes that leave room for each of the blocks, and on a line each what else does not."""
    windows = [b["window"] for b in next_to if b and b["window"]]
    if not windows:
        return "-"
    low = max(window["low_bytes"] for window in windows) / KIB
    high = min(window["high_bytes"] for window in windows) / KIB
    apart = dict.fromkeys(w["other_limit"] for w in windows if w["other_limit"])
    return "\n".join([f"{low:.1f}-{high:.1f}", *apart])
