"""Which cases of a grid `make test` runs. `make test-all` runs every one.

    @pytest.mark.drawn(6)  # of 120
    @pytest.mark.parametrize("ranks", [2, 3, 4, 8])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("op", OPS)

Cases are drawn by a seed, which pytest prints. Each value of each parameter is among them where
their number allows it, then as many pairs of values of two parameters as it allows.

A test that goes through cases of its own takes some of them by the fixture `draw`:

    for size in draw(SIZES, 2):

    @pytest.mark.apart("make islands")  # of a command of its own: `make test` leaves it out
    @pytest.mark.apart("make test-all")  # dear, and its lines are reached by other tests
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import pytest

SEED = 0
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of each grid")
    parser.addoption("--draw", type=int, default=SEED, help="seed of the cases that are drawn")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "drawn(count): `make test` runs so many cases of this grid")
    config.addinivalue_line("markers", "apart(command): what has a command of its own runs there")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--all-cases"):
        return "all cases of each grid"
    return f"cases of large grids drawn by --draw {config.getoption('--draw')}; --all-cases for all"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn. A case that is named on the command line is run."""
    named = any("[" in argument or "::" in argument for argument in config.args)
    if config.getoption("--all-cases") or named:
        return
    grids: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("drawn"):
            grids[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.get_closest_marker("apart")}
    for name, cases in grids.items():
        (count,) = cases[0].get_closest_marker("drawn").args
        given = [getattr(case, "callspec").params for case in cases]  # noqa: B009 (pytest's own)
        kept = drawn(places(given), count, f"{config.getoption('--draw')} {name}")
        left_out |= {case for i, case in enumerate(cases) if i not in kept}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def places(cases: Sequence[Mapping[str, object]]) -> list[dict[str, int]]:
    """Which value of each parameter a case has, in the order in which they come.

    pytest's own numbers of stacked parameters are those of the cases.
    """
    seen: defaultdict[str, dict[str, int]] = defaultdict(dict)
    return [
        {name: seen[name].setdefault(repr(value), len(seen[name])) for name, value in case.items()}
        for case in cases
    ]


def drawn(cases: Sequence[Mapping[str, int]], count: int, seed: str) -> set[int]:
    """Which of `cases` are run: `count`, or all if there are no more.

    Args:
        cases: which value of each parameter a case has.
        count: at least 1, so that no grid is without a case.
        seed: the same cases for the same one, in whatever process.
    """
    assert count >= 1
    left = list(range(len(cases)))
    random.Random(seed).shuffle(left)
    values = [set(case.items()) for case in cases]
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    kept, met, met_pairs = set[int](), set[object](), set[object]()
    while left and len(kept) < count:
        best = max(left, key=lambda i: (len(values[i] - met), len(pairs[i] - met_pairs)))
        left.remove(best)
        kept.add(best)
        met |= values[best]
        met_pairs |= pairs[best]
    return kept


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether all is run: of a test that repeats itself, as often as it can."""
    return bool(request.config.getoption("--all-cases"))


class Draw(NamedTuple):
    """Some of the cases that a test goes through by itself; ranks draw the same ones.

    Args:
        seed: of the run and of the test.
        everything: all cases are run.
    """

    seed: str
    everything: bool

    def __call__(self, cases: Sequence[T], count: int, *of: object) -> list[T]:
        """`count` of them, at least one, in their order; others for another `of`."""
        assert count >= 1
        kept = random.Random(f"{self.seed} {of}").sample(range(len(cases)), min(count, len(cases)))
        return [*cases] if self.everything else [cases[i] for i in sorted(kept)]


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    seed = f"{request.config.getoption('--draw')} {request.node.nodeid}"
    return Draw(seed, bool(request.config.getoption("--all-cases")))
