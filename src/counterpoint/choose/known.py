"""What is known of a machine: its measured costs and the plans tuned on it, from files.

Two files for each kind of GPU and number of ranks, JSON, in the cache folder; costs that were
measured when the library was released come with it. A file that is damaged, of another machine or
of another version is ignored with a warning, never executed, never an error.
"""

import fcntl
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from counterpoint.errors import CounterpointError, CounterpointWarning
from counterpoint.machine import Machine
from counterpoint.presets import preset_of
from counterpoint.problem import Problem

FORMAT = 1
TUNED_FORMAT = 2  # of files of tuned plans: specs of format 1 have words that are gone
SHIPPED = Path(__file__).parent.parent / "measured"


@dataclass(frozen=True)
class Knowledge:
    """A machine, and the specs that were tuned on it by `problem_key`."""

    machine: Machine | None
    tuned: Mapping[str, str]


def cache_folder() -> Path:
    """COUNTERPOINT_CACHE, else counterpoint in the user's cache folder."""
    own = os.environ.get("COUNTERPOINT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(home) / "counterpoint"


def slug(gpu: str, ranks: int) -> str:
    """A file's name for a GPU: "NVIDIA H200", 4 -> "nvidia-h200-4"."""
    return f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{ranks}"


def problem_key(problem: Problem) -> str:
    """The problem as text, the same for equal problems, whatever indices or memory they have."""
    return str(replace(problem, scratch_bytes_limit=0, indices=()))


def load(
    gpu: str, ranks: int, torch_version: str, *, folder: Path | str | None = "cache"
) -> Knowledge:
    """What is known of `ranks` GPUs of that name.

    Args:
        gpu: as the driver says it.
        torch_version: tuned plans are those of one version of torch, and so of its libraries.
        folder: of the files; "cache" is `cache_folder()`, None only what came with the library.

    Returns:
        The measured machine, else the datasheet's, else None; and tuned plans.
    """
    where = cache_folder() if folder == "cache" else Path(folder) if folder else None
    machine = _machine(where, gpu, ranks) if where else None
    tuned = _tuned(where, gpu, ranks, torch_version) if where else {}
    machine = machine or shipped(gpu, ranks) or preset_of(gpu, min(ranks, 8))
    return Knowledge(machine, tuned)


def shipped(gpu: str, ranks: int) -> Machine | None:
    """The measured machine that came with the library; of fewer GPUs where it has no other."""
    for count in (ranks, *range(ranks - 1, 1, -1)):
        path = SHIPPED / f"{slug(gpu, count)}.json"
        if path.exists():
            machine = Machine.from_json(json.dumps(json.loads(path.read_text())["machine"]))
            base = preset_of(gpu, min(ranks, 8))
            if count == ranks or base is None:
                return machine
            source = f"{machine.source}, on {count} GPUs"
            return replace(base, measured=machine.measured, source=source)
    return None


def save_machine(machine: Machine, gpu: str, ranks: int, folder: Path | None = None) -> Path:
    """Keep a measured machine for later; returns the file."""
    content = {"format": FORMAT, "gpu": gpu, "ranks": ranks}
    content["machine"] = json.loads(machine.to_json())
    return _write((folder or cache_folder()) / f"{slug(gpu, ranks)}.json", content)


def save_tuned(
    problem: Problem, entry: Mapping[str, Any], gpu: str, torch_version: str,
    folder: Path | None = None,
) -> Path:  # fmt: skip
    """Keep the plan tuned for `problem`: `entry` has "spec" and what was measured."""
    where = folder or cache_folder()
    path = where / f"tuned-{slug(gpu, problem.ranks)}.json"
    facts = {"format": TUNED_FORMAT, "gpu": gpu, "ranks": problem.ranks, "torch": torch_version}

    def with_it() -> dict[str, Any]:
        plans = _entries(where, gpu, problem.ranks, torch_version)
        return {**facts, "plans": {**plans, problem_key(problem): dict(entry)}}

    return _update(path, with_it)


def load_controls(
    key: str, gpu: str, ranks: int, torch_version: str, folder: Path | None = None
) -> dict[str, Any] | None:
    """What `save_controls` kept under `key`, if anything."""
    where = folder or cache_folder()
    found = _controls(where, gpu, ranks, torch_version).get(key)
    return found if isinstance(found, dict) else None


def save_controls(
    key: str, entry: Mapping[str, Any], gpu: str, ranks: int, torch_version: str,
    folder: Path | None = None,
) -> Path:  # fmt: skip
    """Keep the controls tuned for a pipeline: `entry` has "spec" and what was measured."""
    where = folder or cache_folder()
    facts = {"format": FORMAT, "gpu": gpu, "ranks": ranks, "torch": torch_version}

    def with_it() -> dict[str, Any]:
        known = _controls(where, gpu, ranks, torch_version)
        return {**facts, "controls": {**known, key: dict(entry)}}

    return _update(where / f"controls-{slug(gpu, ranks)}.json", with_it)


def _controls(folder: Path, gpu: str, ranks: int, torch_version: str) -> dict[str, Any]:
    path = folder / f"controls-{slug(gpu, ranks)}.json"
    wants = {"format": FORMAT, "gpu": gpu, "ranks": ranks, "torch": torch_version}
    content = _read(path, wants) or {}
    known = content.get("controls", {})
    if isinstance(known, dict):
        return known
    _ignore(path, "is damaged: its controls are no JSON object")
    return {}


def _machine(folder: Path, gpu: str, ranks: int) -> Machine | None:
    path = folder / f"{slug(gpu, ranks)}.json"
    content = _read(path, {"format": FORMAT, "gpu": gpu, "ranks": ranks})
    if content is None:
        return None
    try:
        machine = Machine.from_json(json.dumps(content["machine"]))
    except (CounterpointError, KeyError, OverflowError) as error:
        return _ignore(path, f"is damaged: {error}")
    return machine if machine.measured else _ignore(path, "has no measured costs")


def _tuned(folder: Path, gpu: str, ranks: int, torch_version: str) -> dict[str, str]:
    entries = _entries(folder, gpu, ranks, torch_version)
    return {key: entry["spec"] for key, entry in entries.items()}


def _entries(folder: Path, gpu: str, ranks: int, torch_version: str) -> dict[str, dict[str, Any]]:
    path = folder / f"tuned-{slug(gpu, ranks)}.json"
    wants = {"format": TUNED_FORMAT, "gpu": gpu, "ranks": ranks, "torch": torch_version}
    content = _read(path, wants)
    plans = content.get("plans") if content else None
    if plans is None:
        return {}
    entries = plans.values() if isinstance(plans, dict) else [None]
    if not all(isinstance(e, dict) and isinstance(e.get("spec"), str) for e in entries):
        _ignore(path, "is damaged: its plans have no spec")
        return {}
    return plans


def _read(path: Path, wants: Mapping[str, object]) -> dict[str, Any] | None:
    """The JSON object in `path`, if it is there and for this machine."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return _ignore(path, f"is damaged: {error}")
    if not isinstance(content, dict):
        return _ignore(path, "is damaged: no JSON object")
    for name, want in wants.items():
        if content.get(name) != want:
            return _ignore(path, f"is for {name} {content.get(name)!r}, this is {want!r}")
    return content


def _ignore(path: Path, why: str) -> None:
    message = f"{path} {why}; it is ignored, delete it or measure again"
    warnings.warn(message, CounterpointWarning, stacklevel=2)


def _update(path: Path, content: Callable[[], Mapping[str, Any]]) -> Path:
    """Put what `content` says into a file, one process after another.

    A folder that cannot be written to is a warning, once: what was tuned holds in this process.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:  # on the folder: the file is replaced, and a lock would go with it
            fcntl.flock(folder, fcntl.LOCK_EX)
            _write(path, content())
        finally:
            os.close(folder)
    except OSError as error:
        _cannot_write(path.parent, str(error))
    return path


def _write(path: Path, content: Mapping[str, Any]) -> Path:
    """All or nothing: another process may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


@cache
def _cannot_write(folder: Path, why: str) -> None:
    message = f"{folder} cannot be written to: {why}; what was tuned is known to this process alone"
    warnings.warn(message, CounterpointWarning, stacklevel=3)
