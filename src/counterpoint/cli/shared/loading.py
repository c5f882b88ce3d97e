"""Loading modules, which takes seconds for torch: Ctrl-C meanwhile, and what is not installed."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from counterpoint.lazy import needing


@contextmanager
def loading() -> Generator[None]:
    """End this process at Ctrl-C, at once.

    An exception would not do it: modules that try to import others take it for a missing one.

    Raises:
        UnsupportedError: torch, or another package that a light install lacks, is missing.
    """
    before = signal.signal(signal.SIGINT, _stop)
    try:
        with needing():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)
