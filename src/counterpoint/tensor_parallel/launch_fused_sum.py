"""How a step of kernel "matmul_all_reduce" runs: a matmul and its sum over ranks in one kernel."""

from typing import Any

import torch
from torch import Tensor

from counterpoint.group.library import library_of
from counterpoint.group.notice_board import Awaited
from counterpoint.group.workspace import Action, Operands
from counterpoint.run.fused import fused_memory
from counterpoint.run.invariant_matmul import in_one_chain
from counterpoint.run.launch import ALIGN, Grid, Launch, Site, aligned, register
from counterpoint.tensor_parallel.kernel_matmul_all_reduce import matmul_all_reduce_kernel
from counterpoint.tensor_parallel.plan_fused_sum import KERNEL, own_rows, settings_in

GIVEN = ("x_ptr", "w_ptr", "bias_ptr", "y_ptr", "stride_wk", "stride_wn")
SHOTS = {"one_shot": 1, "two_shot": 2, "scatter": 1}


def prepare(site: Site) -> Action:
    """The launch of a step, compiled for w as the first call has it; if that is not known, for both
    ways in which it may be stored.

    Raises:
        UnsupportedError: no block of the kernel fits this GPU.
    """
    p, workspace = site.places.plan.problem, site.places.workspace
    settings = settings_in(site.bound.step)
    options = {"num_warps": settings.num_warps, "num_stages": settings.stages}
    fixed = arguments_of(site)
    launches: dict[tuple[int, ...], Launch] = {}
    dtype = getattr(torch, p.dtype)
    grid = Grid(-(-p.n // settings.block_n))
    device = workspace.device

    def launch_for(strides: tuple[int, ...], at: object) -> Launch:
        made = Launch(matmul_all_reduce_kernel, GIVEN, fixed, grid, device, p.op, options)
        return made.compile(dtype, at, dtype, dtype, *strides)

    if site.like:
        w = site.like["w"]
        launches[*w.stride(), aligned(w)] = launch_for(w.stride(), w)
    else:
        for strides in ((p.n, 1), (1, p.k)):
            launches[*strides, True] = launch_for(strides, dtype)

    def run(operands: Operands) -> None:
        x, w, y = operands["x"], operands["w"], operands["y"]
        x = x if x.data_ptr() % ALIGN == 0 else x.clone()
        strides = w.stride()
        key = (*strides, w.data_ptr() % ALIGN == 0)
        launch = launches.get(key)
        if launch is None:  # a rank by itself may have stored w in another way
            launch = launches[key] = launch_for(strides, w)
        launch(x, w, operands.get("bias", y), y, *strides)

    return run


def arguments_of(site: Site) -> dict[str, Any]:
    """The kernel's arguments that do not change from call to call."""
    p, workspace = site.places.plan.problem, site.places.workspace
    settings, memory = settings_in(site.bound.step), fused_memory(workspace)
    scatters = settings.shots == "scatter"
    rows = max(p.rows) if scatters else p.m
    return {
        "words_ptr": memory.words.bases, "state_ptr": memory.state, "fault_ptr": memory.fault,
        "M": rows, "N": p.n, "K": p.k, "stride_xm": p.k,
        "half_bytes": memory.words.half_bytes, "rank": workspace.rank, "tag": site.tag,
        "timeout_ns": int(workspace.timeout_s * 1e9), "WORLD": p.ranks,
        "SHOTS": SHOTS[settings.shots], "SCATTER": scatters, "HAS_BIAS": p.bias,
        "IN_ORDER": p.invariant, "OWN": own_rows(p, rows), "BLOCK_N": settings.block_n,
        "BLOCK_K": settings.block_k,
        "EVEN_N": p.n % settings.block_n == 0, "EVEN_K": p.k % settings.block_k == 0,
        "STAGES": settings.stages, "NUM_WARPS": settings.num_warps,
    }  # fmt: skip


def reference(site: Site) -> Action:
    """What the kernel computes, by torch: its roundings, in one order on all ranks."""
    p, workspace = site.places.plan.problem, site.places.workspace
    scatters = settings_in(site.bound.step).shots == "scatter"
    # a single row travels in fp32
    alone = (max(p.rows) if scatters else p.m) == 1 and not p.invariant
    wire = torch.float32 if alone else getattr(torch, p.dtype)
    calls = library_of(workspace, Awaited(p.op, f"take part in {site.bound.step.name!r}", KERNEL))

    def run(operands: Operands) -> None:
        x, w = operands["x"], operands["w"]
        own = (in_one_chain(x, w) if p.invariant else x.float() @ w.float()).to(wire)
        parts = own.new_empty(p.ranks, *own.shape)
        calls.all_gather(parts, own)
        # in the order of ranks
        total = sum(parts.float(), torch.zeros_like(own, dtype=torch.float32))
        if scatters:
            total = total[p.row_starts[workspace.rank] : p.row_starts[workspace.rank + 1]]
        bias: Tensor | None = operands.get("bias")
        operands["y"].copy_(total if bias is None else total + bias.float())

    return run


register(KERNEL, prepare, reference)
