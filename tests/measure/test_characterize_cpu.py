"""CPU ranks are measured, all at once, and are a machine that plans are priced on."""

import pytest
import torch.distributed as dist
from on_ranks import on_ranks

import counterpoint as cp
from counterpoint.group.ranks import gather_object
from counterpoint.group.workspace import forget, workspace_of
from counterpoint.measure import characterize_cpu, exchanges
from counterpoint.plan.families import build

MIB = exchanges.MIB


@on_ranks(4)
def test_ranks_of_two_islands_are_a_machine_with_a_nic(rank: int, world_size: int):
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTERPOINT_ISLAND", str(rank // 2))
        # sizes so far apart that times grow with them, however busy the cores are
        sizes = MIB // 256, 16 * MIB
        for name, value in (("LEAST_S", 1e-3), ("STREAM", 1), ("SIZES", {"cpu": sizes})):
            patch.setattr(exchanges, name, value)
        patch.setattr(characterize_cpu, "MATMULS", ((16, 16, 16), (512, 512, 512)))
        patch.setattr(characterize_cpu, "SIZES", sizes)
        machine, rows = characterize_cpu.characterize_cpu(group=group, rounds=1)
        forget(workspace_of(group, characterize_cpu.CPU))
    assert machine.num_devices == 2 and machine.measured and machine.nic
    assert gather_object(machine, group) == [machine] * world_size
    asked = {row["question"] for row in rows}
    assert asked == {"matmul", "copy", "memory", "kernel", "barrier", "collective", "exchange",
                     "far gather", "beside"}  # fmt: skip
    problem = cp.Problem("all_gather_matmul", 1024, 64, 512, world_size, "float32", islands=2)
    assert cp.choose(problem, machine.to_json()).machine == machine
    plan = build(problem, "islands chunks=2", machine)
    ends = {span.label: span.end_s for span in cp.estimate(plan, machine).spans}
    # one thread: what it is to multiply last does not begin before the rest
    assert ends["open"] <= ends["matmul_own"] <= ends["matmul_near_1"] <= ends["matmul_far_1_1"]
