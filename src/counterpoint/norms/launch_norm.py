"""How a step of kernel "all_reduce_norm" runs: a norm, or one kernel of it and its all-reduce."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Action, Operands
from counterpoint.norms import norms
from counterpoint.norms.kernel_add_norm import OPTIONS
from counterpoint.norms.kernel_all_reduce_norm import all_reduce_norm_kernel
from counterpoint.norms.norms import NAMES, Norm
from counterpoint.norms.plan_all_reduce_norm import OP, row_words, settings_in
from counterpoint.problem import Problem
from counterpoint.run.fused import fused_memory
from counterpoint.run.launch import Grid, Launch, Site, register
from counterpoint.run.launch_collective import DTYPES, words
from counterpoint.tensor_parallel.plan_fused_sum import padded


def norm_of(p: Problem) -> Norm:
    """What a problem asks for."""
    return Norm("layer" if p.norm == "layer" else "rms", p.eps, bool(p.quantized))


def names_of(p: Problem) -> list[str]:
    """The tensors of a norm that are there, as its kernels name them."""
    held = {b.name for b in p.operation.operands(p)}
    return [name for name in NAMES if name in held]


def results_of(p: Problem, operands: Operands) -> list[Tensor]:
    """Those of a call."""
    return [operands[name] for name in ("y", "h", "scales") if name != "scales" or
            p.quantized == "rows"]  # fmt: skip


def prepare(site: Site) -> Action:
    """The launch of a step, compiled.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    p, workspace, step = site.places.plan.problem, site.places.workspace, site.bound.step
    if not step.spins:
        return _alone(site, norms.run)
    settings = settings_in(step)
    two, norm = settings.shots == "two_shot", norm_of(p)
    memory, part = fused_memory(workspace), row_words(p) // (p.ranks if two else 1)
    fixed = norms.flags_of(norm, names_of(p)) | {
        "words_ptr": memory.words.bases, "state_ptr": memory.state, "fault_ptr": memory.fault,
        "M": p.m, "N": p.n, "part": part, "half_bytes": memory.words.half_bytes,
        "rank": workspace.rank, "tag": site.tag, "timeout_ns": int(workspace.timeout_s * 1e9),
        "WORLD": p.ranks, "TWO_SHOT": two, "DTYPE": DTYPES[p.dtype], "IN_ORDER": p.invariant,
        "BLOCK": padded(part), "NUM_WARPS": settings.num_warps,
    }  # fmt: skip
    launch = Launch(
        all_reduce_norm_kernel, norms.GIVEN, fixed, Grid(p.m), workspace.device, OP,
        {"num_warps": settings.num_warps, **OPTIONS},
    ).compile(*_dtypes(p))  # fmt: skip

    def run(operands: Operands) -> None:
        y, h, *scales = results_of(p, operands)
        x, *rest = norms.ready_for_kernel(operands, y)
        launch(words(x), *rest, y, h, *(scales or [y]))

    return run


def _dtypes(p: Problem) -> list[torch.dtype]:
    """Of the tensors that each call passes; x as words."""
    own, fp32 = getattr(torch, p.dtype), torch.float32
    y = norms.FP8 if p.quantized else own
    there = names_of(p)
    given = {"residual": own, "weight": own, "bias": own, "scale": fp32}
    found = [given[name] if name in there else y for name in NAMES[1:]]
    return [torch.int32, *found, y, own, fp32 if p.quantized == "rows" else y]


def _alone(site: Site, run: Callable[[Norm, Operands, Sequence[Tensor]], None]) -> Action:
    """The norm of what the step reads first: x, or what is its sum."""
    p, first = site.places.plan.problem, site.places.of(site.bound.parts[0].reads[0])
    norm = norm_of(p)
    return lambda o: run(norm, {**o, "x": first(o)}, results_of(p, o))


def reference(site: Site) -> Action:
    """What the kernel computes, by torch: its roundings, in one order on all ranks."""
    p, workspace, step = site.places.plan.problem, site.places.workspace, site.bound.step
    if not step.spins:
        return _alone(site, norms.run_by_torch)
    calls = library_of(workspace, Awaited(p.op, f"take part in {step.name!r}", OP))
    norm = norm_of(p)

    def run(operands: Operands) -> None:
        x = operands["x"].contiguous()
        parts = x.new_empty(p.ranks, *x.shape)
        calls.all_gather(parts, x)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for part in parts:  # torch's own sum takes eight in another order, by their shape
            total += part
        given = {**operands, "x": total.to(x.dtype)}
        norms.run_by_torch(norm, given, results_of(p, operands))

    return run


register(OP, prepare, reference)
