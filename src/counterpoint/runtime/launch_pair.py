"""A matmul and its reduce-scatter as one kernel: two steps of a plan that name it."""

from functools import partial

import torch

from counterpoint.plan.bind import BoundStep, Part, Program
from counterpoint.runtime.compute import Action
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.fused_call import FusedCall, aligned
from counterpoint.runtime.launch_fused import launch_of, reserve, scatter_way, where
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import Operands, Places


def action(bound: BoundStep, part: Part, places: Places, program: Program, tag: int) -> Action:
    """The reduce-scatter step `bound`, with the matmul that writes what it reads.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """
    (matmul,) = (
        b for b in program.steps if b.step.kind == "matmul" and b.step.arg("kernel") == "fused"
    )
    reads = matmul.parts[0].reads
    x, w, y = (places.of(box) for box in (reads[0], reads[1], part.write))
    bias = places.of(reads[-1]) if matmul.step.arg("bias") else None
    p, memory = places.plan.problem, fused_memory(places.workspace)
    num_sms = torch.cuda.get_device_properties(places.workspace.device).multi_processor_count
    way = scatter_way(p.m, p.n, p.ranks, p.item_bytes, num_sms)
    reserve(way, memory, p.m, p.n, p.item_bytes)
    call = FusedCall(partial(launch_of, way, memory, where(memory), tag), way.spec, p.op)

    def run(operands: Operands) -> None:
        rows, weight, target = x(operands), w(operands), y(operands)
        rows = rows if aligned(rows) else rows.clone()
        row = bias(operands) if bias else None
        if not call.launches:  # only the tensors say how they lie
            call.compile(rows, weight, row, target)
            if not torch.cuda.is_current_stream_capturing():
                gather_object(None, places.workspace.group)  # who still compiles is late for all
        call(rows, weight, row, target)

    return run
