"""A matmul and the collective beside it as one kernel: two steps of a plan that name it."""

from functools import partial

import torch

from counterpoint.plan.bind import BoundStep, Part, Program
from counterpoint.runtime import launch_fused, launch_gather
from counterpoint.runtime.compute import Action
from counterpoint.runtime.fused import FusedMemory, fused_memory
from counterpoint.runtime.fused_call import FusedCall, aligned
from counterpoint.runtime.ranks import gather_object
from counterpoint.runtime.workspace import Operands, Places


def action(bound: BoundStep, part: Part, places: Places, program: Program, tag: int) -> Action:
    """The collective step `bound`, with the matmul that writes what it reads, or the other way.

    Raises:
        InputError: memory has to grow while a graph is captured.
    """
    (matmul,) = (
        b for b in program.steps if b.step.kind == "matmul" and b.step.arg("kernel") == "fused"
    )
    gathers = bound.step.arg("collective") == "all_gather"
    first, last = (part, matmul.parts[0]) if gathers else (matmul.parts[0], part)
    x, w, y = (places.of(box) for box in (first.reads[0], matmul.parts[0].reads[1], last.write))
    biased = bool(matmul.step.arg("bias"))
    bias = places.of(matmul.parts[0].reads[-1]) if biased else None
    memory = fused_memory(places.workspace)
    call = (_gathering if gathers else _scattering)(places, memory, tag)

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


def _scattering(places: Places, memory: FusedMemory, tag: int) -> FusedCall:
    p = places.plan.problem
    way = launch_fused.scatter_way(p.m, p.n, p.ranks, p.item_bytes, _num_sms(places))
    launch_fused.reserve(way, memory, p.m, p.n, p.item_bytes)
    at = launch_fused.where(way, memory)
    return FusedCall(partial(launch_fused.launch_of, way, memory, at, tag), way.spec, p.op)


def _gathering(places: Places, memory: FusedMemory, tag: int) -> FusedCall:
    p = places.plan.problem
    way = launch_gather.gather_way(p.m, p.n, p.k, p.ranks, p.item_bytes, _num_sms(places))
    launch_gather.reserve(way, memory, p.m, p.k, p.item_bytes)
    at = launch_gather.where(memory)
    return FusedCall(partial(launch_gather.launch_of, way, memory, at, tag), way.spec, p.op)


def _num_sms(places: Places) -> int:
    return torch.cuda.get_device_properties(places.workspace.device).multi_processor_count
