"""What a repeated call of embedding bags is known by, and what is seen to have changed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedding_cases import random_bags
from rank_bodies import world
from rankpool import RankPool
from torch.utils._python_dispatch import TorchDispatchMode

import counterpoint as cp
from counterpoint.ops import embedding_agreement
from counterpoint.ops.embedding_seen import facts_seen

DIMS = ((4, 8), (4, 8))


def arguments(**more: Any) -> dict[str, Any]:
    bags = random_bags((4, 8), 6)
    given: dict[str, Any] = {
        "tables": bags.tables, "indices": bags.indices, "offsets": bags.offsets, "weights": None,
        "mode": "sum", "last": True, "batch": None, "dims": DIMS, "dtype": None, "out": None,
        "plan": "auto",
    }  # fmt: skip
    return given | more


def with_(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return given | change


def halved(tables: list[torch.Tensor]) -> None:
    for t in tables:
        t.data = t.data.half()


def turned(tables: list[torch.Tensor]) -> None:
    tables[1].t_()


def cut(tables: list[torch.Tensor]) -> None:
    tables[0].resize_(3, 4)


def narrowed(tables: list[torch.Tensor]) -> None:
    tables[1] = tables[1][:, :4]


def moved(tables: list[torch.Tensor]) -> None:
    tables[0] = tables[0].to("meta")


@pytest.mark.parametrize("change", [halved, turned, cut, narrowed, moved])
def test_a_table_that_changed_is_seen(change: Callable[[list[torch.Tensor]], None]):
    """In place, as modules are converted, or as another view of the same memory."""
    given = arguments()
    before = facts_seen(**given)
    assert before is not None and facts_seen(**given) == before
    change(given["tables"])
    after = facts_seen(**given)
    assert after is not None and after != before


def test_every_other_argument_counts():
    outs: list[Any] = [
        SimpleNamespace(group=None, device="cpu", columns=c, dtype=None, batch=(3, 3))
        for c in (24, 25)
    ]
    base = arguments()
    changes: list[dict[str, Any]] = [
        {}, {"mode": "mean"}, {"last": False}, {"batch": (3, 3)}, {"batch": (2, 4)}, {"dims": None},
        {"dims": ((4, 8), (4,))}, {"dtype": torch.float32}, {"out": outs[0]}, {"out": outs[1]},
        {"plan": "serial"}, {"indices": base["indices"].int()}, {"offsets": base["offsets"].int()},
        {"offsets": base["offsets"][:-2]}, {"tables": base["tables"][:1]},
        {"weights": torch.ones(len(base["indices"]))},
        {"weights": torch.ones(len(base["indices"])).half()},
    ]  # fmt: skip
    found = [facts_seen(**with_(base, change)) for change in changes]
    assert None not in found and len(set(found)) == len(changes)


def test_how_many_indices_does_not_count():
    """It differs at each call. Of lists, what is in them counts, not which they are."""
    base = arguments(batch=[3, 3], dims=[[4, 8], [4, 8]])
    found = facts_seen(**base)
    assert found == facts_seen(**with_(base, {"indices": base["indices"][:3]}))
    assert found == facts_seen(**with_(base, {"batch": (3, 3), "dims": DIMS}))
    base["dims"][1][0] = 5
    assert found != facts_seen(**base)


def test_what_is_always_checked(monkeypatch: pytest.MonkeyPatch):
    base = arguments()
    wrong: list[dict[str, Any]] = [
        {"indices": base["indices"][None]}, {"indices": base["indices"].repeat(2)[::2]},
        {"weights": torch.ones(3)}, {"weights": torch.ones(2 * len(base["indices"]))[::2]},
        {"tables": base["tables"][0]}, {"tables": 3}, {"tables": [1]}, {"offsets": None},
        {"out": 3}, {"plan": ["serial"]},
    ]  # fmt: skip
    for change in wrong:
        assert facts_seen(**with_(base, change)) is None, change
    monkeypatch.setattr("counterpoint.ops.embedding_seen.MAX_INDICES", 2)
    assert facts_seen(**base) is None


def test_checks_are_made_once(monkeypatch: pytest.MonkeyPatch):
    """On a GPU, where the columns of all ranks are given; else ranks meet at each call."""
    meetings: list[Any] = []

    def meet(op: str, here: Any, workspace: Any) -> list[Any]:
        meetings.append(here)
        return [here, here]

    checked: list[int] = []
    check = embedding_agreement.check_bags

    def counted(*given: Any) -> None:
        checked.append(1)
        check(*given)

    monkeypatch.setattr(embedding_agreement.agreement, "meet", meet)
    monkeypatch.setattr(embedding_agreement, "check_bags", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("COUNTERPOINT_CHECK", raising=False)
    code: dict[Any, Any] = {}
    workspace: Any = SimpleNamespace(
        device=torch.device("cuda", 0), rank=0, group=SimpleNamespace(size=lambda: 2), agreed={},
        code=code, remember=code.__setitem__,
    )  # fmt: skip
    given = arguments(workspace=workspace)
    first = embedding_agreement.layout_of(**given)
    given["indices"] = given["indices"][:5]
    given["tables"] = [t.clone() for t in given["tables"]]
    assert embedding_agreement.layout_of(**given) is first and len(checked) == len(meetings) == 1
    with pytest.raises(cp.InputError, match="indices must be int32"):
        wrong: dict[str, Any] = given | {"indices": given["indices"].float()}
        embedding_agreement.layout_of(**wrong)
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    embedding_agreement.layout_of(**given)
    assert len(checked) == 3 and len(meetings) == 2
    monkeypatch.delenv("COUNTERPOINT_CHECK")
    given["dims"] = None
    for _ in range(2):
        embedding_agreement.layout_of(**given)
    assert len(checked) == 5 and len(meetings) == 4


class Watching(TorchDispatchMode):
    """Names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def watched(rank: int, ranks: int) -> list[bool]:
    """The same numbers and gradients with and without the dispatcher; of a table that is frozen."""
    bags = random_bags((4, 8), 6, seed=rank)
    bags.tables[1].requires_grad_()
    gradients: list[torch.Tensor | None] = []
    ys: list[torch.Tensor] = []
    mode = Watching()
    for watching in (False, True):
        bags.tables[1].grad = None
        arguments = bags.tables, bags.indices, bags.offsets
        if watching:
            with mode:
                ys.append(cp.embedding_bag_all_to_all(*arguments, include_last_offset=True,
                                                      group=world()))  # fmt: skip
        else:
            ys.append(cp.embedding_bag_all_to_all(*arguments, include_last_offset=True))
        (ys[-1] * torch.arange(24.0)).sum().backward()
        gradients.append(bags.tables[1].grad)
    one, other = gradients
    assert one is not None and other is not None
    name = "counterpoint.embedding_bag_all_to_all.default"
    return [torch.equal(ys[0], ys[1]), torch.equal(one, other) and bool(one.any()),
            bags.tables[0].grad is None, name in mode.names]  # fmt: skip


def test_who_watches_operators_sees_it(pool: RankPool):
    assert pool.run(watched, 2) == [[True] * 4] * 2
