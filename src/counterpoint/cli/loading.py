"""What Ctrl-C does while modules are loaded, which takes seconds for torch."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def loading() -> Generator[None]:
    """End this process at Ctrl-C, at once.

    An exception would not do it: modules that try to import others take it for a missing one.
    """
    before = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)
