"""Which machine is meant: by its name, by JSON, by a file, or by itself.

Names stand for machines that were measured, where the library has such a file, else for presets.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.presets import driver_name, preset, preset_of

MachineLike = Machine | str | Path  # what `machine_of` takes
SHIPPED = Path(__file__).parent / "measured"


def machine_of(op: str, machine: MachineLike) -> Machine:
    """The machine that is meant.

    Args:
        op: who asks, for the error.
        machine: itself, a preset's name such as "h200-8", text that `Machine.to_json` returned, or
            a file of such text, also within what `counterpoint characterize` writes: a Path, or
            text that ends in ".json".

    Raises:
        InputError: it is none of these, or a value in the JSON is refused.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str | Path):
        want = "a Machine, its name, its JSON or a file of it"
        raise InputError(op, "machine", want=want, got=type(machine).__name__)
    if isinstance(machine, str) and machine.lstrip().startswith("{"):
        return _from_text(machine)
    if isinstance(machine, Path) or machine.endswith(".json"):
        try:
            return _from_text(Path(machine).read_text())
        except (OSError, ValueError) as error:
            # of what the system says the words, without its number
            got = error.strerror if isinstance(error, OSError) else error
            got = str(got).removeprefix("Machine.from_json: ")
            want = "a file of a machine"
            raise InputError(op, "machine", want=want, got=f"{machine}: {got}") from error
    found = preset(machine)
    return shipped(driver_name(machine.partition("-")[0]), found.num_devices) or found


def _from_text(text: str) -> Machine:
    """A machine, by itself or in a file that says more."""
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    within = isinstance(content, dict) and "machine" in content
    return Machine.from_json(json.dumps(content["machine"]) if within else text)


def slug(gpu: str, ranks: int) -> str:
    """A file's name for a GPU: "NVIDIA H200", 4 -> "nvidia-h200-4"."""
    return f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{ranks}"


def shipped(gpu: str, ranks: int) -> Machine | None:
    """The measured machine that came with the library; of fewer GPUs where it has no other.

    Two GPUs tell nothing of more: NCCL has other rates between two of them (H200: 236 GB/s, and 301
    between four).
    """
    for count in (ranks, *range(ranks - 1, 2, -1)):
        path = SHIPPED / f"{slug(gpu, count)}.json"
        if path.exists():
            machine = Machine.from_json(json.dumps(json.loads(path.read_text())["machine"]))
            base = preset_of(gpu, min(ranks, 8))
            if count == ranks or base is None:
                return machine
            source = f"{machine.source}, on {count} GPUs"
            return replace(base, measured=machine.measured, source=source)
    return None
