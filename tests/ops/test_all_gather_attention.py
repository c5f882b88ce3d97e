"""all_gather_attention against fp64: forward and gradients, causal and not, grouped queries."""

import pytest
import torch
from attention_bodies import PLANS, wrong
from on_ranks import on_ranks


@pytest.mark.parametrize("causal", [False, True])
@on_ranks(1, 2, 3, 4)
def test_attention_and_gradients_are_those_of_fp64(
    rank: int, ranks: int, causal: bool
) -> list[str]:
    found: list[str] = []
    for seed, plan in enumerate(PLANS):
        found += wrong(rank, ranks, plan, (1, 12, 4, 2, 8), torch.float32, causal, seed=seed)
    found += wrong(rank, ranks, "shard_p2p", (2, 10, 6, 6, 5), torch.bfloat16, causal)
    found += wrong(rank, ranks, "shard_p2p", (3, 2, 2, 1, 16), torch.float16, causal, scale=0.3)
    return found
