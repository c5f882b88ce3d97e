"""The memory of a group: it grows when it has to, is reused by every call, and is all accounted."""

import ctypes
import gc
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import Case, call, operands, world, wrong

from counterpoint.errors import InputError, UnsupportedError
from counterpoint.gpu import driver
from counterpoint.group import workspace as module
from counterpoint.group.groups import release
from counterpoint.group.workspace import (
    ALIGN_BYTES,
    GRANULE_BYTES,
    NUM_SLOTS,
    Places,
    Workspace,
    workspace_of,
)
from counterpoint.plan.families import build
from counterpoint.plan.steps import Signal
from counterpoint.problem import Problem
from counterpoint.resources import transport
from counterpoint.resources.stages import Collective
from counterpoint.run import tables as tables_module
from counterpoint.run.lanes_cuda import CudaLanes
from counterpoint.run.tables import Tables

CPU = torch.device("cpu")


def space() -> Workspace:
    return workspace_of(world(), CPU)


def gather(rows: int, spec: str = "uniform_fused_1d ring") -> Case:
    return Case("all_gather_matmul", spec, (rows, rows), 512, 3)


def once(case: Case, rank: int, turn: int = 0) -> None:
    given = operands(case, rank, turn, CPU)
    y = call(case, given)
    assert y.isfinite().all()


@on_ranks(2)
def test_memory_grows_to_the_largest_plan_in_granules(rank: int, world_size: int):
    """(symmetric, scratch) bytes after calls of these rows: serial gathers in scratch."""
    sizes: list[tuple[int, int]] = []
    for rows in (8, 1024, 512, 1025, 1, 2048):
        once(gather(rows), rank)
        once(gather(rows, "serial"), rank)
        sizes.append(space().num_bytes())
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = maps.read().count("memfd:counterpoint")
        assert mapped == 3 * world_size, "board, pads and arena: what is outgrown is freed"
    # twice rows x 512 x 4 bytes, gathered in symmetric memory or in scratch
    assert GRANULE_BYTES == 2 << 20
    assert sizes == [(n * GRANULE_BYTES, n * GRANULE_BYTES) for n in (1, 2, 2, 3, 3, 4)]


@on_ranks(2)
def test_no_growth_over_a_hundred_smaller_calls(rank: int, world_size: int):
    generator = torch.Generator().manual_seed(7)
    once(gather(1200), rank)
    once(Case("matmul_reduce_scatter", "graded 1/1 ring", (1200,) * 2, 3, 512), rank)
    before = space()
    arena, scratch, sizes = before.arena, before.scratch, before.num_bytes()
    for turn in range(100):
        rows = int(torch.randint(1, 1201, (), generator=generator))
        case = gather(rows) if turn % 3 else replace(gather(rows, "serial"), n=1)
        once(case, rank, turn)
    after = space()
    assert after is before
    assert after.arena is arena
    assert after.scratch is scratch
    assert after.num_bytes() == sizes


@on_ranks(2)
def test_old_programs_are_forgotten(rank: int, world_size: int) -> list[str]:
    """More programs than a workspace remembers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CODE", 3)
        cases = [gather(rows) for rows in (1, 2, 3, 4, 5, 1, 5, 2)]
        problems = [problem for i, case in enumerate(cases) for problem in wrong(case, seed=i)]
        assert len(space().code) == len(space().plans) == 3
    return problems


@on_ranks(2)
def test_more_signals_than_a_pad_has_are_refused(rank: int, world_size: int):
    plan = build(Problem("all_gather_matmul", 4, 3, 2, 2), "shard_p2p")

    def moved(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        return tuple(replace(s, slot=s.slot + NUM_SLOTS - 3) for s in signals)

    steps = tuple(replace(s, waits=moved(s.waits), posts=moved(s.posts)) for s in plan.steps)
    workspace = space()
    workspace.reserve(plan)
    before = workspace.num_bytes()
    text = r"^plan shard_p2p ring: has 4097 signals, a pad holds 4096$"
    with pytest.raises(UnsupportedError, match=text):
        workspace.reserve(replace(plan, steps=steps))
    assert workspace.num_bytes() == before


@on_ranks(2)
def test_buffers_are_aligned_and_apart(rank: int, world_size: int):
    workspace = space()
    ranks = [rank, 1 - rank]
    for op, spec in [("all_gather_matmul", "graded 1/1 ring"),
                     ("all_gather_matmul", "uniform_fused_2d"),
                     ("matmul_reduce_scatter", "graded 1/1 xor")]:  # fmt: skip
        problem = Problem(op, 7, 5, 3, 2, "bfloat16", (3, 4))  # type: ignore[arg-type]
        plan = build(problem, spec)
        workspace.reserve(plan)
        places = Places(workspace, plan)
        ends = {"symmetric": 0, "scratch": 0}
        for buffer in plan.buffers:
            if buffer.space not in ends:
                continue
            offset = places.offsets[buffer.name]
            assert offset % ALIGN_BYTES == 0
            assert offset >= ends[buffer.space], "buffers overlap"
            ends[buffer.space] = offset + plan.buffer_bytes(buffer)
        symmetric, scratch = workspace.num_bytes()
        assert ends["symmetric"] <= symmetric
        assert ends["scratch"] <= scratch
        assert workspace.arena is not None
        assert all(workspace.arena.buffer_ptrs[r] % ALIGN_BYTES == 0 for r in ranks)


@on_ranks(2)
def test_a_group_gives_its_memory_back(rank: int, world_size: int):
    """Calls, gives the memory back, and calls again."""

    def mapped() -> int:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return maps.read().count("memfd:counterpoint")

    release()
    others = mapped()  # of other groups, which live on
    for turn in range(2):
        once(gather(8), rank, turn)
        assert space().num_bytes() != (0, 0) and mapped() > others
        release()
        assert mapped() == others and space().num_bytes() == (0, 0)


@dataclass
class Growing:
    """A workspace as far as tables need it; it counts captures that they would grow in."""

    capturing: bool = False
    device: torch.device = CPU

    def refuse_growth(self, got: str) -> None:
        if self.capturing:
            raise InputError("counterpoint", "workspace", want="warm", got=got)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Tables of pools of 64 words."""

    def upload(host: torch.Tensor, target: int, stream: int) -> None:
        ctypes.memmove(target, host.data_ptr(), host.nbytes)

    monkeypatch.setattr(tables_module, "TABLE_WORDS", 64)
    monkeypatch.setattr(driver, "upload", upload)
    return Tables(cast(Any, Growing()), 0)


def test_tables_of_programs_that_are_gone_are_freed(tables: Tables):
    """A thousand programs, of which the last twenty are kept: what there is stays small."""
    draw, kept = random.Random(0), list[tuple[list[int], torch.Tensor]]()
    for _ in range(1_000):
        words = [draw.randrange(-(2**63), 2**63) for _ in range(draw.randrange(1, 17))]
        kept = [*kept[-19:], (words, tables.of(words))]
        # at most 17 words with what is left empty at a pool's end: 3 or more of them in each
        assert tables.num_bytes <= 8 * 64 * (2 + 20 // 3)
        assert tables.of(words) is kept[-1][1], "equal tables are one"
    for words, table in kept:
        assert table.tolist() == words and table.data_ptr() % 16 == 0


def test_tables_that_are_held_stay(tables: Tables):
    held = [tables.of([i] * 8) for i in range(64)]
    assert tables.num_bytes == 64 * 64
    assert [table.tolist() for table in held] == [[i] * 8 for i in range(64)]
    del held
    tables.of([1] * 64)
    assert tables.num_bytes == 8 * 64


def test_a_table_of_nothing_has_an_address_in_a_pool_that_is_full(tables: Tables):
    full = tables.of(range(64))
    assert tables.of([]).tolist() == [0] and len(full) == 64


def test_tables_of_copies_outlive_what_launches_them(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
):
    """A graph that has captured a pipeline reads them for as long as there is the pipeline."""
    lanes, seen = object.__new__(CudaLanes), list[tuple[tuple[Any, Any], list[int]]]()
    pads = SimpleNamespace(buffer_ptrs=[4096, 8192, 16384])
    pipeline: Any = SimpleNamespace(device=CPU, group=None, workspace=SimpleNamespace(
        rank=1, device=CPU, pads=pads, open_pads=lambda: None))  # fmt: skip
    lanes.workspace, lanes.tables, lanes.epoch = pipeline.workspace, tables, torch.zeros(2)
    lanes._awaited, lanes._num_programs = {}, 0

    def read(posts: Any, waits: Any) -> list[torch.Tensor]:
        return [lanes.posted_words(posts), lanes.awaited_words(waits)]

    def signal(_: object, posts: Any, waits: Any, *__: object, **___: object) -> object:
        held = read(posts, waits)
        seen.append(((posts, waits), [table.data_ptr() for table in held]))
        return lambda: held

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(transport, "lanes_of", lambda _: lanes)
    monkeypatch.setattr(transport, "library_of", lambda *_: None)
    monkeypatch.setattr(transport, "signal", signal)
    monkeypatch.setattr(transport.dist, "get_world_size", lambda _: 3)
    target, lane = torch.zeros(3), transport.CopyLane(pipeline)
    collective = Collective("x", "all_gather", target, target[1:2], "sum")
    memory: Any = SimpleNamespace(world_size=3, buffer_ptrs=[target.data_ptr()] * 3)
    for _ in range(2):
        lane.carrier(collective, memory, cast(Any, None))  # nobody holds it
        tables.of(range(60))
    assert len(seen) == 4
    for words, addresses in seen:
        assert [table.data_ptr() for table in read(*words)] == addresses


def test_tables_do_not_grow_in_a_capture(tables: Tables):
    some = tables.of(range(60))
    cast(Any, tables.workspace).capturing = True
    fits = tables.of([7])
    with pytest.raises(InputError, match="512 bytes of tables, all in use"):
        tables.of(range(8))
    assert some.tolist() == [*range(60)] and fits.tolist() == [7]
    cast(Any, tables.workspace).capturing = False
    with pytest.raises(UnsupportedError, match="a table of 65 words exceeds 64"):
        tables.of(range(65))
