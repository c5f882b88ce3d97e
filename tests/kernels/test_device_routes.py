"""Routes that only the device knows: kernels interpreted against stable sorts, to the bit."""

import pytest
import torch
from rankpool import RankPool
from routed_bodies import KINDS, differ, named, told_of

from counterpoint.errors import UnsupportedError
from counterpoint.kernels import device_routes as kernels
from counterpoint.runtime import launch_routes
from counterpoint.runtime.device_routes import (
    Sizes,
    by_kernels,
    found_by,
    found_by_kernels,
    tell_into,
)
from counterpoint.runtime.routes import NONE
from counterpoint.testing.ptx import CAPABILITIES, compiled

# ranks, experts, experts of a token, tokens of a rank
SHAPES = (
    (2, 8, 2, 37), (4, 12, 3, 19), (3, 15, 4, 11), (8, 8, 2, 7), (2, 64, 8, 18), (16, 32, 16, 1),
    (2, 6, 6, 16), (2, 8, 2, 0),
)  # fmt: skip


def wrong_routes(rank: int, ranks: int, kind: str, held: dict[str, int]) -> list[str]:
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in held.items():
            patch.setattr(launch_routes, name, value)
        for i, (world, experts, top, tokens) in enumerate(SHAPES):
            every = told_of(named(kind, world * tokens, experts, top, world), experts)
            ids, weights = every[:, :top].long(), every[:, top:].contiguous()
            own = (i + 1) % world
            rows = int((ids // (experts // world) == own).sum())
            for room in (rows + 5, max(1, rows // 3)):  # and where not all fit
                sizes = Sizes(tokens, top, world, room)
                want = found_by(own, sizes, ids, weights.view(torch.float32), experts)
                got = found_by_kernels(own, sizes, every, experts)
                if off := differ(got, want):
                    found.append(f"{world} {experts} {top} {tokens} {own} {room}: {off}")
    return found


KERNELS = (
    kernels.tell_experts_kernel, kernels.tally_tokens_kernel, kernels.place_tokens_kernel,
    kernels.place_pairs_kernel,
)  # fmt: skip
MANY_BLOCKS = {
    "ITEMS": 64, "FEW_TOKENS": 2, "COUNTS": 128, "PROGRAMS": 8, "BLOCK": 32, "FILLED": 64
}  # fmt: skip
LONG_BLOCKS = {"ITEMS": 128, "FEW_TOKENS": 1, "PROGRAMS": 1}


@pytest.mark.parametrize(
    ("held", "kind"),
    [*(({}, kind) for kind in KINDS), (MANY_BLOCKS, "skewed"), (MANY_BLOCKS, "twice"),
     (MANY_BLOCKS, "fewer"), (LONG_BLOCKS, "fewer"), (LONG_BLOCKS, "drawn"),
     (LONG_BLOCKS, "one expert")],
)  # fmt: skip
def test_the_kernels_find_what_stable_sorts_find(pool: RankPool, held: dict[str, int], kind: str):
    assert pool.run(wrong_routes, 1, kind, held, group=False) == [[]]


def asked(rank: int, ranks: int) -> list[bool]:
    """Whether kernels find routes: on CPU ranks, if they could, between islands, if none fits."""
    device = torch.device("cpu")

    def kernels(*sizes: int) -> bool:
        by_kernels.cache_clear()
        return by_kernels(Sizes(*sizes), 8, torch.int64, device)

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


def wrong_told(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for dtype in (torch.int32, torch.int64):
        for tokens, top, experts in ((300, 2, 8), (7, 16, 40), (1, 1, 2), (0, 3, 4)):
            ids = torch.randint(-2, experts + 2, (tokens, top), dtype=dtype)
            if dtype == torch.int64 and tokens:
                ids[0, 0] = 2**32  # none, though its low bits are
            ids[torch.rand(ids.shape) < 0.2] = NONE
            weights = torch.randn(tokens, top)
            got, want = (torch.full((tokens, 2 * top), -7, dtype=torch.int32) for _ in range(2))
            launch_routes.tell_into(got, ids, weights, experts)
            tell_into(want, ids, weights, experts)
            if not torch.equal(got, want):
                found.append(f"{dtype} {tokens} {top} {experts}")
    return found


def test_the_kernel_tells_what_torch_tells(pool: RankPool):
    """Wrong experts are clamped, and all weights of their tokens are NaN; NONE is no such."""
    assert pool.run(wrong_told, 1, group=False) == [[]]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("ranks", "experts", "top"), [(8, 256, 8), (2, 512, 16)])
def test_all_stays_in_registers(capability: int, ranks: int, experts: int, top: int):
    """And two programs of each kernel are on an SM at once."""
    shares = launch_routes.shares_of(4096, ranks, experts)
    fixed = launch_routes.fixed_of(*shares, ranks, experts, top)
    told = (("TOP", top), ("E", experts), ("BLOCK", launch_routes.BLOCK))
    for kernel, known in zip(KERNELS, (told, *fixed), strict=True):
        constants = dict(known)
        types = {
            name: "*i64" if name in ("counts_ptr", "table_ptr") else "*i32" if "ptr" in name
            else "i32" for name in kernel.arg_names if name not in constants
        }  # fmt: skip
        aligned = tuple(name for name in types if name.endswith("ptr"))
        found = compiled(
            kernel, capability, types, constants, aligned=aligned, num_warps=launch_routes.NUM_WARPS
        )
        assert not found.spills and found.registers <= 128, kernel.__name__
