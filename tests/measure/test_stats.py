"""What a process says of its own calls: lines of its log, `stats`, and NVTX ranges."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from embedding_cases import random_bags
from on_ranks import on_ranks
from rank_bodies import by_reference, world

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.choose.known import Knowledge, Timed, problem_key
from counterpoint.choose.taken import Pick, Taken
from counterpoint.group.workspace import workspace_of
from counterpoint.measure.stats import HEAD, PlanStats
from counterpoint.ops import call

CPU = torch.device("cpu")
OP, NAME = "all_gather_matmul", "all_gather_matmul M8 N6 K4 float32 on 2 ranks"
NVTX = "COUNTERPOINT_NVTX"


def gather(plan: str = "auto", gradient: bool = False) -> torch.Tensor:
    w = torch.ones(4, 6, requires_grad=gradient)
    return cp.all_gather_matmul(torch.ones(4, 4), w, plan=plan)


@contextmanager
def logged(level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """What the library logs, in a group that has called nothing yet; its memory goes behind it."""
    found: list[logging.LogRecord] = []
    handler, ours = logging.Handler(), logging.getLogger("counterpoint")
    handler.emit = found.append  # type: ignore[method-assign]
    cp.release()
    ours.addHandler(handler)
    ours.setLevel(level)
    try:
        with by_reference():
            yield found
    finally:
        ours.removeHandler(handler)
        ours.setLevel(logging.NOTSET)
        cp.release()


def known(**more: Any) -> None:
    """Let this group be one of H200s of which that is known."""
    knowledge = Knowledge(cp.preset("h200-2"), {})
    workspace_of(world(), CPU).knowledge = replace(knowledge, **more)


def counted() -> Counter[tuple[str, str]]:
    """Calls of each operator by each plan."""
    found = Counter[tuple[str, str]]()
    for one in cp.stats().plans:
        found[one.op, one.plan] += one.calls
    return found


@on_ranks(2)
def test_a_line_for_each_new_choice_and_none_behind_it(rank: int, ranks: int):
    with logged() as found:
        for _ in range(3):
            gather()
        gather("shard_p2p")
        told = [record.getMessage() for record in found]
        gather("shard_p2p")
        gather()
        assert len(found) == 2
    group = f"group {world().group_name}: {NAME}"
    assert told == [f"{group}: serial, not weighed: no machine is known",
                    f"{group}: shard_p2p ring, asked for"]  # fmt: skip
    assert {record.levelno for record in found} == {logging.DEBUG if rank else logging.INFO}
    assert [logging.Formatter("%(rank)s").format(record) for record in found] == [str(rank)] * 2


@on_ranks(2)
def test_a_line_says_the_times_that_were_compared(rank: int, ranks: int):
    """As `choose` predicts them, or as they were measured in this process or before."""
    problem = cp.Problem(OP, 4096, 512, 1024, ranks, dtype="float32")
    x, w, key = torch.ones(4096 // ranks, 1024), torch.ones(1024, 512), problem_key(problem)
    timed = Timed(3e-4, "serial", 4e-4)
    with logged() as found:
        choice = cp.choose(problem, cp.preset("h200-2"))
        after = choice.runner_up
        assert after is not None and after.spec != choice.spec
        known()
        cp.all_gather_matmul(x, w)
        (estimated,) = (one for one in cp.stats().plans if one.problem == str(problem))
        for here in (False, True):
            cp.release()
            known(tuned={key: "graded 2 ring"}, times={key: timed._replace(here=here)})
            cp.all_gather_matmul(x, w)
        (tuned,) = cp.stats().plans
    first, *others = (record.getMessage().partition(f"{problem}: ")[2] for record in found)
    assert first == (
        f"{choice.plan.spec}, {choice.seconds * 1e6:.0f} us predicted, estimated; "
        f"next {after.spec}, {after.seconds * 1e6:.0f} us"
    )
    assert others == [f"graded 2 ring, 300 us measured, {source}; next serial, 400 us"
                      for source in ("kept file", "tuned")]  # fmt: skip
    assert (estimated.predicted_s, estimated.measured_s) == (choice.seconds, None)
    machine = cp.preset("h200-2")
    predicted_s = cp.estimate(cp.build(problem, "graded 2 ring"), machine).end_s
    assert (tuned.predicted_s, tuned.measured_s) == (pytest.approx(predicted_s), 3e-4)


@on_ranks(2)
def test_a_plan_that_does_not_run_is_not_said_to_have_run(rank: int, ranks: int):
    def serial_alone(plan: Any, *given: Any, **named: Any) -> Any:
        if plan.spec != "serial":
            raise cp.UnsupportedError("no kernels")
        return compile_plan(plan, *given, **named)

    compile_plan = call.compile_plan
    pick = Pick("fused", "estimated", "", 1e-5, None, "serial", 2e-5)
    with logged() as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "compile_plan", serial_alone)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr("counterpoint.ops.plans.choose_spec", lambda *_: pick)
        cp.matmul_all_reduce(torch.ones(8, 16).half(), torch.ones(16, 32).half())
        (one,) = cp.stats().plans
    told = found[0].getMessage()
    assert ": serial, not weighed: fused " in told and told.endswith(" does not run here")
    assert len(found) == 1 and one.plan == "serial" and one.calls == 1


@on_ranks(2)
def test_calls_are_counted_by_plan_with_those_of_gradients(rank: int, ranks: int):
    with logged(logging.WARNING) as found:
        for _ in range(3):
            gather()
        for _ in range(2):
            gather("shard_p2p", gradient=True).sum().backward()
        torch.ops.counterpoint.all_gather_matmul(
            torch.ones(4, 4), torch.ones(4, 6), None, "serial", [], world().group_name, ranks
        )
        wgrad = "all_gather_matmul_wgrad"
        (backward,) = (plan for op, plan in counted() if op == wgrad)
        assert counted() == {(OP, "serial"): 4, (OP, "shard_p2p ring"): 2, (wgrad, backward): 2}
        # memory that grows forgets compiled code, not what it has run
        cp.all_gather_matmul(torch.ones(1 << 16, 16), torch.ones(16, 6), plan="shard_p2p")
        gather()
        assert counted()[OP, "serial"] == 5
        cp.all_gather_matmul(torch.ones(0, 4), torch.ones(4, 6))  # nothing runs
        assert sum(counted().values()) == 10
    assert found == [] and counted() == {}


@on_ranks(2)
def test_layers_and_embedding_bags_are_counted(rank: int, ranks: int):
    """An expert layer's known forward launches two operators at once; it counts both."""
    bags = random_bags((4, 8), 4 * ranks)
    with logged():
        layer = cnn.ExpertParallelMLP(16, 32, 2 * ranks, dtype=torch.float32)
        x, logits = torch.randn(8, 16, requires_grad=True), torch.randn(8, 2 * ranks)
        given = bags.tables, bags.indices, bags.offsets
        for turn in range(1, 5):
            layer(x, logits=logits, top_k=2).sum().backward()
            cp.embedding_bag_all_to_all(*given, include_last_offset=True)
            calls = Counter[str]()
            for (op, _), number in counted().items():
                calls[op] += number
            assert calls["embedding_bag_all_to_all"] == turn
            # forward and backward run both directions once
            assert calls["all_to_all_matmul"] == calls["matmul_all_to_all"] == 2 * turn


@on_ranks(2)
def test_memory_is_that_of_the_group(rank: int, ranks: int):
    with logged():
        gather("shard_p2p")
        workspace = workspace_of(world(), CPU)
        (one,) = cp.stats().groups
        arena, scratch = workspace.num_bytes()
        assert one.symmetric_bytes == arena + workspace.pads.num_bytes > arena > 0
        assert (one.name, one.ranks, one.device) == (world().group_name, ranks, "cpu")
        assert (one.scratch_bytes, one.graphs) == (scratch, 0)
        out = cp.PooledOutputs(8, torch.float32, batch=[4] * ranks, device="cpu")
        assert cp.stats().groups[0].symmetric_bytes > one.symmetric_bytes
        del out
        assert cp.stats().groups[0] == one
    assert cp.stats().groups == ()
    assert str(cp.stats()) == "no group has made a call"


@on_ranks(2)
def test_tuning_says_what_it_measured(rank: int, ranks: int):
    problem = cp.Problem(OP, 8, 6, 4, ranks, dtype="float32")
    with logged():
        choice = cp.tune(problem, specs=["shard_p2p"], rounds=1)
        times = {c.spec: c.seconds for c in choice.table}
        found = {one.plan: one.measured_s for one in cp.stats().plans}
        assert found == {"serial": times["serial"], "shard_p2p ring": times["shard_p2p"]}
        gather()
        assert [one.source for one in cp.stats().plans if one.plan.startswith(choice.spec)] == [
            "tuned"
        ]


@on_ranks(2)
def test_stats_are_a_table_and_json(rank: int, ranks: int):
    with logged():
        gather()
        known()
        gather("shard_p2p")
        found = cp.stats()
        back = json.loads(json.dumps(found.as_dict()))
        assert [PlanStats(**one) for one in back["plans"]] == [*found.plans]
        group, empty, head, *rows = str(found).splitlines()
    assert group == str(found.groups[0]) and not empty and head.split("  ") and len(HEAD) == 6
    for row, one in zip(rows, found.plans, strict=True):
        cells = [cell for cell in row.split("  ") if cell]
        us = f"{(one.predicted_s or 0) * 1e6:.0f}"
        assert [cell.strip() for cell in cells] == [one.problem, one.plan, one.source, "1", us, "-"]


@on_ranks(2)
def test_ranges_are_around_each_call_that_was_prepared_with_them(rank: int, ranks: int):
    said: list[str] = []
    bags = random_bags((4, 8), 4 * ranks)
    with logged(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.nvtx.range_push", said.append)
        patch.setattr("torch.cuda.nvtx.range_pop", lambda: said.append("end"))
        gather()
        patch.setenv(NVTX, "1")
        gather()  # was prepared without
        assert said == []
        cp.embedding_bag_all_to_all(
            bags.tables, bags.indices, bags.offsets, include_last_offset=True
        )
        gather("shard_p2p")
        del said[:]  # with what was tried
        gather("shard_p2p")
        patch.delenv(NVTX)
        gather("shard_p2p")
        assert said == ["counterpoint.all_gather_matmul 8x6x4 shard_p2p ring", "end"] * 2


@on_ranks(2)
def test_ranges_of_an_expert_layer(rank: int, ranks: int):
    said: list[str] = []
    with logged(), pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("torch.cuda.nvtx.range_push", said.append)
        patch.setattr("torch.cuda.nvtx.range_pop", lambda: None)
        patch.setenv(NVTX, "1")
        layer = cnn.ExpertParallelMLP(16, 32, 2 * ranks, dtype=torch.float32)
        x, logits = torch.randn(8, 16), torch.randn(8, 2 * ranks)
        for _ in range(3):
            layer(x, logits=logits, top_k=2)
        assert {text.split()[0] for text in said if "x" in text} >= {
            "counterpoint.all_to_all_matmul", "counterpoint.matmul_all_to_all"
        }  # fmt: skip


@pytest.mark.parametrize("asks", ["all", "one"])
@pytest.mark.parametrize("op", ["matmul", "bags"])
@on_ranks(2)
def test_ranges_that_torch_has_not_are_refused_on_all_ranks(
    rank: int, ranks: int, asks: str, op: str
):
    """A CPU build of torch has none; where one rank alone asks for them, the others hear of it."""
    bags = random_bags((4, 8), 4 * ranks)

    def no_ranges(_: str) -> None:
        raise RuntimeError("NVTX functions not installed.")

    def run() -> torch.Tensor:
        if op == "matmul":
            return gather()
        given = bags.tables, bags.indices, bags.offsets
        return cp.embedding_bag_all_to_all(*given, include_last_offset=True)

    with logged(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.nvtx.range_push", no_ranges)
        if asks == "all" or rank == 1:
            patch.setenv(NVTX, "1")
        with pytest.raises(cp.UnsupportedError, match=f"{NVTX}=1 needs NVTX, and .*not installed"):
            run()
        patch.delenv(NVTX, raising=False)
        run()  # the group goes on


def test_a_plan_knows_the_last_source_and_the_times_of_all():
    plan = cp.build(cp.Problem(OP, 8, 6, 4, 2), "serial")
    taken = Taken(plan, Pick("serial", "estimated", "", 1e-5))
    taken.know(Pick("serial", "tuned", "", None, 2e-5))
    taken.know(Pick("serial", "asked for"))
    assert (taken.pick.source, taken.predicted_s, taken.measured_s) == ("asked for", 1e-5, 2e-5)
