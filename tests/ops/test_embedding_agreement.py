"""When ranks of embedding bags meet: a GPU's decisions, with the words of peers made up."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedding_cases import random_bags

import counterpoint as cp
from counterpoint.ops import agreement
from counterpoint.ops import embedding_agreement as layouts
from counterpoint.ops import embedding_bag_all_to_all as operator
from counterpoint.runtime.embedding_layout import MAX_INDICES

AGREED: Any = layouts._agreed  # pyright: ignore[reportPrivateUsage]
SAID = {"op": layouts.OP, "mode": "sum", "bags": "4096", "batch": str((128,) * 32), "out": "False",
        "outputs": "None", "dims": "None", "dtype": "torch.float32", "own": "(8,)"}  # fmt: skip


class Ranks:
    """Rank 0 of two on a GPU, whose peer says the same but of its own tables."""

    def __init__(self, patch: pytest.MonkeyPatch, peer: tuple[int, ...] = (4, 8)) -> None:
        group = SimpleNamespace(size=lambda: 2)
        self.workspace: Any = SimpleNamespace(
            device=torch.device("cuda", 0), rank=0, group=group, agreed={}, code={}
        )
        self.workspace.remember = self.workspace.code.__setitem__
        self.peer, self.meetings, self.capturing = peer, 0, False
        self.refused: cp.InputError | None = None
        patch.setattr(agreement, "meet", self._meet)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.delenv("COUNTERPOINT_CHECK", raising=False)

    def _meet(self, op: str, here: Any, workspace: Any) -> list[Any]:
        self.meetings += 1
        said, _ = here
        return [here, ({**said, "own": str(self.peer)}, self.refused)]

    def layout(self, bags: Any, **more: Any) -> Any:
        given: dict[str, Any] = {
            "tables": bags.tables, "indices": bags.indices, "offsets": bags.offsets,
            "weights": None, "mode": "sum", "last": True, "batch": None, "dims": None,
            "dtype": None, "out": None, "workspace": self.workspace,
        }  # fmt: skip
        return layouts.layout_of(**given | more)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_what_is_one_ranks_alone_decides_no_meeting(ranks: Ranks):
    """Where tables lie, whether they are trained, dtypes of indices, batch= or not."""
    bags, dims = random_bags((4, 8), 6), ((4, 8), (4, 8))
    first = ranks.layout(bags, dims=dims)
    assert first.dims == dims and first.batch == (3, 3) and ranks.meetings == 1
    other = random_bags((4, 8), 6, index=torch.int32, seed=1)
    other.tables[0].requires_grad_()
    with torch.no_grad():
        ranks.layout(other, dims=dims)
    ranks.layout(other, dims=dims, weights=torch.ones(len(other.indices), requires_grad=True))
    assert ranks.layout(other, dims=[[4, 8], [4, 8]], batch=[3, 3]) == first
    assert ranks.meetings == 1
    ranks.layout(bags, dims=dims, mode="mean")
    assert ranks.meetings == 2


def test_without_dims_ranks_meet_at_each_call(ranks: Ranks):
    """Even with the same tables: whose peer's have changed cannot know."""
    bags = random_bags((4, 8), 6)
    assert ranks.layout(bags).dims == ((4, 8), (4, 8))
    ranks.peer = (16,)
    assert ranks.layout(bags).dims == ((4, 8), (16,)) and ranks.meetings == 2


def test_what_a_capture_knows(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """What the last eager call has found, checked or not; nothing of other tables."""
    bags = random_bags((4, 8), 6)
    ranks.capturing = True
    with pytest.raises(cp.InputError, match="first call of such tables"):
        ranks.layout(bags)
    ranks.capturing = False
    found = ranks.layout(bags)
    ranks.layout(bags, dims=((4, 8), (4, 8)))
    ranks.capturing = True
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    assert ranks.layout(bags) == found == ranks.layout(bags, dims=((4, 8), (4, 8)))
    with pytest.raises(cp.InputError, match="first call of such tables"):
        ranks.layout(random_bags((4, 4), 6))
    with pytest.raises(cp.InputError, match="mode must be"):
        ranks.layout(bags, mode="max")
    assert ranks.meetings == 2


def test_a_refusal_is_told_where_ranks_meet(ranks: Ranks):
    """At a first call, or without dims; where peers do not come, the rank raises by itself."""
    bags, dims = random_bags((4, 8), 6), ((4, 8), (4, 8))
    with pytest.raises(cp.InputError, match="indices must be int32"):
        ranks.layout(bags, dims=dims, indices=bags.indices.float())
    with pytest.raises(cp.InputError, match="batch must be a count >= 0"):
        ranks.layout(bags, dims=dims, batch=(-1, 7))
    with pytest.raises(cp.InputError, match=r"on rank 0, got \(\(4, 7\)"):
        ranks.layout(bags, dims=((4, 7), (4, 8)))
    assert ranks.meetings == 3 and not ranks.workspace.agreed
    ranks.refused = cp.InputError(layouts.OP, "mode", want="'sum' or 'mean'", got="'max'")
    with pytest.raises(cp.InputError, match="mode must be"):
        ranks.layout(bags, dims=dims)
    ranks.refused = None
    ranks.layout(bags, dims=dims)
    assert ranks.meetings == 5
    with pytest.raises(cp.InputError, match="indices must be int32"):
        ranks.layout(bags, dims=dims, indices=bags.indices.float())
    with pytest.raises(cp.InputError, match="on rank 0, got"):
        ranks.layout(random_bags((4, 7), 6), dims=dims)
    with pytest.raises(cp.InputError, match="batch must be a count >= 0"):
        ranks.layout(bags, dims=dims, batch=(-1, 7))
    assert ranks.meetings == 5
    with pytest.raises(cp.InputError, match="indices must be int32"):
        ranks.layout(bags, indices=bags.indices.float())
    assert ranks.meetings == 6


def test_counts_beyond_the_limits():
    """What no test can allocate: the ranks' own words are enough."""

    def agreed(*words: dict[str, str]) -> Any:
        return AGREED([(said, None) for said in words])

    found = agreed(*[SAID] * 32)
    assert found.batch == (128,) * 32 and found.dims == ((8,),) * 32
    with pytest.raises(cp.InputError, match="group must be of at most 32 ranks, got 64"):
        agreed(*[SAID | {"batch": str((64,) * 64)}] * 64)
    many = SAID | {"batch": str((1 << 29,) * 2), "own": "(8, 8)"}
    with pytest.raises(cp.InputError, match="offsets must be fewer than 2147483647 bags of all"):
        agreed(many, many)
    with pytest.raises(cp.InputError, match="op must be equal on all ranks, embedding_bag_all"):
        agreed(SAID, SAID | {"op": "matmul_all_reduce"})


def test_limits_while_compiling():
    """A compiled graph asks no other rank, and refuses the same."""
    tables, offsets = [torch.zeros(1, 8)] * 2, torch.zeros(1, dtype=torch.int64)

    def described(sizes: int, batch: list[int]) -> Any:
        group: Any = SimpleNamespace(size=lambda: sizes)
        return operator.described(
            tables, offsets, "sum", True, False, batch, ((8, 8),) * sizes, None, group
        )

    with pytest.raises(cp.InputError, match="group must be of at most 32 ranks, got 33"):
        described(33, [1] * 33)
    with pytest.raises(cp.InputError, match="offsets must be fewer than 2147483647 bags of all"):
        described(2, [1 << 29] * 2)


def test_indices_of_no_tables():
    """Which no rank could place, and no prediction could weigh."""
    none = torch.empty(0, dtype=torch.int64)
    layouts.check_bags([], none, none, None, "sum", False, "auto")
    with pytest.raises(cp.InputError, match="indices must be none without tables, got 3"):
        layouts.check_bags([], torch.arange(3), none, None, "sum", False, "auto")


def test_no_position_of_an_index_wraps():
    """A kernel reads where one bag begins, and as far behind it as another one is long."""
    longest_step = 8
    assert 2 * MAX_INDICES + longest_step < 1 << 31
