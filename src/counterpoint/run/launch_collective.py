"""All-gather, reduce-scatter and all-reduce in a kernel of ours: steps whose transport is words."""

from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
import triton.language as tl
from torch import Tensor

from counterpoint.errors import UnsupportedError
from counterpoint.gpu.device_limits import refused_in
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Action, Operands, Places, Workspace
from counterpoint.kernels.collectives import collective_kernel
from counterpoint.plan.bind import BoundStep
from counterpoint.run.fused import fused_memory
from counterpoint.run.lanes_cuda import lanes_of, profiling
from counterpoint.run.launch import Grid, Launch, aligned

NUM_WARPS, WORD_BYTES = 4, 4
BLOCKS = (256, 512)  # words of a rank's part that a program takes at a time, of 4 ranks
Run = Callable[[Tensor, Tensor], None]  # a target, and a source
DTYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


def block_of(wide: int, ranks: int) -> int:
    """Words of a rank's part that a program takes at a time: as many in all on more ranks."""
    return wide * 4 // max(ranks, 4)


def action(bound: BoundStep, places: Places, tag: int) -> Action:
    """The step, compiled: a program for each block of words, with wider blocks where they are many.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    source, target = places.of(bound.parts[0].reads[0]), places.of(bound.parts[0].write)
    part, op = places.plan.buffer("slots").shape[1], places.plan.problem.op
    launch = _compiled(arguments_of(bound, places, tag), part, places.workspace, op)

    def run(operands: Operands) -> None:
        x = source(operands)
        launch(words(x if aligned(x) else x.clone()), words(target(operands)))

    return run


def _compiled(fixed: dict[str, Any], part: int, workspace: Workspace, op: str) -> Launch:
    ranks = fixed["WORLD"]
    launch = None
    for wide in BLOCKS:
        block = block_of(wide, ranks)
        blocks = max(1, -(-part // block))
        launch = Launch(
            collective_kernel, ("source_ptr", "target_ptr"), fixed | {"BLOCK": block}, Grid(blocks),
            workspace.device, op, {"num_warps": NUM_WARPS},
        ).compile(torch.int32, torch.int32)  # fmt: skip
        if launch.programs == blocks:
            break
    assert launch is not None
    return launch


def arguments_of(bound: BoundStep, places: Places, tag: int) -> dict[str, Any]:
    """The kernel's arguments that do not change from call to call, but its block."""
    p, name = places.plan.problem, bound.step.arg("collective")
    part = places.plan.buffer("slots").shape[1]
    return _arguments(places.workspace, part, p.ranks, tag) | {
        "SCATTER": name != "all_gather", "GATHER": name != "reduce_scatter",
        "DTYPE": DTYPES[p.dtype], "IN_ORDER": p.invariant,
    }  # fmt: skip


def _arguments(workspace: Workspace, part: int, ranks: int, tag: int) -> dict[str, Any]:
    memory = fused_memory(workspace)
    return {
        "words_ptr": memory.words.bases, "state_ptr": memory.state, "fault_ptr": memory.fault,
        "part": part, "half_bytes": memory.words.half_bytes, "rank": workspace.rank, "tag": tag,
        "timeout_ns": int(workspace.timeout_s * 1e9), "WORLD": ranks, "NUM_WARPS": NUM_WARPS,
    }  # fmt: skip


def collective_of(
    workspace: Workspace, name: Literal["all_gather", "reduce_scatter"], part: int,
    awaited: Awaited,
) -> Run | None:  # fmt: skip
    """One collective of fp32 numbers, or of words of 4 bytes, in a kernel that is in no plan.

    Collective at its first call, where it is compiled: a rank that compiles is late for all.

    Args:
        part: words of each rank.

    Returns:
        What runs it from a source into a target, of which the one that has all parts has
        [ranks * part] words. None: it is new while a graph is captured, or no kernel fits.
    """
    if workspace.device.type != "cuda":
        return None
    if not part:
        return nothing
    ranks, key = workspace.group.size(), (name, part)
    if workspace.fused is not None and key in workspace.fused.launches:
        return workspace.fused.launches[key]
    if torch.cuda.is_current_stream_capturing():
        return None
    memory = fused_memory(workspace)
    run, problem = None, f"{ranks} ranks" if ranks & ranks - 1 else refused_in(workspace)
    if not problem:
        memory.words.reserve(ranks * part * WORD_BYTES)
        try:
            run = _alone(workspace, name, part, awaited)
        except UnsupportedError as error:
            problem = str(error)
    memory.launches[key] = None if any(workspace.gather(problem)) else run
    return memory.launches[key]


def nothing(target: Tensor, source: Tensor) -> None:
    """A collective of no words."""


def _alone(workspace: Workspace, name: str, part: int, awaited: Awaited) -> Run:
    lanes, ranks = lanes_of(workspace), workspace.group.size()
    steps = ((awaited.step, tuple(range(ranks))),)
    gathers = name == "all_gather"
    fixed = _arguments(workspace, part, ranks, lanes.register(awaited.op, "fused", steps)) | {
        "SCATTER": not gathers, "GATHER": gathers, "DTYPE": tl.float32, "IN_ORDER": False,
    }  # fmt: skip
    launch = _compiled(fixed, part, workspace, awaited.op)

    def run(target: Tensor, source: Tensor) -> None:
        launch(source, target)

    return run


def replayed(
    workspace: Workspace, key: Hashable, enqueue: Callable[[torch.cuda.Stream], None]
) -> bool:
    """Replay or capture what kernels of ours do in no plan; False: `enqueue` is to be called.

    Args:
        key: all addresses that it reads and writes, and what else tells it from others.
    """
    in_order(workspace)
    if profiling() or torch.cuda.is_current_stream_capturing():
        return False
    return lanes_of(workspace).replays.run(key, enqueue)


def in_order(workspace: Workspace) -> None:
    """Let what follows come behind the calls of the group, whatever streams they are on."""
    if torch.cuda.is_current_stream_capturing():
        workspace.captured = True
        lanes_of(workspace).follow_in_capture(spins=True)
    else:
        lanes_of(workspace).follow(spins=True)


def words(tensor: Tensor) -> Tensor:
    """A contiguous tensor as words of 4 bytes."""
    return tensor.view(-1).view(torch.int32)
