"""The plan that is fastest here: candidates of the model, timed side by side, kept on disk.

All ranks time the same candidates and decide by the slowest rank's times, which are equal on all.
From then on `plan="auto"` takes what was found, in this process and in later ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan

import torch
import torch.distributed as dist

from counterpoint.choose.by_model import by_model, parts_s
from counterpoint.choose.choice import Candidate, Choice
from counterpoint.choose.known import Knowledge, Timed, problem_key, save_tuned
from counterpoint.errors import InputError
from counterpoint.group.workspace import Workspace, workspace_of
from counterpoint.machine import Machine
from counterpoint.measure import record
from counterpoint.measure.timing import captured, rotate
from counterpoint.ops.auto import knowledge_of
from counterpoint.ops.check import check_device, check_group
from counterpoint.ops.place import place_of
from counterpoint.ops.samples import Sample, sample_of
from counterpoint.plan.families import parse
from counterpoint.presets import preset
from counterpoint.problem import Problem
from counterpoint.ranges import instance, misfit, plain, whole

MAX_TIMED = 12  # besides serial
MIN_GAIN = 1.01  # over serial, below which serial stays
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

    On GPUs as CUDA graphs in one rotation, weights in rotation; or call by call where counts of
    rows are known to the host alone. On CPU ranks call by call, which says little about a GPU.

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
    instance("tune", "problem", problem, Problem)
    group = check_group("tune", group)
    if group.size() != problem.ranks:
        want, got = f"of {problem.ranks} ranks as the problem", f"{group.size()} ranks"
        raise InputError("tune", "group", want=want, got=got)
    rounds = whole("tune", "rounds", rounds, 1, 10**6)
    _check_options(specs, save, progress)
    device = _device(device, group)
    _check(problem)
    workspace = workspace_of(group, device)
    machine = knowledge_of(workspace).machine or preset(f"h200-{min(problem.ranks, 8)}")
    # each once, also where serial is among those asked for
    candidates = list(dict.fromkeys(["serial", *(specs or _candidates(problem, machine))]))
    for spec in candidates:
        parse(problem, spec)
    progress(f"preparing {len(candidates)} plans")
    sample = sample_of(problem, group, device)
    calls = {spec: sample.call(spec) for spec in candidates}
    progress(f"timing {len(candidates)} plans")
    choice = _choice(problem, machine, _times(calls, sample, group, device, rounds), device)
    _remember(choice, workspace, save=save and device.type == "cuda")
    return choice


def _check_options(specs: object, save: object, progress: object) -> None:
    """Refuse what is of another kind.

    Raises:
        InputError: names the argument.
    """
    if isinstance(specs, str) or misfit(plain(specs), tuple[str, ...], None, "specs"):
        raise InputError("tune", "specs", want="a list of texts", got=repr(specs))
    instance("tune", "save", save, bool, "True or False")
    if not callable(progress):
        raise InputError("tune", "progress", want="a function of a text", got=repr(progress))


def _device(device: torch.device | None, group: dist.ProcessGroup) -> torch.device:
    """Where the operands are; this rank's GPU if the group is NCCL's and none is given.

    Raises:
        InputError: nothing computes there.
    """
    check_device("tune", device)
    if device is None:
        cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise InputError("tune", "device", want="cpu or cuda", got=device)
    return device


def _check(problem: Problem) -> None:
    """Refuse what cannot be timed.

    Raises:
        InputError: says why.
    """
    for refused, want, fix in (
        (problem.counts.startswith("device"), "of counts that the host knows",
         "auto takes one kernel there, if that takes the problem"),
        (problem.counts == "routed", "of rows, not of tokens", "give it counts='host'"),
        (problem.splits, "of one weight", "tune it as one, as large as all together"),
        (problem.out, "without out",
         "tune it with out=False: a graph would use one output at each replay"),
    ):  # fmt: skip
        if refused:
            raise InputError("tune", "problem", want=want, got=f"{problem}", fix=fix)


def _choice(
    problem: Problem, machine: Machine, times: dict[str, float], device: torch.device
) -> Choice:
    """The fastest, if it gains enough on serial."""
    best = min(times, key=times.__getitem__)
    chosen = best if times[best] * MIN_GAIN <= times["serial"] else "serial"
    too_close = f"not {MIN_GAIN - 1:.0%} faster than serial: measurements may be so far off"
    table = [
        Candidate(spec, seconds, "measured", "chosen" if spec == chosen else
                  too_close if seconds < times[chosen] else "slower")
        for spec, seconds in sorted(times.items(), key=lambda item: item[1])
    ]  # fmt: skip
    on_gpu = device.type == "cuda"
    # what CPU ranks cannot be faster than is not known
    compute_s, comm_s = parts_s(problem, machine) if on_gpu else (nan, nan)
    if not on_gpu:
        what = "a stand-in for CPU ranks, whose times say nothing about a GPU"
        machine = replace(machine, source=what)
    return Choice(
        problem, machine, chosen, tuple(table), not on_gpu, "measurement", compute_s, comm_s, {}
    )


def _remember(choice: Choice, workspace: Workspace, *, save: bool) -> None:
    """For later processes; and at once in this one: what "auto" had compiled is forgotten."""
    problem = choice.problem
    if save and workspace.rank == 0:
        facts = record.environment()
        entry = {"spec": choice.spec, "seconds": choice.seconds, "serial_s": choice.serial_s,
                 "date": facts["date"], "commit": facts["commit"]}  # fmt: skip
        place = place_of(workspace.device, problem.ranks, workspace.islands.number)
        save_tuned(problem, entry, place)
    known = knowledge_of(workspace)
    key, after = problem_key(problem), choice.runner_up
    timed = Timed(choice.seconds, *((after.spec, after.seconds) if after else ("", None)), True)
    workspace.knowledge = Knowledge(
        known.machine, {**known.tuned, key: choice.spec}, {**known.times, key: timed}
    )
    times = {c.spec: c.seconds for c in choice.table}
    for taken in workspace.plans.values():
        if problem_key(taken.plan.problem) == key:  # a spec may be short for that of its plan
            named = times.get(taken.pick.spec, taken.measured_s)
            taken.measured_s = times.get(taken.spec, named)
    workspace.drop_code()
    workspace.agreed.clear()


def _candidates(problem: Problem, machine: Machine) -> list[str]:
    weighed = by_model(replace(problem, scratch_bytes_limit=0), machine).table
    found = [c.spec for c in weighed if c.spec != "serial" and c.basis != "refused"]
    return found[:MAX_TIMED]


def _times(
    calls: dict[str, Callable[[int], object]], sample: Sample, group: dist.ProcessGroup,
    device: torch.device, rounds: int,
) -> dict[str, float]:  # fmt: skip
    """Seconds of one call of each, the slowest rank's."""
    per_arm = max(MIN_CALLS, sample.num_sets) if device.type == "cuda" else 1

    def arm(call: Callable[[int], object]) -> Callable[[], object]:
        if device.type == "cuda" and sample.captures:
            return captured(call, per_arm)[0]
        return lambda: [call(i) for i in range(per_arm)]

    arms = {spec: arm(call) for spec, call in calls.items()}
    times = rotate(arms, group=group, device=device, rounds=rounds, soak_s=0.5)
    return {spec: t.median_s / per_arm for spec, t in times.items()}
