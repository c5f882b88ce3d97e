"""Fixtures of all tests. Imports no torch: tests of the pure half stay quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rankpool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Warm rank processes; `pool.run(body, world_size)` runs a module-level `body` on each."""
    from rankpool import RankPool

    # the ranks have no GPU: their Triton kernels run under the interpreter; none is ever too late
    with RankPool(env={"TRITON_INTERPRET": "1", "COUNTERPOINT_TIMEOUT_S": "600"}) as ranks:
        yield ranks
