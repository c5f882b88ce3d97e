"""matmul_all_reduce in one kernel: interpreted on ranks that share memory, against fp64."""

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counterpoint.runtime.launch_fused import Fused, launch_of, reserve, where
from rank_bodies import world
from rankpool import RankPool

from counterpoint.runtime.fused import FusedMemory
from counterpoint.runtime.workspace import workspace_of

SHOTS = (1, 2, 0)
PROGRAMS = 2  # fewer than tiles: each has several


def way(shots: int) -> Fused:
    """0 shots: scattered."""
    return Fused(shots or 1, 16, 32, 1, 4, not shots)  # type: ignore[arg-type]


def wrong_sums(rank: int, ranks: int, cases: list[tuple[Any, ...]], epoch: int = 0) -> list[str]:
    """Every case twice, on one memory: errors beyond twice torch's, and ranks that differ."""
    memory = FusedMemory(workspace_of(world(), torch.device("cpu")))
    memory.state[0] = epoch
    found: list[str] = []
    for how, m, n, k, dtype, has_bias, transposed in cases:
        reserve(how, memory, m * (ranks if how.scatter else 1), n, dtype.itemsize)
        for call in range(3):
            x = torch.randn(m * (ranks if how.scatter else 1), k).to(dtype)
            w = torch.randn(n, k).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
            bias = torch.randn(n).to(dtype) if has_bias else None
            if bias is not None:
                dist.broadcast(bias, 0)
            y = torch.full((m, n), torch.nan, dtype=dtype)
            with warnings.catch_warnings():
                # the interpreter's own: it takes the bound of a loop from an array of one element
                warnings.simplefilter("ignore", DeprecationWarning)
                launch = launch_of(how, memory, where(memory), 0, x, w, bias)
                launch.programs = min(launch.programs, PROGRAMS)
                launch(x, w, bias, y)
            want = x.double() @ w.double()
            partial = (x @ w).float()
            dist.all_reduce(want)
            dist.all_reduce(partial)
            if bias is not None:
                want, partial = want + bias, partial + bias
            if how.scatter:
                want, partial = (t.chunk(ranks)[rank] for t in (want, partial))
            error, plain = (
                (t.double() - want).norm() / want.norm() for t in (y, partial.to(dtype))
            )
            everyone = [torch.empty_like(y) for _ in range(ranks)]
            dist.all_gather(everyone, y)
            same = how.scatter or all(torch.equal(y, other) for other in everyone)
            if not error <= 2 * plain + 1e-7 or not same:
                found.append(f"{how.spec} {m},{n},{k} {dtype} call {call}: {error:.1e}, {same=}")
    assert not memory.fault.any() and memory.state.tolist()[1:] == [0, 0]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shots", SHOTS)
def test_the_sum_over_ranks(pool: RankPool, shots: int, ranks: int):
    cases = [
        (way(shots), m, n, k, dtype, has_bias, transposed)
        for (m, n, k), dtype, has_bias, transposed in [
            ((1, 64, 64), torch.float16, False, True),
            ((3, 56, 40), torch.float32, True, False),  # nothing divides
            ((17, 16, 32), torch.float32, False, True),
        ]
    ]
    assert pool.run(wrong_sums, ranks, cases) == [[]] * ranks


@pytest.mark.parametrize("epoch", [-2, 2**31 - 2])
@pytest.mark.parametrize("shots", SHOTS)
def test_epochs_wrap(pool: RankPool, shots: int, epoch: int):
    cases = [(way(shots), m, 32, 32, torch.float32, False, True) for m in (1, 2, 1)]
    assert pool.run(wrong_sums, 2, cases, epoch) == [[]] * 2


def late_by_a_call(rank: int, ranks: int, how: Fused) -> list[bool]:
    """Rank 0 gives up before rank 1 comes; neither takes what the other has for a sum."""
    workspace = workspace_of(world(), torch.device("cpu"))
    workspace.timeout_s = 0.3
    memory = FusedMemory(workspace)
    reserve(how, memory, 2, 32, 4)
    x, w, y = torch.randn(2, 16), torch.randn(16, 32), torch.full((2, 32), torch.nan)
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        launch = launch_of(how, memory, where(memory), 6, x, w, None)
        start_s = time.monotonic()
        launch(x, w, None, y)
        took_s = time.monotonic() - start_s
        launch(x, w, None, y)  # waits no more
    fault = int(memory.fault[0])
    dist.barrier()
    return [memory.state.tolist()[2] == 2, fault & 0xFFFFFFFF == 7, bool(fault >> 32 & 3),
            took_s < 1.5]  # fmt: skip


def test_a_rank_that_has_given_up_sends_no_sums(pool: RankPool):
    assert pool.run(late_by_a_call, 2, way(2)) == [[True] * 4] * 2


def grown(rank: int, ranks: int) -> list[int]:
    """Sizes of a memory that calls of more and more make grow."""
    words, found = FusedMemory(workspace_of(world(), torch.device("cpu"))).words, list[int]()
    for num_bytes in range(1, 9):
        words.reserve(num_bytes << 20)
        assert words.half_bytes >= num_bytes << 20
        assert words.memory is not None
        assert (words.memory.local().view(torch.int32) == -(1 << 31)).all()  # they are EMPTY
        found.append(words.memory.num_bytes >> 20)
    return list(dict.fromkeys(found))


def test_memory_that_grows_doubles(pool: RankPool):
    """What is kept of it, for graphs that know it, is then less than what there is."""
    assert pool.run(grown, 2) == [[2, 4, 8, 16]] * 2
