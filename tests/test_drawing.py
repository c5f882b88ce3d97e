"""Cases that `make test` draws of grids."""

import ast
import re
from itertools import combinations, product
from pathlib import Path

import pytest
from drawing import drawn, places

MAKEFILE = Path(__file__).parents[1] / "Makefile"
GRID = [{"ranks": a, "dtype": b, "op": c} for a, b, c in product(range(4), range(3), range(5))]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_each_value_is_met_and_then_each_pair(seed: str):
    few = [GRID[i] for i in drawn(GRID, 5, seed)]
    assert {v for case in few for v in case.items()} == {v for case in GRID for v in case.items()}
    more = [GRID[i] for i in drawn(GRID, 30, seed)]
    met = {pair for case in more for pair in combinations(case.items(), 2)}
    assert met == {pair for case in GRID for pair in combinations(case.items(), 2)}


def test_the_seed_says_which_and_none_is_drawn_twice():
    assert drawn(GRID, 7, "3 a") == drawn(GRID, 7, "3 a") != drawn(GRID, 7, "4 a")
    assert drawn(GRID, 100, "0") == set(range(len(GRID))) and len(drawn(GRID, 1, "0")) == 1


def test_equal_values_are_one():
    cases = [{"op": op, "ranks": ranks} for op in ("a", ["b"]) for ranks in (2, 3)]
    assert places(cases) == [{"op": i, "ranks": j} for i in range(2) for j in range(2)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", ["a", "b"])
def test_two_of_four_have_all_values(request: pytest.FixtureRequest, op: str, ranks: int):
    """Of what pytest itself says of stacked parameters."""
    if not request.config.getoption("--all-cases") and "[" not in " ".join(request.config.args):
        name = f"{request.node.originalname}["
        left = [item.callspec.params for item in request.session.items if name in item.name]
        assert {each["op"] for each in left} == {"a", "b"}
        assert {each["ranks"] for each in left} == {2, 3}


def test_every_grid_has_a_case_in_make_test():
    """No other mark or option leaves tests out: a grid that is drawn from keeps one at least."""
    tests = Path(__file__).parent
    for file in tests.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.drawn":
                (count,) = node.args
                assert isinstance(count, ast.Constant) and count.value >= 1, file
    recipes = dict(re.findall(r"^(test|test-all):.*\n((?:\t.*\n)+)", MAKEFILE.read_text(), re.M))
    assert "--all-cases" in recipes["test-all"]
    assert not re.search(r"pytest.* (-m|-k|--deselect|--ignore) ?", recipes["test"])


APART = {"make test-all", "make islands", "make models", "make faults", "make interrupts"}


@pytest.mark.apart("make faults")
def test_what_is_apart_is_left_to_its_command(request: pytest.FixtureRequest):
    """This one, where not all cases are run: it then shows that it is named or that all are."""
    args = request.config.args
    assert request.config.getoption("--all-cases") or any("::" in each for each in args)


def test_each_that_is_apart_has_such_a_command():
    root = Path(__file__).parent
    made = (root.parent / "Makefile").read_text()
    marked = re.compile(r"^@pytest\.mark\.apart\(\"(.*?)\"\)", re.M)
    found = {name for path in root.rglob("test_*.py") for name in marked.findall(path.read_text())}
    assert found and found <= APART
    assert all(f"\n{name.removeprefix('make ')}:" in made for name in found)
