"""Predicted timelines: what must hold of every plan on every machine, and one plan by hand."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
from drawing import Draw
from plan_cases import AG, ATTENTION, BAGS, BY_ROWS, EXPERTS, NORM, OPS, PLAIN, RS, make_problem

from counterpoint.choose.by_model import parts_s
from counterpoint.choose.choose import choose
from counterpoint.costs import NO_TILES, Costs
from counterpoint.errors import InputError, PlanError
from counterpoint.machine import LinkSpec, Machine
from counterpoint.model import estimate as model
from counterpoint.model.estimate import estimate, predicted_s
from counterpoint.model.slowest_rank import slowest_rank
from counterpoint.model.work import work_s
from counterpoint.plan import bind as binding
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.schedules import finer
from counterpoint.timeline import Span, Timeline

FORWARD = (AG, RS)
MACHINES = ("h200", "mi300x", "a40")  # by a switch, all with all, over PCIe
SHAPES = ((4096, 7168, 8192), (512, 1280, 2048))  # the longer side is matmuls, and copies
UNEQUAL = (0, 127, 1000, 0, 2048, 1, 0, 511)
RANKS = (2, 3, 4, 8)
EXACTLY = 1e-9  # up to rounding

# a copy or a matmul that runs beside the other one takes twice or three times as long
ROUND = Costs(
    gemm_flop_per_s=512e9, gemm_settled=1.0, gemm_settling_s=0.0,
    hbm_bytes_per_s=1e15, kernel_s=0.5e-6, copy_bytes_per_s=32e9, copy_overhead_s=1e-6,
    barrier_s=1e-6, collective_bytes_per_s=16e9, all_gather_s=3e-6, reduce_scatter_s=4e-6,
    collective_small_s=9e-6, direct_bytes_per_s=16e9, direct_s=2e-6,
    matmul_beside_copy=2.0, copy_beside_matmul=3.0, host_call_s=10e-6, host_step_s=1e-6,
)  # fmt: skip


def tiny_machine(ranks: int = 2) -> Machine:
    """One SM, tiles of 16 x 16: a tile of K = 1000 takes 1 us, 32 kB of a copy as well."""
    base = preset(f"h200-{ranks}")
    device = replace(base.device, num_sms=1)
    return replace(base, device=device, gemm_tile=(16, 16), measured=ROUND)


def plans(op: str, ranks: int, *shape: int, rows: tuple[int, ...] = ()) -> Iterator[Plan]:
    """Candidates that the problem allows."""
    m = sum(rows) or shape[0] // (4 * ranks) * 4 * ranks
    problem = make_problem(op, m, shape[1], shape[2], ranks, rows=rows)
    operation = operation_of(op)
    refused = {f.name for f in operation.families if f.refusal(problem)}
    for spec in operation.candidates(problem):
        if spec.split()[0] not in refused:
            yield build(problem, spec)


def every_plan(ranks: int) -> Iterator[Plan]:
    for op in OPS:
        yield from plans(op, ranks, *SHAPES[0])
        yield from plans(op, ranks, 64, *SHAPES[1][1:])
    for op in BY_ROWS:
        yield from plans(op, ranks, *SHAPES[1], rows=UNEQUAL[:ranks])


@pytest.mark.drawn(12)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", OPS)
def test_candidates_are_of_every_family(op: str, ranks: int):
    both = [make_problem(op, m, 8192, 3584, ranks) for m in (64, 8192)]
    both.append(make_problem(op, 8192, 8192, 3584, ranks, islands=2))
    if op in EXPERTS:
        both.append(make_problem(op, 8192, 8192, 3584, ranks, counts="routed"))
    found = {spec.split()[0] for p in both for spec in operation_of(op).candidates(p)}
    if op == RS and ranks > 2:
        found.add("running_sum")  # which is taken by name: the model sees no gain
    if op == BAGS:
        found.add("fused_after_barrier")  # which captured calls take in place of "fused"
    assert found == {family.name for family in operation_of(op).families}


def spans_of(timeline: Timeline) -> dict[tuple[int, str], Span]:
    """Spans of work by rank and step; waits apart."""
    found = {(s.rank, s.label): s for s in timeline.spans if s.kind != "wait"}
    assert len(found) == sum(s.kind != "wait" for s in timeline.spans)
    return found


def check_order(plan: Plan, machine: Machine, timeline: Timeline) -> None:
    """Every step once, in the order of its lane, after what it is after and what it waits for."""
    p, spans = plan.problem, spans_of(timeline)
    assert set(spans) == {(rank, step.name) for rank in range(p.ranks) for step in plan.steps}
    posted_s: dict[tuple[int, int, int], float] = {}
    for rank in range(p.ranks):
        for bound in bind(plan, rank).steps:
            span = spans[rank, bound.step.name]
            assert (span.kind, span.lane) == (bound.step.kind, bound.step.lane)
            # a barrier posts as it begins, everything else as it ends
            time_s = span.start_s if span.kind == "barrier" else span.end_s
            posted_s |= {(rank, post.slot, post.rank): time_s for post in bound.posts}
    for rank in range(p.ranks):
        for bound in bind(plan, rank).steps:
            span, step = spans[rank, bound.step.name], bound.step
            assert all(spans[rank, name].end_s <= span.start_s for name in step.after)
            begins_s = span.start_s
            if span.kind == "barrier":
                costs = machine.costs
                begins_s = span.end_s - (costs.barrier_s if step.posts else costs.kernel_s) + 1e-12
            for wait in bound.waits:
                assert posted_s[wait.rank, wait.slot, rank] <= begins_s
        for lane in plan.lanes:
            mine = [s for s in timeline.spans if (s.rank, s.lane) == (rank, lane.name)]
            assert [s.label for s in mine if s.kind != "wait"] == [
                step.name for step in plan.steps if step.lane == lane.name
            ]
            assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
            assert all(s.label.startswith("wait for ") == (s.kind == "wait") for s in mine)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MACHINES)
def test_every_plan_finishes_in_order_and_no_sooner_than_its_parts(
    name: str, ranks: int, draw: Draw
):
    machine = preset(f"{name}-{ranks}")
    for plan in draw([*every_plan(ranks)], 120):
        timeline = estimate(plan, machine)
        check_order(plan, machine, timeline)
        bound_s = max(parts_s(plan.problem, machine)) * (1 - EXACTLY)
        assert timeline.end_s >= bound_s, f"{plan.problem}: {plan.spec}"
        assert predicted_s(plan, machine) >= bound_s, f"{plan.problem}: {plan.spec}"


@pytest.mark.parametrize("ranks", RANKS)
def test_every_eager_plan_finishes_in_order(ranks: int, draw: Draw):
    machine = preset(f"h200-{ranks}")
    for op in OPS:
        for plan in draw([*plans(op, ranks, *SHAPES[1])], 5, op):
            check_order(plan, machine, estimate(plan, machine, eager=True))


@pytest.mark.parametrize("ranks", RANKS)
def test_host_time_only_adds(ranks: int):
    machine = preset(f"h200-{ranks}")
    costs = machine.costs
    for op in PLAIN:
        for plan in plans(op, ranks, *SHAPES[1]):
            graph_s, eager_s = (predicted_s(plan, machine, eager=e) for e in (False, True))
            host_s = costs.host_call_s + len(plan.steps) * costs.host_step_s
            assert eager_s > max(graph_s, host_s), plan.spec
            assert eager_s < (graph_s + host_s) * (1 + EXACTLY), plan.spec


@pytest.mark.drawn(6)
@pytest.mark.parametrize("family", finer.NAMES)
@pytest.mark.parametrize("op", FORWARD)
def test_the_slowest_rank_of_plans_finer_than_shards_is_found(op: str, family: str):
    """Rows before and behind its own are two matmuls, of slices of w as well."""
    for name in ("mi300x-8", "h200-8"):
        machine = preset(name)
        for shape in ((2048, 7168, 8192), (8192, 6144, 4096)):
            plan = build(Problem(op, *shape, 8), f"{family} ring")
            all_s = estimate(plan, machine).end_s
            assert predicted_s(plan, machine) == pytest.approx(all_s, rel=5e-3), plan.spec


@pytest.mark.drawn(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("name", "shape"), list(zip(MACHINES, (*SHAPES, SHAPES[1]), strict=True)))
def test_one_rank_stands_for_all_where_rows_are_equal(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], name: str, ranks: int
):
    machine = preset(f"{name}-{ranks}")
    for op in PLAIN:
        for plan in plans(op, ranks, *shape):
            one_s, all_s = predicted_s(plan, machine), estimate(plan, machine).end_s
            own_s: list[float] = []
            for rank in range(ranks):
                with monkeypatch.context() as patched:
                    patched.setattr(model, "slowest_rank", Mock(return_value=rank))
                    own_s.append(predicted_s(plan, machine))
            # where the groups wrap is all in which ranks differ; a copy that comes a little
            # later may then run beside a matmul for a little longer
            assert abs(one_s - all_s) <= max(own_s) - min(own_s) + 1e-3 * all_s, plan.spec
            assert one_s == own_s[slowest_rank(plan, machine)]
            assert one_s >= max(own_s) * 0.92, plan.spec


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_xor_groups_that_never_wrap_are_equal(ranks: int):
    machine = preset(f"h200-{ranks}")
    groups = {2: "1/1", 4: "1/1/2", 8: "1/1/2/4"}[ranks]
    specs: list[tuple[str, str]] = [
        (AG, f"graded {groups} xor"),
        (AG, "shard_p2p xor"),
        (RS, "shard_p2p xor"),
        ("all_gather_matmul_backward", "side_by_side xor"),
    ]
    for op, spec in specs:
        plan = build(Problem(op, 4096, 1280, 2048, ranks), spec)
        timeline = estimate(plan, machine)
        ends_s = [max(s.end_s for s in timeline.spans if s.rank == r) for r in range(ranks)]
        assert ends_s == pytest.approx([predicted_s(plan, machine)] * ranks, rel=EXACTLY)


def test_the_slowest_rank_is_one_whose_groups_wrap():
    machine = preset("h200-4")
    plan = build(Problem(AG, 4096, 4096, 4096, 4), "graded 1/3 ring")
    # it gathers me, me - 1, me - 2, me - 3: on rank 3 others' rows lie side by side, on rank 1
    # they are 0 | 2, 3, on rank 2 they are 0, 1 | 3
    assert slowest_rank(plan, machine) in (1, 2)
    assert len(bind(plan, 3).steps[-1].parts) == 1
    parts = [len(s.parts) for s in bind(plan, 1).steps if s.step.name == "matmul_1"]
    assert parts == [2]


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("ranks", RANKS)
def test_serial_is_its_collective_and_its_matmul(op: str, ranks: int):
    machine = preset(f"h200-{ranks}")
    costs = machine.costs
    p = Problem(op, 1024 * ranks, 7168, 8192, ranks)
    matmul_s = costs.matmul_s(p.m, p.n, p.k, 2, machine.sms)
    matmul_s *= costs.settling(matmul_s)
    kind = "all_gather" if op == AG else "reduce_scatter"
    received = 1024 * (ranks - 1) * (p.k if op == AG else p.n) * 2
    total_s = matmul_s + costs.collective_s(kind, received)
    plan = build(p, "serial")
    assert predicted_s(plan, machine) == pytest.approx(total_s, rel=EXACTLY)
    assert estimate(plan, machine).end_s == pytest.approx(total_s, rel=EXACTLY)
    tile = (64, 64)
    tiles = {(p.m, p.n, p.k): tile}
    slow_s = costs.matmul_s(p.m, p.n, p.k, 2, machine.sms, tile)
    slow_s = slow_s * costs.settling(slow_s) + costs.collective_s(kind, received)
    assert slow_s > total_s
    assert predicted_s(plan, machine, tiles=tiles) == pytest.approx(slow_s, rel=EXACTLY)


def test_matmuls_beside_copies_slow_each_other_and_nothing_else():
    machine = preset("h200-4")

    def of(**factors: float) -> Machine:
        costs = {"matmul_beside_copy": 1.0, "copy_beside_matmul": 1.0} | factors
        return replace(machine, measured=replace(machine.costs, **costs))

    for op in PLAIN:
        for plan in plans(op, 4, *SHAPES[0]):
            alone = spans_of(estimate(plan, of()))
            for factors in ({"matmul_beside_copy": 1.5}, {"copy_beside_matmul": 1.5}):
                together = spans_of(estimate(plan, of(**factors)))
                for key, span in together.items():
                    other = {"matmul": "copy", "copy": "matmul"}.get(span.kind)
                    beside = any(
                        s.start_s < span.end_s and span.start_s < s.end_s
                        for s in together.values()
                        if s.kind == other and s.rank == span.rank
                    )
                    if span.kind != "barrier":  # which waits for others
                        ratio = span.duration_s / alone[key].duration_s
                        slowed = beside and f"{span.kind}_beside_{other}" in factors
                        assert 1 - EXACTLY < ratio < 1.5 + EXACTLY
                        assert slowed == (ratio > 1 + EXACTLY), f"{plan.spec} {key}"
            if plan.family == "serial":
                assert predicted_s(plan, of()) == predicted_s(plan, of(matmul_beside_copy=9.0))


US = 1e-6


def by_hand(timeline: Timeline) -> list[tuple[str, str, float, float]]:
    """Spans of one rank, which must be those of every rank: kind, label, start and end in us."""
    ranks = [
        [
            (s.kind, s.label, round(s.start_s / US, 6), round(s.end_s / US, 6))
            for s in sorted(timeline.spans, key=lambda s: (s.start_s, s.label))
            if s.rank == rank
        ]
        for rank in timeline.ranks
    ]
    assert all(spans == ranks[0] for spans in ranks)
    return ranks[0]


def test_a_gather_by_hand():
    """Two ranks, a shard of 16 x 1000: a copy and two matmuls of 1 + 1 us."""
    machine = tiny_machine()
    plan = build(Problem(AG, 32, 16, 1000, 2), "shard_p2p ring")
    # beside the matmul, of which 1 us is left after the barrier and takes 2, the copy does 2 / 3 us
    # of its 2; 1 1/3 us later the second matmul starts, with 0.5 us for its wait and 1.5 for the
    # fork, an edge and the join of the other lanes
    copied = round(3 + 2 - 2 / 3, 6)
    expected = [
        ("matmul", "matmul_0", 0.0, 3.0),
        ("barrier", "open", 0.0, 1.0),
        ("copy", "push_1", 1.0, copied),
        ("wait", "wait for matmul_1", 3.0, copied),
        ("matmul", "matmul_1", copied, round(copied + 4.0, 6)),
    ]
    assert by_hand(estimate(plan, machine)) == expected
    assert predicted_s(plan, machine) == pytest.approx((copied + 4.0) * US)


def test_an_eager_gather_by_hand():
    """As above; the host is at step i after 11 + i us."""
    machine = tiny_machine()
    plan = build(Problem(AG, 32, 16, 1000, 2), "shard_p2p ring")
    assert [s.name for s in plan.steps] == ["open", "matmul_0", "push_1", "matmul_1"]
    # the matmul starts at 12 and is half done when the copy starts
    copied = round(15 + 2 - 2 / 3, 6)
    assert by_hand(estimate(plan, machine, eager=True)) == [
        ("barrier", "open", 11.0, 12.0),
        ("matmul", "matmul_0", 12.0, 15.0),
        ("copy", "push_1", 13.0, copied),
        ("wait", "wait for matmul_1", 15.0, copied),
        ("matmul", "matmul_1", copied, round(copied + 4.0, 6)),
    ]


def test_where_one_block_runs_at_a_time_kernels_take_turns_and_exchanges_slow_them():
    """As on a CPU rank: its barrier first, and an exchange has no engine of its own."""
    machine = tiny_machine()
    cores = replace(machine.device, max_blocks_per_sm=1)
    nic = LinkSpec(name="NIC", bytes_per_s=16 * 1000 * 2 / 2e-6)
    machine = replace(machine, device=cores, nic=nic)
    plan = build(Problem(AG, 64, 16, 1000, 4, islands=2), "islands chunks=1")
    spans = {label: (start, end) for _, label, start, end in by_hand(estimate(plan, machine))}
    assert spans["open"] == (0.0, 1.0)
    assert spans["matmul_own"][0] == 1.0
    alone_us, both_us = 2.0, spans["give_1"][1] - spans["give_1"][0]
    assert both_us > alone_us


def test_a_scatter_by_hand():
    """K = 2000: two matmuls of 1 + 2 us, a copy of 1 + 0.016 us, a sum of 0.5 us."""
    machine = tiny_machine()
    plan = build(Problem(RS, 32, 16, 2000, 2), "shard_p2p ring")
    block_us = 16 * 16 * 2 / 32e9 / US
    sum_us = 3 * 16 * 16 * 2 / 1e15 / US
    pushed = 3 + 3 * (1 + block_us)
    # the copy takes three times as long; the matmul half its speed, and ends later
    second = pushed + 3 - (pushed - 3) / 2
    assert by_hand(estimate(plan, machine)) == [
        ("matmul", "matmul_0", 0.0, 3.0),
        ("barrier", "open", 0.0, 1.0),
        ("matmul", "matmul_1", 3.0, round(second, 6)),
        ("copy", "push_1", 3.0, round(pushed, 6)),
        # posted long ago: no wait is seen, but it is a kernel's time; and the lanes' fork and join
        ("reduce", "reduce", round(second, 6), round(second + 0.5 + 0.5 + 1.5 + sum_us, 6)),
    ]


def test_clocks_settle_by_all_matmuls_of_a_call():
    machine = tiny_machine()
    machine = replace(machine, measured=replace(ROUND, gemm_settled=2.0, gemm_settling_s=1e-3))
    plan = build(Problem(RS, 32, 16, 2000, 2), "serial")
    spans = by_hand(estimate(plan, machine))
    # 1 + 4 us of matmuls are 5 / 1005 of the way to twice the time
    assert spans[0] == ("matmul", "matmul", 0.0, round(5 * (1 + 5 / 1005), 6))


@pytest.mark.parametrize("eager", [False, True])
def test_a_plan_that_waits_for_ever_is_refused(eager: bool):
    plan = build(Problem(AG, 32, 16, 16, 2), "shard_p2p ring")
    steps = tuple(replace(s, posts=()) if s.name == "push_1" else s for s in plan.steps)
    silent = replace(plan, steps=steps)
    for run in (estimate, predicted_s):
        with pytest.raises(PlanError, match=r"step matmul_1: waits for what never comes$"):
            run(silent, preset("h200-2"), eager=eager)
    steps = tuple(replace(s, posts=()) if s.name == "open" else s for s in plan.steps)
    with pytest.raises(PlanError, match=r"step open: waits for what never comes$"):
        predicted_s(replace(plan, steps=steps), preset("h200-2"), eager=eager)


@pytest.mark.parametrize("op", OPS)
def test_one_rank_multiplies_and_no_more(op: str):
    machine = preset("h200-1")
    p = make_problem(op, 4096, 1024, 2048, 1)
    plan = build(p, "serial")
    timeline = estimate(plan, machine)
    kinds = {
        BAGS: "fused",
        NORM: "fused",
        ATTENTION[0]: "attention",
        ATTENTION[1]: "attention_backward",
    }
    assert {s.kind for s in timeline.spans} == {kinds.get(op, "matmul")}
    compute_s, comm_s = parts_s(p, machine)
    assert comm_s == 0
    assert predicted_s(plan, machine) == timeline.end_s == pytest.approx(compute_s, rel=EXACTLY)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_an_empty_problem_takes_the_time_of_its_signals(op: str, shape: tuple[int, int, int]):
    machine = preset("h200-4")
    for plan in plans(op, 4, *shape):
        timeline = estimate(plan, machine)
        check_order(plan, machine, timeline)
        assert predicted_s(plan, machine) == pytest.approx(timeline.end_s)
        assert timeline.end_s < 200e-6


def test_a_batch_of_copies_is_quick_where_each_peer_has_a_link():
    p = Problem(AG, 8192, 1280, 8192, 8)
    chunk_bytes = 8192 // 8 // 8 * 8192 * 2

    def exchange_s(name: str) -> float:
        machine = preset(name)
        plan = build(p, "uniform_fused_1d ring", machine)
        machine = replace(machine, measured=replace(machine.costs, copy_beside_matmul=1.0))
        spans = spans_of(estimate(plan, machine))
        ours = [s for (rank, label), s in spans.items() if not rank and label.startswith("push_0")]
        return max(s.end_s for s in ours) - min(s.start_s for s in ours)

    # a link is a seventh of what a GPU has in all; own rows come from no link
    assert exchange_s("mi300x-8") == pytest.approx(preset("mi300x-8").costs.copy_s(7 * chunk_bytes))
    costs = preset("h200-8").costs
    copies_s = 7 * costs.copy_s(chunk_bytes) + costs.copy_s(chunk_bytes // 3)
    assert exchange_s("h200-8") == pytest.approx(copies_s)


def test_a_copy_to_one_peer_has_one_link_of_a_mesh():
    p = Problem(AG, 8192, 1280, 8192, 8)
    plan = build(p, "shard_p2p ring")
    mesh, switch = preset("mi300x-8"), preset("h200-8")
    for machine, links in ((mesh, 7), (switch, 1)):
        machine = replace(machine, measured=replace(machine.costs, copy_beside_matmul=1.0))
        span = spans_of(estimate(plan, machine))[0, "push_1"]
        shard_bytes = 1024 * 8192 * 2
        assert span.duration_s == pytest.approx(machine.costs.copy_s(links * shard_bytes))


def test_a_sum_in_fp32_is_read_and_written_by_every_pass():
    machine = preset("h200-4")
    machine = replace(machine, measured=replace(machine.costs, matmul_beside_copy=1.0))
    plan = build(Problem(AG, 8192, 8192, 256, 4), "uniform_fused_2d ring")
    spans = spans_of(estimate(plan, machine))
    first_s, *later_s = (spans[0, f"matmul_{i}"].duration_s for i in range(4))
    sum_s = 2 * 8192 * 8192 * 4 / machine.costs.hbm_bytes_per_s
    # products of 64 columns each: the first pass writes only
    assert first_s < sum_s < min(later_s)


def test_what_comes_to_one_rank_from_several_shares_its_link():
    rows = (0, 0, 4096, 0)
    p = Problem(RS, 4096, 7168, 64, 4, rows=rows)
    plan = build(p, "shard_p2p ring")
    for name, together in (("h200-4", True), ("mi300x-4", False)):
        machine = preset(name)
        machine = replace(machine, measured=replace(machine.costs, copy_overhead_s=0.0))
        spans = spans_of(estimate(plan, machine))
        block_s = 4096 * 7168 * 2 / machine.costs.copy_bytes_per_s
        # three partials of its rows, at once or not
        last_s = max(s.end_s for s in spans.values() if s.kind == "copy")
        first_s = min(s.start_s for s in spans.values() if s.kind == "copy" and s.duration_s)
        assert last_s - first_s >= 3 * block_s * (1 - EXACTLY)
        pushes = [spans[rank, f"push_{(2 - rank) % 4}"].duration_s for rank in (0, 1, 3)]
        assert (max(pushes) > 2 * block_s) == (together or machine.link.topology == "mesh")


def test_with_unequal_rows_all_ranks_are_simulated():
    for op in BY_ROWS:
        for plan in plans(op, 4, *SHAPES[1], rows=UNEQUAL[:4]):
            machine = preset("h200-4")
            assert predicted_s(plan, machine) == estimate(plan, machine).end_s


def test_a_timeline_says_what_it_predicts_and_from_what():
    machine = preset("h200-4")
    plan = build(Problem(AG, 4096, 1280, 2048, 4), "graded 1/3")
    timeline = estimate(plan, machine)
    assert timeline.title == "all_gather_matmul 4096, 1280, 2048: graded 1/3 ring"
    assert timeline.source == "predicted for h200-4 from datasheet rates"
    measured = replace(machine, measured=machine.costs)
    assert estimate(plan, measured).source == "predicted for h200-4 from measured rates"


@pytest.mark.parametrize("op", EXPERTS)
def test_a_group_of_experts_takes_the_time_of_one_launch(op: str):
    machine = preset("h200-4")
    p = Problem(op, 8192, 4096, 4096, 4, experts=16)
    costs = machine.costs
    spans = estimate(build(p, "grouped 4/12"), machine).spans
    ranks = {s.rank: [t for t in spans if t.rank == s.rank and t.kind == "matmul"] for s in spans}
    whole_s = costs.matmul_s(512, 4096, 4096, 2, machine.sms, count=16)
    for matmuls in ranks.values():
        assert len(matmuls) == 16
        busy = [s for s in matmuls if s.end_s > s.start_s]
        assert [s.label for s in busy] == ["matmul_0", "matmul_4"]
        took_s = sum(s.end_s - s.start_s for s in busy)
        # settled clocks and copies beside them: longer than all in one launch
        assert whole_s < took_s < 1.6 * whole_s
    alone = 16 * costs.matmul_s(512, 4096, 4096, 2, machine.sms)
    assert whole_s < alone


def test_a_strided_copy_of_a_group_costs_one_overhead():
    machine = preset("h200-2")
    p = Problem("all_to_all_matmul", 64, 8, 8, 2, experts=16)
    costs = machine.costs

    def copies_s(groups: str) -> float:
        program = bind(build(p, groups), 0)
        pushes = [b for b in program.steps if b.step.name.startswith("push")]
        return sum(work_s(b, program.plan, machine, NO_TILES) for b in pushes)

    assert copies_s("grouped 16") < 1.5 * costs.copy_overhead_s
    assert copies_s("grouped 4/4/4/4") > 4 * costs.copy_overhead_s


def test_groups_of_experts_hide_what_serial_exposes():
    """The sizes chosen are no slower than all in one group, and than halves; nor than serial."""
    machine = preset("h200-8")
    for op in EXPERTS:
        p = Problem(op, 32768, 4096, 7168, 8, experts=32)
        times = {spec: predicted_s(build(p, spec, machine), machine)
                 for spec in ("serial", "grouped", "grouped 32", "grouped 16/16")}  # fmt: skip
        assert times["grouped"] == min(times.values())
        assert times["grouped"] > parts_s(p, machine)[0]


def test_work_of_many_ranks_grows_as_the_ranks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of chunked buffers are cut once each, not once for each of the others."""
    cuts = 0

    def cut(rows: int, i: int, of: int) -> tuple[int, int]:
        nonlocal cuts
        cuts += 1
        return rows * i // of, rows * (i + 1) // of

    monkeypatch.setattr(binding, "_chunk", cut)
    bind(build(Problem("all_to_all_matmul", 4096, 512, 512, 1024, experts=4), "serial"), 0)
    assert 0 < cuts < 64 * 1024


@pytest.mark.parametrize("spec", ["serial", "shard_p2p"])
def test_of_a_thousand_ranks_one_is_simulated(spec: str, monkeypatch: pytest.MonkeyPatch):
    bound: list[int] = []
    monkeypatch.setattr(model, "bind", lambda p, rank: bound.append(rank) or bind(p, rank))
    plan = build(Problem("all_gather_matmul", 4096, 512, 512, 1024), spec)
    timeline = estimate(plan, preset("h200-8"))
    assert bound == [0] and {span.rank for span in timeline.spans} == {0}


def test_a_plan_of_very_many_regions_is_not_estimated():
    plan = build(Problem("all_gather_matmul", 300 * 300, 8, 8, 300), "uniform_fused_1d")
    with pytest.raises(PlanError, match=r"regions and signals, more than 65536: too many to est"):
        estimate(plan, preset("h200-8"))


def test_what_goes_to_other_islands_takes_the_nic():
    """Matmuls and exchanges of one length run side by side, but for a chunk of either."""
    nic = LinkSpec(name="NIC", bytes_per_s=45e9, latency_s=5e-6)
    machine = replace(preset("h200-8"), nic=nic)
    problem = Problem(AG, m=65536, n=8192, k=8192, ranks=16, islands=2)
    block_s = 5e-6 + problem.m // 16 * 8192 * 2 / 45e9
    plan = build(problem, "islands chunks=1")
    ran = {span.label: span for span in estimate(plan, machine).spans}
    assert ran["give_1"].end_s - ran["give_1"].start_s == pytest.approx(block_s)
    assert ran["matmul_far_1"].start_s >= ran["give_1"].end_s
    choice = choose(problem, machine)
    assert choice.plan.family == "islands"
    assert choice.seconds < choice.serial_s
    slower = replace(machine, nic=replace(nic, bytes_per_s=20e9))
    assert choose(problem, slower).serial_s > choice.serial_s


def test_islands_want_a_nic():
    problem = Problem(AG, m=65536, n=8192, k=8192, ranks=16, islands=2)
    with pytest.raises(InputError, match="machine must be a machine with a nic"):
        choose(problem, "h200-8")
    with pytest.raises(InputError, match="by must be model"):
        nic = LinkSpec(name="NIC", bytes_per_s=45e9)
        choose(problem, replace(preset("h200-8"), nic=nic), by="rule")
    with pytest.raises(PlanError, match="goes to other islands, and h200-8 has no nic"):
        estimate(build(problem, "islands"), "h200-8")
    own = replace(preset("h200-8"), nic=LinkSpec(name="NIC", bytes_per_s=45e9))
    assert Machine.from_json(own.to_json()) == own
