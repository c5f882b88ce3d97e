"""Routes that only the device knows: kernels interpreted against torch's stable sorts, to the bit."""

import pytest
import torch
from rankpool import RankPool
from torch import Tensor

from counterpoint.kernels import device_routes as kernels
from counterpoint.runtime import launch_routes
from counterpoint.runtime.device_routes import Found, found_by, found_by_kernels, tell_into
from counterpoint.testing.ptx import CAPABILITIES, compiled

# ranks, experts, experts of a token, tokens of a rank
SHAPES = (
    (2, 8, 2, 37), (4, 12, 3, 19), (3, 15, 4, 11), (8, 8, 2, 7), (2, 64, 8, 18), (16, 32, 16, 1),
    (2, 6, 6, 16), (2, 8, 2, 0),
)  # fmt: skip
KINDS = ("drawn", "skewed", "one expert", "last rank", "twice")


def named(kind: str, tokens: int, experts: int, top: int, ranks: int) -> Tensor:
    """Experts of all tokens; but for "drawn", a token may have one of them several times."""
    if kind == "drawn":
        return torch.rand(tokens, experts).argsort(1)[:, :top]
    if kind == "skewed":
        return (torch.rand(tokens, top) ** 4 * experts).long()
    if kind == "one expert":
        return torch.full((tokens, top), experts // 2)
    if kind == "last rank":
        return experts - 1 - torch.randint(experts // ranks, (tokens, top))
    drawn = torch.randint(experts, (tokens, top))
    drawn[:, -1] = drawn[:, 0]
    return drawn


def differ(got: Found, want: Found) -> list[str]:
    """What is not to the bit."""
    bits = (got.weights.view(torch.int32), want.weights.view(torch.int32))
    pairs = {"weights": bits, "counts": (got.counts, want.counts)}
    pairs |= {"firsts": (got.firsts, want.firsts), "lists": (got.lists, want.lists)}
    return [name for name, pair in pairs.items()
            if pair[0].dtype != pair[1].dtype or not torch.equal(*pair)]  # fmt: skip


def told_of(ids: Tensor, experts: int) -> Tensor:
    """What all ranks tell, of random weights."""
    told = torch.full((len(ids), 2 * ids.shape[1]), -7, dtype=torch.int32)
    tell_into(told, ids, torch.randn(ids.shape), experts)
    return told


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
                want = found_by(own, world, ids, weights.view(torch.float32), experts, room)
                got = found_by_kernels(own, world, every, experts, room)
                if off := differ(got, want):
                    found.append(f"{world} {experts} {top} {tokens} {own} {room}: {off}")
    return found


KERNELS = (
    kernels.tell_experts_kernel, kernels.tally_tokens_kernel, kernels.place_tokens_kernel,
    kernels.place_pairs_kernel,
)  # fmt: skip
AS_ON_GPUS: dict[str, int] = {}
MANY_BLOCKS = {
    "ITEMS": 64, "FEW_TOKENS": 2, "COUNTS": 128, "PROGRAMS": 8, "BLOCK": 32, "FILLED": 64
}  # fmt: skip
LONG_BLOCKS = {"ITEMS": 128, "FEW_TOKENS": 1, "PROGRAMS": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "held", [AS_ON_GPUS, MANY_BLOCKS, LONG_BLOCKS], ids=["as on GPUs", "many blocks", "long blocks"]
)
def test_the_kernels_find_what_stable_sorts_find(pool: RankPool, kind: str, held: dict[str, int]):
    assert pool.run(wrong_routes, 1, kind, held, group=False) == [[]]


def wrong_told(rank: int, ranks: int) -> list[str]:
    found: list[str] = []
    for dtype in (torch.int32, torch.int64):
        for tokens, top, experts in ((300, 2, 8), (7, 16, 40), (1, 1, 2), (0, 3, 4)):
            ids = torch.randint(-2, experts + 2, (tokens, top), dtype=dtype)
            if dtype == torch.int64 and tokens:
                ids[0, 0] = 2**32  # none, though its low bits are
            weights = torch.randn(tokens, top)
            got, want = (torch.full((tokens, 2 * top), -7, dtype=torch.int32) for _ in range(2))
            launch_routes.tell_into(got, ids, weights, experts)
            tell_into(want, ids, weights, experts)
            if not torch.equal(got, want):
                found.append(f"{dtype} {tokens} {top} {experts}")
    return found


def test_the_kernel_tells_what_torch_tells(pool: RankPool):
    """Wrong experts are clamped, and all weights of their tokens are NaN."""
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
