"""The communicator of exchanges between islands: one for a group, and the same on all ranks.

Gloo stands for NCCL here.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks

from counterpoint.group import wire
from counterpoint.group.workspace import Workspace, forget


class Gloo:
    """Made as torch's ProcessGroupNCCL is."""

    class Options(SimpleNamespace):
        pass

    def __new__(cls, store: Any, rank: int, ranks: int, options: Any) -> Any:
        assert options.is_high_priority_stream and len(options.global_ranks_in_group) == ranks
        return dist.ProcessGroupGloo(store, rank, ranks, timeout=timedelta(seconds=20))


def exchanged(communicator: Any, rank: int, ranks: int) -> float:
    """What the rank before this one sends."""
    kept, sent = torch.zeros(1), torch.full((1,), float(rank))
    works = [communicator.recv([kept], (rank - 1) % ranks, 0)]
    works.append(communicator.send([sent], (rank + 1) % ranks, 0))
    for work in works:
        work.wait()
    return kept.item()


@on_ranks(2, 3)
def test_a_later_workspace_finds_it_unless_a_rank_has_ended_it(rank: int, ranks: int) -> None:
    """Also where ranks differ in how many groups they have, which names of `new_group` are by."""
    dist.new_group([0])
    group: Any = dist.new_group()
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", Gloo, raising=False)
        for ended in (False, False, True, False):
            workspace = Workspace(group, torch.device("cpu"))
            found.append(wire._communicator_of(workspace))
            assert exchanged(found[-1], rank, ranks) == (rank - 1) % ranks
            nccl = object.__new__(wire.Nccl)
            nccl._workspace = workspace
            nccl.communicator = SimpleNamespace(abort=lambda: None)
            nccl.end()  # of an older workspace, whose communicator this is not
            if ended and rank == 0:
                nccl.communicator = found[-1]
                patch.setattr(type(found[-1]), "abort", lambda _: None, raising=False)
                nccl.end()
            forget(workspace)
    assert found[0] is found[1] is found[2] is not found[3]
    assert len({name for name, _ in wire._kept.values()}) == 1
