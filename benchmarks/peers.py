"""Code of others for arms of ours, from checkouts in `.peers/`: git ignores that folder."""

import sys
from importlib import import_module
from types import ModuleType

from benchmarks.tables import ROOT

FOLDER = ROOT / ".peers"


def peer(repository: str, module: str) -> ModuleType | str:
    """A module of a checkout there; a text says why it cannot be had.

    Args:
        repository: name of its folder.
        module: full name; the folder of its package is in that of the repository.
    """
    folder = FOLDER / repository
    if not folder.is_dir():
        return f"there is no checkout of {repository} in .peers/"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
