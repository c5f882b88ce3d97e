"""What the steps of a pipeline's plan do here: the calls that the executor of plans is given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from counterpoint.errors import InputError
from counterpoint.gpu.delay import Delay
from counterpoint.plan.steps import Plan, Step
from counterpoint.resources import budget
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.granularity import Cut
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.rewrites import rewritten
from counterpoint.resources.stages import Compute, Stage
from counterpoint.resources.transport import carriers
from counterpoint.run.execute import Code, compile_plan

Call = Callable[[], object]
Around = Callable[[Stage, Call], object]


def compiled(pipeline: Pipeline, controls: Controls, around: Around | None = None) -> Code:
    """A pipeline under `controls`, ready for the executor of plans. All ranks call this.

    Args:
        pipeline: whose stages run.
        controls: that hold; what a plan cannot carry of them, its caller lets hold.
        around: makes the call of each stage, where something is to be seen of it.

    Raises:
        InputError: a control cannot be had here, and why.
        UnsupportedError: this machine lacks what a control needs.
    """
    if pipeline.device.type != "cuda" and controls not in (OFF, SEQUENTIAL):
        want = "'overlap' or 'sequential' on CPU ranks"
        raise InputError("run", "controls", want=want, got=repr(controls.spec))
    plan = rewritten(pipeline.plan(), controls)
    return compile_plan(plan, pipeline.workspace, _calls(pipeline, plan, around))


def _calls(pipeline: Pipeline, plan: Plan, around: Around | None) -> dict[str, Call]:
    marks = next(dict(step.args) for step in plan.steps if step.arg("collective"))
    transport: Any = marks.get("transport", "sm")
    group = None
    if "max_ctas" in marks:
        group = budget.group(pipeline.group, pipeline.device, int(marks["max_ctas"]))
    carries = iter(carriers(pipeline, transport, group))
    stages = iter(pipeline.stages)
    calls: dict[str, Call] = {}
    for step in plan.steps:
        if delay_ns := int(step.arg("delay_ns")):
            if "delay" not in pipeline.kept:
                pipeline.kept["delay"] = Delay(pipeline.device)
            calls[step.name] = partial(pipeline.kept["delay"], delay_ns * 1e-9)
            continue
        stage = next(stages)
        call = _cut(step, stage, pipeline.device) if isinstance(stage, Compute) else next(carries)
        calls[step.name] = partial(around, stage, call) if around else call
    return calls


def _cut(step: Step, stage: Compute, device: torch.device) -> Call:
    """The call of a stage, its matmuls in as many launches as the step says."""
    marks: dict[str, Any] = dict(step.args)
    if "chunks" not in marks:
        return stage.call

    def call() -> None:
        here = torch.cuda.get_device_properties(device)
        with Cut(marks["chunks"], marks["along"], here.multi_processor_count):
            stage.call()

    return call
