"""Training steps of an unmodified Qwen3-MoE of transformers, by its word `ep_implementation`.

    all_to_all      transformers' own way, with its grouped matmuls
    counterpoint    the same model, its experts by ExpertParallelMLP
    and overlapped  the same, behind cp.overlap(model) as well

Qwen3-30B-A3B's widths in 8 of its 48 layers, and as much of its vocabulary; bf16 computation over
fp32 masters by FSDP2, expert parallel over all ranks. All arms share one model, its optimizer and
one shuffled rotation; a step is forward, backward and fused AdamW. A row has each round's time of
the slowest rank. Needs transformers 5.24 or newer; it has no short form."""

import gc
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import counterpoint as cp
from benchmarks.declare import Bench, Benchmark, Case, Section
from benchmarks.fsdp import timed_ms
from benchmarks.rows import Row, Timed, taken
from benchmarks.tables import Column, arm, by_machine, ms, table

THEIRS, OURS, OVERLAPPED = "all_to_all", "counterpoint", "and overlapped"
PLACE = "transformers.distributed.expert_parallel"
ROUNDS = 15
WARM = 4  # steps of each arm before the first round
LOSS_OFF = 1e-2
WIDTHS: dict[str, dict[str, int]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 8, "vocab_size": 25344,
    },
    "toy": {
        "hidden_size": 32, "moe_intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "vocab_size": 64,
    },
}  # fmt: skip


def case_of(model: str, tokens: int) -> Case:
    """A sequence of `tokens` on each rank."""
    facts = {"model": model, "tokens": tokens, "layers": WIDTHS[model]["num_hidden_layers"]}
    return Case(f"{model}, {tokens} tokens a rank", facts)


def cases(_: int) -> list[Case]:
    """Those that we publish."""
    return [case_of("Qwen3-30B-A3B", tokens) for tokens in (4096, 8192)]


def both_ways() -> type:
    """An implementation of transformers that goes either way, as its `arm` says."""
    from transformers.distributed import (  # type: ignore[import-not-found]
        expert_parallel as theirs,
    )

    import counterpoint.adapters.transformers  # pyright: ignore[reportUnusedImport]  # noqa: F401

    class BothWays(theirs.EPImplementation):
        arm = THEIRS

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            registered = theirs.EPImplementationInterface()
            self.ways = {name: registered[name](*given) for name in (THEIRS, OURS)}

        def __call__(self, *given: Tensor) -> Tensor:
            return self.ways[self.arm](*given)

    theirs.EPImplementationInterface.register("both_ways", BothWays)
    return BothWays


def model_of(case: Case, bench: Bench) -> Any:
    """With the same random weights on all ranks; they go by way of files, as those of users do."""
    import transformers  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    memory = Path("/dev/shm")
    where = [tempfile.mkdtemp(dir=memory if memory.is_dir() else None)]
    dist.broadcast_object_list(where, 0, group=bench.group)
    config = transformers.Qwen3MoeConfig(
        **WIDTHS[case["model"]], intermediate_size=256, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, use_cache=False,
    )  # fmt: skip
    if bench.rank == 0:
        torch.manual_seed(0)
        with bench.device:
            made = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        made.save_pretrained(where[0])
        del made
    bench.meet()
    how = DistributedConfig(
        fsdp_size=bench.ranks, ep_size=bench.ranks, ep_implementation="both_ways",
        fsdp_mixed_precision=bench.on_gpu,
    )  # fmt: skip
    options = {"experts_implementation": "grouped_mm"} if bench.on_gpu else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        where[0], dtype=torch.float32, distributed_config=how, **options
    )
    bench.meet()
    if bench.rank == 0:
        shutil.rmtree(where[0])
    return model.train()


class Lab:
    """One model, its optimizer, and how each arm is set up."""

    def __init__(self, case: Case, bench: Bench) -> None:
        self.bench, self.ways = bench, both_ways()
        self.model = model_of(case, bench)
        shape = 1, case["tokens"]
        vocabulary = WIDTHS[case["model"]]["vocab_size"]
        self.ids = torch.randint(vocabulary, shape, device=bench.device, generator=bench.draw)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=bench.on_gpu)
        self.overlapped: cp.Overlapped | None = None

    def set_to(self, name: str) -> None:
        """Go this way from now on."""
        self.ways.arm = THEIRS if name == THEIRS else OURS  # type: ignore[attr-defined]
        if name == OVERLAPPED and self.overlapped is None:
            self.overlapped = cp.overlap(self.model, trial_steps=0)
        if self.overlapped is not None:
            self.overlapped.switch(ours=name == OVERLAPPED)

    def gradients(self) -> Tensor:
        """Forward and backward; the loss."""
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def step(self, *, optimizes: bool) -> Tensor:
        """A step, or its gradients alone."""
        loss = self.gradients()
        if optimizes:
            self.adamw.step()
        self.adamw.zero_grad()
        return loss


def rows(case: Case, bench: Bench) -> list[Row]:
    """Times of whole steps, and of their gradients alone, by arm."""
    if bench.short:
        bench.say(f"{case.name}: left out of the short form, which is too short to load a model")
        return []
    if find_spec("transformers") is None or find_spec(PLACE) is None:
        raise cp.UnsupportedError("bench", "transformers", want="5.24 or newer", got="none such")
    lab = Lab(case, bench)
    bench.say(f"{case.name}: the model is there")
    calls: dict[str, Callable[[], Tensor]] = {
        "step": partial(lab.step, optimizes=True), "gradients": partial(lab.step, optimizes=False),
    }  # fmt: skip
    arms, losses = [THEIRS, OURS, OVERLAPPED], dict[str, float]()
    for name in arms:
        lab.set_to(name)
        for _ in range(WARM):
            losses[name] = lab.step(optimizes=True).item()
        bench.say(f"{case.name}: {name} runs, loss {losses[name]:.4f}")
    off = {name: abs(loss - losses[THEIRS]) / losses[THEIRS] for name, loss in losses.items()}
    if max(bench.most([*off.values()])) > LOSS_OFF:
        raise AssertionError(f"losses are wrong: {losses}")
    times = {(name, what): list[float]() for name in arms for what in calls}
    shuffled = random.Random(7)
    for _ in range(bench.rounds or ROUNDS):
        shuffled.shuffle(arms)
        for name in arms:
            lab.set_to(name)
            lab.step(optimizes=True)
            for what, call in calls.items():
                times[name, what].append(timed_ms(call, bench))
    every = bench.gathered(times)
    slowest = {key: [max(each) for each in zip(*(e[key] for e in every), strict=True)]
               for key in times}  # fmt: skip
    if lab.overlapped is not None:
        lab.overlapped.off()
    del lab, calls
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()

    def gain(name: str, what: str) -> float:
        pairs = zip(slowest[THEIRS, what], slowest[name, what], strict=True)
        return median(theirs / mine for theirs, mine in pairs)

    return [
        {
            "arm": name, "mode": "eager", "median_s": median(slowest[name, "step"]) / 1e3,
            "gradients_s": median(slowest[name, "gradients"]) / 1e3,
            "rounds_ms": [round(t, 3) for t in slowest[name, "step"]],
            "baseline_over_arm": gain(name, "step"), "loss_off": off[name],
            "gradients_over_arm": gain(name, "gradients"),
        }
        for name in (THEIRS, OURS, OVERLAPPED)
    ]  # fmt: skip


def _gain(name: str, fact: str = "baseline_over_arm") -> Callable[[Timed], str]:
    return lambda case: f"{case.main[name][fact]:.2f}"


COLUMNS = [
    Column("model, layers", lambda case: f"{case.head['model']}, {case.head['layers']}"),
    Column("tokens of a rank", lambda case: str(case.head["tokens"])),
    arm(THEIRS, ms, "transformers' own, ms"),
    arm(OURS, ms, "ours, ms"),
    Column("ours over its own", _gain(OURS)),
    Column("and overlapped", _gain(OVERLAPPED)),
    Column("of gradients alone", _gain(OURS, "gradients_over_arm")),
]


def write(rows: list[Row]) -> str:
    """Steps by case."""
    note = (
        "Steps of forward, backward and AdamW; medians of the slowest rank's. Speedups are medians "
        "of rounds. *And overlapped* is with cp.overlap(model) as well."
    )
    return table(COLUMNS, [*taken(rows, "model", "tokens")], note)


TRANSFORMERS_EXPERTS = Benchmark(
    "transformers_experts", cases, rows=rows, unit="ms", host=False,
    sections=(Section("docs/results/experts.md", "transformers-experts", by_machine(write)),),
)  # fmt: skip
