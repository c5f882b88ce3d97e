"""What must not happen on the host while a CUDA graph is captured."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Generator[None]:
    """Collect no garbage: what frees peers' memory ends the process while a graph is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
