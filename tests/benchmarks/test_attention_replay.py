"""Context parallelism replayed: a rank computes what it would, and is priced as it should be."""

from typing import cast

import pytest
import torch
from torch import Tensor

from benchmarks import attention_replay as replay
from benchmarks.attention import BOTH, SPECS, case_of, problem_of
from benchmarks.declare import Bench
from benchmarks.replay import COMPUTED, OneRank, lane_of, program_of
from counterpoint.machine_of import machine_of
from counterpoint.model.estimate import predicted_s
from counterpoint.model.work import works
from counterpoint.plan.families import build

MACHINE = machine_of("test", replay.LINKS)


class Drawn(Bench):
    """One rank, whose numbers are fp32."""

    def __init__(self) -> None:
        self.device, self.on_gpu = torch.device("cpu"), False
        self.draw = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().normal(*shape, scale=scale, dtype=dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["serial", *SPECS, *replay.BY_HEADS])
@pytest.mark.parametrize("what", ["forward", BOTH])
def test_what_a_rank_computes_runs_by_itself(what: str, spec: str, causal: bool):
    case, bench = case_of(4, 2, 64, 16, causal, what), Drawn()
    op = replay.BACKWARD if what == BOTH else replay.FORWARD
    by_heads = spec in replay.BY_HEADS
    if (spec == SPECS[1] and what == BOTH) or (by_heads and (causal or what != BOTH)):
        pytest.skip("no arm")
    problem = problem_of(case, replay.RANKS, op)
    program = program_of(build(problem, spec), MACHINE)
    operands = replay.operands_of(problem, bench)
    made = ("dq",) if op == replay.BACKWARD else ("y", "lse")
    for name in made:
        operands[name].fill_(torch.nan)
    memory = OneRank(bench.device, program.rank)
    lane = lane_of(program, memory, operands)
    assert list(lane) == [b.step.name for b in program.steps if b.step.kind in COMPUTED]
    for step in lane.values():
        step()
    assert all(operands[name].isfinite().all() for name in made)


def test_attention_to_keys_of_both_ranks_is_exact():
    case, bench = case_of(2, 2, 64, 16, False, "forward"), Drawn()
    problem = problem_of(case, replay.RANKS)
    program = program_of(build(problem, SPECS[0]), MACHINE)
    operands = replay.operands_of(problem, bench)
    memory = OneRank(bench.device, program.rank)
    memory.reserve(program.plan)
    rows, cols = problem.rows[0], problem.k
    # the slots of k, then those of v, which a peer has filled
    there = [bench.normal(rows, cols).bfloat16() for _ in range(2)]
    for i, x in enumerate(there):
        part = memory.memory[i * rows * cols * 2 :][: rows * cols * 2].view(torch.bfloat16)
        part.copy_(x.flatten())
    operands |= {name: operands[name].bfloat16() for name in ("q", "k", "v", "y")}
    for step in lane_of(program, memory, operands).values():
        step()

    def by_head(x: Tensor) -> Tensor:
        return x.double().unflatten(1, (2, 16)).transpose(0, 1)

    keys, values = (torch.cat([operands[name], x]) for name, x in zip("kv", there, strict=True))
    scores = by_head(operands["q"]) @ by_head(keys).mT * 16**-0.5
    want = (scores.softmax(-1) @ by_head(values)).transpose(0, 1).flatten(1)
    assert (operands["y"] - want).abs().max() < 2e-2 * want.abs().max()


@pytest.mark.parametrize("spec", ["serial", *SPECS])
def test_a_replay_of_predicted_steps_is_the_prediction(spec: str):
    plan = build(problem_of(case_of(32, 8, 8192, 128, True, "forward"), 2), spec)
    program = program_of(plan, MACHINE)
    priced = zip(program.steps, works(program, MACHINE, {}), strict=True)
    times = {b.step.name: (work.seconds, work.seconds) for b, work in priced
             if b.step.kind in COMPUTED}  # fmt: skip
    assert replay.replayed(program, times, MACHINE, 1.0) == pytest.approx(
        predicted_s(plan, MACHINE), rel=1e-9
    )


def test_library_lanes_attend_as_torch_does():
    bench = Drawn()
    for causal in (False, True):
        case = case_of(4, 2, 64, 16, causal, BOTH)
        lanes = replay.library_lanes(case, bench)
        assert list(lanes) == ["serial", "serial packed"]
        dq, dk, dv = cast(tuple[Tensor, ...], lanes["serial"]["attend"]())
        assert [x.shape for x in (dq, dk, dv)] == [(32, 4, 16), (64, 2, 16), (64, 2, 16)]


def test_a_library_gathers_both_at_once_or_one_by_one():
    for what, kinds in (("forward", 1), (BOTH, 2)):
        case = case_of(32, 8, 8192, 128, False, what)
        two, one = (replay.gathers_s(case, MACHINE, packed=packed) for packed in (False, True))
        costs = MACHINE.costs
        assert two > one > kinds * 4096 * 8 * 128 * 2 * 2 / costs.collective_bytes_per_s
