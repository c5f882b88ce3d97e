"""A profiled run: what really ran when, on all ranks of a group, as one Timeline.

On CPU ranks the executor notes each step; on GPUs the spans are the kernels and copies that
torch's profiler saw, with the steps that launched them.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from counterpoint.errors import InputError
from counterpoint.group.ranks import gather_object
from counterpoint.measure.trace import read_trace
from counterpoint.ops.check import check_group
from counterpoint.ranges import instance
from counterpoint.run import execute_cpu
from counterpoint.timeline import Span, Timeline

T = TypeVar("T")


def profile(
    fn: Callable[[], T], *, group: dist.ProcessGroup | None = None, title: str = ""
) -> tuple[T, Timeline]:
    """Run `fn` once under the profiler; all ranks of `group` call this.

    Run `fn` once before, so that nothing is compiled or allocated meanwhile.

    Args:
        fn: calls of this library, and of others; on GPUs all that they launch is seen.
        group: the default group if None.
        title: of the timeline; the number of ranks if left out.

    Returns:
        What `fn` returned, and the timeline of all ranks, from zero. Clocks of GPUs are compared
        through the host's and may differ by some microseconds between ranks.

    Raises:
        InputError: `fn` is no function, there is no group, or this rank is not in it.
        CounterpointError: `fn` launched nothing that could be seen.
    """
    group = check_group("profile", group)
    if not callable(fn):
        raise InputError("profile", "fn", want="a function", got=repr(fn))
    instance("profile", "title", title, str, "text")
    rank, num_ranks = group.rank(), group.size()
    plural = "s" * (num_ranks != 1)
    if torch.cuda.is_available():
        result, spans = _on_gpu(fn, rank)
        device = torch.cuda.get_device_name()
        source = f"measured on {num_ranks}x {device}"
    else:
        result, spans = _on_cpu(fn)
        where = f"{num_ranks} CPU rank{plural}"
        source = f"measured on {where}: the order is real, the times are not a GPU's"
    everyone = gather_object(spans, group)
    together = tuple(span for spans in everyone for span in spans)
    title = title or f"{num_ranks} rank{plural}"
    return result, Timeline(together, title=title, source=source).shifted()


def _on_cpu(fn: Callable[[], T]) -> tuple[T, list[Span]]:
    execute_cpu.recording = spans = []
    try:
        return fn(), spans
    finally:
        execute_cpu.recording = None


def _on_gpu(fn: Callable[[], T], rank: int) -> tuple[T, list[Span]]:
    result, content = traced(fn)
    return result, list(read_trace(content, rank))


def traced(fn: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """Run `fn` on a GPU under torch's profiler: what it returns, and the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.cuda.synchronize()  # the profiler's own start is slow the first time
    with torch.profiler.profile(activities=activities) as profiler:
        result = fn()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return result, json.loads(path.read_text())
