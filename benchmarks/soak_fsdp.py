"""Training steps of a small overlapped model for the soak, ranks late in the midst of them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import counterpoint as cp
from benchmarks.declare import Bench
from benchmarks.soak_routes import Set

MEMORY = {"overlap, kept": "kept", "overlap, ring": "ring"}  # by name of an operator
BLOCKS, DIM, ROWS, INPUTS = 4, 256, 64, 5


def overlap_sets(op: str, bench: Bench, late: Callable[[], object], limit: float) -> list[Set]:
    """Steps of one model, each with another input; a step gives this rank's gradients.

    Args:
        op: of MEMORY.
        bench: this rank.
        late: called in each block's forward and backward.
        limit: of the distance to what torch's own way gives.
    """
    model = model_of(bench)
    inputs = [bench.normal(ROWS, DIM).requires_grad_() for _ in range(INPUTS)]

    def step(x: Tensor) -> Tensor:
        model(x).float().square().mean().mul(ROWS).backward()
        found = [p.grad.to_local().flatten() for p in model.parameters()]  # type: ignore[union-attr]
        for p in (*model.parameters(), x):
            p.grad = None
        return torch.cat(found)

    torchs = [step(x).double() for x in inputs]
    cp.overlap(model, trial_steps=0, memory=MEMORY[op])  # type: ignore[arg-type]

    def late_in_both(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        late()
        if result.requires_grad:
            result.register_hook(lambda _: late())

    for block in model:
        block.register_forward_hook(late_in_both)
    return [Set(lambda x=x: step(x), exact, limit)
            for x, exact in zip(inputs, torchs, strict=True)]  # fmt: skip


def model_of(bench: Bench) -> nn.Sequential:
    """Blocks with the same weights on all ranks, sharded; some rows are uneven."""
    torch.manual_seed(0)
    with bench.device:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(DIM, 3 * DIM + i), nn.SiLU(), nn.Linear(3 * DIM + i, DIM))
              for i in range(BLOCKS))
        )  # fmt: skip
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(bench.group, bench.device.type)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
        block.set_force_sum_reduction_for_comms(not bench.on_gpu)  # type: ignore[operator]
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
