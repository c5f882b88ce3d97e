"""`counterpoint.advise`: what a profiled step loses, and which line wins it back."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from counterpoint.advice.losses import CAUSES, Collective, Losses, bases, late_ranks, losses_of
from counterpoint.advice.remedies import Remedy, remedies
from counterpoint.advice.trace import STEP, Range, Trace, read_trace
from counterpoint.advice.words import ms, speedup, text
from counterpoint.errors import InputError
from counterpoint.machine_of import MachineLike, machine_of, shipped
from counterpoint.presets import preset_of

WORTH_IT = 0.03  # of a step: with less to win, the advice is to leave it
MOSTLY = 0.9  # of a step: with so much computation, nothing is lost


@dataclass(frozen=True)
class Report:
    """What steps lost, and what to do.

    Args:
        title: what it is of, in a line.
        losses: of each rank, in the order of their ranks; means over the steps that count.
        remedies: of the first of them, the best first.
        link_bytes_per_s: of the machine, beside which the bus bandwidth is shown; 0: unknown.
        steps: names of the steps that count.
        traces: what was read; none where the step was predicted.
        notes: what comes before all else, a line each: of a predicted step, whether it fits.
    """

    title: str
    losses: tuple[Losses, ...]
    remedies: tuple[Remedy, ...]
    link_bytes_per_s: float = 0.0
    steps: tuple[str, ...] = ()
    traces: tuple[Trace, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """In one sentence: the largest thing to win, or that there is none."""
        first = self.losses[0]
        if self.traces and not first.collectives:
            return (f"No communication in this trace; {first.computation_s / first.time_s:.0%} of "
                    "the step is computation.")  # fmt: skip
        share = first.computation_s / first.time_s
        if not self.remedies or self.remedies[0].bound_s < WORTH_IT * first.time_s:
            what = "Nothing here" if share > MOSTLY else "No remedy is known"
            return f"{what}: {share:.0%} is computation."
        best = self.remedies[0]
        likely = ""
        if best.saves_s is not None:
            by = "measured cases" if best.gain else "the cost model"
            likely = f", {speedup(first.time_s, best.saves_s)} by {by}"
        return f"First: {best.name}, up to {speedup(first.time_s, best.bound_s)}{likely}."

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: seconds, bytes, names; without the events."""
        return {
            "title": self.title, "notes": list(self.notes), "verdict": self.verdict,
            "steps": list(self.steps), "link_bytes_per_s": self.link_bytes_per_s,
            "traces": [str(trace.path) for trace in self.traces],
            "losses": [asdict(each) for each in self.losses],
            "remedies": [asdict(each) for each in self.remedies],
        }  # fmt: skip

    def to_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1)

    def to_html(self, path: str | Path) -> Path:
        """Write one page that fetches nothing: the step as a picture, losses and remedies.

        Raises:
            InputError: the file's name does not end in .html.
        """
        from counterpoint.advice.page import page

        path = Path(path)
        if path.suffix != ".html":
            want = "a file name that ends in .html"
            raise InputError("advise", "path", want=want, got=str(path))
        path.write_text(page(self), encoding="utf-8")
        return path

    def draw(self, path: str | Path, *, dark: bool = False) -> Path:
        """Draw the middle step of each rank: what runs, and what is exposed.

        Raises:
            InputError: the file's name ends in none of .png, .svg and .pdf, or the step was
                predicted.
        """
        from counterpoint.advice.picture import timeline

        return timeline(self).save(path, dark=dark)

    def __str__(self) -> str:
        return text(self)


def advise(
    *traces: "str | Path | Any",
    step: int | None = None,
    machine: MachineLike | None = None,
    read: Callable[[int], None] = lambda _: None,
) -> Report:
    """Say what a profiled step loses to communication, and which line wins it back.

    Args:
        traces: files of torch.profiler (`export_chrome_trace`), .json or .json.gz, of one rank or
            of several; or one torch.profiler.profile that has ended.
        step: N of the profiler's mark ProfilerStep#N; all that there are if None.
        machine: whose links are compared with; that of the trace's GPU if None.
        read: is told how many bytes of a file were read by now.

    Raises:
        InputError: a trace cannot be read, was cut, has no GPU in it, or lacks that step; two are
            of the same rank.
    """
    if not traces:
        raise InputError("advise", "traces", want="at least one trace", got="none")
    found = sorted((_read(each, read) for each in traces), key=lambda each: each.rank)
    ranks = [trace.rank for trace in found]
    if len({*ranks}) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        names = ", ".join(str(trace.path) for trace in found if trace.rank == twice)
        want = "traces of different ranks"
        raise InputError("advise", "traces", want=want, got=f"rank {twice} more than once: {names}")
    late = late_ranks(found)
    means: list[Losses] = []
    for trace, waits in zip(found, late, strict=True):
        base = bases(trace)
        means.append(mean([losses_of(trace, each, waits, base) for each in chosen(trace, step)]))
    first, steps = found[0], chosen(found[0], step)
    link = _link_bytes_per_s(first, machine)
    return Report(
        title=_title(first, means[0], len(found), steps), losses=tuple(means),
        remedies=tuple(remedies(means[0], first, link)), link_bytes_per_s=link,
        steps=tuple(each.name for each in steps), traces=tuple(found),
    )  # fmt: skip


def _title(trace: Trace, losses: Losses, traces: int, steps: Sequence[Range]) -> str:
    unmarked = not steps[0].name.startswith(STEP)
    of = steps[0].name if len(steps) == 1 else f"mean of {len(steps)} steps"
    ranks = f"rank {trace.rank} of {trace.world}" if trace.world > 1 else "one rank"
    beside = f", {traces} traces" if traces > 1 else ""
    step = "all that was traced, no step is marked" if unmarked else of
    others = f" (its process's other GPUs left out: {trace.others})" if trace.others else ""
    gpu = f"{trace.gpu or 'GPU unknown'}{others}"
    return f"{ms(losses.time_s)} ms: {step}; {ranks}{beside}; {gpu}"


def _read(trace: object, read: Callable[[int], None]) -> Trace:
    """The trace of a file, or of a profiler."""
    if isinstance(trace, str | Path):
        return read_trace(Path(trace), read)
    if not hasattr(trace, "export_chrome_trace"):
        want = "a file, or a torch.profiler.profile"
        raise InputError("advise", "traces", want=want, got=type(trace).__name__)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))  # pyright: ignore[reportAttributeAccessIssue]
        return read_trace(path, read)


def _link_bytes_per_s(trace: Trace, machine: MachineLike | None) -> float:
    """What a GPU's links carry where one machine has all ranks; 0 where nothing is known."""
    if machine is not None:
        known = machine_of("advise", machine)
    elif trace.gpu and trace.world <= 8:
        known = shipped(trace.gpu, max(2, trace.world)) or preset_of(trace.gpu, max(2, trace.world))
    else:
        return 0.0
    return known.link.bytes_per_s if known and trace.world <= known.num_devices else 0.0


def chosen(trace: Trace, step: int | None) -> tuple[Range, ...]:
    """The steps that count.

    Raises:
        InputError: `step` is none of the trace's.
    """
    if step is None:
        return trace.steps
    found = tuple(each for each in trace.steps if each.name == f"{STEP}{step}")
    if not found:
        have = [each.name.removeprefix(STEP) for each in trace.steps if each.name.startswith(STEP)]
        want = f"one of {', '.join(have)}" if have else f"left out: the trace marks no {STEP}N"
        raise InputError("advise", "step", want=want, got=str(step))
    return found


def mean(losses: Sequence[Losses]) -> Losses:
    """The mean step. A kind of collective that some steps lack counts as none there."""
    n = len(losses)
    rows: dict[tuple[str, str, int], list[Collective]] = {}
    for each in losses:
        for row in each.collectives:
            rows.setdefault((row.kind, row.group, row.ranks), []).append(row)
    numbers = {
        field.name: sum(getattr(each, field.name) for each in losses) / n
        for field in fields(Losses) if field.type in (float, "float")
    }  # fmt: skip
    idle: Mapping[str, float] = {
        cause: sum(each.idle_s[cause] for each in losses) / n for cause in CAUSES
    }
    means = [_mean_row(found, n) for found in rows.values()]
    means.sort(key=lambda row: -row.exposed_s)
    return Losses(rank=losses[0].rank, idle_s=idle, collectives=tuple(means), **numbers)


def _mean_row(rows: Sequence[Collective], n: int) -> Collective:
    calls = sum(row.calls for row in rows)
    waited = [row.late_s for row in rows if row.late_s is not None]
    time_s = sum(row.time_s for row in rows)
    moving_s = time_s - sum(waited)
    most = max(rows, key=lambda row: row.calls)
    return Collective(
        kind=most.kind, group=most.group, ranks=most.ranks, calls=calls / n,
        num_bytes=sum(row.num_bytes * row.calls for row in rows) / max(1, calls), time_s=time_s / n,
        exposed_s=sum(row.exposed_s for row in rows) / n,
        late_s=sum(waited) / n if waited else None,
        bus_bytes_per_s=sum(
            row.bus_bytes_per_s * (row.time_s - (row.late_s or 0.0)) for row in rows
        ) / moving_s if moving_s > 0 else 0.0,
        blocks=max(row.blocks for row in rows), before=most.before, after=most.after,
    )  # fmt: skip
