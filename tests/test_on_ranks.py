"""A test that runs on ranks fails with what any of them says, and takes what a test takes."""

from inspect import signature

import pytest
from on_ranks import on_ranks
from rankpool import RankError, RankPool
from refusals import wrongly_refused

from counterpoint.errors import InputError


def says(rank: int, ranks: int, what: str) -> list[str] | None:
    assert what != "nonsense", "this is nonsense"
    return [f"{what} of {ranks}"] if what and rank == ranks - 1 else [] if what else None


on_two = on_ranks(2)(says)


def test_what_a_rank_says_or_raises_fails_the_test(pool: RankPool):
    on_two(pool=pool, what="")
    with pytest.raises(AssertionError, match=r"^rank 1: this of 2$"):
        on_two(pool=pool, what="this")
    with pytest.raises(RankError, match="this is nonsense"):
        on_two(pool=pool, what="nonsense")
    assert list(signature(on_two).parameters) == ["pool", "what"] and on_two.__name__ == "says"


@pytest.mark.parametrize("given", ["a", "b"])
@on_ranks(1, 3)
def test_parameters_and_fixtures_reach_the_ranks(rank: int, ranks: int, given: str, tmp_path):
    assert ranks in (1, 3) and given in "ab" and tmp_path.exists()


def refuses(x: int) -> None:
    if x < 0:
        raise InputError("refuses", "x", want=">= 0", got=x)


def test_refusals_in_other_words_are_told():
    cases = [({"x": -1}, "x must be >= 0"), ({"x": -2}, "x must be >= 0, got -2")]
    assert wrongly_refused(refuses, {}, cases) == []
    assert len(wrongly_refused(refuses, {}, cases, exact=True)) == 1
    assert len(wrongly_refused(refuses, {}, cases, name="other")) == 2
    assert "accepted" in wrongly_refused(refuses, {"x": 1}, [({}, "x must be")])[0]
