"""The middle step of each rank as a timeline, for the picture that all commands draw."""

from counterpoint.advice.kinds import COMMUNICATION, COMPUTATION, PACKING, family_of
from counterpoint.advice.trace import Activity, Range, Trace
from counterpoint.advice.words import Said
from counterpoint.errors import InputError
from counterpoint.spans import Span
from counterpoint.timeline import Timeline

LANES = {COMPUTATION: "compute", PACKING: "packing", COMMUNICATION: "communication"}


def middle(report: Said, trace: Trace) -> Range:
    """Of the steps that count, the one of median length."""
    steps = [each for each in trace.steps if each.name in report.steps] or [*trace.steps]
    return sorted(steps, key=lambda each: each.end_s - each.start_s)[len(steps) // 2]


def timeline(report: Said) -> Timeline:
    """A lane each for computation, packing and communication; each rank's step begins at 0."""
    if not report.traces:
        raise InputError("advise", "picture", want="of a trace", got="a predicted step")
    spans: list[Span] = []
    for trace in report.traces:
        step = middle(report, trace)
        for _, each in trace.within(step):
            start_s, end_s = max(each.start_s, step.start_s), min(each.end_s, step.end_s)
            if each.kind in LANES and end_s > start_s:
                spans.append(Span(
                    trace.rank, LANES[each.kind], start_s - step.start_s, end_s - step.start_s,
                    _kind(each), each.name[:80],
                ))  # fmt: skip
    return Timeline(tuple(spans), title="Where the step goes", source=f"measured: {report.title}")


def _kind(each: Activity) -> str:
    if each.said is not None:
        return "copy" if each.said.collective == "peer copy" else "collective"
    if each.kind == PACKING:
        return "other"
    family = family_of(each.name)
    return family if family in ("matmul", "attention") else "opaque"
