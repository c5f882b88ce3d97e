"""The plan that is fastest here: candidates of the model, timed side by side, kept on disk.

All ranks time the same candidates and decide by the slowest rank's times, which are equal on all.
From then on `plan="auto"` takes what was found, in this process and in later ones.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, nan

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.choose.by_model import by_model, parts_s
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.known import Knowledge, problem_key, save_tuned
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.timing import captured, rotate
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.call import Operator, prepare
from counterpoint.ops.operators import OPERATORS, bags_call, operands, rows_of
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.runtime.workspace import workspace_of

MAX_TIMED = 12  # besides serial
MIN_GAIN = 1.01  # over serial, below which serial stays
L2_ROTATIONS = 4
MIN_CALLS = 8  # of one graph

Progress = Callable[[str], None]


def tune(
    problem: Problem,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    specs: Sequence[str] = (),
    rounds: int = 9,
    save: bool = True,
    progress: Progress = lambda _: None,
) -> Choice:
    """Time the plans for `problem` on this group and remember the fastest; all ranks call this.

    On GPUs as CUDA graphs in one rotation, weights in rotation; on CPU ranks call by call, which
    says little about a GPU.

    Args:
        problem: what is computed; its `ranks` are those of the group.
        group: the default group if None.
        device: of the operands; this rank's GPU if the group is NCCL's and None is given.
        specs: which plans besides serial; the model's best 12 if empty.
        rounds: how often each is timed.
        save: write the result into the cache folder, for later processes.
        progress: called with what is being done.

    Returns:
        The choice, with the measured time of each candidate; equal on all ranks.

    Raises:
        InputError: the group has another number of ranks, or a spec is none.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None or group.size() != problem.ranks:
        got = "no group" if group is None else f"{group.size()} ranks"
        raise InputError("tune", "group", want=f"of {problem.ranks} ranks as the problem", got=got)
    if problem.op not in OPERATORS and not problem.tables:
        want = f"of one of {', '.join(OPERATORS)}"
        raise InputError("tune", "problem", want=want, got=f"{problem}")
    if problem.counts == "device":
        fix = "auto takes one kernel there, if that takes the problem"
        want = "of counts that the host knows"
        raise InputError("tune", "problem", want=want, got=f"{problem}", fix=fix)
    if problem.splits:
        fix = "tune it as one weight of all columns"
        raise InputError("tune", "problem", want="of one weight", got=f"{problem}", fix=fix)
    if problem.out:
        fix = "tune it with out=False: a graph would use one output at each replay"
        raise InputError("tune", "problem", want="without out", got=f"{problem}", fix=fix)
    if device is None:
        cuda = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    workspace = workspace_of(group, device)
    machine = knowledge_of(workspace).machine or preset(f"h200-{min(problem.ranks, 8)}")
    # each once, also where serial is among those asked for
    candidates = list(dict.fromkeys(["serial", *(specs or _candidates(problem, machine))]))
    progress(f"preparing {len(candidates)} plans")
    num_sets, calls = _calls(problem, candidates, group, workspace.rank, device)
    progress(f"timing {len(candidates)} plans")
    # counts that change from call to call are in no graph
    one_by_one = _eagerly if device.type == "cuda" else _on_cpu
    timed = one_by_one if problem.counts == "host" or device.type != "cuda" else _on_gpu
    times = timed(calls, num_sets, group, device, rounds)

    best = min(candidates, key=times.__getitem__)
    chosen = best if times[best] * MIN_GAIN <= times["serial"] else "serial"
    too_close = f"not {MIN_GAIN - 1:.0%} faster than serial"
    table = [
        Candidate(spec, times[spec], "measured", "chosen" if spec == chosen else
                  too_close if times[spec] < times[chosen] else "slower")
        for spec in sorted(candidates, key=times.__getitem__)
    ]  # fmt: skip
    on_gpu = device.type == "cuda"
    if not on_gpu:
        what = "a stand-in for CPU ranks, whose times say nothing about a GPU"
        machine = replace(machine, source=what)
    # what CPU ranks cannot be faster than is not known
    compute_s, comm_s = parts_s(problem, machine) if on_gpu else (nan, nan)
    choice = Choice(
        problem, machine, chosen, tuple(table), not on_gpu, "measurement", compute_s, comm_s, {}
    )
    if save and on_gpu and workspace.rank == 0:
        name = torch.cuda.get_device_name(device)
        facts = record.environment()
        entry = {"spec": chosen, "seconds": times[chosen], "serial_s": times["serial"],
                 "date": facts["date"], "commit": facts["commit"]}  # fmt: skip
        save_tuned(problem, entry, name, torch.__version__)
    # at once in this process: what "auto" had compiled is forgotten
    known = knowledge_of(workspace)
    workspace.knowledge = Knowledge(known.machine, {**known.tuned, problem_key(problem): chosen})
    workspace.drop_code()
    workspace.agreed.clear()
    return choice


def _calls(
    problem: Problem, specs: Sequence[str], group: dist.ProcessGroup, rank: int,
    device: torch.device,
) -> tuple[int, dict[str, Callable[[int], object]]]:  # fmt: skip
    """How many sets of operands there are, and a call of each plan on the set of a number."""
    if problem.tables:
        return 1, {spec: bags_call(problem, rank, device, spec, group) for spec in specs}
    operator, rows = OPERATORS[problem.op], rows_of(problem)
    sets = _operands(problem, rank, device)
    return len(sets), {spec: _call(operator, sets, spec, rows, group) for spec in specs}


def _candidates(problem: Problem, machine: Machine) -> list[str]:
    weighed = by_model(replace(problem, scratch_bytes_limit=0), machine).table
    found = [c.spec for c in weighed if c.spec != "serial" and c.basis != "refused"]
    return found[:MAX_TIMED]


def _operands(problem: Problem, rank: int, device: torch.device) -> list[list[Tensor | None]]:
    """One set of tensors for each call of a graph: weights take turns, other tensors do not."""
    first = operands(problem, rank, device)
    if device.type != "cuda":
        return [first]
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    weight_bytes = max(problem.experts, 1) * problem.n * problem.k * problem.item_bytes
    turns = max(1, min(MIN_CALLS, ceil(L2_ROTATIONS * l2_bytes / max(weight_bytes, 1))))
    sets = [first]
    for _ in range(turns - 1):
        fresh = operands(problem, rank, device)
        names = [given.name for given in OPERATORS[problem.op].inputs]
        weights = [name.startswith("w") for name in names]
        sets.append([b if turn else a for a, b, turn in zip(first, fresh, weights, strict=True)])
    return sets


def _call(
    operator: Operator,
    sets: list[list[Tensor | None]],
    spec: str,
    rows: Sequence[int],
    group: dist.ProcessGroup,
) -> Callable[[int], object]:
    room = len(sets[0][0]) if sets[0][0] is not None else 0  # of experts: as many as x has
    prepare(operator, sets[0], spec, rows, group)(sets[0], room)

    def call(i: int) -> object:
        tensors = sets[i % len(sets)]
        return prepare(operator, tensors, spec, rows, group)(tensors, room)

    return call


def _on_gpu(
    calls: dict[str, Callable[[int], object]], num_sets: int, group: dist.ProcessGroup,
    device: torch.device, rounds: int,
) -> dict[str, float]:  # fmt: skip
    per_graph = max(MIN_CALLS, num_sets)
    pairs = {spec: captured(call, per_graph) for spec, call in calls.items()}
    arms = {spec: arm for spec, (arm, _) in pairs.items()}
    times = rotate(arms, group=group, device=device, rounds=rounds, soak_s=0.5)
    return {spec: t.median_s / per_graph for spec, t in times.items()}


def _eagerly(
    calls: dict[str, Callable[[int], object]], num_sets: int, group: dist.ProcessGroup,
    device: torch.device, rounds: int,
) -> dict[str, float]:  # fmt: skip
    arms = {spec: partial(_each, call) for spec, call in calls.items()}
    times = rotate(arms, group=group, device=device, rounds=rounds, soak_s=0.5)
    return {spec: t.median_s / MIN_CALLS for spec, t in times.items()}


def _each(call: Callable[[int], object]) -> None:
    for i in range(MIN_CALLS):
        call(i)


def _on_cpu(
    calls: dict[str, Callable[[int], object]], num_sets: int, group: dist.ProcessGroup,
    device: torch.device, rounds: int,
) -> dict[str, float]:  # fmt: skip
    times = torch.zeros(len(calls), rounds, dtype=torch.float64)
    for j in range(rounds):
        for i, call in enumerate(calls.values()):
            dist.barrier(group)
            start_s = time.perf_counter()
            call(j)
            times[i, j] = time.perf_counter() - start_s
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return {spec: statistics.median(times[i].tolist()) for i, spec in enumerate(calls)}
