"""Twelve models under FSDP2, each as torch runs it and after one line: `cp.overlap(model)`.

Nothing is set by hand. Two optimizer steps show what memory is left, the trial takes its turns, and
what it decides is then timed in one shuffled rotation with a second copy of the model, which is as
it was. Weights hardly move, so that losses of both can be compared."""

import gc
import random
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import counterpoint as cp
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.fsdp import AS_IS, OURS, Layer, timed_ms
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table

MOST_STEPS = 72  # a trial has ended by then
ROUNDS = 11
LOSS_OFF = 1e-2


class Made(NamedTuple):
    """A model, what is sharded of it one by one, and what it is given."""

    model: nn.Module
    blocks: list[nn.Module]
    batch: Callable[[Bench], Tensor]
    micro: int = 1


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.f = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Lora(nn.Module):
    """A frozen linear layer and a trained one of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Experts(nn.Module):
    """Eight experts, of which each token takes two, in a loop, as models in eager mode have it."""

    def __init__(self, dim: int, hidden: int, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(dim), nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).float().softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            part = (weights * (chosen == i)).sum(-1, keepdim=True).to(x.dtype)
            out = out + part * expert(y)
        return x + out


class Tied(nn.Module):
    """Token embeddings, layers, and a head with the weights of the embeddings."""

    def __init__(self, words: int, dim: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(words, dim), nn.Sequential(*layers)
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens)))


def normal(*shape: int) -> Callable[[Bench], Tensor]:
    """Numbers that are drawn for each rank."""
    return lambda bench: bench.normal(*shape)


def llama(dim: int, layers: int, tokens: int, *, again: bool = False, micro: int = 1) -> Made:
    """Layers of Llama; `again`: activations are computed again in the backward."""
    heads = max(dim // 128, 2)
    blocks: list[nn.Module] = [
        Layer(dim, dim * 7 // 2, heads, max(heads // 4, 1)) for _ in range(layers)
    ]
    if again:
        blocks = [checkpoint_wrapper(block) for block in blocks]
    return Made(nn.Sequential(*blocks), blocks, normal(1, tokens, dim), micro)


def tied(dim: int, layers: int, tokens: int, words: int) -> Made:
    """A GPT whose head is its embedding."""
    blocks = llama(dim, layers, tokens).blocks
    model = Tied(words, dim, blocks)

    def batch(bench: Bench) -> Tensor:
        return torch.randint(0, words, (1, tokens), device=bench.device, generator=bench.draw)

    return Made(model, blocks, batch)


def encoder(dim: int, layers: int, tokens: int) -> Made:
    """Torch's own encoder layers: biases, LayerNorm, full attention."""
    blocks: list[nn.Module] = [
        nn.TransformerEncoderLayer(dim, max(dim // 64, 1), 4 * dim, 0.0, batch_first=True)
        for _ in range(layers)
    ]
    return Made(nn.Sequential(*blocks), blocks, normal(4, tokens, dim))


def vit(dim: int, layers: int, pixels: int) -> Made:
    """Patches of images, encoder layers, a head."""
    blocks = encoder(dim, layers, 1).blocks
    patches = nn.Sequential(nn.Conv2d(3, dim, 16, 16), nn.Flatten(2))
    head = nn.Linear(dim, 1000)

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.blocks, self.head = patches, nn.Sequential(*blocks), head

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(self.patches(x).transpose(1, 2)).mean(1))

    return Made(Vit(), blocks, normal(32, 3, pixels, pixels))


def convolved(width: int, depth: int, pixels: int) -> Made:
    """A CNN of bottlenecks, four times half as large and twice as wide."""
    blocks: list[nn.Module] = []
    for stage in range(4):
        c = width * 2**stage
        for _ in range(depth):
            blocks.append(Residual(
                nn.Conv2d(c, c // 4, 1), nn.GroupNorm(4, c // 4), nn.ReLU(),
                nn.Conv2d(c // 4, c // 4, 3, padding=1), nn.ReLU(), nn.Conv2d(c // 4, c, 1),
            ))  # fmt: skip
        blocks.append(nn.Conv2d(c, 2 * c, 3, 2, 1))
    return Made(nn.Sequential(*blocks), blocks, normal(16, width, pixels, pixels))


def unet(width: int, pixels: int) -> Made:
    """A convolutional encoder and decoder."""
    down = [nn.Sequential(nn.Conv2d(width << i, width << i + 1, 3, 2, 1), nn.SiLU())
            for i in range(3)]  # fmt: skip
    up = [nn.Sequential(nn.ConvTranspose2d(width << i + 1, width << i, 4, 2, 1), nn.SiLU())
          for i in reversed(range(3))]  # fmt: skip
    blocks: list[nn.Module] = [*down, *up]
    return Made(nn.Sequential(*blocks), blocks, normal(16, width, pixels, pixels))


def mlp(dim: int, hidden: int, layers: int, rows: int) -> Made:
    """Wide linear layers."""
    blocks: list[nn.Module] = [
        Residual(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(layers)
    ]
    return Made(nn.Sequential(*blocks), blocks, normal(rows, dim))


def moe(dim: int, layers: int, tokens: int) -> Made:
    """Experts that FSDP2 shards as it does any weights."""
    blocks: list[nn.Module] = [Experts(dim, 2 * dim) for _ in range(layers)]
    return Made(nn.Sequential(*blocks), blocks, normal(1, tokens, dim))


def lora(dim: int, layers: int, tokens: int) -> Made:
    """Llama whose linear layers are frozen, with adapters."""
    made = llama(dim, layers, tokens)
    for block in made.blocks:
        for name, layer in [*block.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(block, name, Lora(layer))
            else:
                layer.requires_grad_(False)
    return made


MODELS: dict[str, tuple[Callable[[], Made], Callable[[], Made]]] = {  # as measured, and tiny
    "Llama": (lambda: llama(4096, 4, 4096), lambda: llama(64, 3, 16)),
    "Llama, small": (lambda: llama(1024, 12, 2048), lambda: llama(64, 4, 8)),
    "Llama, tiny": (lambda: llama(256, 8, 512), lambda: llama(32, 2, 8)),
    "Llama, 4 micro-batches, checkpointed":
        (lambda: llama(2048, 8, 2048, again=True, micro=4),
         lambda: llama(32, 2, 8, again=True, micro=2)),
    "GPT, tied": (lambda: tied(1024, 8, 2048, 50304), lambda: tied(32, 2, 8, 96)),
    "LoRA": (lambda: lora(4096, 4, 2048), lambda: lora(64, 2, 8)),
    "experts": (lambda: moe(1024, 4, 2048), lambda: moe(32, 2, 8)),
    "encoder": (lambda: encoder(1024, 12, 512), lambda: encoder(64, 2, 8)),
    "ViT": (lambda: vit(768, 12, 224), lambda: vit(64, 2, 32)),
    "CNN": (lambda: convolved(256, 3, 56), lambda: convolved(16, 1, 16)),
    "U-Net": (lambda: unet(256, 64), lambda: unet(8, 16)),
    "wide MLP": (lambda: mlp(8192, 32768, 2, 4096), lambda: mlp(64, 128, 2, 8)),
}  # fmt: skip


def case_of(name: str, *, toy: bool = False) -> Case:
    """One model."""
    return Case(f"{name}{', toy' * toy}", {"model": name, "toy": toy})


class Trained:
    """A model of FSDP2 with its optimizer."""

    def __init__(self, case: Case, bench: Bench) -> None:
        torch.manual_seed(0)
        bench.seeded(1)
        with bench.device:
            made = MODELS[case["model"]][case["toy"]]()
        self.model, self.micro, self.x = made.model, made.micro, made.batch(bench)
        mesh = DeviceMesh.from_group(bench.group, bench.device.type)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.numel = sum(p.numel() for p in self.model.parameters())
        for module in (*made.blocks, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if not bench.on_gpu:  # gloo has no average
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-7, foreach=True)
        if self.x.is_floating_point():
            self.x.requires_grad_()  # else the first backward hooks of FSDP2 have no tensor

    def step(self) -> Tensor:
        """An optimizer step."""
        loss = torch.zeros((), device=self.x.device)
        for i in range(self.micro):
            self.model.set_requires_gradient_sync(i == self.micro - 1)  # type: ignore[operator]
            found = self.model(self.x).float().square().mean()
            found.backward()
            loss += found.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        return loss


def rows(case: Case, bench: Bench) -> list[Row]:
    """Times of a model as it is, and of its copy after the trial."""
    as_is, ours = Trained(case, bench), Trained(case, bench)
    overlapped = cp.overlap(ours.model)
    lost = 0.0
    for _ in range(MOST_STEPS):
        want, got = as_is.step().item(), ours.step().item()
        lost = max(lost, abs(got / want - 1))
        if overlapped.verdict is not None:
            break
    (lost,) = bench.most([lost])
    if lost > LOSS_OFF:
        raise AssertionError(f"{case.name}: losses are {lost:.1e} off")
    bench.say(f"{case.name}: {overlapped.explain().splitlines()[-3:]}")
    arms = {AS_IS: as_is.step, OURS: ours.step}
    times: dict[str, list[float]] = {name: [] for name in arms}
    shuffled = random.Random(7)
    for _ in range(bench.rounds or ROUNDS):
        order = [*arms]
        shuffled.shuffle(order)
        for name in order:
            arms[name]()
            times[name].append(timed_ms(arms[name], bench))
    every = bench.gathered(times)
    slowest = {n: [max(each) for each in zip(*(e[n] for e in every), strict=True)] for n in times}
    verdict = overlapped.verdict
    facts: Row = {
        "numel": as_is.numel, "loss_off": lost, "in_place": bool(verdict and verdict.ours),
        "tried": list(verdict) if verdict else [], "groups": len(overlapped.found),
        "left": sum(bool(group.why) for group in overlapped.found),
    }  # fmt: skip
    overlapped.off()
    del as_is, ours, arms, overlapped
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()
    return [
        {
            "arm": name, "mode": "eager", "median_s": median(of) / 1e3,
            "rounds_ms": [round(t, 3) for t in of],
            "baseline_over_arm": median(a / b for a, b in zip(slowest[AS_IS], of, strict=True)),
            **facts,
        }
        for name, of in slowest.items()
    ]  # fmt: skip


def _speedup(case: Timed) -> str:
    return f"**{case.main[OURS]['baseline_over_arm']:.2f}**"


def _left(case: Timed) -> str:
    left, groups = case.head["left"], case.head["groups"]
    return "torch's" if not case.head["in_place"] else f"in place, {groups - left} of {groups}"


COLUMNS = (
    Column("model", lambda c: str(c.head["case"])),
    Column("M parameters", lambda c: f"{c.head['numel'] / 1e6:.0f}"),
    arm(AS_IS, ms), arm(OURS, ms), Column("speedup", _speedup),
    Column("after the trial, groups", _left),
)  # fmt: skip


def models_table(rows: list[Row]) -> str:
    """Training steps of models, whatever the trial has decided."""
    return table(COLUMNS, taken(rows, "case"))


FSDP_MODELS = Benchmark(
    "fsdp_models", lambda _: [case_of(name) for name in MODELS], rows=rows, unit="ms",
    short=lambda case: case.name == "ViT",
    sections=(Section("docs/fsdp.md", "fsdp_models", by_machine(models_table)),),
)  # fmt: skip
