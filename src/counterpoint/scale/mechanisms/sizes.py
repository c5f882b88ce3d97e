"""What pooling that sends as it goes would save of a DLRM's step, at its sizes and at others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from counterpoint.scale.mechanisms.chosen import ChosenDlrm, Name
from counterpoint.scale.recommenders.step import DlrmStep

TIMES = 4  # as large, or as small, as what is given


class Sized(NamedTuple):
    """A step of some sizes, and what it saves, each as a share of it.

    Args:
        label: of what differs from the model and the batch that are given.
        seconds: of the step, pooling and its all-to-all one after the other.
        ours: by the plan that this library takes.
        puts: by puts that the GPU posts.
        of_forward: the same as a share of the forward alone.
        bound: by hiding the shorter of both behind the longer one.
    """

    label: str
    seconds: float
    ours: float
    puts: float
    of_forward: float
    bound: float


def sizes(step: DlrmStep) -> tuple[Sized, ...]:
    """The step as it is given, and with one size a quarter or four times as large."""
    return tuple(_sized(label, each) for label, each in _others(step))


def _others(step: DlrmStep) -> Iterator[tuple[str, DlrmStep]]:
    model, layout = step.model, step.layout
    bare = replace(model, top=model.top[-1:], bottom=model.bottom[-1:])
    fewer = tuple(max(each // TIMES, 1) for each in model.pooling)
    more = tuple(each * TIMES for each in model.pooling)
    wide = model.dim * TIMES
    larger = replace(layout, micro_batch=layout.micro_batch * TIMES)
    yield "as given", step
    if layout.micro_batch >= TIMES:
        smaller = replace(layout, micro_batch=layout.micro_batch // TIMES)
        yield f"1/{TIMES} of the batch", replace(step, layout=smaller)
    yield f"{TIMES}x the batch", replace(step, layout=larger)
    yield f"1/{TIMES} of the rows a sample", replace(step, model=replace(model, pooling=fewer))
    yield f"{TIMES}x the rows a sample", replace(step, model=replace(model, pooling=more))
    wider = replace(model, dim=wide, bottom=(*model.bottom[:-1], wide))
    yield f"{TIMES}x the columns", replace(step, model=wider)
    yield "no hidden layers", replace(step, model=bare)
    yield f"no hidden layers, {TIMES}x the batch", replace(step, model=bare, layout=larger)


def _sized(label: str, step: DlrmStep) -> Sized:
    def run(*on: Name) -> tuple[float, float]:
        chosen = ChosenDlrm(step.model, step.layout, step.network, "none", frozenset(on))
        stages = chosen.run()[1]
        return stages.seconds, stages.chunks[0][0].forward.seconds

    (none_s, forward_s), (ours_s, _), (puts_s, _) = run(), run("embedding"), run("puts")
    bound_s = min(step.pooled.bound_s, none_s)
    return Sized(label, none_s, 1 - ours_s / none_s, 1 - puts_s / none_s,
                 (none_s - puts_s) / forward_s, bound_s / none_s)  # fmt: skip
