"""Experts by routes that the host does not read: right against fp64, and what does not fit."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expert_bodies import small_kernels
from island_bodies import everyone, on_islands, shards
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from routed_bodies import CHOICES, LOCAL, TOP, K, N, chosen, wrong_layer
from torch import Tensor

import counterpoint as cp
from counterpoint.experts.routes import exchange_routes
from counterpoint.group.workspace import workspace_of
from counterpoint.run.fused import fused_memory


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", [*CHOICES, "no tokens"])
@pytest.mark.parametrize(
    ("ranks", "size", "known"), [(2, 2, "room"), (2, 2, "drop"), (4, 2, "room"), (4, 1, "room")]
)
@on_ranks()
def test_kernels_against_fp64(rank: int, ranks: int, size: int, known: str, name: str) -> list[str]:
    """Interpreted."""
    tokens, name = (0, "uniform") if name == "no tokens" else (9, name)
    known = known if tokens else "room"
    plan, dtype = "fused" if size == ranks else "islands", torch.float16
    with on_islands(rank, size), small_kernels():
        return wrong_layer(rank, ranks, name, [tokens] * ranks, (plan,), dtype, known)


def rows_written(op: Callable[[], Tensor], columns: int) -> int:
    """How many rows of that many fp16 numbers peers and this rank have put into its memory."""
    workspace = workspace_of(world(), torch.device("cpu"))
    op()  # memory is there
    dist.barrier()
    memory = fused_memory(workspace).turns.memory
    assert memory is not None
    bits = memory.local()[: memory.num_bytes // (4 * columns) * 4 * columns].view(torch.int16)
    bits.fill_(-23131)  # no small integer
    dist.barrier()
    op()
    dist.barrier()
    return int((bits.view(-1, columns) != -23131).any(1).sum())


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["uniform", "zipf"])
@on_ranks(2)
def test_a_token_goes_to_another_rank_once(rank: int, ranks: int, name: str):
    """Rows on the wire are the tokens that have experts there, and they come back."""
    local, tokens = 4, 12
    with on_islands(rank, ranks), small_kernels():
        experts = chosen(name, rank, ranks, tokens, local)
        weights = torch.ones(tokens, TOP)
        every, room = ranks * local, ranks * tokens * TOP
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        x, w = torch.ones(tokens, 16).half(), torch.ones(local, 16, 16).half()
        h = cp.all_to_all_matmul(x, w, counts=routes)
        there = rows_written(lambda: cp.all_to_all_matmul(x, w, counts=routes), 16)
        back = rows_written(lambda: cp.matmul_all_to_all(h, w, counts=routes), 16)
        once = [(each // local == rank).any(1).sum() for each in everyone(experts)]
        reached = sum((experts // local == d).any(1).sum() for d in range(ranks))
        assert (there, back) == (sum(once), reached)
        assert there < routes.counts.view(ranks, ranks, local)[:, rank].sum(), "some go once"


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_what_does_not_fit_is_said_on_all_ranks(rank: int, ranks: int):
    """Of one island, and of two."""
    experts, weights = chosen("last rank", rank, ranks, 5), torch.ones(5, TOP)
    every, full = ranks * LOCAL, ranks * 5 * TOP
    few, wrong = slice(0, 4 if rank == 2 else 5), experts + (rank == 1) * every
    x, w = shards(rank, 6, K), shards(rank, LOCAL, K, N)

    def routed(experts: Tensor = experts, weights: Tensor = weights, rows: int = full) -> cp.Routes:
        return cp.exchange_routes(experts, weights, num_experts=every, max_rows=rows)

    def refused(text: str, call: Callable[..., object], *args: Any, **more: Any) -> None:
        with pytest.raises(cp.InputError, match=text):
            call(*args, **more)

    out = cp.all_to_all_matmul
    with on_islands(rank, 2), by_reference() if ranks == 4 else nullcontext():
        text = f"max_rows must be >= {full}, what rank {ranks - 1} gets, got {full - 4}, 4 fewer"
        refused(text, routed, rows=full - 4)
        if ranks == 4:
            text = "tokens must be equal on all ranks"
            refused(text, routed, experts[few], weights[few])
            plans = {"fused": "plan must be auto, islands or serial",
                     "islands": "plan must be for 16-bit numbers"}  # fmt: skip
        else:
            refused("experts must be 0 to 3, got . to . on rank 1", routed, wrong)
            text = "experts must be .tokens, 1 to 4, all experts."
            refused(text, routed, torch.zeros(5, 5, dtype=torch.int64), torch.ones(5, 5))
            text = "x must be .5, K., as the routes say, got .6, 8"
            refused(text, out, x, w, counts=routed())
            text = rf"x must be .{full}, K., as the routes say"
            refused(text, cp.matmul_all_to_all, x, w, counts=routed())
            plans = dict.fromkeys(("grouped", "islands"), "plan must be auto, fused or serial")
        for plan, text in plans.items():
            refused(text, out, x[:5], w, plan=plan, counts=routed())


@on_ranks(6)
def test_islands_of_three_have_no_plan_of_their_own(rank: int, ranks: int) -> list[str]:
    with on_islands(rank, 3), by_reference():
        text = "plan must be for a number of ranks that is a power of two"
        with pytest.raises(cp.InputError, match=text):
            wrong_layer(rank, ranks, "uniform", [5] * 6, ("islands",), torch.float16, "room")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("missing", [5, 70])
@on_ranks(4)
def test_too_many_rows_on_one_island_spoil_all_results_on_all(
    rank: int, ranks: int, missing: int
) -> list[str]:
    """Kernels say so, as on GPUs, where the host reads no routes; also of more tokens than rows."""
    found, tokens = list[str](), 6
    with on_islands(rank, 2), small_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_routes, "_look", lambda *_: None)
        experts, weights = chosen("last rank", rank, ranks, tokens), torch.ones(tokens, TOP)
        every, room = ranks * LOCAL, ranks * tokens * TOP - missing
        routes = cp.exchange_routes(experts, weights, num_experts=every, max_rows=room)
        x, w = shards(rank, tokens, 16).half(), shards(rank, LOCAL, 16, 16).half()
        for op in (cp.all_to_all_matmul, cp.matmul_all_to_all):
            dispatches = op is cp.all_to_all_matmul
            given = x if dispatches else torch.zeros(room, 16).half()
            y = op(given, w, counts=routes, plan="islands")
            rows = y[: int(routes.counts[:, rank * LOCAL :][:, :LOCAL].sum())] if dispatches else y
            if not rows.isnan().all():
                found.append(f"{op.__name__}: results are numbers")
            memory = fused_memory(workspace_of(world(), torch.device("cpu")))
            want = rf"{op.__name__}: .* for ranks \[{ranks - 1}\].*, got {missing} fewer at an"
            if not re.match(want, text := str(memory.dropped())):
                found.append(text)
            memory.over.zero_()
    return found
