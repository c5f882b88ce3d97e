"""A matmul and the reduce-scatter behind it as one kernel: two steps of a plan that name it."""

import torch

from counterpoint.plan.bind import BoundStep, Part, Program
from counterpoint.runtime.compute import Action
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.fused_call import FusedCall
from counterpoint.runtime.launch_fused import reserve, scatter_way
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import Operands, Places

ALIGN = 16  # bytes, of the addresses that it is compiled for


def action(bound: BoundStep, part: Part, places: Places, program: Program, tag: int) -> Action:
    """The collective step `bound`, with the matmul that writes what it reads.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """
    (matmul,) = (
        b for b in program.steps if b.step.kind == "matmul" and b.step.arg("kernel") == "fused"
    )
    x, w = (places.of(box) for box in matmul.parts[0].reads)
    y = places.of(part.write)
    p, device = places.plan.problem, places.workspace.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    way = scatter_way(p.m, p.n, p.ranks, p.item_bytes, num_sms)
    memory = fused_memory(places.workspace)
    reserve(way, memory, p.m, p.n, p.item_bytes)
    call = FusedCall(way, memory, tag, p.op)

    def run(operands: Operands) -> None:
        rows, weight, target = x(operands), w(operands), y(operands)
        rows = rows if rows.data_ptr() % ALIGN == 0 else rows.clone()
        if not call.launches:  # only the tensors say how they lie
            call.compile(rows, weight, None, target)
            if not torch.cuda.is_current_stream_capturing():
                gather_object(None, places.workspace.group)  # who still compiles is late for all
        call(rows, weight, None, target)

    return run
