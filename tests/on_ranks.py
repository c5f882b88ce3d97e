"""`@on_ranks(2, 3)`: a test that runs as a whole on each of 2 ranks, and on each of 3.

It asserts on the ranks, or returns texts of what is wrong there: ranks then stay in step, and one
wrong case does not hide the others.
"""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest
from rankpool import RankPool


def on_ranks(*worlds: int) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of `body(rank, ranks, ...)`; what follows are parameters and fixtures.

    Args:
        worlds: how many ranks; without any, a parameter `ranks` says it.
    """

    def made(body: Callable[..., Any]) -> Any:
        name, module = body.__name__, sys.modules[body.__module__]
        _, second, *given = list(signature(body).parameters.values())
        # ranks import the body by its name, and that is the test's
        body.__name__ = body.__qualname__ = f"_{name}"
        setattr(module, body.__name__, body)

        def test(pool: RankPool, **values: Any) -> None:
            __tracebackhide__ = True
            ranks = worlds[0] if len(worlds) == 1 else values["ranks"]
            found = pool.run(body, ranks, *(values[p.name] for p in given))
            wrong = [f"rank {r}: {text}" for r, texts in enumerate(found) for text in texts or ()]
            assert not wrong, "\n".join(wrong[:20])

        test.__name__, test.__qualname__, test.__module__ = name, name, body.__module__
        test.__doc__ = body.__doc__
        first = [Parameter("pool", second.kind)]
        first += [Parameter("ranks", second.kind)] if len(worlds) != 1 else []
        test.__signature__ = signature(body).replace(parameters=[*first, *given])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", worlds)(test) if len(worlds) > 1 else test

    return made


def script(rank: int, ranks: int, path: str, *words: str) -> str:
    """What a rank of the pool prints as `python path *words`, whose run_on_ranks starts none."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", [path, *words])
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()


def script_by_torch(rank: int, ranks: int, path: str, *words: str) -> str:
    """The same as on a user's CPU ranks: torch stands for our kernels."""
    from rank_bodies import by_reference

    with by_reference():
        return script(rank, ranks, path, *words)
