"""Sharded blocks compute what they compute as a whole."""

import pytest
import torch
from rankpool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import blocks
from benchmarks.compile import local
from counterpoint.errors import InputError

SIZES = blocks.Sizes(layers=2, batch=2)
SHARDED = [name for name in blocks.NAMES if name != blocks.DECODE]


def errors(rank: int, ranks: int, name: str) -> list[float]:
    """How far off the result, the input's gradient and the weights' gradients are."""
    mesh = init_device_mesh("cpu", (ranks,))
    by_sequence = not name.endswith(blocks.TP)
    model, x = blocks.made(name, SIZES, mesh, dtype=torch.float64, seed=3)
    torch.manual_seed(3)
    alone = blocks.whole(name, SIZES).double()
    full = blocks.inputs(name, SIZES, seed=3).double()
    dy = torch.randn(full.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(ranks, 1)[rank] if by_sequence else t

    got, want = ([y, *torch.autograd.grad(y, [t, *m.parameters()], d)] for m, t, d in (
        (model, x.requires_grad_(), mine(dy)), (alone, full.requires_grad_(), dy),
    ) for y in [m(t)])  # fmt: skip
    assert torch.equal(x, mine(full))
    want[:2] = [mine(t) for t in want[:2]]
    shards = zip(got[2:], want[2:], strict=True)
    want[2:] = [_as(g, w, rank, ranks) for g, w in shards]
    # the gradient of a bias of keys is zero but for rounding
    with torch.no_grad():
        return [float((local(g) - w).norm() / w.norm().clamp(min=1e-2))
                for g, w in zip(got, want, strict=True)]  # fmt: skip


def _as(sharded: torch.Tensor, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    for place in getattr(sharded, "placements", ()):
        if place.is_shard():
            return whole.chunk(ranks, place.dim)[rank]
    return whole


@pytest.mark.drawn(8)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_is_as_the_whole_one(pool: RankPool, name: str, ranks: int):
    for found in pool.run(errors, ranks, name):
        assert len(found) > 10 and max(found) < 1e-12, found


@torch.no_grad()
def decoded(rank: int, ranks: int) -> float:
    """How far off the last token of a sequence is, whose keys and values before it are cached."""
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = SIZES._replace(layers=1)
    torch.manual_seed(2)
    alone = blocks.whole(f"llama{blocks.TP}", sizes).double()
    x = blocks.inputs("llama", sizes).double()
    model, token = blocks.made(blocks.DECODE, sizes, mesh, dtype=torch.float64, seed=2)
    assert token.shape == (sizes.batch, 1, sizes.width.dim)
    whole, cached = alone.blocks[0], model.blocks[0].attention
    h = whole.attention_norm(x)
    b, s, _ = x.shape
    k, v = (w(h).view(b, s, -1, cached.columns).transpose(1, 2)
            for w in (whole.attention.wk, whole.attention.wv))  # fmt: skip
    for cache, wanted in ((cached.keys, whole.attention.rotary(k)), (cached.values, v)):
        cache.copy_(wanted.chunk(ranks, 1)[rank])
        cache[..., -1, :] = torch.nan  # of the token itself
    return float((model(x[:, -1:]) - alone(x)[:, -1:]).norm())


def test_a_decode_is_the_last_token_of_a_prefill(pool: RankPool):
    assert max(pool.run(decoded, 2)) < 1e-12


def test_a_name_that_there_is_not():
    with pytest.raises(InputError, match="name must be one of llama, "):
        blocks.whole("lama", SIZES)
