"""What is known of a machine: its measured costs and the plans tuned on it, from files.

JSON files in the cache folder, each with the `Place` that its content was measured in; costs that
were measured when the library was released come with it. A file that is damaged, or of another
place, is ignored with a warning, never executed, never an error.
"""

import fcntl
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from counterpoint.errors import CounterpointError, CounterpointWarning
from counterpoint.log import logger
from counterpoint.machine import Machine
from counterpoint.machine_of import shipped, slug
from counterpoint.presets import preset_of
from counterpoint.problem import Problem

CPU = "cpu"  # in place of a GPU's name
# variables that change what is measured: not those that say where files are, what is logged or
# shown in a profile, how long to wait, or which rank this is
CHANGES = re.compile(
    r"(NCCL|TORCH_SYMM_MEM|CUBLAS|CUBLASLT|GLOO|COUNTERPOINT)_"
    r"(?!ASYNC_ERROR|CACHE|COMMIT|COMM_ID|DEBUG|HOSTID|ISLAND|LOG|NVTX|TIMEOUT)|"
    r"CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MPS_|SCALE_LAUNCH_QUEUES)|"
    r"NVIDIA_TF32|TORCH_ALLOW_TF32|TORCH_NCCL_HIGH_PRIORITY|TRITON_(DEFAULT_FP|INTERPRET|PTXAS)"
)


def environment() -> dict[str, str]:
    """The variables of this process that change what is measured."""
    return {name: os.environ[name] for name in sorted(os.environ) if CHANGES.match(name)}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where something is measured: all that its times depend on besides what is timed.

    A file says which place it is of, and is of no other.

    Args:
        gpu: as the driver says it, or CPU.
        ranks: of the group.
        islands: that the ranks are on.
        versions: of all that runs, by name.
        environment: variables that change what is measured.
    """

    gpu: str
    ranks: int
    islands: int = 1
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=environment)

    def facts(self) -> dict[str, object]:
        """All of it, as a file has it."""
        return {
            "gpu": self.gpu, "ranks": self.ranks, "islands": self.islands,
            "versions": dict(self.versions), "environment": dict(self.environment),
        }  # fmt: skip


class Kind(NamedTuple):
    """A kind of file: what its name begins with, its format, and the field of its content."""

    begins: str
    format: int
    content: str


MACHINE = Kind("", 2, "machine")
# an entry has "spec", and what was measured
PLANS = Kind("tuned-", 3, "plans")
CONTROLS = Kind("controls-", 2, "controls")
# fields of a problem that no time depends on, or that are not equal in each call
FREE = ("scratch_bytes_limit", "indices", "eps", "scale")


class Timed(NamedTuple):
    """Times of a spec that was tuned, in seconds of one call.

    Args:
        next_spec, next_s: of the fastest of the others that is known.
        here: in this process; else it was read from a file.
    """

    seconds: float
    next_spec: str = ""
    next_s: float | None = None
    here: bool = False


@dataclass(frozen=True)
class Knowledge:
    """A machine, and the specs that were tuned on it by `problem_key`; times of those that say."""

    machine: Machine | None
    tuned: Mapping[str, str]
    times: Mapping[str, Timed] = field(default_factory=dict[str, Timed])

    def to_json(self) -> str:
        """As text, for other ranks."""
        return json.dumps([
            self.machine and self.machine.to_json(), dict(self.tuned), dict(self.times)
        ])  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> "Knowledge":
        """What `to_json` has written."""
        machine, tuned, times = json.loads(text)
        timed = {key: Timed(*each) for key, each in times.items()}
        return cls(Machine.from_json(machine) if machine else None, tuned, timed)


def cache_folder() -> Path:
    """COUNTERPOINT_CACHE, else counterpoint in the user's cache folder."""
    own = os.environ.get("COUNTERPOINT_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(home) / "counterpoint"


def problem_key(problem: Problem) -> str:
    """The problem as text: all fields that times depend on."""
    told = ((f.name, getattr(problem, f.name), f.default) for f in fields(problem))
    some = (f"{name} {value}" for name, value, default in told if value != default)
    return ", ".join(text for text in some if text.split()[0] not in FREE)


def load(place: Place, folder: Path | None = None) -> Knowledge:
    """What is known of a place.

    Args:
        place: where plans are to run.
        folder: of the files; None: `cache_folder()`.

    Returns:
        The measured machine, else the datasheet's, else None; and tuned plans.
    """
    plans = _kept(PLANS, place, folder)
    if plans:
        logger.info("%s: tuned plans of %d problems", file_of(PLANS, place, folder)[0], len(plans))
    machine = _machine(place, folder) or released(place.gpu, place.ranks)
    times = {key: timed for key, entry in plans.items() if (timed := _timed(entry))}
    return Knowledge(machine, {key: entry["spec"] for key, entry in plans.items()}, times)


def _timed(entry: Mapping[str, Any]) -> Timed | None:
    """What a file says of times; None where someone has written something else into it."""
    seconds, serial_s = entry.get("seconds"), entry.get("serial_s")
    if not (isinstance(seconds, float) and isinstance(serial_s, float)):
        return None
    return Timed(seconds) if entry["spec"] == "serial" else Timed(seconds, "serial", serial_s)


def released(gpu: str, ranks: int) -> Machine | None:
    """What the library itself has of so many GPUs: measured, else from the datasheet."""
    return shipped(gpu, ranks) or preset_of(gpu, min(ranks, 8))


def save_machine(machine: Machine, place: Place, folder: Path | None = None) -> Path:
    """Keep a measured machine for later; returns the file."""
    path, facts = file_of(MACHINE, place, folder)
    return _write(path, {**facts, MACHINE.content: json.loads(machine.to_json())})


def save_tuned(
    problem: Problem, entry: Mapping[str, Any], place: Place, folder: Path | None = None
) -> Path:
    """Keep the plan tuned for `problem`: `entry` has "spec" and what was measured."""
    return _keep(PLANS, problem_key(problem), entry, place, folder)


def load_controls(key: str, place: Place, folder: Path | None = None) -> dict[str, Any] | None:
    """What `save_controls` kept under `key`, if anything."""
    found = _kept(CONTROLS, place, folder)
    if key in found:
        logger.info("%s: tuned controls of a pipeline", file_of(CONTROLS, place, folder)[0])
    return found.get(key)


def save_controls(
    key: str, entry: Mapping[str, Any], place: Place, folder: Path | None = None
) -> Path:
    """Keep the controls tuned for a pipeline: `entry` has "spec" and what was measured."""
    return _keep(CONTROLS, key, entry, place, folder)


def file_of(kind: Kind, place: Place, folder: Path | None = None) -> tuple[Path, dict[str, object]]:
    """The file of a place, and what it must say of itself."""
    where = f"-on-{place.islands}-islands" if place.islands > 1 else ""
    name = f"{kind.begins}{slug(place.gpu, place.ranks)}{where}.json"
    return (folder or cache_folder()) / name, {"format": kind.format, **place.facts()}


def _keep(
    kind: Kind, key: str, entry: Mapping[str, Any], place: Place, folder: Path | None
) -> Path:
    """Put an entry into its file, one process after another.

    A folder that cannot be written to is a warning, once: what was tuned holds in this process.
    """
    path, facts = file_of(kind, place, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY)
        try:  # on the folder: the file is replaced, and a lock would go with it
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = {**_kept(kind, place, folder), key: dict(entry)}
            _write(path, {**facts, kind.content: entries})
        finally:
            os.close(lock)
    except OSError as error:
        _cannot_write(path.parent, str(error))
    return path


def _kept(kind: Kind, place: Place, folder: Path | None) -> dict[str, dict[str, Any]]:
    """The entries of a file; none where it is of another place."""
    path, wants = file_of(kind, place, folder)
    found = (_read(path, wants) or {}).get(kind.content)
    entries = found.values() if isinstance(found, dict) else [found]
    if found is None:
        return {}
    if not all(isinstance(e, dict) and isinstance(e.get("spec"), str) for e in entries):
        _ignore(path, f"is damaged: its {kind.content} have no spec")
        return {}
    return found


def _machine(place: Place, folder: Path | None) -> Machine | None:
    path, wants = file_of(MACHINE, place, folder)
    content = _read(path, wants)
    if content is None:
        return None
    try:
        machine = Machine.from_json(json.dumps(content[MACHINE.content]))
    except (CounterpointError, KeyError, OverflowError) as error:
        return _ignore(path, f"is damaged: {error}")
    if not (machine.measured or machine.nic):
        return _ignore(path, "has no measured costs")
    logger.info("%s: measured costs of %s", path, machine.name)
    return machine


def _read(path: Path, wants: Mapping[str, object]) -> dict[str, Any] | None:
    """The JSON object in `path`, if it is there and of that place."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return _ignore(path, f"is damaged: {error}")
    if not isinstance(content, dict):
        return _ignore(path, "is damaged: no JSON object")
    said, wanted = _flat(content, wants), _flat(wants, wants)
    for name in (*wanted, *said):
        if said.get(name) != wanted.get(name):
            return _ignore(path, f"is for {name} {said.get(name)!r}, this is {wanted.get(name)!r}")
    return content


def _flat(facts: Mapping[str, Any], names: Mapping[str, object]) -> dict[str, object]:
    """The facts of those names, each version and each variable by itself."""
    found: dict[str, object] = {}
    for name in names:
        value = facts.get(name)
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _ignore(path: Path, why: str) -> None:
    message = f"{path} {why}; it is ignored, delete it or measure again"
    logger.info(message)
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
