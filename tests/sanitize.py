"""`make gpu SUITE=sanitize`: every kernel of ours on small shapes under compute-sanitizer.

2 ranks, each a python of its own under the sanitizer. Each operator is called once by each of its
kernels, its result compared with fp64. A row for each tool: kernels that were launched, what the
sanitizer's own summaries count, and seconds.
"""

import argparse
import json
import os
import re
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from embedding_cases import pooled, random_bags
from expert_bodies import Whole, by_expert, by_owner, multiplied, summed, whole
from fsdp_models import Step, made, mesh_of, trained
from rank_bodies import Case, Operands, call, exact, operands
from routed_bodies import LOCAL, TOP, by_torch, chosen, layer
from torch import Tensor

import counterpoint as cp
from benchmarks.gpu_suite import run
from counterpoint.choose.known import Knowledge
from counterpoint.experts.fused.sums import sum_of_tokens
from counterpoint.experts.fused.weighted_rows import gathered, swiglu_back, weighted_rows
from counterpoint.experts.routes.router import choose_experts, order_by_expert
from counterpoint.measure.timing import relative_error
from counterpoint.ops.activations import swiglu

RANKS = 2
TOOLS = ("memcheck", "racecheck")
LIMIT_S = 225  # of a tool
SETTINGS = (
    f"COUNTERPOINT_TIMEOUT_S={LIMIT_S}",
    "COUNTERPOINT_REPLAY=0",  # each kernel is launched by itself
    # memory of an allocator of its own is checked by the bytes that were asked for
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
    "MASTER_ADDR=127.0.0.1",
    "GLOO_SOCKET_IFNAME=lo",
)
OPTIONS = ("--report-api-errors", "no", "--target-processes", "all", "--error-exitcode", "1")
# kernels that are none of an operator's
LEFT_OUT = {
    "delay_kernel": "reads the clock, and stores one word that nobody reads",
    "matmul_kernel": "what benchmarks shape: no operator launches it",
    "spoil_kernel": "of several islands alone: one word is read, two are stored",
}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
SEEN = "kernels launched: "
TOLERANCE = 5e-3  # of fp16


class At(NamedTuple):
    """Where a case runs; kernels' names are noted as they are launched."""

    rank: int
    group: dist.ProcessGroup
    device: torch.device

    def own(self, everyone: list[Tensor]) -> Tensor:
        """This rank's of them, as a leaf."""
        return everyone[self.rank].to(self.device, copy=True).requires_grad_()


def check(what: str, got: Tensor | None, want: Tensor | None) -> None:
    """Compare with fp64.

    Raises:
        AssertionError: it is another.
    """
    assert got is not None and want is not None, f"{what}: none"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    error = relative_error(got.detach().cpu(), want.detach().cpu())
    assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def of_matmuls(at: At, op: str, plan: str) -> tuple[list[Operands], Case]:
    case = Case(op, plan, (16,) * RANKS, 64, 128, torch.float16)
    return [operands(case, rank, 0, at.device) for rank in range(RANKS)], case


def matmuls(at: At, op: str, plan: str) -> None:
    everyone, case = of_matmuls(at, op, plan)
    got = call(case, everyone[at.rank], at.group)
    check(f"{op} by {plan}", got, exact(case, at.rank, everyone))


def invariant_rows(at: At) -> None:
    """More rows than the kernel for a few takes, and a part of a tile."""
    draw = torch.Generator().manual_seed(1)
    x, w = (torch.randn(shape, generator=draw).half() for shape in ((70, 64), (64, 80)))
    with cp.batch_invariant():
        y = cp.all_gather_matmul(x.to(at.device), w.to(at.device), group=at.group, plan="serial")
    want = x.double().repeat(dist.get_world_size(at.group), 1) @ w.double()
    check("batch-invariant product", y, want)


def activated(at: At) -> None:
    """silu(x gate) * (x up) of few rows, by matmuls and a kernel behind them; and its gradients."""
    draw = torch.Generator().manual_seed(1)
    x, gate, up = (torch.randn(n, m, generator=draw).half() / 8
                   for n, m in ((12, 64), (64, 80), (64, 80)))  # fmt: skip
    plain = [t.double().requires_grad_() for t in (x, gate, up)]
    leaves = [t.to(at.device).requires_grad_() for t in (x, gate, up)]
    y = cp.all_gather_matmul(
        leaves[0], leaves[1:], group=at.group, plan="serial", activation="silu_mul"
    )
    both = plain[0].repeat(RANKS, 1)
    want = torch.nn.functional.silu(both @ plain[1]) * (both @ plain[2])
    check("gate and up", y, want)
    y.sum().backward()
    want.sum().backward()
    for name, got, each in zip(("x", "gate", "up"), leaves, plain, strict=True):
        # gradients of x are of all ranks, who computed the same
        check(f"gradient of {name}", got.grad, each.grad)


def normed(at: At) -> None:
    # "auto" looks at the library's kernels in a capture, which the sanitizer does not bear
    everyone, case = of_matmuls(at, "matmul_all_reduce", "fused")
    draw = torch.Generator().manual_seed(1)
    residual, weight = (
        torch.randn(shape, generator=draw).half().to(at.device) for shape in ((32, 128), (128,))
    )
    mine = everyone[at.rank]
    y, h = cp.matmul_all_reduce_rms_norm(
        mine.x, mine.w, residual=residual, norm_weight=weight, group=at.group, plan="fused"
    )
    want = residual.double() + exact(case, at.rank, everyone)
    check("the sum", h, want)
    scale = torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6)
    check("its norm", y, want * scale * weight.double())


def normed_rows(at: At, plan: str) -> None:
    """On a GPU more rows than programs are there at once; wide ones are of several blocks."""
    rows = 256 if at.device.type == "cuda" else 3
    n = 1024 if plan.startswith("fused") else 20000
    draw = torch.Generator().manual_seed(3)
    xs, residual, weight = (
        torch.randn(shape, generator=draw).half().to(at.device)
        for shape in ((RANKS, rows, n), (rows, n), (n,))
    )
    y, h = cp.all_reduce_layer_norm(
        xs[at.rank], residual, weight, weight, group=at.group, plan=plan
    )
    check("the sum", h, xs.double().sum(0) + residual.double())
    wide = weight.double()
    norm = torch.nn.functional.layer_norm(h.double(), (n,), wide, wide, 1e-5)
    check("its norm", y, norm)


BAGS = 8
COUNTS = [[8] * (2 * RANKS)] * RANKS  # rows of each rank for each expert
ROWS = sum(COUNTS[0])
ROOM = ROWS + 8  # rows of a result whose counts the device knows


def of_experts(*, back: bool) -> tuple[Whole, Whole, list[Tensor], list[Tensor]]:
    """Operands of all ranks; those in fp64, what their matmuls take, and what each rank gets."""
    given = whole(COUNTS, 64, 128, torch.float16, back=back)
    fp64 = given.double()
    rows = fp64.xs if back else by_expert(fp64.xs, COUNTS)
    y = multiplied(rows, fp64.ws, COUNTS)
    return given, fp64, rows, by_owner(y, COUNTS) if back else y


def experts(at: At, op: str, known: str) -> None:
    """A dispatch or a combine of 2 experts a rank; its gradient is the other one's kernel."""
    given, fp64, rows, want = of_experts(back=op == "matmul_all_to_all")
    x, w = at.own(given.xs), at.own(given.ws)
    counts, options = torch.tensor(COUNTS), dict[str, Any]()
    if known == "device" and at.device.type == "cuda":  # a CPU is the host
        x = torch.cat([x.detach(), x.new_zeros(ROOM - ROWS, 64)]).requires_grad_()
        counts, options = counts.to(at.device), {"max_rows": ROOM}
    if op == "all_to_all_matmul":
        y, kept = cp.all_to_all_matmul(
            x, w, counts=counts, group=at.group, plan="fused", return_rows=True, **options
        )
        check("rows that came", kept[:ROWS], rows[at.rank])
    else:
        y = cp.matmul_all_to_all(x, w, counts=counts, group=at.group, plan="fused", **options)
    check(f"{op} of counts that the {known} knows", y[:ROWS], want[at.rank])
    y[:ROWS].sum().backward()
    torch.cat(want).sum().backward()
    assert x.grad is not None
    check(f"the gradient of {op}", x.grad[:ROWS], fp64.xs[at.rank].grad)
    check("that of its weights", w.grad, fp64.ws[at.rank].grad)


def sums(at: At) -> None:
    """Sums of rows that come back, in the combine's kernels and in those of gradients."""
    given, _, _, ys = of_experts(back=True)
    index = torch.tensor([[0, 9], [31, 1], [2, 2], [17, 30], [4, 8]])
    draw = torch.Generator().manual_seed(at.rank)
    exact_weights = torch.randn(index.shape, generator=draw).double().requires_grad_()
    weights = exact_weights.detach().float().to(at.device).requires_grad_()
    there = index.to(at.device)
    out = cp.matmul_all_to_all(
        at.own(given.xs), at.own(given.ws), counts=torch.tensor(COUNTS), group=at.group,
        plan="fused", sum_of=(there, weights),
    )  # fmt: skip
    want = summed(ys[at.rank], index, exact_weights)
    check("sums of rows", out, want)
    out.sum().backward()
    want.sum().backward()
    check("their gradient", weights.grad, exact_weights.grad)
    own = given.xs[at.rank]
    check("sums of tokens", sum_of_tokens(own.to(at.device), there), own[index].double().sum(1))


def routed(at: At) -> None:
    """Logits to weights, and to rows sorted by expert, of more than one block; and back."""
    logits = torch.randn(70, 12, generator=torch.Generator().manual_seed(at.rank))
    exact = logits.double().requires_grad_()
    given = logits.to(at.device).requires_grad_()
    weights, experts = choose_experts(given, 4, True)
    largest, chosen = exact.topk(4)
    want = largest.softmax(-1)
    check("weights of experts", weights, want)
    assert torch.equal(experts.cpu().long(), chosen), "experts"
    weights[:, 0].sum().backward()
    want[:, 0].sum().backward()
    check("gradient of logits", given.grad, exact.grad)
    for got, wanted in zip(
        order_by_expert(experts, 12), order_by_expert(experts.cpu(), 12), strict=True
    ):
        assert torch.equal(got.cpu(), wanted), "order of rows"


def routed_on_device(at: At) -> None:
    """A layer of experts whose routes only the device knows."""
    tokens, k, hidden, every = 20, 32, 48, RANKS * LOCAL
    draw = torch.Generator().manual_seed(2)
    ups = torch.randn(every, k, hidden, generator=draw).half() / 8
    downs = torch.randn(every, hidden, k, generator=draw).half() / 8
    x = torch.randn(tokens, k, generator=draw.manual_seed(at.rank)).half()
    weights, experts = torch.rand(tokens, TOP), chosen("skewed", at.rank, RANKS, tokens)
    own = slice(at.rank * LOCAL, (at.rank + 1) * LOCAL)
    there = [t.to(at.device) for t in (x, ups[own], downs[own])]
    given, exact = weights.to(at.device).requires_grad_(), weights.double().requires_grad_()
    there[1].requires_grad_()
    routes = cp.exchange_routes(
        experts.to(at.device), given, num_experts=every, group=at.group,
        max_rows=RANKS * tokens * TOP,
    )  # fmt: skip
    y = layer(*there, routes, "auto", at.group)
    want = by_torch(x.double(), ups.double(), downs.double(), experts, exact)
    check("experts by routes of the device", y.detach(), want.detach())
    ones = torch.ones_like(y)
    got, _ = torch.autograd.grad(y, (given, there[1]), ones)
    (dwant,) = torch.autograd.grad(want, exact, ones.double().cpu())
    check("gradients of their weights", got, dwant)


def gated(at: At) -> None:
    """SwiGLU of the rows of this rank's experts, of which there are fewer than room for them."""
    counts = torch.tensor([[3, 0, 5, 2], [4, 6, 0, 1]])
    rows = int(counts.view(2, 2, 2)[:, at.rank].sum())
    draw = torch.Generator().manual_seed(at.rank)
    gate_up = torch.randn(20, 48, generator=draw).half()
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    given = gate_up.to(at.device).requires_grad_()
    y = swiglu(given, counts.to(at.device), at.rank)
    check("SwiGLU", y[:rows], want[:rows])
    y.backward(torch.ones_like(y))
    want.sum().backward()
    assert given.grad is not None and exact.grad is not None
    check("gradient of SwiGLU", given.grad[:rows], exact.grad[:rows])


def weighted(at: At) -> None:
    """Rows of this rank's experts times their weights, of which there are fewer than room."""
    counts = torch.tensor([[3, 0, 5, 2], [4, 6, 0, 1]])
    rows = int(counts.view(2, 2, 2)[:, at.rank].sum())
    draw = torch.Generator().manual_seed(at.rank)
    x, other = (torch.randn(20, 48, generator=draw).half() for _ in range(2))
    weights = torch.rand(20, generator=draw)
    there = [t.to(at.device) for t in (x, weights, other, counts)]
    y, dots = weighted_rows(*there, at.group.group_name)
    check("weighted rows", y[:rows], (x.double() * weights[:, None])[:rows])
    check("products of rows", dots[:rows], (x.double() * other).sum(1)[:rows])
    y, _ = weighted_rows(*there[:2], None, there[3], at.group.group_name)
    check("weighted rows alone", y[:rows], (x.double() * weights[:, None])[:rows])
    index = torch.arange(20, dtype=torch.int32).flip(0)
    index[rows:] = 2**31 - 1
    y = gathered(there[0], index.to(at.device), 20, there[3], at.rank)
    check("gathered rows", y[:rows], x.flip(0)[:rows])
    products = torch.cat((other, x), 1)
    given = there[0], there[1], products.to(at.device), there[3], at.rank
    (dproducts, dots), leaves = swiglu_back(*given), products.double().requires_grad_()
    gate, up = leaves.chunk(2, 1)
    hidden = torch.nn.functional.silu(gate) * up
    hidden.backward(x.double() * weights[:, None])
    assert leaves.grad is not None
    check("weighted SwiGLU", dproducts[:rows], leaves.grad[:rows])
    check("its weights", dots[:rows], (x.double() * hidden.detach()).sum(1)[:rows])


def embedding(at: At, plan: str) -> None:
    """2 tables a rank, one of them of a single row, 8 bags in all; gradients of tables, weights."""
    every = [random_bags((8, 16), BAGS, dtype=torch.float16, weighted=True, seed=rank, rows=1,
                         longest=160) for rank in range(RANKS)]  # fmt: skip
    mine = every[at.rank]
    assert mine.weights is not None
    leaves = [t.to(at.device, copy=True).requires_grad_() for t in mine.tables]
    leaves.append(mine.weights.float().to(at.device).requires_grad_())
    y = cp.embedding_bag_all_to_all(
        leaves[:-1], mine.indices.to(at.device), mine.offsets.to(at.device), group=at.group,
        per_sample_weights=leaves[-1], include_last_offset=True, plan=plan,
    )  # fmt: skip
    want = [pooled(bags, BAGS, mean=False).chunk(RANKS)[at.rank] for bags in every]
    check(f"bags by {plan}", y, torch.cat(want, 1))
    y.sum().backward()
    *tables, weights = fp64 = [t.double().requires_grad_() for t in (*mine.tables, mine.weights)]
    pooled(replace(mine, tables=tables, weights=weights), BAGS, mean=False).sum().backward()
    for leaf, exact_leaf in zip(leaves, fp64, strict=True):
        check("a gradient of tables and weights", leaf.grad, exact_leaf.grad)


def exchanged(at: At) -> None:
    from benchmarks.transports import open_transport

    part = 4096
    transport = open_transport("sm", at.group, at.device, RANKS * part)
    for kind in ("all_gather", "all_to_all"):
        sent = torch.arange(RANKS * part, device=at.device) % 251
        transport.source.copy_(sent + at.rank)
        getattr(transport, kind)(part)()
        transport.check()
        first = at.rank * part * (kind == "all_to_all")
        want = torch.cat([sent[first : first + part] + r for r in range(RANKS)])
        assert torch.equal(transport.target.long(), want), kind
    transport.close()


def merged(at: At) -> None:
    """Some rows of two attentions, as the plans of attention merge them."""
    from counterpoint.attention.steps import merge_into

    y, other = torch.randn(2, 40, 3, 24)
    lse, lse_other = torch.randn(2, 3, 40)
    want, sums = y.clone(), lse.clone()
    merge_into(want[2:39], sums[:, 2:39], other[:37], lse_other[:, :37])
    y, lse, other, lse_other = (x.to(at.device) for x in (y, lse, other, lse_other))
    merge_into(y[2:39], lse[:, 2:39], other[:37], lse_other[:, :37])
    check("merged attentions", y, want.double())
    check("their log-sum-exp", lse, sums.double())


def overlapped(at: At) -> None:
    """Two steps of an FSDP2 model: gradients of ranks are summed in place."""
    step = Step()
    mesh = mesh_of(RANKS, at.device.type)
    want = trained(made(step, mesh), step, at.rank)
    model = made(step, mesh)
    ours = cp.overlap(model, trial_steps=0, memory="kept")
    unknown = Knowledge(None, {})  # else so small groups are left to torch
    with mock.patch("counterpoint.fsdp.overlapped.knowledge_of", return_value=unknown):
        found = trained(model, step, at.rank)
    for got, each in zip(found, want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-2, atol=1e-3)
    ours.off()


# each case, and the kernels that it is there for
CASES: dict[str, tuple[Callable[[At], None], tuple[str, ...]]] = {
    "copies": (lambda at: matmuls(at, "all_gather_matmul", "shard_p2p"), ("signal_kernel",)),
    "sums": (lambda at: matmuls(at, "matmul_reduce_scatter", "shard_p2p"), ("reduce_kernel",)),
    "gather by words": (lambda at: matmuls(at, "all_gather_matmul", "direct"),
                        ("collective_kernel",)),
    "scatter by words": (lambda at: matmuls(at, "matmul_reduce_scatter", "direct"), ()),
    "all-reduce by words": (lambda at: matmuls(at, "matmul_all_reduce", "direct"), ()),
    "one shot": (lambda at: matmuls(at, "matmul_all_reduce", "fused one_shot"),
                 ("matmul_all_reduce_kernel",)),
    "two shots": (lambda at: matmuls(at, "matmul_all_reduce", "fused two_shot"), ()),
    "scatter": (lambda at: matmuls(at, "matmul_reduce_scatter", "fused"), ()),
    "norm": (normed, ("add_norm_kernel",)),
    "norm of one shot": (lambda at: normed_rows(at, "fused one_shot"),
                         ("all_reduce_norm_kernel",)),
    "norm of two shots": (lambda at: normed_rows(at, "fused two_shot"), ()),
    "norm of wide rows": (lambda at: normed_rows(at, "direct"), ()),
    "batch-invariant, few rows": (lambda at: matmuls(at, "matmul_all_reduce", "serial invariant"),
                                  ("few_rows_matmul_kernel",)),
    "batch-invariant": (invariant_rows, ("invariant_matmul_kernel",)),
    "dispatch": (lambda at: experts(at, "all_to_all_matmul", "host"),
                 ("routes_kernel", "all_to_all_matmul_kernel")),
    "combine": (lambda at: experts(at, "matmul_all_to_all", "host"),
                ("matmul_all_to_all_kernel", "arrival_kernel", "collect_kernel")),
    "dispatch, device": (lambda at: experts(at, "all_to_all_matmul", "device"), ()),
    "combine, device": (lambda at: experts(at, "matmul_all_to_all", "device"), ("clear_kernel",)),
    "tokens": (sums, ("token_sum_kernel", "name_rows_kernel", "token_sum_gradient_kernel")),
    "router": (routed, ("choose_experts_kernel", "choose_experts_gradient_kernel",
                        "count_experts_kernel", "place_rows_kernel")),
    "routes of the device": (routed_on_device, (
        "send_sums_kernel", "tell_experts_kernel", "tally_tokens_kernel", "place_tokens_kernel",
        "place_pairs_kernel", "name_entries_kernel", "rows_here_kernel",
    )),
    "activation": (activated, ("activation_kernel", "activation_gradient_kernel")),
    "SwiGLU": (gated, ()),
    "weighted rows": (weighted, ("weighted_rows_kernel", "gathered_rows_kernel",
                                 "weighted_swiglu_kernel")),
    "bags": (lambda at: embedding(at, "fused"),
             ("embedding_all_to_all_kernel", "copy_out_kernel", "names_kernel", "mark_rows_kernel",
              "table_gradient_kernel", "long_rows_kernel", "weight_gradient_kernel")),
    "lookup": (lambda at: embedding(at, "serial"), ("lookup_kernel",)),
    "exchange": (exchanged, ("exchange_kernel",)),
    "attention": (merged, ("merge_attention_kernel",)),
    "FSDP2": (overlapped, ("sum_kernel",)),
}  # fmt: skip
EXPECTED = frozenset(name for _, names in CASES.values() for name in names)


def run_rank(rank: int) -> int:
    """All cases on one rank, and the kernels that it has launched; 1 where one is missing."""
    import triton

    seen = set[str]()

    def note(launched: Any) -> None:
        seen.add(launched.get()["name"])

    knobs: Any = triton.knobs  # pyright: ignore[reportAttributeAccessIssue]
    knobs.runtime.launch_enter_hook.add(note)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # torch gathers objects by gloo: NCCL reads whole words of a buffer of 23 bytes
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        rank=rank,
        world_size=RANKS,
        device_id=device,
        timeout=timedelta(seconds=LIMIT_S),
    )
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    failed = list[str]()
    for name, (case, _) in CASES.items():
        start_s, said = time.monotonic(), ""
        try:
            case(At(rank, group, device))
            torch.cuda.synchronize()
            cp.check(group)
        except Exception:  # the tool is to see the other kernels, too
            said = traceback.format_exc()
            failed.append(name)
        print(f"rank {rank}: {name}, {time.monotonic() - start_s:.1f} s {said}", flush=True)
    print(SEEN + " ".join(sorted(seen)), flush=True)
    cp.release(group)
    dist.destroy_process_group()
    missing = EXPECTED - seen
    if missing:
        print(f"not launched: {', '.join(sorted(missing))}", flush=True)
    return 1 if missing or failed else 0


def sanitizer() -> str | None:
    """The program: on the path, of a CUDA toolkit, or of a package of python's."""
    places = [*Path("/usr/local").glob("cuda*/bin"), *Path("/usr/local").glob("cuda*/*sanitizer*")]
    if nvcc := shutil.which("nvcc"):
        places.append(Path(nvcc).resolve().parent)
    for folder in map(Path, sys.path):
        places += folder.glob("nvidia/*/bin")
    search = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which("compute-sanitizer", path=search)


def row_of(tool: str, logs: list[str], codes: list[int], seconds: float) -> dict[str, Any]:
    """What a tool found.

    Args:
        logs: what each rank printed, the sanitizer's lines among it.
        codes: with which it ended.
        seconds: of all ranks.
    """
    counts = [[int(a or b) for a, b in SUMMARY.findall(log)] for log in logs]
    kernels = {
        name for log in logs for line in log.splitlines() if line.startswith(SEEN)
        for name in line.removeprefix(SEEN).split()
    }  # fmt: skip
    # a rank without a summary was not looked at, or did not end
    errors = sum(map(sum, counts)) if all(counts) else None
    return {
        "tool": tool, "ranks": len(logs), "kernels": sorted(kernels & EXPECTED),
        "missing": sorted(EXPECTED - kernels), "errors": errors,
        "exit_codes": codes, "seconds": round(seconds, 1),
    }  # fmt: skip


def passed(row: dict[str, Any]) -> bool:
    """Whether every kernel ran on every rank, and nothing was found."""
    return row["errors"] == 0 and not row["missing"] and not any(row["exit_codes"])


def run_tool(program: str, tool: str, out: Path) -> dict[str, Any]:
    """All ranks under one tool, each with a log of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_s, paths = time.monotonic(), [out / f"{tool}-{rank}.log" for rank in range(RANKS)]

    def ended(rank: int) -> int:
        command = ["env", *SETTINGS, f"MASTER_PORT={port}", program, "--tool", tool, *OPTIONS]
        command += [sys.executable, "-m", "sanitize", "--rank", str(rank)]
        with paths[rank].open("w") as log:
            return run(command, LIMIT_S, out / "cache", log)

    with ThreadPoolExecutor(RANKS) as lanes:
        codes = list(lanes.map(ended, range(RANKS)))
    logs = [path.read_text(errors="replace") for path in paths]
    return row_of(tool, logs, codes, time.monotonic() - start_s)


def main() -> int:
    """0 where no tool has found anything, 1 where one has, 2 without the sanitizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--rank", type=int, help="of a process under the sanitizer")
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank)
    program = sanitizer()
    if program is None:
        print("sanitize: no compute-sanitizer on the path, in /usr/local/cuda*/bin or beside nvcc")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    good = True
    for tool in TOOLS:
        row = run_tool(program, tool, args.out)
        with (args.out / "sanitize.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"sanitize: {json.dumps(row)}", flush=True)
        if not passed(row):
            good = False
            for rank in range(RANKS):
                lines = (args.out / f"{tool}-{rank}.log").read_text(errors="replace").splitlines()
                print("\n".join(lines[-60:]), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
