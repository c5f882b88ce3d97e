"""A model of transformers, sharded by its own plan, under compile_options. Skipped without it."""

import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled import sequence_parallel, worse
from on_ranks import on_ranks
from rank_bodies import by_reference, world
from rankpool import RankPool
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import counterpoint as cp
from benchmarks import transformers_experts
from benchmarks.declare import Bench
from counterpoint.adapters.explain import Report
from counterpoint.measure.timing import relative_error

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LAYERS, STEPS = 2, 20


@contextmanager
def environment(rank: int, world_size: int) -> Iterator[None]:
    """Of a rank, as torchrun sets it."""
    with pytest.MonkeyPatch.context() as patch, by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and of torch, in their own code
        for name, number in ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size):
            patch.setenv(name, str(number))
        yield


def sharded(folder: Path, dtype: torch.dtype) -> Any:
    """A small Llama with random weights, sharded by tp_plan="auto"."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=plan)


@pytest.mark.parametrize("page", ["compile.md", "experts.md"])
def test_lines_of_the_docs(page: str):
    """transformers takes them."""
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    lines = re.findall(r"`(DistributedConfig\(.*?\))`", text)
    assert lines
    for line in lines:
        eval(line, {"DistributedConfig": DistributedConfig})


@pytest.mark.parametrize(("name", "settings", "last", "said"), [
    ("Llama", {}, "down_proj", "of 2 weights with silu_mul"),
    ("Qwen3", {}, "down_proj", "of 2 weights with silu_mul"),
    ("Gemma", {}, "down_proj", "of 2 weights with gelu_tanh_mul"),
    ("Phi3", {}, "down_proj", "with silu_mul"),
    ("GPTNeoX", {}, "dense_4h_to_h", "with gelu"),
    ("Phi", {}, "fc2", "with gelu_tanh"),
    ("Llama", {"mlp_bias": True}, "down_proj", "of 2 weights"),
])  # fmt: skip
@on_ranks(2)
def test_mlps(
    rank: int, ranks: int, name: str, settings: dict[str, Any], last: str, said: str
) -> list[str]:
    """Sequence parallel, in inference: what the operator that gathers does."""
    import transformers  # type: ignore[import-not-found]

    kind = getattr(transformers, f"{name}Config")
    config = kind(
        hidden_size=16, intermediate_size=48, num_attention_heads=2, pad_token_id=0, **settings
    )
    module = importlib.import_module(kind.__module__.replace("configuration", "modeling"))

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        return sequence_parallel(getattr(module, f"{name}MLP")(config), last, dtype, (2, 12, 16))

    operators = [f"all_gather_matmul {said}", "matmul_reduce_scatter"]
    apart = "silu_mul stays apart, as its products have a bias" if settings else ""
    found: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        found += worse(make, matched=2, train=False, dtype=dtype, operators=operators, apart=apart)
    return found


def inferred(rank: int, world_size: int, folder: str) -> tuple[Report, list[str]]:
    """What was done with the collectives of a forward, and what is farther off than torch's."""
    tokens, found = torch.arange(32).view(2, 16), list[Tensor]()
    with environment(rank, world_size), fresh_cache(), torch.no_grad():
        for dtype, options in (torch.float64, None), (torch.bfloat16, {}), (
            torch.bfloat16, cp.compile_options()
        ):  # fmt: skip
            torch._dynamo.reset()
            model = run = sharded(Path(folder), dtype)
            if options is not None:
                run = torch.compile(model, options=options)
            found.append(run(input_ids=tokens, use_cache=False).logits)
    want, torchs, mine = found
    error, allowed = relative_error(mine, want), 2 * relative_error(torchs, want)
    wrong = f"off by {error:.1e}, torch's by half of {allowed:.1e}"
    return cp.explain(run), [] if error <= allowed else [wrong]


def test_inference_of_llama(pool: RankPool, tmp_path: Path):
    """The sum of the embedding goes with the norm behind it, as transformers writes it."""
    for report, wrong in pool.run(inferred, 2, str(tmp_path / "llama")):
        assert not wrong, wrong
        first = report.found[0]
        assert (first.module, first.operator) == ("model.embed_tokens", "all_reduce_rms_norm")
        assert report.matched == 2 * LAYERS + 1, str(report)


def losses(model: Any, run: Any) -> torch.Tensor:
    """Of training steps on random tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for _ in range(STEPS):
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def trained(rank: int, world_size: int, folder: str) -> tuple[Report, str]:
    """What was done with the collectives, and whether the losses are right."""
    with environment(rank, world_size):
        torch._dynamo.reset()
        exact = sharded(Path(folder), torch.float64)
        want = losses(exact, exact)
        torchs = sharded(Path(folder), torch.float32)
        plain = losses(torchs, torch.compile(torchs))
        model = sharded(Path(folder), torch.float32)
        compiled = torch.compile(model, options=cp.compile_options())
        with fresh_cache():
            mine = losses(model, compiled)
    assert want[-1] < want[0] / 2, "the model learns"
    error, allowed = relative_error(mine, want), 2 * relative_error(plain, want)
    wrong = f"off by {error:.1e}, torch's by half of {allowed:.1e}"
    return cp.explain(compiled), "" if error <= allowed + 1e-7 else wrong


def test_training_steps_of_llama(pool: RankPool, tmp_path: Path):
    """Losses are those without us; each collective beside a matmul is part of an operator."""
    for report, wrong in pool.run(trained, 2, str(tmp_path / "llama")):
        assert not wrong, wrong
        left = [(one.kind, one.module, one.reason) for one in report.found if one.reason]
        assert left == [
            ("all-reduce", "model.embed_tokens", "no matmul, but index_put stands before it"),
            ("all-gather", "lm_head", "no matmul reads it, but amax"),
        ]
        assert report.matched == 7 * LAYERS + 1


EXPERTS, VOCABULARY = 4, 64


def of_experts(folder: Path, kind: str, how: str, **sizes: int) -> Any:
    """A small model of experts with random weights, as `ep_implementation` has it."""
    import transformers  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    import counterpoint.adapters.transformers  # pyright: ignore[reportUnusedImport]  # noqa: F401

    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_experts_per_tok": 2, "use_cache": False}  # fmt: skip
    own = {
        "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": EXPERTS, "head_dim": 8,
                     "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "Mixtral": {"num_local_experts": EXPERTS},
        "GptOss": {"num_local_experts": EXPERTS, "head_dim": 8},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**common, **own)
    where = folder / kind
    if dist.get_rank() == 0 and not where.exists():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(where)
    dist.barrier()
    plan = DistributedConfig(ep_size=dist.get_world_size(), ep_implementation=how, **sizes)
    return transformers.AutoModelForCausalLM.from_pretrained(
        where, dtype=torch.float32, distributed_config=plan
    )


def trained_losses(model: nn.Module, seed: int) -> list[float]:
    """Of some steps of AdamW, on tokens of this seed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    draw, found = torch.Generator().manual_seed(seed), list[float]()
    for _ in range(4):
        ids = torch.randint(VOCABULARY, (2, 9), generator=draw)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("way", ["fsdp", "fsdp, bf16", "tp"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_experts_of_unmodified_models(pool: RankPool, tmp_path: Path, kind: str, way: str):
    """By one word, they train as transformers' own all-to-all trains them."""
    pool.run(_train_both, 2, tmp_path, kind, way)


def _train_both(rank: int, ranks: int, folder: Path, kind: str, way: str) -> None:
    with environment(rank, ranks):
        from counterpoint.adapters.transformers import explain_experts

        shared, sizes = way == "tp", {"fsdp_size": ranks, "fsdp_mixed_precision": "bf16" in way}
        if shared:
            sizes = {"tp_size": ranks}
        seed = 5 if shared else 5 + rank  # ranks of a tensor-parallel group have one batch
        want = trained_losses(of_experts(folder, kind, "all_to_all", **sizes), seed)
        model = of_experts(folder, kind, "counterpoint", **sizes)
        said = explain_experts(model).splitlines()
        left = "transformers, since" if kind == "GptOss" else "counterpoint"
        assert len(said) == LAYERS and all(f": {left}" in line for line in said), said
        overlapped = None if shared else cp.overlap(model, trial_steps=0)
        got = trained_losses(model, seed)
        assert overlapped is None or "in place" in overlapped.explain()
        assert want[0] != want[-1]
        near = 2e-2 if "bf16" in way else 1e-5
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=near, atol=near)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None
    or importlib.util.find_spec(transformers_experts.PLACE) is None,
    reason="transformers is older than 5.24",
)
def test_steps_are_timed_each_way(pool: RankPool):
    """On a model that is a toy: each arm has its rows, and trains as transformers does."""
    for rows in pool.run(_timed, 2):
        arms = {row["arm"]: row for row in rows}
        assert arms.keys() == {transformers_experts.THEIRS, transformers_experts.OURS,
                               transformers_experts.OVERLAPPED}  # fmt: skip
        for row in rows:
            assert min(row["median_s"], row["gradients_s"]) > 0 and len(row["rounds_ms"]) == 2
            assert row["loss_off"] < 1e-3


def _timed(rank: int, ranks: int) -> list[dict[str, Any]]:
    with environment(rank, ranks):
        bench = Bench(world(), torch.device("cpu"), rounds=2)
        return transformers_experts.rows(transformers_experts.case_of("toy", 16), bench)
