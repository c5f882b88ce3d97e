"""All-gather, reduce-scatter and all-reduce in a kernel of ours: steps whose transport is words."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from counterpoint.kernels.collectives import collective_kernel
from counterpoint.plan.bind import BoundStep
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch import Grid, Launch, aligned
from counterpoint.runtime.workspace import Action, Operands, Places

NUM_WARPS = 4
BLOCKS = (256, 512)  # words of a rank's part that a program takes at a time, of 4 ranks
DTYPES = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}


def block_of(wide: int, ranks: int) -> int:
    """Words of a rank's part that a program takes at a time: as many in all on more ranks."""
    return wide * 4 // max(ranks, 4)


def action(bound: BoundStep, places: Places, tag: int) -> Action:
    """The step, compiled: a program for each block of words, with wider blocks where they are many.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    plan, workspace = places.plan, places.workspace
    source, target = places.of(bound.parts[0].reads[0]), places.of(bound.parts[0].write)
    part = plan.buffer("slots").shape[1]
    ranks = plan.problem.ranks
    launch, blocks = None, 0
    for wide in BLOCKS:
        block = block_of(wide, ranks)
        blocks = max(1, -(-part // block))
        fixed = arguments_of(bound, places, tag) | {"BLOCK": block}
        launch = Launch(
            collective_kernel, ("source_ptr", "target_ptr"), fixed, Grid(blocks),
            workspace.device, plan.problem.op, {"num_warps": NUM_WARPS},
        ).compile(torch.int32, torch.int32)  # fmt: skip
        if launch.programs == blocks:
            break
    assert launch is not None

    def run(operands: Operands) -> None:
        x = source(operands)
        launch(words(x if aligned(x) else x.clone()), words(target(operands)))

    return run


def arguments_of(bound: BoundStep, places: Places, tag: int) -> dict[str, Any]:
    """The kernel's arguments that do not change from call to call, but its block."""
    plan, workspace = places.plan, places.workspace
    memory, name = fused_memory(workspace), bound.step.arg("collective")
    return {
        "words_ptr": memory.words.bases, "state_ptr": memory.state, "fault_ptr": memory.fault,
        "part": plan.buffer("slots").shape[1], "half_bytes": memory.words.half_bytes,
        "rank": workspace.rank, "tag": tag, "timeout_ns": int(workspace.timeout_s * 1e9),
        "WORLD": plan.problem.ranks, "SCATTER": name != "all_gather",
        "GATHER": name != "reduce_scatter", "DTYPE": DTYPES[plan.problem.dtype],
        "IN_ORDER": plan.problem.invariant, "NUM_WARPS": NUM_WARPS,
    }  # fmt: skip


def words(tensor: Tensor) -> Tensor:
    """A contiguous tensor as words of 4 bytes."""
    return tensor.view(-1).view(torch.int32)
