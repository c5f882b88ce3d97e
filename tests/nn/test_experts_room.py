"""ExpertParallelMLP with default arguments: room for all rows, uneven tokens, and no host waits."""

import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from expert_bodies import small_kernels
from expert_layer_bodies import pair
from expert_layer_bodies import wrong_mlp as wrong_in
from island_bodies import CPU, on_islands
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.experts.routes import exchange_routes, room_for_rows
from counterpoint.group.workspace import workspace_of

FEATURES, HIDDEN, LOCAL, TOP = 16, 8, 3, 2
DTYPE = torch.bfloat16


wrong_mlp = partial(wrong_in, norm=float("inf"))


@contextmanager
def rooms() -> Iterator[list[int | None]]:
    """What calls of layers exchange routes with, as max_rows."""
    found: list[int | None] = []
    exchange = exchange_routes.on_device

    def counted(workspace: Any, experts: Any, weights: Any, room: Any, asks: str) -> Any:
        found.append(room.max_rows)
        return exchange(workspace, experts, weights, room, asks)

    with pytest.MonkeyPatch.context() as patch, by_reference():
        patch.setattr(exchange_routes, "on_device", counted)
        yield found


def layer_of(ranks: int, **options: Any) -> cnn.ExpertParallelMLP:
    return pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, **options)[0]


def drawn(
    ranks: int, tokens: Sequence[int], kind: str = "drawn", dtype: torch.dtype = DTYPE
) -> dict[str, Tensor]:
    """x, experts and weights of all ranks' tokens, and the gradient of the result."""
    total, every = sum(tokens), ranks * LOCAL
    generator = torch.Generator().manual_seed(100 * total + tokens[0])
    first, among = (every - LOCAL, LOCAL) if kind == "one rank" else (0, every)  # rows: the most
    experts = first + torch.rand(total, among, generator=generator).argsort(1)[:, :TOP]
    x, dy = (torch.randn(total, FEATURES, generator=generator).to(dtype) for _ in range(2))
    weights = torch.rand(total, TOP, generator=generator).softmax(1)
    return {"x": x, "experts": experts, "weights": weights, "dy": dy}


def inputs(rank: int, ranks: int, tokens: int) -> list[Tensor]:
    """x, experts and weights of one rank."""
    given = drawn(ranks, [tokens] * ranks)
    return [given[name].chunk(ranks)[rank] for name in ("x", "experts", "weights")]


TOKENS = {"equal": (8, 8, 8, 8), "uneven": (5, 21, 0, 2), "one has all": (0, 7, 0, 0),
          "none": (0, 0, 0, 0)}  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("plan", ["auto", "fused", "routed"])
@on_ranks(2, 4)
def test_it_has_room_for_all_rows_of_as_many_tokens_as_ranks_bring(
    rank: int, ranks: int, plan: str
) -> list[str]:
    """Against fp64; and bits of two runs are equal."""
    found: list[str] = []
    with on_islands(rank, ranks), rooms() as asked:
        layer, plain = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE, plan=plan)
        for name, of_ranks in TOKENS.items():
            tokens = list(of_ranks[:ranks])
            for kind in ("drawn", "one rank"):
                given = drawn(ranks, tokens, kind)
                wrong = wrong_mlp(rank, ranks, layer, plain, tokens, again=True, **given)
                found += [f"{name} {kind}: {text}" for text in wrong]
        most = (8, 22, 7, 0)  # 21 tokens are a multiple of 2
        wants = [max(1, ranks * n * TOP) for n in most for _ in range(4)]
        if asked != wants:
            found.append(f"room for {asked}, not for {wants}")
        if "give max_rows" in repr(layer):
            found.append(repr(layer))
    return found


@on_ranks(2)
def test_kernels_with_room_for_all_rows_of_uneven_tokens(rank: int, ranks: int) -> list[str]:
    """Interpreted, which multiplies no bf16."""
    found, dtype = list[str](), torch.float16
    with on_islands(rank, ranks), small_kernels():
        layer, plain = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=dtype)
        for tokens in ([3, 9], [4, 0]):
            given = drawn(ranks, tokens, dtype=dtype)
            found += wrong_mlp(rank, ranks, layer, plain, tokens, **given)
        assert len(layer._fits) == 2  # pyright: ignore[reportPrivateUsage]
    return found


@on_ranks(2)
def test_logits_and_any_dims(rank: int, ranks: int):
    """Without a gradient; as the layer that is told how many rows come."""
    with on_islands(rank, ranks), rooms() as asked, torch.no_grad():
        layer = layer_of(ranks)
        x = torch.randn(2, 3 + rank, FEATURES).to(DTYPE)
        logits = torch.randn(2, 3 + rank, ranks * LOCAL)
        y = layer(x, logits=logits, top_k=TOP)
        assert asked == [ranks * 8 * TOP]
        layer.plan = "serial"
        torch.testing.assert_close(y, layer(x, logits=logits, top_k=TOP), rtol=2e-2, atol=1e-2)
        assert y.shape == x.shape and len(asked) == 1
        with torch.autocast("cpu", DTYPE):
            layer.float().plan = "auto"
            half = layer(x.float(), logits=logits, top_k=TOP)
        assert len(asked) == 2
        torch.testing.assert_close(y, half, rtol=2e-2, atol=1e-2)


@on_ranks(2)
def test_a_compiled_layer_is_told_how_many_rows_come(rank: int, ranks: int) -> list[str]:
    """In one graph, of other numbers of tokens."""
    with on_islands(rank, ranks), rooms() as asked, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # dynamo's own imports warn
        layer, plain = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        traced: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        traced.named_parameters = layer.named_parameters
        found = wrong_mlp(rank, ranks, traced, plain, [5, 6], **drawn(ranks, [5, 6]))
        assert not asked
    return found


@on_ranks(2)
def test_what_has_no_room_is_told_how_many_rows_come(rank: int, ranks: int) -> list[str]:
    """Of memory of one rank that is short, of fp32, and of sizes that no one kernel takes."""
    found: list[str] = []
    with on_islands(rank, ranks), rooms() as asked, pytest.MonkeyPatch.context() as patch:
        layer, plain = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        free = 60_000 if rank else 2**40
        patch.setattr(room_for_rows, "_free_bytes", Mock(return_value=free))
        # 13 * 2 * 2 rows of 864 bytes are 45 kB, of 20 tokens 69
        for tokens in ([5, 13], [3, 3]):
            found += wrong_mlp(rank, ranks, layer, plain, tokens, **drawn(ranks, tokens))
        assert asked == [52, 12] and "max_rows=None, plan='auto'" in repr(layer)
        layer(*inputs(rank, ranks, 20))
        patch.setattr(room_for_rows, "_free_bytes", Mock(return_value=2**40))  # too late
        layer(*inputs(rank, ranks, 20))
        said = "plan='auto', short of memory for all rows of [20] tokens: give max_rows"
        assert len(asked) == 2 and said in repr(layer)
        x, experts, weights = inputs(rank, ranks, 3)
        layer.float()(x.float(), experts, weights)
        narrow = cnn.ExpertParallelMLP(10, HIDDEN, ranks * LOCAL, dtype=DTYPE)
        narrow(x[:, :10], experts, weights)
        assert len(asked) == 2
    return found


@on_ranks(2)
def test_what_is_refused_all_hear_of_and_the_group_works_on(rank: int, ranks: int):
    """Of arguments of one rank, of layers that differ, and of experts that are none."""
    with on_islands(rank, ranks), by_reference():
        layers = layer_of(ranks), cnn.ExpertParallelMLP(FEATURES, 16, ranks * LOCAL, dtype=DTYPE)
        x, experts, weights = inputs(rank, ranks, 5)
        want = layers[0](x, experts, weights)
        with pytest.raises(cp.InputError, match=r"x must be \[..., 16\], got \(5, 15\)"):
            layers[0](x[:, rank:], experts, weights)
        dist.barrier()
        assert torch.equal(layers[0](x, experts, weights), want)
        text = "hidden must be equal on all ranks, 8 as on rank 0, got 16 on rank 1"
        with pytest.raises(cp.InputError, match=f"^ExpertParallelMLP: {text}"):
            layers[rank](x, experts, weights)
        layers[1](x, experts, weights)
        # what routes have for none is no expert of a layer, on whichever way its rows go
        experts[0, 0] = 2**31 - 1
        drops = {"max_rows": 100, "capacity": "drop"}
        for options in ({"plan": "serial"}, {"plan": "routed"}, drops):
            with pytest.raises(cp.InputError, match="experts must be 0 to 5, got"):
                layer_of(ranks, **options)(x, experts, weights)


@on_ranks(2, 4)
def test_any_ranks_may_refuse_any_call(rank: int, ranks: int):
    """All ranks fail together or none does, and no call is another rank's next one."""
    layer, plain = pair(FEATURES, HIDDEN, ranks * LOCAL, dtype=DTYPE)
    draw, own = random.Random(ranks), random.Random(rank)
    with by_reference(), torch.no_grad():
        for i in range(30):
            refuse = [draw.random() < 0.25 for _ in range(ranks)]
            if own.random() < 0.3:
                time.sleep(0.03)
            tokens = 2 + (i + rank) % 3
            x, logits = torch.randn(tokens, FEATURES).to(DTYPE), torch.randn(tokens, ranks * LOCAL)
            given, error = x[:, : FEATURES - refuse[rank]], ""
            try:
                y = layer(given, logits=logits, top_k=TOP)
                torch.testing.assert_close(
                    y, plain(x, logits=logits, top_k=TOP), rtol=0.1, atol=0.1
                )
            except cp.InputError as refused:
                error = str(refused)
            assert bool(error) == any(refuse), (i, refuse, error)
    cp.check()


@on_ranks(2)
def test_who_does_not_come_is_named(rank: int, ranks: int):
    group: Any = dist.new_group()
    layer = layer_of(ranks, group=group)
    x, experts, weights = inputs(rank, ranks, 5)
    with by_reference():
        layer(x, experts, weights)
        workspace_of(group, CPU).timeout_s = 0.5
        if rank == 0:
            text = "ExpertParallelMLP: rank 1 did not come to compare its arguments within"
            with pytest.raises(cp.PeerTimeoutError, match=text):
                layer(x, experts, weights)
    dist.barrier()
