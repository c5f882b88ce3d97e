"""Every family, for every shape that it may meet: proved, made again from its spec, read back."""

from collections.abc import Iterator

import pytest
from counterpoint.plan.variants import variants
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.plan.families import DIRECTIONS, FAMILIES, build
from counterpoint.plan.finer import FINER
from counterpoint.plan.grading import compositions
from counterpoint.plan.serialize import to_json
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import FORWARD, OPS, Op, Problem

AG: Op = "all_gather_matmul"
RS: Op = "matmul_reduce_scatter"
AG_WGRAD: Op = "all_gather_matmul_wgrad"
AG_BACKWARD: Op = "all_gather_matmul_backward"
RS_BACKWARD: Op = "matmul_reduce_scatter_backward"

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
            found += [f"{family} {peers}" for family in FINER]
        elif op == AG_WGRAD:
            found += [f"sliced {peers}{tail}" for tail in ("", " pieces=1", " pieces=3")]
        elif op == AG_BACKWARD:
            found += [f"side_by_side {peers}{tail}" for tail in ("", " pieces=3")]
        elif op == RS_BACKWARD:
            found += [f"shard_p2p {peers}", f"graded {halves} {peers}", f"graded {ranks} {peers}"]
            if ranks > 1:
                found += [f"graded {ranks - 1}/1 {peers} pieces=2", f"shard_p2p {peers} pieces=3"]
        else:
            found += [f"shard_p2p {peers}", f"graded {halves} {peers}"]
            found += [f"{family} {peers}" for family in FINER]
            if ranks > 1:
                found += [f"graded 1/{ranks - 1} {peers} pieces=2", f"shard_p2p {peers} pieces=3"]
    return found


def prove(problem: Problem, spec: str) -> Plan:
    plan = build(problem, spec)
    validate(plan)
    assert build(problem, plan.spec) == plan
    assert Plan.from_json(to_json(plan)) == plan
    return plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_is_right(op: Op, ranks: int, shape: str):
    for spec in specs(op, ranks):
        for bias in (False, True)[: 2 if op in FORWARD else 1]:
            prove(problem_of(op, shape, ranks, bias=bias), spec)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["primes", "unequal"])
def test_every_family_is_right_on_eight_ranks(op: Op, shape: str):
    for spec in specs(op, 8):
        prove(problem_of(op, shape, 8, bias=shape == "unequal" and op in FORWARD), spec)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_family_is_right_in_other_dtypes(op: Op, dtype: str):
    for spec in specs(op, 3):
        prove(problem_of(op, "primes", 3, dtype=dtype, bias=op in FORWARD), spec)


@pytest.mark.parametrize("splits", [(17, 0), (0, 2, 15), (9, 8), (17,)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_several_weights_are_right(ranks: int, splits: tuple[int, ...]):
    for spec in (spec for spec in specs(AG, ranks) if spec.split()[0] not in FINER):
        for shape in ("primes", "unequal"):
            rows = tuple(SHAPES[shape][0][:ranks])
            plan = prove(Problem(AG, sum(rows), 17, 19, ranks, rows=rows, splits=splits), spec)
            outputs = [b.name for b in plan.buffers if b.space == "output"]
            assert outputs == [f"y{i}" for i in range(len(splits))]


def test_several_weights_share_what_is_gathered_and_waited_for():
    one = build(Problem(AG, 8, 12, 4, 4), "graded 1/3")
    two = build(Problem(AG, 8, 12, 4, 4, splits=(8, 4)), "graded 1/3")
    groups = [s.name for s in two.steps if s.kind == "matmul"]
    assert groups == ["matmul_0_w0", "matmul_0_w1", "matmul_1_w0", "matmul_1_w1"]
    assert [s for s in one.steps if s.kind != "matmul"] == [
        s for s in two.steps if s.kind != "matmul"
    ]
    assert [bool(s.waits) for s in two.steps if s.kind == "matmul"] == [False, False, True, False]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_every_variant_is_right(op: Op, ranks: int):
    found = variants(op, ranks)
    assert found[0] == "serial" and len(set(found)) == len(found)
    assert len(found) <= (30 if op in FORWARD else 8)
    for spec in found:
        prove(Problem(op, 2 * ranks, 5, 7, ranks), spec)


def lane_of(plan: Plan, lane: str) -> list[str]:
    return [step.name for step in plan.steps if step.lane == lane]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_gather_hides_behind_dgrad_and_scatter_behind_wgrad(ranks: int):
    for peers in peers_of(ranks):
        plan = build(problem_of(AG_BACKWARD, "primes", ranks), f"side_by_side {peers} pieces=2")
        compute = ["dx_matmul_0", "wgrad", "dx_reduce_0", "dx_reduce_1"]
        assert lane_of(plan, "compute") == compute
        copies = [name.rpartition("_")[0].partition("_push")[0] for name in lane_of(plan, "copy")]
        assert copies == [*["x"] * ranks, *["dx"] * ranks]
        edges = {step.name: step.after for step in plan.steps if step.after}
        first = next(name for name in lane_of(plan, "copy") if name.startswith("dx"))
        assert edges == {"x_push_1": ("open",), "wgrad": ("x_keep",), first: ("dx_matmul_0",)}


@pytest.mark.parametrize("groups", list(compositions(4)), ids=lambda g: "/".join(map(str, g)))
def test_dw_of_reduce_scatter_takes_what_was_gathered_for_dx(groups: tuple[int, ...]):
    sizes = "/".join(map(str, groups))
    plan = prove(problem_of(RS_BACKWARD, "unequal", 4), f"graded {sizes} ring")
    assert lane_of(plan, "compute")[-1] == "wgrad"
    # own rows are where all rows are: put there beside the matmuls, or already for the first
    alone = groups[0] == 1
    assert lane_of(plan, "copy") == [f"dx_push_{d}" for d in (1, 2, 3)] + ["keep"] * alone
    assert ("dx_keep" in lane_of(plan, "compute")) == (not alone)


def test_groups_of_a_backward_are_those_of_the_matmul_that_they_cut():
    problem = Problem(RS_BACKWARD, 8192, 4096, 1024, 8)
    forward = Problem(AG, 8192, 1024, 4096, 8)
    assert build(problem, "graded").spec == build(forward, "graded").spec.replace(" push", "")


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
    op: Op = draw(st.sampled_from(OPS))
    ranks = draw(st.integers(1, 6))
    rows = tuple(draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)))
    n, k = draw(st.integers(0, 300)), draw(st.integers(0, 600))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    bias = draw(st.booleans()) and op in FORWARD
    problem = Problem(op, sum(rows), n, k, ranks, dtype, rows, bias)
    family = draw(st.sampled_from(FAMILIES[op]))
    words = [family]
    if family == "graded":
        words.append("/".join(map(str, draw(st.sampled_from(list(compositions(ranks)))))))
    if family != "serial":
        words.append(draw(st.sampled_from(peers_of(ranks))))
        if family in ("shard_p2p", "sliced", "side_by_side"):
            words += draw(st.sampled_from([[], ["pieces=2"], ["pieces=5"]]))
        if op == AG and family in ("shard_p2p", "graded"):
            words += draw(st.sampled_from([[], ["push"], ["pull"]]))
    return problem, " ".join(words)


@given(cases())
@settings(max_examples=250, derandomize=True, deadline=None, database=None)
def test_random_problems_and_specs_are_right(case: tuple[Problem, str]):
    prove(*case)


def edges(plan: Plan) -> Iterator[tuple[int, str]]:
    return ((i, name) for i, step in enumerate(plan.steps) for name in step.after)


@pytest.mark.parametrize("op", OPS)
def test_steps_name_each_predecessor_once(op: Op):
    for spec in specs(op, 4):
        plan = build(problem_of(op, "primes", 4), spec)
        assert len(set(edges(plan))) == len(list(edges(plan)))


@pytest.mark.parametrize("op", [AG, RS, RS_BACKWARD])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_graded_without_sizes_takes_those_of_the_machine(op: Op, ranks: int):
    problem = Problem(op, 1024 * ranks, 1024, 1024, ranks)
    assert build(problem, "graded") == build(problem, "graded", preset(f"h200-{ranks}"))
    validate(build(problem, "graded"))


def test_a_group_of_one_rank_is_plain_matmuls():
    for op in OPS:
        for family in FAMILIES[op]:
            plan = build(problem_of(op, "primes", 1), family)
            matmuls = 2 if op in (AG_BACKWARD, RS_BACKWARD) else 1
            assert [step.kind for step in plan.steps] == ["matmul"] * matmuls
            assert plan.spec == "serial"
    plan = build(Problem(AG, 4, 5, 3, 1, splits=(2, 3)), "graded 1")
    assert [step.name for step in plan.steps] == ["matmul_w0", "matmul_w1"]


@pytest.mark.parametrize(
    ("op", "ranks", "spec", "message"),
    [
        (
            AG,
            4,
            "ring",
            "plan must be auto or one of serial, shard_p2p, .*uniform_fused_1d, .*, got 'ring'",
        ),
        (AG, 4, "", "plan must be auto or one of serial, .*, got ''"),
        (RS, 4, "uniform_unfused_2d", "plan must be auto or one of serial, shard_p2p, graded, "),
        (RS, 4, "hetero_fused_1d push", "of words that hetero_fused_1d knows; 'push' is none"),
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
        (AG_WGRAD, 4, "graded", "plan must be auto or one of serial, sliced, got 'graded'"),
        (AG_WGRAD, 4, "sliced push", "of words that sliced knows; 'push' is none"),
        (AG_WGRAD, 4, "serial pieces=2", "of words that serial knows; 'pieces=2' is none"),
        (AG_BACKWARD, 4, "side_by_side 1/3", "of words that side_by_side knows; '1/3' is none"),
        (AG_BACKWARD, 3, "side_by_side xor", "for a power of two of ranks where it says xor"),
        (RS_BACKWARD, 4, "graded 1/3 push", "of words that graded knows; 'push' is none"),
        (RS_BACKWARD, 4, "graded 1/3 pieces=2", "a spec whose last group is one shard, where it"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(op: Op, ranks: int, spec: str, message: str):
    with pytest.raises(InputError, match=f"^{op}: plan must be .*{message.split('must be ')[-1]}"):
        build(problem_of(op, "primes", ranks), spec)


@pytest.mark.parametrize("family", FINER)
@pytest.mark.parametrize("ranks", [1, 4])
def test_families_finer_than_shards_take_one_weight(family: str, ranks: int):
    problem = Problem(AG, 4, 5, 3, ranks, splits=(2, 3))
    want = f"plan must be serial, shard_p2p or graded for several weights, got '{family} ring'"
    with pytest.raises(InputError, match=want):
        build(problem, f"{family} ring")


def test_a_plan_prints_its_steps_and_memory():
    text = str(build(problem_of(AG, "primes", 2), "shard_p2p ring pull"))
    assert text.startswith("plan shard_p2p ring pull: all_gather_matmul M26 N17 K19 bfloat16")
    assert "buffer stage    symmetric [26, 19] bfloat16, split over ranks, holds own" in text
    assert "pull_1" in text
    assert "stage@1 -> full[1]" in text
    assert "waits 1@1  posts 1@1" in text
