"""When ranks of embedding bags meet, and what they decide: a GPU's, with words of peers made up."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from embedding_cases import OP, problem_of, random_bags
from on_ranks import on_ranks
from rank_bodies import world
from torch.utils._python_dispatch import TorchDispatchMode

import counterpoint as cp
from counterpoint.choose.known import Knowledge
from counterpoint.embedding import call as embedding_call
from counterpoint.embedding import embedding_bag_all_to_all as operator
from counterpoint.embedding import exchange as embedding_exchange
from counterpoint.embedding import facts as embedding_facts
from counterpoint.embedding.check import check_bags
from counterpoint.embedding.layout import MAX_INDICES
from counterpoint.group.islands import islands_of
from counterpoint.ops import agreement, auto, plans

TOLD: Any = embedding_facts._told  # pyright: ignore[reportPrivateUsage]
SAID = {"op": OP, "mode": "sum", "bags": "4096", "batch": str((128,) * 32), "out": "False",
        "outputs": "None", "dims": "None", "dtype": "torch.float32", "own": "(8,)", "indices": "9",
        "plan": "auto"}  # fmt: skip
DIMS = ((4, 8), (4, 8))
# MLPerf's tables on 4 ranks: one of them has a single table, of a pooling of 100
BAGS, POOLED = 4096, (100, 38, 38, 38)
MLPERF = problem_of(((128,), (128,) * 7, (128,) * 9, (128,) * 9), (BAGS // 4,) * 4, torch.bfloat16)


class Ranks:
    """Rank 0 on a GPU, whose peers say the same but of their own tables and indices."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peers: list[dict[str, str]] = [{"own": "(4, 8)"}]
        self.workspace: Any = SimpleNamespace(
            islands=islands_of(["here"] * (1 + len(self.peers)), 0),
            device=torch.device("cuda", 0),
            rank=0,
            agreed={},
            kernels_refused="",
            code={},
            known={},
            compiled=[],
            group=SimpleNamespace(size=lambda: 1 + len(self.peers), group_name="bags"),
            check=lambda: None,
            gather=lambda spec: [spec],
            board=SimpleNamespace(note=None, refuse=lambda error: None, facts={}),
            refuse_growth=self._grown,
        )
        self.workspace.group_id = id(self.workspace.group)
        self.workspace.remember = self.workspace.code.__setitem__
        self.said: list[dict[str, str]] = []
        self.capturing, self.checked = False, 0
        self.refused: cp.InputError | None = None
        self.machine: cp.Machine | None = None
        patch.setattr(agreement, "meet", self._meet)
        for module in (auto, plans, embedding_exchange):
            patch.setattr(module, "knowledge_of", self._knowledge)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(embedding_facts, "check_bags", self._check)
        patch.setattr(embedding_call, "workspace_of", self._workspace)
        patch.setattr(embedding_call, "workspaces", SimpleNamespace(get=self._workspace))
        patch.setattr(embedding_call, "compiled", self._compiled)
        patch.setattr(embedding_call, "noted", lambda taken, *_: taken)
        patch.delenv("COUNTERPOINT_CHECK", raising=False)

    def _knowledge(self, workspace: Any) -> Knowledge:
        return Knowledge(self.machine, {})

    def _workspace(self, *_: Any) -> Any:
        return self.workspace

    @property
    def met(self) -> int:
        return len(self.said)

    def _meet(self, op: str, here: Any, *_: Any) -> list[Any]:
        said, _ = here
        self.said.append(said)
        return [here, *(({**said, **peer}, self.refused) for peer in self.peers)]

    def _check(self, *given: Any) -> None:
        self.checked += 1
        check_bags(*given)

    def _compiled(self, plan: Any, asked: str, workspace: Any, like: Any) -> str:
        self.workspace.compiled.append(plan.spec)
        return plan.spec

    def _grown(self, got: str) -> None:
        if self.capturing:
            raise cp.InputError("counterpoint", "workspace", want="warm", got=got)

    def asked(self, bags: Any, **more: Any) -> Any:
        given: dict[str, Any] = {
            "tables": bags.tables, "indices": bags.indices, "offsets": bags.offsets,
            "weights": None, "mode": "sum", "last": True, "batch": None, "dims": None,
            "dtype": None, "out": None, "plan": "serial",
        }  # fmt: skip
        return embedding_facts.Asked(**given | more)

    def agreed(self, bags: Any, **more: Any) -> Any:
        return embedding_facts.agreed(self.asked(bags, **more), self.workspace, False)

    def tables(self, bags: Any, **more: Any) -> Any:
        return self.agreed(bags, **more)[0].tables

    def ready(self, bags: Any, **more: Any) -> Any:
        """As on a GPU, of tensors that lie elsewhere."""
        asked = self.asked(bags, **more)
        with pytest.MonkeyPatch.context() as patch:
            where = property(lambda _: torch.device("cuda:0"))
            patch.setattr(embedding_facts.Asked, "device", where)
            return embedding_call.ready_for(tuple(asked), self.workspace.group, asks=False).ready

    def chosen(self, pooled: int = 0, into: bool = True, **more: Any) -> str:
        """Of MLPerf's tables, which no rank here has."""
        self.peers = [{"own": str(own), "indices": str(n * BAGS)}
                      for own, n in zip(MLPERF.tables[1:], POOLED[1:], strict=True)]  # fmt: skip
        bags = SimpleNamespace(
            tables=[torch.empty(1, 128, dtype=torch.bfloat16, device="meta")],
            indices=torch.empty((pooled or POOLED[0]) * BAGS, dtype=torch.int64, device="meta"),
            offsets=torch.empty(BAGS + 1, dtype=torch.int64, device="meta"),
        )
        out: Any = object.__new__(cp.PooledOutputs) if into else None
        if into:
            out.group, out.device = self.workspace.group, self.workspace.device
            out.columns, out.dtype, out.batch = MLPERF.n, torch.bfloat16, MLPERF.rows
            out.captured = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedding_facts, "check_bags", self._workspace)
            return self.agreed(bags, dims=MLPERF.tables, out=out, **more)[1].spec


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_what_is_one_ranks_alone_decides_no_meeting(ranks: Ranks):
    """Where tables lie, whether they are trained, dtypes of indices, batch= or not."""
    bags = random_bags((4, 8), 6)
    first, _ = ranks.agreed(bags, dims=DIMS)
    assert first.tables == DIMS and first.rows == (3, 3) and ranks.met == 1
    other = random_bags((4, 8), 6, index=torch.int32, seed=1)
    other.tables[0].requires_grad_()
    with torch.no_grad():
        ranks.agreed(other, dims=DIMS)
    ranks.agreed(other, dims=DIMS, weights=torch.ones(len(other.indices), requires_grad=True))
    assert ranks.agreed(other, dims=[[4, 8], [4, 8]], batch=[3, 3])[0] == first
    assert ranks.met == 1
    for more in ({"mode": "mean"}, {"plan": "fused"}):
        ranks.agreed(bags, dims=DIMS, **more)
    assert ranks.met == 3


def test_without_dims_ranks_meet_at_each_call(ranks: Ranks):
    """Even with the same tables: whose peer's have changed cannot know."""
    bags = random_bags((4, 8), 6)
    assert ranks.tables(bags) == DIMS
    ranks.peers = [{"own": "(16,)"}]
    assert ranks.tables(bags) == ((4, 8), (16,)) and ranks.met == 2


def test_what_a_capture_knows(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """What the last eager call has found, checked or not; nothing of other tables."""
    bags = random_bags((4, 8), 6)
    ranks.capturing = True
    monkeypatch.setattr(embedding_facts, "refuse_capture", ranks.workspace.refuse_growth)
    with pytest.raises(cp.InputError, match="first call of such tables"):
        ranks.agreed(bags)
    ranks.capturing = False
    found = ranks.agreed(bags)
    ranks.agreed(bags, dims=DIMS)
    ranks.capturing = True
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    assert ranks.agreed(bags) == found == ranks.agreed(bags, dims=DIMS)
    with pytest.raises(cp.InputError, match="first call of such tables"):
        ranks.agreed(random_bags((4, 4), 6))
    with pytest.raises(cp.InputError, match="mode must be"):
        ranks.agreed(bags, mode="max")
    assert ranks.met == 2


def test_a_refusal_is_told_where_ranks_meet(ranks: Ranks):
    """At a first call, or without dims; where peers do not come, the rank raises by itself."""
    bags = random_bags((4, 8), 6)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("indices must be int32", {"indices": bags.indices.float()}),
        ("batch must be a count >= 0", {"batch": (-1, 7)}),
    ]
    for text, more in wrong:
        with pytest.raises(cp.InputError, match=text):
            ranks.agreed(bags, dims=DIMS, **more)
    with pytest.raises(cp.InputError, match=r"on rank 0, got \(\(4, 7\)"):
        ranks.agreed(bags, dims=((4, 7), (4, 8)))
    with pytest.raises(cp.InputError, match="plan must be auto or one of serial, fused"):
        ranks.agreed(bags, dims=DIMS, plan="graded")
    assert ranks.met == 4 and not ranks.workspace.agreed
    ranks.refused = cp.InputError(OP, "mode", want="'sum' or 'mean'", got="'max'")
    with pytest.raises(cp.InputError, match="mode must be"):
        ranks.agreed(bags, dims=DIMS)
    ranks.refused = None
    ranks.agreed(bags, dims=DIMS)
    assert ranks.met == 6
    for text, more in wrong:
        with pytest.raises(cp.InputError, match=text):
            ranks.agreed(bags, dims=DIMS, **more)
    with pytest.raises(cp.InputError, match="on rank 0, got"):
        ranks.agreed(random_bags((4, 7), 6), dims=DIMS)
    assert ranks.met == 6
    with pytest.raises(cp.InputError, match="indices must be int32"):
        ranks.agreed(bags, indices=bags.indices.float())
    assert ranks.met == 7


def test_counts_beyond_the_limits():
    """What no test can allocate: the ranks' own words are enough."""

    def told(*words: dict[str, str]) -> Any:
        return TOLD([(said, None) for said in words])

    found = told(*[SAID] * 32)
    assert found.rows == (128,) * 32 and found.tables == ((8,),) * 32 and found.indices == (9,) * 32
    with pytest.raises(cp.InputError, match="group must be of at most 32 ranks, got 64"):
        told(*[SAID | {"batch": str((64,) * 64)}] * 64)
    many = SAID | {"batch": str((1 << 29,) * 2), "own": "(8, 8)"}
    with pytest.raises(cp.InputError, match="offsets must be fewer than 2147483647 bags of all"):
        told(many, many)
    with pytest.raises(cp.InputError, match="op must be equal on all ranks, embedding_bag_all"):
        told(SAID, SAID | {"op": "matmul_all_reduce"})


def test_limits_while_compiling():
    """A compiled graph asks no other rank, and refuses the same."""
    tables, offsets = [torch.zeros(1, 8)] * 2, torch.zeros(1, dtype=torch.int64)
    none = torch.empty(0, dtype=torch.int64)

    def described(sizes: int, batch: list[int]) -> Any:
        group: Any = SimpleNamespace(size=lambda: sizes)
        asked = embedding_facts.Asked(
            tables, none, offsets, None, "sum", True, batch, ((8, 8),) * sizes, None, None, "auto"
        )
        return operator.described(asked, False, group)

    with pytest.raises(cp.InputError, match="group must be of at most 32 ranks, got 33"):
        described(33, [1] * 33)
    with pytest.raises(cp.InputError, match="offsets must be fewer than 2147483647 bags of all"):
        described(2, [1 << 29] * 2)


def test_indices_of_no_tables():
    """Which no rank could place, and no prediction could weigh."""
    none = torch.empty(0, dtype=torch.int64)
    check_bags([], none, none, None, "sum", False)
    with pytest.raises(cp.InputError, match="indices must be none without tables, got 3"):
        check_bags([], torch.arange(3), none, None, "sum", False)


def test_no_position_of_an_index_wraps():
    """A kernel reads where one bag begins, and as far behind it as another one is long."""
    longest_step = 8
    assert 2 * MAX_INDICES + longest_step < 1 << 31


# what auto takes


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("plan", ["fused", "serial"])
def test_auto_takes_what_the_chooser_says(ranks: Ranks, plan: str, into: bool):
    problem = replace(MLPERF, indices=tuple(n * BAGS for n in POOLED), out=into)
    machine = cp.choose(problem, "h200-4").machine
    if plan == "serial":  # where a peer's memory is stored to slowly
        machine = replace(machine, measured=replace(machine.costs, copy_bytes_per_s=1e9))
    ranks.machine = machine
    assert ranks.chosen(into=into, plan="auto") == cp.choose(problem, machine).spec == plan


def test_what_is_asked_for_is_taken(ranks: Ranks):
    assert [ranks.chosen(plan=plan) for plan in ("serial", "fused")] == ["serial", "fused"]


def test_it_is_decided_once(ranks: Ranks):
    """By all ranks' indices of the first call; for each layout, mode and kind of output."""
    ranks.machine = cp.preset("h200-4")
    first = ranks.chosen(plan="auto")
    assert ranks.met == 1 and ranks.said[0]["indices"] == str(POOLED[0] * BAGS)
    for pooled in (1, 5, 1000):
        assert ranks.chosen(pooled, plan="auto") == first
    assert ranks.met == 1
    ranks.chosen(plan="auto", mode="mean")
    ranks.chosen(plan="auto", into=False)
    assert ranks.met == 3


def test_a_machine_that_nobody_knows_is_serial(ranks: Ranks):
    assert ranks.chosen(plan="auto") == "serial" and ranks.met == 1


# what a repeated call is known by


def halved(tables: list[torch.Tensor]) -> None:
    for t in tables:
        t.data = t.data.half()


def turned(tables: list[torch.Tensor]) -> None:
    tables[1].t_()


def cut(tables: list[torch.Tensor]) -> None:
    tables[0].resize_(3, 4)


def narrowed(tables: list[torch.Tensor]) -> None:
    tables[1] = tables[1][:, :4]


def replaced(tables: list[torch.Tensor]) -> None:
    tables[0] = tables[0].clone()


@pytest.mark.parametrize("change", [halved, turned, cut, narrowed, replaced])
def test_a_table_that_changed_is_seen(ranks: Ranks, change: Callable[[list[torch.Tensor]], None]):
    """In place, as modules are converted, or as another view of the same memory."""
    bags = random_bags((4, 8), 6)
    first = ranks.ready(bags, dims=DIMS)
    assert ranks.ready(bags, dims=DIMS) is first and ranks.checked == 1
    change(bags.tables)
    with suppress(cp.InputError):
        ranks.ready(bags, dims=DIMS)
    assert ranks.checked == 2


def test_every_other_argument_counts(ranks: Ranks):
    """Another one is checked anew; how many indices there are is not one."""
    bags = random_bags((4, 8), 6)
    base: dict[str, Any] = {"dims": DIMS}
    ones = torch.ones(len(bags.indices))
    changes: list[dict[str, Any]] = [
        {}, {"mode": "mean"}, {"batch": (3, 3)}, {"dtype": torch.float32}, {"plan": "fused"},
        {"indices": bags.indices.int()}, {"offsets": bags.offsets.int()}, {"weights": ones},
        {"last": False, "offsets": bags.offsets[:-1]},
    ]  # fmt: skip
    for number, change in enumerate(changes, 1):
        for _ in range(2):
            ranks.ready(bags, **base | change)
        assert ranks.checked == number == len(ranks.workspace.known)
    ranks.ready(bags, **base, indices=bags.indices[:3])
    ranks.ready(bags, dims=[[4, 8], [4, 8]], batch=None)
    assert ranks.checked == len(changes)


def test_what_is_always_checked(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    bags = random_bags((4, 8), 6)
    ranks.ready(bags, dims=DIMS)
    long = torch.ones(2 * len(bags.indices))[::2]
    wrong: list[dict[str, Any]] = [
        {"indices": bags.indices[None]}, {"indices": bags.indices.repeat(2)[::2]},
        {"weights": torch.ones(3)}, {"weights": long}, {"tables": bags.tables[0]}, {"tables": 3},
        {"tables": [1]}, {"offsets": None}, {"out": 3}, {"plan": ["serial"]},
        {"indices": bags.indices.float()},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(cp.InputError):
            ranks.ready(bags, **{"dims": DIMS} | change)
    assert len(ranks.workspace.known) == 1
    monkeypatch.setattr(embedding_call, "MAX_INDICES", 2)
    before = ranks.checked
    ranks.ready(bags, dims=DIMS)
    assert ranks.checked == before + 1


def test_checks_are_made_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """On a GPU, where the columns of all ranks are given; else ranks meet at each call."""
    bags = random_bags((4, 8), 6)
    first = ranks.ready(bags, dims=DIMS)
    bags.indices = bags.indices[:5]
    assert ranks.ready(bags, dims=DIMS) is first and ranks.checked == ranks.met == 1
    bags.tables = [t.clone() for t in bags.tables]
    assert ranks.ready(bags, dims=DIMS) is first and (ranks.checked, ranks.met) == (2, 1)
    monkeypatch.setenv("COUNTERPOINT_CHECK", "1")
    bags = random_bags((4, 8), 6)
    ranks.ready(bags, dims=DIMS)
    assert (ranks.checked, ranks.met) == (3, 2) and ranks.said[-1]["values"] == ""
    monkeypatch.delenv("COUNTERPOINT_CHECK")
    for _ in range(2):
        ranks.ready(bags)
    assert (ranks.checked, ranks.met) == (5, 4)
    assert ranks.workspace.compiled == ["serial"]


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


@on_ranks(2)
def test_who_watches_operators_sees_it(rank: int, ranks: int):
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
    assert all([torch.equal(ys[0], ys[1]), torch.equal(one, other) and bool(one.any()),
            bags.tables[0].grad is None, name in mode.names])  # fmt: skip
