"""Every family, for every shape that it may meet: proved, made again from its spec, read back."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import (
    AG,
    AG_BACKWARD,
    AG_WGRAD,
    AR,
    ATTENTION,
    BAGS,
    BIASED,
    BY_ROWS,
    EXPERTS,
    NORM,
    OPS,
    PLAIN,
    RS,
    RS_BACKWARD,
    make_problem,
    peers_of,
    prove,
    prove_or_refuse,
    specs,
)
from plan_simulator import simulate

from counterpoint.errors import InputError
from counterpoint.plan.families import build, families
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan
from counterpoint.plan.validate import validate
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules.grading import compositions

# rows of each rank (or of an expert), n, k: one, primes, one less than a tile, nothing at all
SHAPES = {
    "ones": ([1] * 8, 1, 1),
    "even": ([4] * 8, 16, 8),
    "primes": ([13] * 8, 17, 19),
    "below_a_tile": ([127] * 8, 255, 63),
    "unequal": ([3, 0, 7, 1, 0, 5, 2, 11], 5, 131),
    "first_is_empty": ([0, 4, 4, 1, 4, 4, 4, 4], 3, 513),
    "one_has_all": ([0, 6, 0, 0, 0, 0, 0, 0], 2, 3),
    "no_rows": ([0] * 8, 4, 4),
    "no_columns": ([2] * 8, 0, 4),
    "no_k": ([2] * 8, 4, 0),
}


def problem_of(op: str, shape: str, ranks: int, **options: object) -> Problem:
    rows, n, k = SHAPES[shape]
    mine = tuple(rows[:ranks])
    if op in EXPERTS:
        return make_problem(op, ranks * 3 * rows[0], n, k, ranks, experts=3, **options)
    if op in ATTENTION:
        return make_problem(op, ranks * rows[0], n, k, ranks, **options)
    if op not in (*BY_ROWS, BAGS):
        return make_problem(op, sum(mine), n, k, ranks, **options)
    return make_problem(op, sum(mine), n, k, ranks, rows=mine, **options)


@pytest.mark.drawn(40)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_is_right(op: str, ranks: int, shape: str):
    for bias in (False, True)[: 1 + (op in BIASED)]:
        case = problem_of(op, shape, ranks, bias=bias)
        for spec in specs(case):
            prove_or_refuse(case, spec)
    if op in EXPERTS:
        case = problem_of(op, shape, ranks, counts="routed")
        for spec in specs(case):
            prove_or_refuse(case, spec)


@pytest.mark.drawn(14)
@pytest.mark.parametrize(("ranks", "islands"), [(2, 2), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("op", OPS)
def test_every_family_is_right_on_islands(op: str, ranks: int, islands: int):
    for counts in ("host", "routed", "device_routed") if op in EXPERTS else ():
        case = problem_of(op, "even", ranks, islands=islands, counts=counts)
        for spec in specs(case):
            prove_or_refuse(case, spec)
    for shape in ("even", "unequal")[: 1 + (ranks < 6)]:
        for bias in (False, True)[: 1 + (op in BIASED)]:
            case = problem_of(op, shape, ranks, bias=bias, islands=islands)
            for spec in specs(case):
                prove_or_refuse(case, spec)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ["even", "unequal"])
def test_every_family_is_right_on_eight_ranks(op: str, shape: str):
    case = problem_of(op, shape, 8, bias=shape == "unequal" and op in BIASED)
    for spec in specs(case):
        prove_or_refuse(case, spec)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_every_family_is_right_in_other_dtypes(op: str, dtype: str):
    for ranks, shape in ((3, "primes"), (4, "even")):
        case = problem_of(op, shape, ranks, dtype=dtype, bias=op in BIASED)
        for spec in specs(case):
            prove_or_refuse(case, spec)


@pytest.mark.parametrize("op", OPS)
def test_each_family_takes_some_of_these_problems(op: str):
    """Else the tests above could do without it."""
    taken = {
        family.name
        for islands, shape in product((1, 2), SHAPES)
        for given in ({}, {"counts": "routed"})[: 1 + (op in EXPERTS)]
        for family in operation_of(op).families
        if not family.refusal(problem_of(op, shape, 4, islands=islands, **given))
    }
    assert taken == set(families(op))
    assert families(op)[0] == "serial"


@pytest.mark.drawn(12)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_every_candidate_is_right(op: str, ranks: int):
    larger = ((256, 512, 128), (8192, 7168, 1024)) if ranks in (2, 4) else ()
    for m, n, k in ((8 * ranks, 5, 7), (4 * ranks, 16, 8), *larger):
        case = make_problem(op, m, n, k, ranks)
        found = operation_of(op).candidates(case)
        assert found[0] == "serial" and len(set(found)) == len(found) <= 32
        assert {spec.split()[0] for spec in found} <= set(families(op))
        for spec in found:
            prove_or_refuse(case, spec)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, str]:
    op = draw(st.sampled_from(OPS))
    ranks = draw(st.integers(1, 6))
    n, k = draw(st.integers(0, 300)), draw(st.integers(0, 600))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    experts = draw(st.integers(1, 6)) if op in EXPERTS else 0
    rows = tuple(draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks)))
    if op not in BY_ROWS or op in ATTENTION or draw(st.booleans()):
        rows = (rows[0] * max(experts, 1),) * ranks
    if op in EXPERTS and draw(st.booleans()):
        n, k = n // 8 * 8, k // 8 * 8
    bias = draw(st.booleans()) and op in BIASED
    own = (
        {"experts": experts, "counts": draw(st.sampled_from(["equal", "host", "routed"]))}
        if experts
        else {}
    )
    if op in ATTENTION:
        n, own = draw(st.sampled_from([k, 3 * k])), {"causal": draw(st.booleans())}
        rows = tuple(count + count % 2 for count in rows)
    own |= {"out": draw(st.booleans())} if op == BAGS else {}
    case = make_problem(op, sum(rows), n, k, ranks, dtype=dtype, rows=rows, bias=bias, **own)
    family = draw(st.sampled_from(operation_of(op).families))
    words = [family.name]
    if "sizes" in family.takes:
        edges = sorted(draw(st.sets(st.integers(1, experts or ranks))) | {0, experts or ranks})
        words.append("/".join(str(b - a) for a, b in zip(edges, edges[1:], strict=False)))
    if "chunks" in family.takes and ("sizes" not in family.takes or experts):
        words += draw(st.sampled_from([[], ["chunks=2"], ["chunks=5"]]))
    if "peers" in family.takes:
        words.append(draw(st.sampled_from(peers_of(ranks))))
    if "tile" in family.takes:
        words += draw(st.sampled_from([[], ["32x64x3"], ["128x16x1", "warps=8"], ["warps=1"]]))
    return case, " ".join(words)


@given(cases())
@settings(max_examples=60)
def test_random_problems_and_specs_are_right(case: tuple[Problem, str]):
    plan = prove_or_refuse(*case)
    if plan is not None and 0 < case[0].flop + case[0].link_bytes < 2e5 and not case[0].empty:
        assert simulate(plan, seed=case[0].n)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("splits", [(17, 0), (0, 2, 15), (9, 8), (17,)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("op", [AG, RS, AG_WGRAD, AG_BACKWARD])
def test_several_weights_are_right(op: str, ranks: int, splits: tuple[int, ...]):
    """Of a reduce-scatter several products, and one result."""
    for shape in ("primes", "unequal"):
        rows = tuple(SHAPES[shape][0][:ranks])
        n, k = (20, 17) if op == RS else (17, 20)
        case = Problem(op, sum(rows), n, k, ranks, rows=rows, splits=splits)
        for spec in specs(case):
            plan = prove_or_refuse(case, spec)
            if plan is None:
                continue
            assert simulate(plan, seed=n)
            outputs = [b.name for b in plan.buffers if b.space == "output"]
            wanted = {RS: ["y"], AG_BACKWARD: ["dx"]}.get(op, [])
            each = {AG: "y", AG_WGRAD: "dw", AG_BACKWARD: "dw"}.get(op)
            wanted += [f"{each}{i}" for i in range(len(splits))] if each else []
            assert sorted(outputs) == sorted(wanted)


def test_several_weights_share_what_is_gathered_and_waited_for():
    one = build(Problem(AG, 8, 12, 4, 4), "graded 1/3")
    two = build(Problem(AG, 8, 12, 4, 4, splits=(8, 4)), "graded 1/3")
    groups = [s.name for s in two.steps if s.kind == "matmul"]
    assert groups == ["matmul_0_w0", "matmul_0_w1", "matmul_1_w0", "matmul_1_w1"]
    assert [s for s in one.steps if s.kind != "matmul"] == [
        s for s in two.steps if s.kind != "matmul"
    ]
    assert [bool(s.waits) for s in two.steps if s.kind == "matmul"] == [False, False, True, False]


def lane_of(plan: Plan, lane: str) -> list[str]:
    return [step.name for step in plan.steps if step.lane == lane]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_gather_hides_behind_dgrad_and_scatter_behind_wgrad(ranks: int):
    for peers in peers_of(ranks):
        plan = build(problem_of(AG_BACKWARD, "primes", ranks), f"side_by_side {peers} chunks=2")
        compute = ["dx_matmul_0", "wgrad", "dx_reduce_0", "dx_reduce_1"]
        assert lane_of(plan, "compute") == compute
        copies = [name.rpartition("_")[0].partition("_push")[0] for name in lane_of(plan, "copy")]
        assert copies == [*["x"] * ranks, *["dx"] * ranks]
        edges = {step.name: step.after for step in plan.steps if step.after}
        first = next(name for name in lane_of(plan, "copy") if name.startswith("dx"))
        assert edges == {"x_push_1": ("open",), "wgrad": ("x_keep",), first: ("dx_matmul_0",)}


@pytest.mark.parametrize("groups", list(compositions(4)), ids=lambda g: "/".join(map(str, g)))
def test_every_grouping_of_four_ranks_is_right(groups: tuple[int, ...]):
    sizes = "/".join(map(str, groups))
    for peers in ("ring", "xor"):
        for tail in ("", " chunks=2")[: 2 if groups[-1] == 1 else 1]:
            prove(problem_of(AG, "unequal", 4, bias=True), f"graded {sizes} {peers}{tail}")
        for tail in ("", " chunks=2", " chunks=3")[: 3 if groups[0] == 1 else 1]:
            prove(problem_of(RS, "unequal", 4, bias=True), f"graded {sizes} {peers}{tail}")
    # dw takes what was gathered for dx
    plan = prove(problem_of(RS_BACKWARD, "unequal", 4), f"graded {sizes} ring")
    assert lane_of(plan, "compute")[-1] == "wgrad"
    # own rows are where all rows are: put there beside the matmuls, or already for the first
    alone = groups[0] == 1
    assert lane_of(plan, "copy") == [f"dx_push_{d}" for d in (1, 2, 3)] + ["keep"] * alone
    assert ("dx_keep" in lane_of(plan, "compute")) == (not alone)


@pytest.mark.parametrize("op", [AG, RS, RS_BACKWARD])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_graded_without_sizes_takes_those_of_the_machine(op: str, ranks: int):
    case = Problem(op, 1024 * ranks, 1024, 1024, ranks)
    assert build(case, "graded") == build(case, "graded", preset(f"h200-{ranks}"))
    validate(build(case, "graded"))


def test_groups_of_a_backward_are_those_of_the_matmul_that_they_cut():
    backward, forward = (
        Problem(RS_BACKWARD, 8192, 4096, 1024, 8),
        Problem(AG, 8192, 1024, 4096, 8),
    )
    assert build(backward, "graded").spec == build(forward, "graded").spec


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_rank_is_plain_matmuls(op: str):
    for family in (f.name for f in operation_of(op).families if not f.alone):
        plan = build(problem_of(op, "primes", 1), family)
        matmuls = {AG_BACKWARD: 2, RS_BACKWARD: 2}.get(op, 3 if op in EXPERTS else 1)
        kinds = ["fused"] if op in (BAGS, NORM) else ["matmul"] * matmuls
        if op in ATTENTION:
            kinds = ["attention_backward" if op.endswith("_backward") else "attention"]
        assert [step.kind for step in plan.steps] == kinds
        assert plan.spec == "serial"
    plan = build(Problem(AG, 4, 5, 3, 1, splits=(2, 3)), "graded 1")
    assert [step.name for step in plan.steps] == ["matmul_w0", "matmul_w1"]


@pytest.mark.parametrize("op", OPS)
def test_a_misspelt_family_and_a_misspelt_word_have_a_suggestion(op: str):
    case = problem_of(op, "even", 4)
    for family in operation_of(op).families:
        wrong = family.name[:-2] + family.name[-1]
        # of families that differ by one letter, either
        near = "|".join(n for n in families(op) if n[:-2] == family.name[:-2])
        with pytest.raises(InputError, match=f", got '{wrong} ring'; did you mean '({near})'"):
            build(case, f"{wrong} ring")
        for option, word, meant in (("peers", "rimg", "ring"), ("shots", "onE_shot", "one_shot")):
            fix = f"; did you mean '{meant}'" if option in family.takes else ""
            message = f"of words that {family.name} knows; '{word}' is none, got '.*'{fix}"
            with pytest.raises(InputError, match=f"{message}[?]?$"):
                build(case, f"{family.name} {word}")


@pytest.mark.parametrize(
    ("op", "ranks", "spec", "message"),
    [
        (AG, 4, "ring", "auto or one of serial, direct, shard_p2p, graded, .*, got 'ring'"),
        (AG, 4, "", "auto or one of serial, .*, got ''"),
        (AG, 4, "fused", "auto or one of serial, direct, shard_p2p, .*, got 'fused'"),
        (RS, 4, "uniform_unfused_2d", "auto or one of serial, direct, fused, shard_p2p, graded, "),
        (AG_WGRAD, 4, "graded", "auto or one of serial, sliced, islands, got 'graded'"),
        (AG, 3, "shard_p2p xor", "for a power of two of ranks where it says xor, got .*; use ring"),
        (AG_BACKWARD, 3, "side_by_side xor", "for a power of two of ranks where it says xor"),
        ("all_to_all_matmul", 3, "grouped xor", "for a power of two of ranks where it says xor"),
        (AG, 4, "graded 1/2", "whose sizes add up to 4; '1/2' do not"),
        ("matmul_all_to_all", 4, "grouped 2/2", "whose sizes add up to 3; '2/2' do not"),
        (AG, 4, "graded 4/0", "with sizes like 1/1/2; '4/0' are none"),
        (AG, 4, "graded 1//3", "with sizes like 1/1/2; '1//3' are none"),
        (AR, 4, "fused 64x64", "with sizes like 64x64x8; '64x64' are none"),
        (AR, 4, "fused 64x0x8", "with sizes like 64x64x8; '64x0x8' are none"),
        (AR, 4, "fused 48x64x8", "block_n a power of 2 from 16 to 1024, got 48"),
        (RS, 4, "fused 64x64x8 warps=3", "num_warps a power of 2 from 1 to 32, got 3"),
        (AR, 4, "fused scatter", "a spec of one_shot or two_shot, got 'fused scatter'"),
        (RS, 4, "fused one_shot", "a spec that scatters, got 'fused one_shot'"),
        (AR, 4, "fused one_shot two_shot", "makes each choice once; 'two_shot' is the second"),
        (AG, 4, "graded 1/3 chunks=2", "a spec whose last group is one shard, where it has chunks"),
        (RS, 4, "graded 3/1 chunks=2", "a spec whose first group is one shard, where it has chun"),
        (RS_BACKWARD, 4, "graded 1/3 chunks=2", "a spec whose last group is one shard, where it"),
        *((op, 4, f"{family} {word}", f"of words that {family} knows; '{word}' is none")
          for op, family, word in (
              (AG, "serial", "xor"), (AG, "graded", "chunks=9"), (AG, "graded", "push"),
              (AG, "uniform_fused_1d", "chunks=2"), (RS, "shard_p2p", "1/3"),
              (AG_WGRAD, "serial", "chunks=2"), (AG_BACKWARD, "side_by_side", "1/3"),
              (RS, "direct", "ring"), (AR, "fused", "words"), ("all_to_all_matmul", "fused", "3"),
              ("matmul_all_to_all", "grouped", "warps=4"))),
    ],
)  # fmt: skip
def test_a_spec_that_does_not_fit_is_refused(op: str, ranks: int, spec: str, message: str):
    with pytest.raises(InputError, match=f"^{op}: plan must be .*{message}"):
        build(problem_of(op, "even", ranks), spec)


@pytest.mark.parametrize("op", PLAIN)
def test_a_plan_prints_its_steps_and_memory(op: str):
    case = problem_of(op, "even", 2)
    for spec in specs(case):
        plan = prove_or_refuse(case, spec)
        if plan is None:
            continue
        text = str(plan)
        assert text.startswith(f"plan {plan.spec}: {case}\n")
        assert all(f"  buffer {b.name} " in text for b in plan.buffers)
        lines = text.splitlines()[1 + len(plan.buffers) :]
        assert [line.split()[:3] for line in lines] == [
            [step.lane, step.kind, step.name] for step in plan.steps
        ]
    text = str(build(problem_of(AG, "primes", 2), "shard_p2p"))
    assert "buffer full     symmetric [26, 19] bfloat16, split over ranks, holds all" in text
    assert "push_1" in text and "x -> full@1[0]" in text and "posts 3@1" in text
    assert "x, w -> y, slots[0], slots@1[0]" in str(build(problem_of(AR, "even", 2), "fused"))
