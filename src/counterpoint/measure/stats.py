"""What the library has done in this process: plans that calls ran by, and memory of groups."""

from dataclasses import asdict, dataclass
from typing import Any

from counterpoint.choose.taken import Source, Taken
from counterpoint.group.workspace import Workspace, workspaces
from counterpoint.model.estimate import predicted_s

HEAD = ("problem", "plan", "source", "calls", "predicted us", "measured us")


@dataclass(frozen=True)
class PlanStats:
    """Calls of one problem by one plan.

    Args:
        group: its name.
        op, m, n, k, ranks, dtype: of the `Problem`.
        problem: all of it, as text.
        plan: its family and variant.
        source: where the plan came from, at last: "estimated" by the model; "tuned" in this
            process, or before and read from a "kept file"; "asked for" by the call; "not weighed":
            nothing else could be.
        calls: that this process has begun.
        predicted_s: time of one call in a CUDA graph; None: no machine is known, as of CPU ranks.
        measured_s: the same, as `tune` has measured it; None: it has not.
    """

    group: str
    op: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    problem: str
    plan: str
    source: Source
    calls: int
    predicted_s: float | None
    measured_s: float | None


@dataclass(frozen=True)
class GroupStats:
    """What one group holds on one device of this rank.

    Args:
        name: of the group.
        ranks: that it has.
        device: of the memory.
        symmetric_bytes: symmetric memory of this rank: of operators, `cp.overlap`, `PooledOutputs`
            and kernels of your own.
        scratch_bytes: memory of this rank alone, between the steps of plans.
        graphs: repeated eager calls that were captured, each in less than 256 KiB of the device.
    """

    name: str
    ranks: int
    device: str
    symmetric_bytes: int
    scratch_bytes: int
    graphs: int

    def __str__(self) -> str:
        return (
            f"group {self.name}: {self.ranks} ranks on {self.device}, "
            f"{self.symmetric_bytes / 2**20:.1f} MiB symmetric, "
            f"{self.scratch_bytes / 2**20:.1f} MiB scratch, {self.graphs} graphs"
        )


@dataclass(frozen=True)
class Stats:
    """See `stats`.

    Args:
        groups: those that have memory.
        plans: those that have been compiled, group by group.
    """

    groups: tuple[GroupStats, ...]
    plans: tuple[PlanStats, ...]

    def as_dict(self) -> dict[str, Any]:
        """It as JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.groups:
            return "no group has made a call"
        rows = [HEAD, *map(_cells, self.plans)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([*map(str, self.groups), "", *lines])


def _cells(one: PlanStats) -> tuple[str, ...]:
    times = ("-" if s is None else f"{s * 1e6:.0f}" for s in (one.predicted_s, one.measured_s))
    return one.problem, one.plan, one.source, str(one.calls), *times


def stats() -> Stats:
    """Say which plans have run in this process, how often, and what memory groups hold.

    Calls are counted on the host: those of operators, of layers and of models that were compiled,
    gradients included, and those that `tune` times. Replays of CUDA graphs that you capture are
    not seen: such a call counts once, when it is captured. `cp.overlap` calls no operators: of it
    there is memory alone. No call is timed. No rank waits for another one. What `release` gives
    back, or a group that was destroyed, is gone from here; of a group the last 1024 plans are kept.

    Returns:
        Groups and plans, of this rank; `print` shows a table, `as_dict()` is for JSON.

    Example:
        >>> print(counterpoint.stats())  # doctest: +SKIP
    """
    found = [(name, workspace) for (name, _), workspace in workspaces.items()]
    return Stats(
        tuple(_group(name, workspace) for name, workspace in found),
        tuple(_plan(name, workspace, taken) for name, workspace in found
              for taken in workspace.plans.values()),
    )  # fmt: skip


def _group(name: str, workspace: Workspace) -> GroupStats:
    lanes, (_, scratch) = workspace.lanes, workspace.num_bytes()
    return GroupStats(
        name, workspace.board.ranks, str(workspace.device),
        sum(memory.num_bytes for memory in [*workspace.symmetric]), scratch,
        len(lanes.replays.graphs) if lanes else 0,
    )  # fmt: skip


def _plan(name: str, workspace: Workspace, taken: Taken) -> PlanStats:
    p, machine = taken.plan.problem, workspace.knowledge and workspace.knowledge.machine
    far = p.islands > 1 and machine and machine.nic is None  # what it costs between them
    if taken.predicted_s is None and machine and not far:
        taken.predicted_s = predicted_s(taken.plan, machine)
    return PlanStats(
        name, p.op, p.m, p.n, p.k, p.ranks, p.dtype, str(p), taken.spec, taken.pick.source,
        taken.calls, taken.predicted_s, taken.measured_s,
    )  # fmt: skip
