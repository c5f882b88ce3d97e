"""What a decomposed operation loses, and one beside another: DIL and CIL of FiCCO.

DIL, decomposition: the pieces of an operation one after another / the whole of it. CIL, contention:
an operation beside another that lasts a little less / alone. A plan finer than serial hides
communication behind computation and pays these. Source: FiCCO, arXiv 2512.10236.
"""

import os
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.measure import record
from counterpoint.measure.characterize import L2_ROTATIONS, MIB, Bench, Call, Row, beside_counts
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch_collective import WORD_BYTES, Collective, refusal
from counterpoint.runtime.transports import TRANSPORTS, Transport, missing, open_transport
from counterpoint.runtime.workspace import workspace_of

# rows, n, k: of Llama-3-70B at 8 ranks, and a GEMM of tall tiles alone
MATMULS = ((8192, 7168, 8192), (2048, 7168, 8192), (8192, 1280, 8192), (8192, 8192, 1024))
PIECES = (1, 2, 4, 8, 16, 64)
TOTALS = (16 * MIB, 64 * MIB)  # gathered, on each rank
# by zeros tensor cores draw little power: what is left then is no loss of clock
BESIDE = {
    "compute-bound": (8192, 8192, 8192, 1.0), "compute-bound, of zeros": (8192, 8192, 8192, 0.0),
    "memory-bound": (64, 28672, 8192, 1.0),
}  # fmt: skip
BESIDE_S = 12e-3  # of the longer one: clocks change within less
CALLS = 2
Along = Literal["rows", "columns", "K"]


def measure_losses(
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Rows of all three questions; all ranks of `group` call this, and all get them.

    Each row has `question` ("matmul in pieces", "communication in pieces" or "beside"), what was
    timed, `seconds` and what it is compared with, `whole_s` or `alone_s`, beside `other_s`.

    Raises:
        InputError: fewer than two ranks.
    """
    bench, rows = _Losses(group, device, rounds, progress), list[Row]()
    for question in (bench.matmuls_in_pieces, bench.communication_in_pieces, bench.beside):
        progress(question.__name__.replace("_", " "))
        rows += question()
    bench.close()
    facts = {"table": "losses", "ranks": bench.ranks} | record.environment()
    return [row | facts for row in rows]


class _Losses(Bench):
    """The questions, each a method that returns rows."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        rounds: int,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(group, device, rounds)
        self._progress = progress
        self._open: dict[str, Transport] | None = None

    def matmuls_in_pieces(self) -> list[Row]:
        rows: list[Row] = []
        for m, n, k in MATMULS:
            count = max(1, ceil(L2_ROTATIONS * self.l2_bytes / (2 * n * k)))
            weights = [self.normal(n, k).t() for _ in range(min(count, CALLS))]
            x, calls = self.normal(m, k), dict[tuple[Along, int], Call]()
            for pieces in PIECES:
                for along in ("rows", "columns", "K"):
                    if pieces > 1 or along == "rows":
                        calls[along, pieces] = self._in_pieces(x, weights, along, pieces)
            named = {f"{along} {pieces}": call for (along, pieces), call in calls.items()}
            times = self.timed(named, CALLS)
            rows += [
                {"question": "matmul in pieces", "rows": m, "n": n, "k": k, "along": along,
                 "pieces": pieces, "seconds": times[f"{along} {pieces}"],
                 "whole_s": times["rows 1"]}
                for along, pieces in calls
            ]  # fmt: skip
        return rows

    def _in_pieces(self, x: Tensor, weights: list[Tensor], along: Along, pieces: int) -> Call:
        """One matmul in as many; pieces of K are accumulated in fp32, as plans do."""
        m, n = x.shape[0], weights[0].shape[1]
        if along == "K":
            total, wide = torch.empty(m, n, device=self.device), torch.float32

            def accumulate(i: int) -> None:
                parts = zip(x.chunk(pieces, 1), weights[i % len(weights)].chunk(pieces),
                            strict=True)  # fmt: skip
                for j, (x_part, w_part) in enumerate(parts):
                    if j:
                        torch.addmm(total, x_part, w_part, wide, out=total)
                    else:
                        torch.mm(x_part, w_part, wide, out=total)

            return accumulate
        parts = [self.normal(m // pieces, n) for _ in range(pieces)]
        if along == "columns":
            parts = [self.normal(m, n // pieces) for _ in range(pieces)]

        def multiply(i: int) -> None:
            w = weights[i % len(weights)]
            xs = x.chunk(pieces) if along == "rows" else (x,) * pieces
            ws = w.chunk(pieces, 1) if along == "columns" else (w,) * pieces
            for x_part, w_part, y in zip(xs, ws, parts, strict=True):
                torch.mm(x_part, w_part, out=y)

        return multiply

    def communication_in_pieces(self) -> list[Row]:
        calls: dict[tuple[str, int, int], Call] = {}
        for total in TOTALS:
            for pieces in PIECES:
                for transport, call in self._transports(total // pieces).items():
                    calls[transport, total, pieces] = partial(_again, call, pieces)
        dist.barrier(self.group)  # all have compiled before one waits
        named = {" ".join(map(str, key)): call for key, call in calls.items()}
        times = self.timed(named, CALLS)
        return [
            {"question": "communication in pieces", "transport": transport, "num_bytes": total,
             "pieces": pieces, "seconds": times[f"{transport} {total} {pieces}"],
             "whole_s": times[f"{transport} {total} 1"]}
            for transport, total, pieces in calls
        ]  # fmt: skip

    def _transports(self, total: int) -> dict[str, Call]:
        """All-gathers of `total` bytes in all, by each transport that is here and by ours.

        Peers' copies are signalled and not waited for: as in a plan, whose steps wait where they
        read. NCCL and ours cannot do without.
        """
        part_bytes = total // self.ranks
        found: dict[str, Call] = {
            TRANSPORTS[name].label: partial(_run, transport.all_gather(part_bytes, meets=False))
            for name, transport in self._opened().items()
        }
        if not refusal(WORD_BYTES, self.ranks):
            part = self.normal(part_bytes // 2)
            whole = self.normal(self.ranks * part.numel())
            memory = fused_memory(workspace_of(self.group, self.device))
            call = Collective(memory, 0, part_bytes, scatter=False, gather=True, dtype=part.dtype,
                              name="losses")  # fmt: skip
            found["ours"] = partial(self.launch, call, (part, whole))
        return found

    def _opened(self) -> dict[str, Transport]:
        """The transports of this machine, set up once."""
        if self._open is None:
            self._open = {}
            for name in TRANSPORTS:
                why = missing(name, self.group, self.device)
                # not tried with buffers that NCCL registers once more when they are captured
                if name == "nccl_zero_cta" and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
                    why = why or "set NCCL_GRAPH_REGISTER=0 before the process starts"
                if why:
                    self._progress(f"without {name}: {why}")
                    continue
                transport = open_transport(name, self.group, self.device, max(TOTALS))
                transport.source.random_()
                self._open[name] = transport
        return self._open

    def close(self) -> None:
        """Give the transports' memory back."""
        for transport in (self._open or {}).values():
            transport.close()
        self._open = None

    def beside(self) -> list[Row]:
        """Each of two lasts a little longer than the other, in turn; it is the one that counts."""
        rows: list[Row] = []
        for kind, (*shape, scale) in BESIDE.items():
            multiply = self.multiply(*shape, scale=scale)
            for transport, send in self._transports(TOTALS[-1]).items():
                dist.barrier(self.group)
                # as many in a row as below: copies of ranks that are out of step meet on a link
                parts = self.timed({"matmul": multiply}, 8) | self.timed({"send": send}, 64)
                matmuls = beside_counts(parts["matmul"], parts["send"], BESIDE_S)
                sends = beside_counts(parts["send"], parts["matmul"], BESIDE_S)[::-1]
                calls: dict[str, Call] = {}
                for which, (m, s) in (("matmul", matmuls), ("transport", sends)):
                    calls[f"{which} beside"] = self.both(multiply, m, send, s)
                    first = which == "matmul"
                    calls[f"{which} alone"] = self.both(multiply, m * first, send, s * (not first))
                    calls[f"{which} other"] = self.both(multiply, m * (not first), send, s * first)
                times = self.timed(calls, 1, rounds=2 * self.rounds)
                rows += [
                    {"question": "beside", "matmul": kind, "transport": transport, "which": which,
                     "rows": shape[0], "n": shape[1], "k": shape[2],
                     "seconds": times[f"{which} beside"], "alone_s": times[f"{which} alone"],
                     "other_s": times[f"{which} other"]}
                    for which in ("matmul", "transport")
                ]  # fmt: skip
        return rows


def _run(move: Callable[[], None], _: int) -> None:
    move()


def _again(call: Callable[[int], Any], times: int, i: int) -> None:
    for _ in range(times):
        call(i)
