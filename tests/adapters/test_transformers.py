"""A model of transformers, sharded by its own plan, under compile_options. Skipped without it."""

import importlib
import importlib.util
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
from rank_bodies import by_reference
from rankpool import RankPool
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import counterpoint as cp
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
