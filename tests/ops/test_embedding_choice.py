"""Which way embedding bags take on GPUs: one decision of all ranks, with the words of a peer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import counterpoint as cp
from counterpoint.choose.known import Knowledge
from counterpoint.ops import agreement, embedding_choice
from counterpoint.ops.embedding_call import Given, How
from counterpoint.ops.embedding_choice import way_of
from counterpoint.runtime.embedding_layout import Layout

BAGS = 4096
# MLPerf's tables on 4 ranks: one of them has a single table, of a pooling of 100
LAYOUT = Layout(((128,), (128,) * 7, (128,) * 9, (128,) * 9), (BAGS // 4,) * 4, torch.bfloat16)
POOLED = (100, 38, 38, 38)  # rows of a sample


class Ranks:
    """One rank of four H200s, whose peers say how many indices they have."""

    def __init__(self, patch: pytest.MonkeyPatch, pooled: tuple[int, ...] = POOLED) -> None:
        self.pooled, self.met = pooled, 0
        self.machine: cp.Machine | None = cp.preset("h200-4")
        self.said: list[dict[str, str]] = []
        self.workspace: Any = SimpleNamespace(
            device=torch.device("cuda", 0), rank=0, agreed={}, refuse_growth=self._grown
        )
        self.capturing = False
        patch.setattr(agreement, "meet", self._meet)
        patch.setattr(embedding_choice, "knowledge_of", self._knowledge)

    def _knowledge(self, workspace: Any) -> Knowledge:
        return Knowledge(self.machine, {})

    def _grown(self, got: str) -> None:
        if self.capturing:
            raise cp.InputError("counterpoint", "workspace", want="warm", got=got)

    def _meet(self, op: str, here: Any, workspace: Any) -> list[Any]:
        self.met += 1
        said, _ = here
        self.said.append(said)
        others = [({**said, "indices": str(n * BAGS)}, None) for n in self.pooled[1:]]
        return [here, *others]

    def way(
        self, pooled: int = 0, *, plan: str = "auto", into: bool = True, layout: Layout = LAYOUT,
        mean: bool = False,
    ) -> str:  # fmt: skip
        indices = torch.empty((pooled or self.pooled[0]) * BAGS, device="meta")
        given = Given([], indices, indices, None)
        how = How(mean, True, False, layout, 0, plan)
        return way_of(given, how, self.workspace, into=into)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("way", ["fused", "serial"])
def test_auto_takes_what_the_chooser_says(ranks: Ranks, way: str, into: bool):
    indices = tuple(n * BAGS for n in POOLED)
    problem = cp.EmbeddingProblem(LAYOUT.dims, BAGS, indices, out=into)
    machine = cp.choose(problem, "h200-4").machine
    if way == "serial":  # where a peer's memory is stored to slowly
        machine = replace(machine, measured=replace(machine.costs, copy_bytes_per_s=1e9))
    ranks.machine = machine
    assert ranks.way(into=into) == cp.choose(problem, machine).plan == way


def test_what_is_asked_for_is_taken(ranks: Ranks):
    assert [ranks.way(plan=plan) for plan in ("serial", "fused")] == ["serial", "fused"]
    assert not ranks.met


def test_it_is_decided_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    """By all ranks' indices of the first call; for each layout, mode and kind of output."""
    first = ranks.way()
    assert ranks.met == 1 and ranks.said[0]["indices"] == str(POOLED[0] * BAGS)
    for pooled in (1, 5, 1000):
        assert ranks.way(pooled) == first
    ranks.capturing = True
    assert ranks.way() == first and ranks.met == 1
    with pytest.raises(cp.InputError, match="first call of such bags"):
        ranks.way(mean=True)
    ranks.capturing = False
    ranks.way(mean=True)
    ranks.way(into=False)
    assert ranks.met == 3


def test_nobody_to_agree_with(ranks: Ranks):
    alone = Layout(((128,),), (BAGS,), torch.bfloat16)
    assert ranks.way(layout=alone) == ranks.way(layout=alone, plan="fused") == "serial"
    ranks.workspace.device = torch.device("cpu")
    assert ranks.way(plan="fused") == "serial" and not ranks.met


def test_a_machine_that_nobody_knows_is_serial(ranks: Ranks):
    ranks.machine = None
    assert ranks.way() == "serial" and ranks.met == 1


def test_another_op_of_a_peer_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    def meet(op: str, here: Any, workspace: Any) -> list[Any]:
        return [here, ({"op": "matmul_all_reduce"}, None)]

    monkeypatch.setattr(agreement, "meet", meet)
    with pytest.raises(cp.InputError, match=r"op must be .*, got another call on rank 1"):
        ranks.way()
    assert not ranks.workspace.agreed
