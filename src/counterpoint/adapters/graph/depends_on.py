"""What a rewritten graph depends on besides the graph: torch's caches know it by that, too.

A graph holds this rank, the sizes and names of its groups, and decisions about this machine. One
that another rank has compiled, or another number of ranks, computes something else.
"""

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import counterpoint
from counterpoint.group.ranks import ranks_of_groups
from counterpoint.group.workspace import workspaces


def facts() -> tuple[object, ...] | None:
    """All of it, by value; None where this torch does not say which groups there are."""
    groups = ranks_of_groups()
    if groups is None:
        return None
    islands = {
        (name, str(device), *workspace.islands[:2])
        for (name, device), workspace in workspaces.items()
    }
    return library(), tuple(sorted(groups.items())), tuple(sorted(islands)), _gpus()


def uuids_of(passes: Iterable[Any]) -> tuple[Any, ...] | None:
    """What a user's own passes are known by; None if one of them is not."""
    found = tuple(getattr(each, "uuid", lambda: None)() for each in passes)
    return None if None in found else found


@cache
def library() -> str:
    """A digest of this library: its code, and what it knows of machines."""
    digest, folder = sha256(), Path(counterpoint.__file__).parent
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _gpus() -> tuple[str, ...]:
    """The GPUs that this process sees: what is predicted to be slower on them stays apart."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
