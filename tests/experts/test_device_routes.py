"""Routes that only the device knows: kernels interpreted against stable sorts, to the bit."""

import pytest
import torch
from on_ranks import on_ranks
from rankpool import RankPool
from routed_bodies import KINDS, differ, named, told_of

from counterpoint.errors import UnsupportedError
from counterpoint.experts.routes import launch as launch_routes
from counterpoint.experts.routes.lists import NONE
from counterpoint.experts.routes.on_device import Sizes, found_by
from counterpoint.experts.routes.tell import by_kernels, found_by_kernels, tell_into
from counterpoint.experts.steps_counted import rows_here

# ranks, experts, experts of a token, tokens of a rank
SHAPES = (
    (2, 8, 2, 37), (4, 12, 3, 19), (3, 15, 4, 11), (8, 8, 2, 7), (2, 64, 8, 18), (16, 32, 16, 1),
    (2, 6, 6, 16), (2, 8, 2, 0),
)  # fmt: skip


HELD: dict[str, dict[str, int]] = {
    "as launched": {},
    "many blocks": {"ITEMS": 64, "FEW_TOKENS": 2, "COUNTS": 128, "PROGRAMS": 8, "BLOCK": 32,
                    "FILLED": 64},
    "long blocks": {"ITEMS": 128, "FEW_TOKENS": 1, "PROGRAMS": 1},
}  # fmt: skip


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("held", "kind"),
    [*(("as launched", kind) for kind in KINDS),
     *(("many blocks", kind) for kind in ("skewed", "twice", "fewer")),
     *(("long blocks", kind) for kind in ("fewer", "drawn", "one expert"))],
)  # fmt: skip
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@on_ranks(1)
def test_the_kernels_find_what_stable_sorts_find(
    rank: int, ranks: int, held: str, kind: str, sizes: tuple[int, int, int, int]
) -> list[str]:
    found: list[str] = []
    world, experts, top, tokens = sizes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HELD[held].items():
            patch.setattr(launch_routes, name, value)
        launch_routes._known.cache_clear()
        every = told_of(named(kind, world * tokens, experts, top, world), experts)
        ids, weights = every[:, :top].long(), every[:, top:].contiguous()
        own = (SHAPES.index(sizes) + 1) % world
        rows = int((ids // (experts // world) == own).sum())
        for room in (rows + 5, max(1, rows // 3)):  # and where not all fit
            given = Sizes(tokens, top, world, room)
            want = found_by(own, given, ids, weights.view(torch.float32), experts)
            if off := differ(found_by_kernels(own, given, every, experts), want):
                found.append(f"{own} {room}: {off}")
    return found


def asked(rank: int, ranks: int) -> list[bool]:
    """Whether kernels find routes: on CPU ranks, if they could, between islands, if none fits."""
    device = torch.device("cpu")

    def kernels(*sizes: int) -> bool:
        by_kernels.cache_clear()
        return by_kernels(Sizes(*sizes), 8, (torch.int64, torch.float32), device)

    def refuse(*_: object) -> None:
        raise UnsupportedError("it does not fit")

    found = [kernels(5, 2, 4, 9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_routes, "takes", lambda *_: True)
        found += [kernels(5, 2, 4, 9), kernels(0, 2, 4, 1), kernels(5, 2, 4, 9, 2)]
        patch.setattr(launch_routes, "routes_into", refuse)
        found.append(kernels(5, 2, 4, 9))
    by_kernels.cache_clear()
    return found


def test_torch_finds_what_kernels_cannot(pool: RankPool):
    assert pool.run(asked, 1, group=False) == [[False, True, True, False, False]]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top", "experts"), [(300, 2, 8), (7, 16, 40), (1, 1, 2), (0, 3, 4)]
)
@on_ranks(1)
def test_the_kernel_tells_what_torch_tells(
    rank: int, ranks: int, tokens: int, top: int, experts: int, dtype: torch.dtype
):
    """Wrong experts are clamped, and all weights of their tokens are NaN; NONE is no such."""
    ids = torch.randint(-2, experts + 2, (tokens, top), dtype=dtype)
    if dtype == torch.int64 and tokens:
        ids[0, 0] = 2**32  # none, though its low bits are
    ids[torch.rand(ids.shape) < 0.2] = NONE
    weights = torch.randn(tokens, top).to(torch.bfloat16 if dtype == torch.int32 else torch.float32)
    got, want = (torch.full((tokens, 2 * top), -7, dtype=torch.int32) for _ in range(2))
    launch_routes.tell_into(got, ids, weights, experts)
    tell_into(want, ids, weights, experts)
    assert torch.equal(got, want)


@on_ranks(1)
def test_numbers_of_rows_go_to_their_entries(rank: int, ranks: int):
    for rows in (1, 700, 1500):
        sent, each = torch.zeros(1001), torch.randn(rows)
        entries = torch.randperm(2000)[:rows].int()
        want = sent.clone()
        want[entries[entries < 1001].long()] = each[entries < 1001]
        launch_routes.name_entries(sent, entries, each)
        assert torch.equal(sent, want)


@on_ranks(1)
def test_rows_here_end_where_there_is_room(rank: int, ranks: int):
    counts = torch.randint(0, 9, (4, 12))
    for own, room in ((0, 10_000), (3, 20)):
        rows, ends = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        launch_routes.rows_into(rows, ends, counts, own, room)
        want = rows_here(counts, own, 4, room)  # on a CPU by torch
        assert torch.equal(rows, want.rows) and torch.equal(ends, want.ends)
