"""How many Python functions of ours a call runs, and in how many modules: what the host pays."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import counterpoint as cp
from counterpoint.gpu.capture import no_collector

HOME = str(Path(cp.__file__).parent)
MOST_CALLS, MOST_MODULES = 12, 8


def own_calls(call: Callable[[], object]) -> list[str]:
    """The functions of ours that `call` runs, in order, as "ops/call.py key_of".

    Garbage is collected before, not within: what ends a group of an earlier test is ours, too.
    """
    found: list[str] = []

    def seen(frame: Any, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        # what is inlined from Python 3.12 on is none
        if event == "call" and file.startswith(HOME) and name not in ("<listcomp>", "<genexpr>"):
            found.append(f"{file[len(HOME) + 1 :]} {name}")

    gc.collect()
    before = sys.getprofile()
    with no_collector():
        sys.setprofile(seen)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


def too_many(found: list[str], saves: int = 0) -> str:
    """What is beyond the bar, or ""; `saves`: functions that save what a gradient needs."""
    modules = {each.split()[0] for each in found}
    good = 0 < len(found) - saves <= MOST_CALLS and len(modules) <= MOST_MODULES
    return "" if good else f"{len(found)} calls in {len(modules)} modules: {found}"
