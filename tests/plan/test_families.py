"""Every family, for every shape that it may meet: proved, made again from its spec, read back."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.plan.families import DIRECTIONS, FAMILIES, build
from counterpoint.plan.grading import compositions
from counterpoint.plan.serialize import from_json, to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import OPS, Op, Problem

AG: Op = "all_gather_matmul"
RS: Op = "matmul_reduce_scatter"

# rows of each rank, n, k: one, primes, one less than a tile, nothing at all
SHAPES = {
    "ones": ([1] * 8, 1, 1),
    "primes": ([13] * 8, 17, 19),
    "below_a_tile": ([127] * 8, 255, 63),
    "unequal": ([3, 0, 7, 1, 0, 5, 2, 11], 5, 131),
    "first_is_empty": ([0, 4, 4, 1, 4, 4, 4, 4], 3, 513),
    "one_has_all": ([0, 6, 0, 0, 0, 0, 0, 0], 2, 3),
    "no_rows": ([0] * 8, 4, 4),
    "no_columns": ([2] * 8, 0, 4),
    "no_k": ([2] * 8, 4, 0),
}


def problem_of(op: Op, shape: str, ranks: int, **options: object) -> Problem:
    rows, n, k = SHAPES[shape]
    mine = tuple(rows[:ranks])
    return Problem(op, sum(mine), n, k, ranks, rows=mine, **options)  # type: ignore[arg-type]


def peers_of(ranks: int) -> tuple[str, ...]:
    return ("ring",) if ranks & (ranks - 1) else ("ring", "xor")


def specs(op: Op, ranks: int) -> list[str]:
    """At least one spec of each family, peers and direction."""
    halves = f"{(ranks + 1) // 2}/{ranks // 2}" if ranks > 1 else "1"
    found = ["serial"]
    for peers in peers_of(ranks):
        if op == AG:
            for way in DIRECTIONS:
                graded = (f"graded {halves} {peers} {way}", f"graded {ranks} {peers} {way}")
                found += [f"shard_p2p {peers} {way}", *graded]
                if ranks > 1:
                    found += [f"graded {ranks - 1}/1 {peers} {way} pieces=2"]
                    found += [f"shard_p2p {peers} {way} pieces=3"]
            found += [f"uniform_fused_2d {peers}", f"uniform_fused_1d {peers}"]
        else:
            found += [f"shard_p2p {peers}", f"graded {halves} {peers}"]
            if ranks > 1:
                found += [f"graded 1/{ranks - 1} {peers} pieces=2", f"shard_p2p {peers} pieces=3"]
    return found


def prove(problem: Problem, spec: str) -> Plan:
    plan = build(problem, spec)
    validate(plan)
    assert build(problem, plan.spec) == plan
    assert from_json(to_json(plan)) == plan
    return plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_is_right(op: Op, ranks: int, shape: str):
    for spec in specs(op, ranks):
        for bias in (False, True):
            prove(problem_of(op, shape, ranks, bias=bias), spec)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["primes", "unequal"])
def test_every_family_is_right_on_eight_ranks(op: Op, shape: str):
    for spec in specs(op, 8):
        prove(problem_of(op, shape, 8, bias=shape == "unequal"), spec)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_family_is_right_in_other_dtypes(op: Op, dtype: str):
    for spec in specs(op, 3):
        prove(problem_of(op, "primes", 3, dtype=dtype, bias=True), spec)


@pytest.mark.parametrize("peers", ["ring", "xor"])
@pytest.mark.parametrize("groups", list(compositions(4)), ids=lambda g: "/".join(map(str, g)))
def test_every_grouping_of_four_ranks_is_right(groups: tuple[int, ...], peers: str):
    sizes = "/".join(map(str, groups))
    for way in DIRECTIONS:
        for tail in ("", " pieces=2")[: 2 if groups[-1] == 1 else 1]:
            prove(problem_of(AG, "unequal", 4, bias=True), f"graded {sizes} {peers} {way}{tail}")
    for tail in ("", " pieces=2", " pieces=3")[: 3 if groups[0] == 1 else 1]:
        prove(problem_of(RS, "unequal", 4, bias=True), f"graded {sizes} {peers}{tail}")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, str]:
    op: Op = draw(st.sampled_from([AG, RS]))
    ranks = draw(st.integers(1, 6))
    rows = tuple(draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)))
    n, k = draw(st.integers(0, 300)), draw(st.integers(0, 600))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    problem = Problem(op, sum(rows), n, k, ranks, dtype, rows, draw(st.booleans()))
    family = draw(st.sampled_from(FAMILIES[op]))
    words = [family]
    if family == "graded":
        words.append("/".join(map(str, draw(st.sampled_from(list(compositions(ranks)))))))
    if family != "serial":
        words.append(draw(st.sampled_from(peers_of(ranks))))
        if family == "shard_p2p":
            words += draw(st.sampled_from([[], ["pieces=2"], ["pieces=5"]]))
        if op == AG and family in ("shard_p2p", "graded"):
            words += draw(st.sampled_from([[], ["push"], ["pull"]]))
    return problem, " ".join(words)


@given(cases())
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
def test_random_problems_and_specs_are_right(case: tuple[Problem, str]):
    prove(*case)


def edges(plan: Plan) -> Iterator[tuple[int, str]]:
    return ((i, name) for i, step in enumerate(plan.steps) for name in step.after)


@pytest.mark.parametrize("op", OPS)
def test_steps_name_each_predecessor_once(op: Op):
    for spec in specs(op, 4):
        plan = build(problem_of(op, "primes", 4), spec)
        assert len(set(edges(plan))) == len(list(edges(plan)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_graded_without_sizes_takes_those_of_the_machine(op: Op, ranks: int):
    problem = Problem(op, 1024 * ranks, 1024, 1024, ranks)
    assert build(problem, "graded") == build(problem, "graded", preset(f"h200-{ranks}"))
    validate(build(problem, "graded"))


def test_a_group_of_one_rank_is_a_plain_matmul():
    for op in OPS:
        for family in FAMILIES[op]:
            plan = build(problem_of(op, "primes", 1), family)
            assert [step.kind for step in plan.steps] == ["matmul"]
            assert plan.spec == "serial"


@pytest.mark.parametrize(
    ("op", "ranks", "spec", "message"),
    [
        (
            AG,
            4,
            "ring",
            "plan must be auto or one of serial, shard_p2p, .*uniform_fused_1d, got 'ring'",
        ),
        (AG, 4, "", "plan must be auto or one of serial, .*, got ''"),
        (RS, 4, "uniform_fused_1d", "plan must be auto or one of serial, shard_p2p, graded, got"),
        (
            AG,
            3,
            "shard_p2p xor",
            "power of two of ranks where it says xor, got 'shard_p2p xor'; use ring",
        ),
        (AG, 4, "graded 1/2", "whose sizes add up to 4; '1/2' do not"),
        (AG, 4, "graded 4/0", "with sizes like 1/1/2; '4/0' are none"),
        (AG, 4, "graded 1//3", "with sizes like 1/1/2; '1//3' are none"),
        (AG, 4, "serial xor", "of words that serial knows; 'xor' is none"),
        (AG, 4, "graded 1/3 pieces=9", "of words that graded knows; 'pieces=9' is none"),
        (AG, 4, "graded 1/3 pieces=2", "a spec whose last group is one shard, where it has pieces"),
        (RS, 4, "graded 3/1 pieces=2", "a spec whose first group is one shard, where it has piec"),
        (AG, 4, "uniform_fused_1d pull", "of words that uniform_fused_1d knows; 'pull' is none"),
        (RS, 4, "graded pull", "of words that graded knows; 'pull' is none"),
        (RS, 4, "graded 2/1", "whose sizes add up to 4; '2/1' do not"),
        (RS, 4, "shard_p2p 1/3", "of words that shard_p2p knows; '1/3' is none"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(op: Op, ranks: int, spec: str, message: str):
    with pytest.raises(InputError, match=f"^{op}: plan must be .*{message.split('must be ')[-1]}"):
        build(problem_of(op, "primes", ranks), spec)


def test_a_plan_prints_its_steps_and_memory():
    text = str(build(problem_of(AG, "primes", 2), "shard_p2p ring pull"))
    assert text.startswith("plan shard_p2p ring pull: all_gather_matmul M26 N17 K19 bfloat16")
    assert "buffer stage    symmetric [26, 19] bfloat16, split over ranks, holds own" in text
    assert "pull_1" in text
    assert "stage@1 -> full[1]" in text
    assert "waits 1@1  posts 1@1" in text
