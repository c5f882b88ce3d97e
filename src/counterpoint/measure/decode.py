"""A matmul of few rows and its all-reduce: every arm in one rotation, weights from memory.

Each arm is a CUDA graph of calls on different weights, four times the L2 in all, so that no weight
is there already; the time is that of one call.
"""
# the kernel is in Triton's language, which is not Python's
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from counterpoint.errors import CounterpointError
from counterpoint.kernels.matmul_all_reduce import partial_tile, store_tile
from counterpoint.measure import record
from counterpoint.measure.timing import captured, host_s, relative_error, rotate
from counterpoint.ops.matmul_all_reduce import matmul_all_reduce, way_of
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch_collective import Collective
from counterpoint.runtime.launch_fused import default_way, padded_rows
from counterpoint.runtime.symmetric_cuda import torch_symmetric_memory
from counterpoint.runtime.workspace import workspace_of

L2_BYTES = 60 << 20
MIN_CALLS = 8
MAX_OUR_ROWS = 256  # of our own matmul: the tile of more does not fit
ROUNDS = 15
TORCH = ("torch one_shot", "torch two_shot")


def compare_decode(
    m: int, n: int, k: int, *, group: dist.ProcessGroup, device: torch.device,
    plans: Sequence[str] = (), rounds: int = ROUNDS, eager: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of all arms of y[m, n] = sum of x[m, k] w[k, n], equal on all ranks.

    Args:
        m, n, k: of one rank.
        group: NCCL group.
        device: this rank's GPU.
        plans: of matmul_all_reduce, beside "auto", "fused" and "direct".
        rounds: of the rotation.
        eager: plain eager time and host time of serial and auto too.

    Raises:
        CounterpointError: a result is off; nothing was timed.
    """
    generator = torch.Generator(device).manual_seed(group.rank())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    calls = max(MIN_CALLS, -(-4 * L2_BYTES // (2 * n * k)))
    ws = [normal(n, k).mul_(k**-0.5).t() for _ in range(calls)]
    x, y = normal(m, k), torch.empty(m, n, dtype=torch.bfloat16, device=device)
    symm_mem: Any = torch_symmetric_memory()
    opened: Tensor = symm_mem.empty(m * n, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(opened, group.group_name)
    in_opened, name = opened.view(m, n), group.group_name
    ops: Any = torch.ops.symm_mem

    def serial(i: int) -> Tensor:
        torch.mm(x, ws[i], out=y)
        dist.all_reduce(y, group=group)
        return y

    def torch_op(op: Callable[..., Tensor]) -> Callable[[int], Tensor]:
        def run(i: int) -> Tensor:
            torch.mm(x, ws[i], out=in_opened)
            return op(opened, "sum", name).view(m, n)

        return run

    def ours(plan: str) -> Callable[[int], Tensor]:
        return lambda i: matmul_all_reduce(x, ws[i], group=group, plan=plan)

    # what is fusion, and what is a better matmul: our kernels one after the other
    workspace, partial = workspace_of(group, device), torch.empty_like(y)
    collective = Collective(
        fused_memory(workspace), 0, y.numel() * 2 // group.size(), scatter=True, gather=True,
        dtype=y.dtype, name="decode",
    )  # fmt: skip

    def unfused(i: int) -> Tensor:
        our_matmul(x, ws[i], partial)
        collective(partial, y)
        return y

    arms: dict[str, Callable[[int], object]] = {
        "serial": serial,
        "torch one_shot": torch_op(ops.one_shot_all_reduce),
        "torch two_shot": torch_op(ops.two_shot_all_reduce_),
        **{plan: ours(plan) for plan in ("auto", "direct", *plans)},
    }
    few = m <= MAX_OUR_ROWS
    if few:
        arms |= {"fused": ours("fused"), "unfused": unfused}
    want = x.double() @ ws[0].double()
    dist.all_reduce(want, group=group)
    errors = {name: relative_error(_tensor(arm(0)), want) for name, arm in arms.items()}
    worst = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    errors = dict(zip(errors, worst.tolist(), strict=True))
    for arm, error in errors.items():
        if not error <= 2 * errors["serial"]:
            raise CounterpointError(f"matmul_all_reduce {m},{n},{k}, {arm}: error {error:.2e}")
    arms["matmul"] = lambda i: torch.mm(x, ws[i], out=y)
    if few:
        arms["our matmul"] = lambda i: our_matmul(x, ws[i], y)
    graphs = {name: captured(arm, calls) for name, arm in arms.items()}
    times = rotate(
        {name: replay for name, (replay, _) in graphs.items()},
        group=group, device=device, rounds=rounds, soak_s=0.1,
    )  # fmt: skip
    taken = way_of("auto", m, n, group.size(), x.dtype, device)
    facts = {
        "table": "decode", "m": m, "n": n, "k": k, "ranks": group.size(), "calls": calls,
        "pick": taken if isinstance(taken, str) else taken.spec, "weight_bytes": 2 * n * k,
    } | record.environment()  # fmt: skip
    rows: list[dict[str, Any]] = []
    for arm, t in times.items():
        row: dict[str, Any] = {
            "arm": arm, "mode": "graph", "median_s": t.median_s / calls,
            "p20_s": t.quantile_s(2) / calls, "p80_s": t.quantile_s(8) / calls,
            "serial_over_arm": t.ratio_of(times["serial"]), "error": errors.get(arm),
        }  # fmt: skip
        if eager and arm in ("serial", "auto"):
            row["host_s"] = host_s(lambda arm=arm: arms[arm](0), group=group)
        rows.append(row | facts)
    if eager:
        plain = rotate(
            {arm: (lambda arm=arm: arms[arm](0)) for arm in ("serial", "auto")},
            group=group, device=device, rounds=rounds, soak_s=0.1, backlog_cycles=0,
        )  # fmt: skip
        rows += [
            {"arm": arm, "mode": "plain eager", "median_s": t.median_s,
             "serial_over_arm": t.ratio_of(plain["serial"])} | facts
            for arm, t in plain.items()
        ]  # fmt: skip
    return rows


@triton.jit(do_not_specialize=["M"])
def partial_kernel(
    x_ptr, w_ptr, y_ptr, M, N, K, stride_xm, stride_wk, stride_wn,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The matmul of the fused kernel alone, a tile per program."""
    tile = tl.program_id(0)
    acc = partial_tile(
        x_ptr, w_ptr, tile, M, N, K, stride_xm, stride_wk, stride_wn,
        ROWS, ROWS, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
    )  # fmt: skip
    store_tile(y_ptr, acc, (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :], M, N, ROWS)


def our_matmul(x: Tensor, w: Tensor, y: Tensor) -> None:
    """The matmul of the fused kernel by itself, with the tile that it would have."""
    (m, k), n = x.shape, w.shape[1]
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    way = default_way(m, n, 2, x.element_size(), sms)
    launch: Any = partial_kernel
    launch[(-(-n // way.block_n),)](
        x, w, y, m, n, k, x.stride(0), w.stride(0), w.stride(1), padded_rows(m), way.block_n,
        way.block_k, n % way.block_n == 0, k % way.block_k == 0, way.stages,
        num_warps=way.num_warps, num_stages=way.stages,
    )  # fmt: skip


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
