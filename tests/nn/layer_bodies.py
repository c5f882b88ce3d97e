"""An MLP of parallel layers beside that of torch.nn.Linear: what each rank compares.

Every rank makes the whole inputs from a seed, and trains the serial model in fp32 and in fp64 too.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from grad_bodies import error
from torch import Tensor, nn

import counterpoint.nn as cnn

K, HIDDEN, N = 10, 24, 7  # 1 to 4 ranks divide the hidden features
POSITIONS, BATCH, STEPS, LR = 12, 3, 4, 0.05


@dataclass(frozen=True)
class MlpCase:
    """`shape` of an activation without its features, and the dim of it that is the sequence."""

    shape: tuple[int, ...] = (POSITIONS,)
    dim: int = 0
    bias: bool = True
    plan: str = "auto"

    def part(self, whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return whole.chunk(dist.get_world_size(group), self.dim)[dist.get_rank(group)]


class Mlp(nn.Module):
    """Parallel where there is a case; gate and up from one gather."""

    def __init__(self, case: MlpCase | None, bias: bool = True, group=None, dtype=None) -> None:
        super().__init__()
        if case is None:
            self.gate, self.up = (nn.Linear(K, HIDDEN, bias, dtype=dtype) for _ in range(2))
            self.down = nn.Linear(HIDDEN, N, bias, dtype=dtype)
            return
        self.gate, self.up = (
            cnn.ColumnParallelLinear(
                K, HIDDEN, group=group, bias=bias, gather_dim=case.dim, plan=case.plan, dtype=dtype
            )
            for _ in range(2)
        )
        self.down = cnn.RowParallelLinear(
            HIDDEN, N, group=group, bias=bias, scatter_dim=case.dim, plan=case.plan, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.gate, nn.Linear):
            gate, up = self.gate(x), self.up(x)
        else:
            gate, up = cnn.gather_once(x, self.gate, self.up)
        return self.down(torch.tanh(gate) * up)


def pair(case: MlpCase, group=None) -> tuple[Mlp, Mlp]:
    """The parallel and the serial model, of one seed."""
    torch.manual_seed(3)
    ours = Mlp(case, case.bias, group)
    torch.manual_seed(3)
    return ours, Mlp(None, case.bias)


def slice_of(whole: Tensor, like: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The part of a whole parameter, or gradient, that is where `like` is on this rank."""
    for dim, (n, m) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if n != m:
            return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return whole


def wrong_training(case: MlpCase, group: dist.ProcessGroup | None = None) -> list[str]:
    """What differs from the serial model in STEPS steps of SGD."""
    ours, plain = pair(case, group)
    exact = copy.deepcopy(plain).double()
    models = [ours, plain, exact]
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9) for m in models]
    generator = torch.Generator().manual_seed(11)
    problems: list[str] = []

    def compare(what: str, got: Tensor, plainly: Tensor, want: Tensor) -> None:
        # STEPS roundings on top: the plain result may be lucky
        bound = 2 * error(plainly, want) + STEPS * torch.finfo(got.dtype).eps
        if got.shape != want.shape or not error(got, want) <= bound:
            problems.append(f"{case} {what}: off by {error(got, want):.1e}, bound {bound:.1e}")

    for step in range(STEPS):
        x = torch.randn(*case.shape, K, generator=generator)
        dy = torch.randn(*case.shape, N, generator=generator)
        xs = [case.part(x, group).clone(), x.clone(), x.double()]
        ys = [model(t.requires_grad_()) for model, t in zip(models, xs, strict=True)]
        dys = [case.part(dy, group), dy, dy.double()]
        for optimizer, y, d in zip(optimizers, ys, dys, strict=True):
            optimizer.zero_grad()
            y.backward(d)
        for what, given in (("y", ys), ("dx", [t.grad for t in xs])):
            compare(f"step {step} {what}", given[0], *(case.part(t, group) for t in given[1:]))
        for (name, p), q, r in zip(
            ours.named_parameters(), plain.parameters(), exact.parameters(), strict=True
        ):
            compare(f"step {step} d{name}", p.grad, *(slice_of(t.grad, p, group) for t in (q, r)))
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q, r in zip(
        ours.named_parameters(), plain.parameters(), exact.parameters(), strict=True
    ):
        compare(f"trained {name}", p.detach(), *(slice_of(t, p, group) for t in (q, r)))
    if ours.down.bias is not None:
        copies = [torch.empty_like(ours.down.bias) for _ in range(dist.get_world_size(group))]
        dist.all_gather(copies, ours.down.bias.detach(), group=group)
        if not all(torch.equal(each, copies[0]) for each in copies):
            problems.append(f"{case}: the copies of the bias have other bits")
    return problems
