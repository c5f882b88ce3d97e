"""What is known of a machine: its measured costs and the plans tuned on it, from files.

Two files for each kind of GPU and number of ranks, JSON, in the cache folder; costs that were
measured when the library was released come with it. A file that is damaged, of another machine or
of another version is ignored with a warning, never executed, never an error.
"""

import fcntl
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from counterpoint.errors import CounterpointError, CounterpointWarning
from counterpoint.machine import Machine
from counterpoint.machine_of import shipped, slug
from counterpoint.presets import preset_of
from counterpoint.problem import Problem

FORMAT = 1
CPU = "cpu"  # in place of a GPU's name


class Kind(NamedTuple):
    """A kind of file of what was tuned: what its name begins with, its format, where entries are.

    An entry has "spec", and what was measured.
    """

    name: str
    format: int
    entries: str


PLANS = Kind("tuned", 2, "plans")  # specs of format 1 have words that are gone
CONTROLS = Kind("controls", 1, "controls")


@dataclass(frozen=True)
class Knowledge:
    """A machine, and the specs that were tuned on it by `problem_key`."""

    machine: Machine | None
    tuned: Mapping[str, str]

    def to_json(self) -> str:
        """As text, for other ranks."""
        return json.dumps([self.machine and self.machine.to_json(), dict(self.tuned)])

    @classmethod
    def from_json(cls, text: str) -> "Knowledge":
        """What `to_json` has written."""
        machine, tuned = json.loads(text)
        return cls(Machine.from_json(machine) if machine else None, tuned)


def cache_folder() -> Path:
    """COUNTERPOINT_CACHE, else counterpoint in the user's cache folder."""
    own = os.environ.get("COUNTERPOINT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(home) / "counterpoint"


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
    plans = _kept(PLANS, (gpu, ranks, torch_version), where) if where else {}
    machine = machine or shipped(gpu, ranks) or preset_of(gpu, min(ranks, 8))
    return Knowledge(machine, {key: entry["spec"] for key, entry in plans.items()})


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
    place = (gpu, problem.ranks, torch_version)
    return _keep(PLANS, problem_key(problem), entry, place, folder)


def load_controls(
    key: str, gpu: str, ranks: int, torch_version: str, folder: Path | None = None
) -> dict[str, Any] | None:
    """What `save_controls` kept under `key`, if anything."""
    return _kept(CONTROLS, (gpu, ranks, torch_version), folder).get(key)


def save_controls(
    key: str, entry: Mapping[str, Any], gpu: str, ranks: int, torch_version: str,
    folder: Path | None = None,
) -> Path:  # fmt: skip
    """Keep the controls tuned for a pipeline: `entry` has "spec" and what was measured."""
    return _keep(CONTROLS, key, entry, (gpu, ranks, torch_version), folder)


def _keep(
    kind: Kind, key: str, entry: Mapping[str, Any], place: tuple[str, int, str],
    folder: Path | None,
) -> Path:  # fmt: skip
    """Put an entry into its file, one process after another.

    A folder that cannot be written to is a warning, once: what was tuned holds in this process.
    """
    path, facts = _file(kind, place, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY)
        try:  # on the folder: the file is replaced, and a lock would go with it
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = {**_kept(kind, place, folder), key: dict(entry)}
            _write(path, {**facts, kind.entries: entries})
        finally:
            os.close(lock)
    except OSError as error:
        _cannot_write(path.parent, str(error))
    return path


def _kept(
    kind: Kind, place: tuple[str, int, str], folder: Path | None
) -> dict[str, dict[str, Any]]:
    """The entries of a file; none where it is none of that place."""
    path, wants = _file(kind, place, folder)
    found = (_read(path, wants) or {}).get(kind.entries)
    entries = found.values() if isinstance(found, dict) else [found]
    if found is None:
        return {}
    if not all(isinstance(e, dict) and isinstance(e.get("spec"), str) for e in entries):
        _ignore(path, f"is damaged: its {kind.entries} have no spec")
        return {}
    return found


def _file(
    kind: Kind, place: tuple[str, int, str], folder: Path | None
) -> tuple[Path, dict[str, object]]:
    """The file of a GPU's name, a number of ranks and a version of torch; and what it is for."""
    gpu, ranks, torch_version = place
    path = (folder or cache_folder()) / f"{kind.name}-{slug(gpu, ranks)}.json"
    return path, {"format": kind.format, "gpu": gpu, "ranks": ranks, "torch": torch_version}


def _machine(folder: Path, gpu: str, ranks: int) -> Machine | None:
    path = folder / f"{slug(gpu, ranks)}.json"
    content = _read(path, {"format": FORMAT, "gpu": gpu, "ranks": ranks})
    if content is None:
        return None
    try:
        machine = Machine.from_json(json.dumps(content["machine"]))
    except (CounterpointError, KeyError, OverflowError) as error:
        return _ignore(path, f"is damaged: {error}")
    known = machine.measured or machine.nic
    return machine if known else _ignore(path, "has no measured costs")


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
