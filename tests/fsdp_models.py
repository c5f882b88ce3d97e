"""Training steps of small FSDP2 models, as torch runs them and overlapped."""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import counterpoint as cp

DIM = 32
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A norm and two linear layers, around which the input is added."""

    def __init__(self, hidden: int = 3 * DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.RMSNorm(DIM),
            nn.Linear(DIM, hidden),
            nn.Linear(hidden, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Step(NamedTuple):
    """How a model is made and trained.

    Args:
        hidden: of each block; a number that ranks do not share evenly leaves uneven rows.
        policy: None: fp32 all through.
        frozen: blocks without gradients.
        keep: reshard_after_forward is False.
        micro: forwards and backwards of a step, of which the last one reduces, or all.
        sync_all: all of them do.
        factor: of set_gradient_divide_factor.
        prefetch: forwards that are gathered ahead.
        checkpoint: activations are recomputed.
        clip: gradients are clipped.
        foreach: the optimizer takes all at once, as on GPUs: no version of a DTensor tells.
    """

    hidden: tuple[int, ...] = (96, 96, 96, 96)
    policy: MixedPrecisionPolicy | None = MIXED
    frozen: tuple[int, ...] = ()
    keep: bool = False
    micro: int = 1
    sync_all: bool = False
    factor: float | None = None
    prefetch: int = 0
    checkpoint: bool = False
    clip: bool = False
    steps: int = 3
    foreach: bool | None = None


def mesh_of(ranks: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (ranks,))


def sharded(
    model: nn.Module, blocks: list[nn.Module], step: Step, mesh: DeviceMesh, by: Any = None
) -> nn.Module:
    """FSDP2 of each block and of the model; gloo has no average, so sums are divided.

    Args:
        by: shard_placement_fn.
    """
    policy = step.policy or MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, shard_placement_fn=by)
    for block in blocks:
        shard(block, reshard_after_forward=not step.keep)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if step.factor:
                module.set_gradient_divide_factor(step.factor)
    return model


def made(step: Step, mesh: DeviceMesh, by: Any = None) -> nn.Sequential:
    """A model of blocks, with equal weights on all ranks."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        blocks: list[nn.Module] = [Block(hidden) for hidden in step.hidden]
        head = nn.Linear(DIM, DIM)
    for i in step.frozen:
        blocks[i].requires_grad_(False)
    if step.checkpoint:
        blocks = [checkpoint_wrapper(block) for block in blocks]
    model = nn.Sequential(*blocks, head, nn.Tanh())  # FSDP2 warns of views
    sharded(model, blocks, step, mesh, by)
    if step.prefetch:
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + step.prefetch])  # type: ignore[operator]
            block.set_modules_to_backward_prefetch(blocks[max(0, i - step.prefetch) : i][::-1])  # type: ignore[operator]
    return model


def batch(rank: int, index: int, device: torch.device | str = "cpu") -> Tensor:
    """Random input, another one on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(2, 8, DIM, generator=generator).to(device).requires_grad_()


def trained(model: nn.Module, step: Step, rank: int) -> list[Any]:
    """Losses, norms, gradients and weights of some steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, foreach=step.foreach)
    device = weights[0].device
    out: list[Any] = []
    for i in range(step.steps):
        for j in range(step.micro):
            if step.micro > 1 and not step.sync_all:
                model.set_requires_gradient_sync(j == step.micro - 1)  # type: ignore[operator]
            x = batch(rank, i * step.micro + j, device)
            loss = model(x).float().square().mean()
            loss.backward()
            out.append(loss.detach())
        if step.clip:
            out.append(nn.utils.clip_grad_norm_(weights, 0.1).full_tensor())  # type: ignore[union-attr]
        out += [p.grad.to_local().clone() for p in weights]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            out.append(model(batch(rank, 1000 + i, device)).float().sum())
    out += [w.to_local().clone() for w in model.state_dict().values()]
    return out


def both(step: Step, rank: int, ranks: int, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """What torch's own way and the overlapped one make, and what was done."""
    mesh = mesh_of(ranks)
    want = trained(made(step, mesh), step, rank)
    model = made(step, mesh)
    overlapped = cp.overlap(model, **{"trial_steps": 0} | options)
    got = trained(model, step, rank)
    return want, got, overlapped


def same(want: list[Any], got: list[Any]) -> bool:
    """Whether all bits are equal."""
    return len(want) == len(got) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
