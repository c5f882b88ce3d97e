"""How a pipeline shares the GPU best, found by measuring it: `counterpoint.resources.tune`.

All ranks time the same settings side by side and decide by the slowest rank's times, which are
equal on all. What is found is kept on disk for the next process.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.choose.known import Place, load_controls, save_controls
from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.group.ranks import gather_object
from counterpoint.measure.settings import Bench, space_of
from counterpoint.ops.place import place_of
from counterpoint.resources import search
from counterpoint.resources.controls import MODES, OFF, TRANSPORTS, Controls, Mode
from counterpoint.resources.pipeline import Pipeline
from counterpoint.resources.run import Captured, Eager
from counterpoint.resources.search import Arm, Found, Space
from counterpoint.resources.stages import Compute
from counterpoint.resources.transport import refusal

BUDGET_S = 60.0


@dataclass
class Tuned:
    """A pipeline with the controls that were found for it. Call it to run the pipeline once.

    A context: left, everything that the controls changed is as before.

    Args:
        pipeline: that it runs.
        mode: "graph" or "eager".
        found: the search, with every setting that was measured.
        remembered: whether that was in an earlier process.
        runner: what runs it, entered.
    """

    pipeline: Pipeline
    mode: Mode
    found: Found
    remembered: bool
    runner: Captured | Eager

    @property
    def controls(self) -> Controls:
        """What was taken."""
        return self.found.best

    def __call__(self) -> None:
        """Run the pipeline once, on the current stream. All ranks call it."""
        self.runner()

    def __enter__(self) -> "Tuned":
        """Nothing to do: the controls hold since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Bring all back."""
        self.close()

    def close(self) -> None:
        """Bring back what the controls changed, drop the graph; not to be called afterwards.

        A process group cannot end while a graph lives that captured its collectives.
        """
        self.runner.__exit__()
        if isinstance(self.runner, Captured):
            self.runner.graph.reset()

    def explain(self) -> str:
        """The choice, by which way each control reaches the kernels, and every setting measured."""
        lines = [f"{self.controls.spec} ({self.mode}): {self.found.why}"]
        lines += [f"  {name}: by {way}" for name, way in self.controls.way_in(self.mode).items()]
        if self.remembered:
            lines.append("  remembered from an earlier process")
        width = max(len(arm.controls.spec) for arm in self.found.arms)
        lines.append(f"  {'setting':{width}}       ms    less   noise  rounds")
        for arm in sorted(self.found.arms, key=lambda arm: arm.seconds):
            less = arm.gain / (1 + arm.gain)
            lines.append(
                f"  {arm.controls.spec:{width}}  {arm.seconds * 1e3:7.3f}  {less:6.1%}  "
                f"{arm.noise:6.1%}  {arm.num_rounds:6}"
            )
        lines += [f"  {spec}: cannot be had: {why}" for spec, why in self.found.refused.items()]
        if self.found.timed_out:
            lines.append("  the time was up before nothing gained any more")
        return "\n".join(lines)


def tune(
    pipeline: Pipeline,
    *,
    mode: Mode = "graph",
    budget_s: float = BUDGET_S,
    space: Space | None = None,
    remember: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Find the controls with which `pipeline` is fastest, and run it with them from then on.

    Plain overlap is kept unless a setting gains more than twice the noise of its gain. All ranks of
    the pipeline's group call this with equal pipelines; they get equal controls. The pipeline runs
    many times: it must not matter how often.

    Args:
        pipeline: of compute stages and collectives, on GPUs.
        mode: "graph": captured in one CUDA graph, which a call replays; "eager": enqueued at each
            call.
        budget_s: seconds of search; a rotation that has begun is ended.
        space: of settings; None: all that can be had here.
        remember: take what was found before for an equal pipeline, and keep what is found.
        progress: is told what is measured next, on every rank.

    Returns:
        The pipeline, to be called.

    Raises:
        InputError: the pipeline has no collective or no compute, ranks have different ones, a stage
            allocates, or an argument is wrong. Nothing was launched, except for the stages.
        UnsupportedError: the pipeline is not on NVIDIA GPUs, or cannot be captured.
    """
    register = os.environ.get("NCCL_GRAPH_REGISTER")
    pipeline.agree("tune", (mode, budget_s, space, remember, register))
    pipeline.check("tune")
    if mode not in MODES:
        raise InputError("tune", "mode", want=f"one of {', '.join(MODES)}", got=repr(mode))
    if not budget_s > 0:
        raise InputError("tune", "budget_s", want="seconds > 0", got=budget_s)
    if pipeline.device.type != "cuda" or torch.version.hip:
        raise UnsupportedError(
            f"tune: measures, and needs NVIDIA GPUs for it; the pipeline is on {pipeline.device}"
        )
    key = _key(pipeline, mode, space)
    place = place_of(
        pipeline.device, dist.get_world_size(pipeline.group), pipeline.workspace.islands.number
    )
    known = None
    if remember:  # rank 0's word counts: other hosts may have other files
        known = gather_object(_remembered(key, place), pipeline.group)[0]
    remembered = known is not None
    found = known or _search(pipeline, mode, space, budget_s, progress)
    if remember and not remembered and pipeline.group.rank() == 0:
        save_controls(key, _written(found), place)
    runner = (Captured if mode == "graph" else Eager)(pipeline, found.best)
    return Tuned(pipeline, mode, found, remembered, runner.__enter__())


def _search(
    pipeline: Pipeline, mode: Mode, space: Space | None, budget_s: float,
    progress: Callable[[str], None],
) -> Found:  # fmt: skip
    start_s = time.monotonic()
    space = space or space_of(pipeline, mode)
    with Bench(pipeline, mode) as bench:
        soaks = iter((1.0,))

        def measure(some: Sequence[Controls], num: int) -> Mapping[Controls, Sequence[float]]:
            found = bench.rounds(some, num, soak_s=next(soaks, 0.1))
            if OFF.spec in bench.refused:
                raise CounterpointError(f"tune: the pipeline cannot run: {bench.refused[OFF.spec]}")
            return found

        def time_left() -> bool:
            spent = gather_object(time.monotonic() - start_s, pipeline.group)
            return max(spent) < budget_s

        found = search.search(space, measure, time_left=time_left, progress=progress)
        refused = dict(bench.refused)
    return Found(found.best, found.arms, found.why, refused, found.timed_out)


def _key(pipeline: Pipeline, mode: Mode, space: Space | None) -> str:
    """What a search is remembered by: what was searched, and in which memory."""
    able = [transport for transport in TRANSPORTS[1:] if not refusal(pipeline, transport)]
    kernels = sorted(
        {triton_footprint(k).name for s in pipeline.stages if isinstance(s, Compute)
         for k in s.kernels}
    )  # fmt: skip
    codes = [_code(s.call) for s in pipeline.stages if isinstance(s, Compute)]
    facts = f"{space} {able} {kernels} {codes}"
    return f"{mode} {pipeline.key()} {hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def _code(call: Callable[[], object]) -> tuple[object, ...]:
    """What a stage's call does, as far as its code says."""
    code: Any = getattr(call, "__code__", None)
    return _told(code) if code else (getattr(call, "__qualname__", ""),)


def _told(code: CodeType) -> tuple[object, ...]:
    """A function's code and its constants, functions within it likewise."""
    consts = (_told(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts)
    return code.co_code, code.co_names, tuple(consts)


def _written(found: Found) -> dict[str, Any]:
    """A search as JSON."""
    arms = [
        [arm.controls.spec, arm.seconds, arm.gain, arm.noise, arm.num_rounds]
        for arm in found.arms
    ]  # fmt: skip
    return {"spec": found.best.spec, "why": found.why, "arms": arms,
            "refused": dict(found.refused), "timed_out": found.timed_out}  # fmt: skip


def _remembered(key: str, place: Place) -> Found | None:
    """What `_written` wrote; None if there is nothing, or it is of another version."""
    known = load_controls(key, place)
    if known is None:
        return None
    try:
        arms = tuple(Arm(Controls.parse(spec), *numbers) for spec, *numbers in known["arms"])
        refused = {str(spec): str(why) for spec, why in known["refused"].items()}
        best = Controls.parse(known["spec"])
        return Found(best, arms, str(known["why"]), refused, bool(known["timed_out"]))
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return None
