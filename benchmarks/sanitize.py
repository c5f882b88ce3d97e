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
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp

RANKS = 2
TOOLS = ("memcheck", "racecheck")
LIMIT_S = 230  # of a tool
OPTIONS = ("--report-api-errors", "no", "--target-processes", "all", "--error-exitcode", "1")
# kernels that are none of an operator's
LEFT_OUT = {
    "delay_kernel": "reads the clock, and stores one word that nobody reads",
    "matmul_kernel": "what benchmarks shape: no operator launches it",
}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
SEEN = "kernels launched: "
TOLERANCE = 5e-3  # of fp16


class At(NamedTuple):
    """Where a case runs; kernels' names are noted as they are launched."""

    rank: int
    group: dist.ProcessGroup
    device: torch.device

    def drawn(self, *shape: int) -> list[Tensor]:
        """What each rank has: drawn here for all of them."""
        made = [torch.Generator().manual_seed(sum(shape) + r) for r in range(RANKS)]
        return [torch.randn(shape, generator=g).half().to(self.device) for g in made]


def check(what: str, got: Tensor, want: Tensor) -> None:
    """Compare with fp64.

    Raises:
        AssertionError: it is another.
    """
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    error = float((got.detach().double() - want).norm() / want.norm())
    assert error < TOLERANCE, f"{what} is off by {error:.1e}"


def matmuls(at: At, op: str, plan: str) -> None:
    xs, ws = at.drawn(32, 64), at.drawn(64, 128)
    y = getattr(cp, op)(xs[at.rank], ws[at.rank], group=at.group, plan=plan)
    if op == "all_gather_matmul":
        want = torch.cat(xs).double() @ ws[at.rank].double()
    else:
        want = sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True))
        assert isinstance(want, Tensor)
        want = want.chunk(RANKS)[at.rank] if op == "matmul_reduce_scatter" else want
    check(f"{op} by {plan}", y, want)


def normed(at: At) -> None:
    xs, ws, residual, weight = at.drawn(32, 64), at.drawn(64, 128), *(
        at.drawn(*shape)[0] for shape in ((32, 128), (128,))
    )  # fmt: skip
    # "auto" looks at the library's kernels in a capture, which the sanitizer does not bear
    y, h = cp.matmul_all_reduce_rms_norm(
        xs[at.rank], ws[at.rank], residual=residual, norm_weight=weight, group=at.group,
        plan="fused",
    )  # fmt: skip
    want = residual.double() + sum(x.double() @ w.double() for x, w in zip(xs, ws, strict=True))
    check("the sum", h, want)
    scale = torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6)
    check("its norm", y, want * scale * weight.double())


EACH = 8  # rows of a rank for an expert
ROOM = 40  # rows of a result whose counts the device knows: 32 are used


def _products(x: Tensor, w: Tensor) -> Tensor:
    """Rows sorted by expert, times its weight, in fp64."""
    return (x.double().view(len(w), -1, x.shape[1]) @ w.double()).flatten(0, 1)


def _swapped(xs: list[Tensor], rank: int, *, back: bool) -> Tensor:
    """Rows of all ranks that go to the experts of `rank`, or that come back to it from them."""
    each = torch.stack([x.view(-1, EACH, x.shape[1]) for x in xs])  # [rank, block, EACH, K]
    if back:  # blocks by local expert, then by source
        return each.view(RANKS, 2, RANKS, EACH, -1)[:, :, rank].flatten(0, 2)
    return each.view(RANKS, RANKS, 2, EACH, -1)[:, rank].transpose(0, 1).flatten(0, 2)


def experts(at: At, op: str, known: str) -> None:
    """A dispatch or a combine of 2 experts a rank; its gradient is the other one's kernel."""
    rows, ws = 4 * EACH, at.drawn(2, 64, 128)
    xs = at.drawn(rows, 64)
    counts = torch.full((RANKS, 2 * RANKS), EACH)
    x, options = xs[at.rank].clone(), dict[str, Any]()
    if known == "device" and at.device.type == "cuda":  # a CPU is the host
        x, counts = torch.cat([x, x.new_zeros(ROOM - rows, 64)]), counts.to(at.device)
        options["max_rows"] = ROOM
    x.requires_grad_()
    w = ws[at.rank].clone().requires_grad_()
    if op == "all_to_all_matmul":
        y, kept = cp.all_to_all_matmul(
            x, w, counts=counts, group=at.group, plan="fused", return_rows=True, **options
        )
        want = _products(come := _swapped(xs, at.rank, back=False), ws[at.rank])
        check("rows that came", kept[:rows], come.double())
    else:
        y = cp.matmul_all_to_all(
            x, w, counts=counts, group=at.group, plan="fused", **options
        )  # fmt: skip
        want = _swapped([_products(*each) for each in zip(xs, ws, strict=True)], at.rank, back=True)
    check(f"{op} of counts that the {known} knows", y[:rows], want)
    y[:rows].sum().backward()
    ones = torch.ones(rows, 128, device=at.device)
    dxs = [_products(ones, w.mT) for w in ws]
    if op == "all_to_all_matmul":
        want = _swapped(dxs, at.rank, back=True)
    else:
        want = _products(ones, ws[at.rank].mT)
    assert x.grad is not None and w.grad is not None
    check(f"the gradient of {op}", x.grad[:rows], want)


def summed(at: At) -> None:
    """Sums of rows that come back, in the combine's kernels and in those of gradients."""
    xs, ws, weights = at.drawn(4 * EACH, 64), at.drawn(2, 64, 128), at.drawn(5, 2)[0].float()
    index = torch.tensor([[0, 9], [31, 1], [2, 2], [17, 30], [4, 8]], device=at.device)
    x = xs[at.rank].clone().requires_grad_()
    out = cp.matmul_all_to_all(
        x, ws[at.rank], counts=torch.full((RANKS, 2 * RANKS), EACH), group=at.group, plan="fused",
        sum_of=(index, weights.requires_grad_()),
    )  # fmt: skip
    y = _swapped([_products(*each) for each in zip(xs, ws, strict=True)], at.rank, back=True)
    want = (y[index] * weights.detach().double()[..., None]).sum(1)
    check("sums of rows", out, want)
    out.sum().backward()
    assert weights.grad is not None
    check("their gradient", weights.grad, y[index].sum(-1))
    _, came = cp.all_to_all_matmul(
        x, ws[at.rank], counts=torch.full((RANKS, 2 * RANKS), EACH), group=at.group, plan="fused",
        return_rows=True,
    )  # fmt: skip
    from counterpoint.ops.token_sums import sum_of_tokens

    own = xs[at.rank]
    check("sums of tokens", sum_of_tokens(own, index), own[index].double().sum(1))
    assert came.shape == own.shape


def embedding(at: At, plan: str) -> None:
    """2 tables a rank, 8 bags of 2 indices in all; and gradients of tables and weights."""
    bags, every = 8, [at.drawn(16, 8), at.drawn(16, 16)]
    tables = [each[at.rank].clone().requires_grad_() for each in every]
    indices = torch.arange(2 * 2 * bags, device=at.device) * 5 % 16
    offsets = torch.arange(0, 2 * 2 * bags, 2, device=at.device)
    weights = at.drawn(2 * 2 * bags)[0].float().requires_grad_()
    y = cp.embedding_bag_all_to_all(
        tables, indices, offsets, per_sample_weights=weights, group=at.group, plan=plan
    )
    place = indices.view(2, bags, 2)
    scale = weights.detach().double().view(2, bags, 2, 1)
    pooled = [
        (every[t][r].double()[place[t]] * scale[t]).sum(1) for r in range(RANKS) for t in range(2)
    ]
    check(f"bags by {plan}", y, torch.cat(pooled, 1).chunk(RANKS)[at.rank])
    y.sum().backward()
    for t, table in enumerate(tables):
        want = torch.zeros(table.shape, dtype=torch.float64, device=at.device)
        want.index_add_(0, place[t].flatten(), scale[t].view(-1, 1).expand(-1, table.shape[1]))
        assert table.grad is not None
        check("the gradient of a table", table.grad, want)
    each = [table.detach().double()[place[t]].sum(-1) for t, table in enumerate(tables)]
    assert weights.grad is not None
    check("the gradient of weights", weights.grad, torch.stack(each).flatten())


def exchanged(at: At) -> None:
    from counterpoint.runtime.transports import open_transport

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
    "norm": (normed, ("add_rms_norm_kernel",)),
    "dispatch": (lambda at: experts(at, "all_to_all_matmul", "host"),
                 ("routes_kernel", "all_to_all_matmul_kernel")),
    "combine": (lambda at: experts(at, "matmul_all_to_all", "host"),
                ("matmul_all_to_all_kernel", "arrival_kernel", "collect_kernel")),
    "dispatch, device": (lambda at: experts(at, "all_to_all_matmul", "device"), ()),
    "combine, device": (lambda at: experts(at, "matmul_all_to_all", "device"), ("clear_kernel",)),
    "tokens": (summed, ("token_sum_kernel", "token_sum_gradient_kernel")),
    "bags": (lambda at: embedding(at, "fused"),
             ("embedding_all_to_all_kernel", "copy_out_kernel", "table_gradient_kernel",
              "weight_gradient_kernel")),
    "lookup": (lambda at: embedding(at, "serial"), ("lookup_kernel",)),
    "exchange": (exchanged, ("exchange_kernel",)),
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
    dist.init_process_group(
        "nccl", rank=rank, world_size=RANKS, device_id=device, timeout=timedelta(seconds=LIMIT_S)
    )
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    for name, (case, _) in CASES.items():
        start_s = time.monotonic()
        case(At(rank, group, device))
        torch.cuda.synchronize()
        cp.check(group)
        print(f"rank {rank}: {name}, {time.monotonic() - start_s:.1f} s", flush=True)
    print(SEEN + " ".join(sorted(seen)), flush=True)
    cp.release(group)
    dist.destroy_process_group()
    missing = EXPECTED - seen
    if missing:
        print(f"not launched: {', '.join(sorted(missing))}", flush=True)
    return 1 if missing else 0


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
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "COUNTERPOINT_TIMEOUT_S": str(LIMIT_S),
        "COUNTERPOINT_REPLAY": "0",  # each kernel is launched by itself
        # memory of an allocator of its own is checked by the bytes that were asked for
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }  # fmt: skip
    start_s, paths = time.monotonic(), [out / f"{tool}-{rank}.log" for rank in range(RANKS)]
    processes: list[subprocess.Popen[bytes]] = []
    for rank, path in enumerate(paths):
        ours = [sys.executable, "-m", "benchmarks.sanitize", "--rank", str(rank)]
        with path.open("wb") as log:
            processes.append(subprocess.Popen(
                [program, "--tool", tool, *OPTIONS, *ours], env=environment, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            ))  # fmt: skip
    codes: list[int] = []
    for process in processes:
        try:
            codes.append(process.wait(max(1.0, start_s + LIMIT_S - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(124)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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
