"""Models from the `config.json` of a checkpoint."""

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import CounterpointError, InputError
from counterpoint.machine_of import machine_of
from counterpoint.scale import Layout, Model, memory, predict
from counterpoint.scale.layer import Layers
from counterpoint.scale.models import MODELS
from counterpoint.scale.network.fabric import Fabric, Network
from counterpoint.scale.step import Step

# the fields that count, as published with each checkpoint
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "vocab_size": 129280, "max_position_embeddings": 163840, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 12288,
    "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": None, "vocab_size": 50257, "n_positions": 1024,
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama3-8b", LLAMA), ("deepseek-v3", DEEPSEEK), ("qwen3-235b", QWEN3),
     ("mixtral-8x7b", MIXTRAL)],
)  # fmt: skip
def test_a_config_says_the_same_as_the_models_name(
    tmp_path: Path, name: str, config: dict[str, Any]
):
    found, known = Model.from_config(written(tmp_path, config)), MODELS[name]
    ffn = found.ffn if known.ffn else 0  # no layer of Qwen3's has the MLP that its config sizes
    assert replace(found, name=name, sequence=known.sequence, ffn=ffn, source=known.source) == known
    assert found.sequence == 8192 and "8192 tokens assumed" in found.source


def test_a_plain_mlp_is_four_times_as_wide(tmp_path: Path):
    found = Model.from_config(written(tmp_path, GPT2).parent)
    assert (found.ffn, found.gated, found.sequence) == (3072, False, 1024)
    assert found.name == tmp_path.name
    assert found.tied and found.parameters == pytest.approx(124e6, rel=0.01)


def test_predict_takes_the_path(tmp_path: Path):
    path = written(tmp_path, LLAMA)
    layout = Layout(tp=8)
    want = predict("llama3-8b", layout).seconds
    assert predict(path, layout).seconds == predict(str(path), layout).seconds == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Llama4ForCausalLM"]},
         "architectures must be one of LlamaForCausalLM, .* did you mean LlamaForCausalLM"),
        ({"architectures": None}, "architectures must be .* got None; give its sizes by hand"),
        ({"hidden_size": None}, "hidden_size must be a whole number, as LlamaForCausalLM has it"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number, .* got 2.5"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"intermediate_size": -1}, "intermediate_size must be a whole number, .* got -1"),
        ({"intermediate_size": 10**30}, "intermediate_size must be a whole number, .* from 1 to"),
        ({"num_attention_heads": 24}, "hidden_size must be a multiple of the 24 heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of the 32 heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number, .* from 1"),
        ({"hidden_size": 4095}, "hidden_size must be a multiple of the 32 .*; give head_dim"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be one of"),
        ({"architectures": {}}, "architectures must be one of"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"sliding_window": 4096}, "sliding_window must be null: LlamaForCausalLM has none"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types must be full_attention or"),
        ({"layer_types": ["full_attention"]}, "layer_types must be .* for each of 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window must be given"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers must be \[\]: layers that differ"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Model.from_config(written(tmp_path, LLAMA | change))


def test_latent_attention_needs_its_ranks(tmp_path: Path):
    with pytest.raises(InputError, match=r"kv_lora_rank must be a whole number, .* got none"):
        Model.from_config(written(tmp_path, DEEPSEEK | {"kv_lora_rank": None}))
    without = {key: DEEPSEEK[key] for key in DEEPSEEK if key != "q_lora_rank"}
    with pytest.raises(InputError, match=r"q_lora_rank must be a whole number, .* got none"):
        Model.from_config(written(tmp_path, without))
    with pytest.raises(InputError, match="qk_nope_head_dim must be as wide as v_head_dim, 128"):
        Model.from_config(written(tmp_path, DEEPSEEK | {"qk_nope_head_dim": 64}))


MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "vocab_size": 32000,
                   "max_position_embeddings": 32768, "sliding_window": 4096}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21,
}  # fmt: skip
V2_LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
    "vocab_size": 102400, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "q_lora_rank": None, "kv_lora_rank": 512,
}  # fmt: skip
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
    "vocab_size": 151936, "max_position_embeddings": 8192, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
}  # fmt: skip
LLAMA_1B = LLAMA | {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
                    "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 6144, "num_hidden_layers": 44,
    "num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432,
    "max_position_embeddings": 2048,
}  # fmt: skip


def llama_like(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [f"{name}ForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": vocab, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


QWEN3_30B = llama_like(
    "Qwen3Moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1,
)  # fmt: skip
GPT_OSS = llama_like(
    "GptOss", 2880, 36, 64, 8, 2880, 201088, head_dim=64, num_local_experts=128,
    num_experts_per_tok=4, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
)  # fmt: skip
GEMMA2_9B = llama_like("Gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256, sliding_window=4096)
PUBLISHED = {  # as each model's card counts them
    "Llama-3.1-8B": (LLAMA, 8.03e9), "Llama-3.2-1B": (LLAMA_1B, 1.236e9),
    "Mistral-7B": (MISTRAL, 7.24e9), "Mixtral-8x7B": (MIXTRAL, 46.7e9),
    "Qwen2.5-0.5B": (QWEN2, 0.494e9), "Qwen1.5-MoE-A2.7B": (QWEN2_MOE, 14.3e9),
    "Qwen3-235B": (QWEN3, 235.1e9), "DeepSeek-V2-Lite": (V2_LITE, 15.7e9),
    "DeepSeek-V3": (DEEPSEEK, 671e9), "GPT-2": (GPT2, 124e6), "GPT-NeoX-20B": (NEOX, 20.6e9),
    "Llama-3.2-3B": (llama_like("Llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128,
                                tie_word_embeddings=True), 3.21e9),
    "Llama-3.1-70B": (llama_like("Llama", 8192, 80, 64, 8, 28672, 128256), 70.6e9),
    "Llama-2-13B": (llama_like("Llama", 5120, 40, 40, 40, 13824, 32000), 13.0e9),
    "Yi-34B": (llama_like("Llama", 7168, 60, 56, 8, 20480, 64000), 34.4e9),
    "Mistral-Nemo": (llama_like("Mistral", 5120, 40, 32, 8, 14336, 131072, head_dim=128), 12.2e9),
    "Mixtral-8x22B": (MIXTRAL | {"hidden_size": 6144, "num_hidden_layers": 56,
                                 "num_attention_heads": 48, "intermediate_size": 16384}, 141e9),
    "Qwen2.5-14B": (llama_like("Qwen2", 5120, 48, 40, 8, 13824, 152064), 14.7e9),
    "Qwen2.5-72B": (llama_like("Qwen2", 8192, 80, 64, 8, 29568, 152064), 72.7e9),
    "Qwen3-8B": (llama_like("Qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8.2e9),
    "Qwen3-32B": (llama_like("Qwen3", 5120, 64, 64, 8, 25600, 151936, head_dim=128), 32.8e9),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5e9), "gpt-oss-120b": (GPT_OSS, 116.8e9),
    "Gemma-7B": (llama_like("Gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256), 8.54e9),
    "Gemma-2-9B": (GEMMA2_9B, 9.24e9),
    "OLMo-2-7B": (llama_like("Olmo2", 4096, 32, 32, 32, 11008, 100352), 7.3e9),
    "Phi-3-mini": (llama_like("Phi3", 3072, 32, 32, 32, 8192, 32064), 3.82e9),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(tmp_path: Path, name: str):
    config, count = PUBLISHED[name]
    found = Model.from_config(written(tmp_path, config))
    assert found.parameters == pytest.approx(count, rel=0.008)


def test_a_tied_embedding_counts_once(tmp_path: Path):
    tied = Model.from_config(written(tmp_path, LLAMA_1B))
    apart = replace(tied, tied=False)
    embedding = 128256 * 2048
    assert apart.parameters - tied.parameters == embedding
    assert apart.multiplied == tied.multiplied == tied.parameters
    # a GPU of one stage has it once; the first and the last stage one each
    one, two = ([step_of(model, Layout(pp=pp)).stage_parameters(0)[0] for model in (tied, apart)]
                for pp in (1, 2))  # fmt: skip
    assert one[1] - one[0] == embedding and two[1] == two[0]
    assert predict(tied, Layout(dp=8)).seconds < predict(apart, Layout(dp=8)).seconds


def step_of(model: Model, layout: Layout) -> Step:
    network = Network(machine_of("test", "h100-8"), Fabric())
    return Step(Layers(model, layout, network, "none"))


def pairs(length: int, window: int) -> int:
    return sum(min(i + 1, window) for i in range(length))


def test_windows(tmp_path: Path):
    every = Model.from_config(written(tmp_path, MISTRAL))
    assert (every.window, every.windowed) == (4096, 32)
    assert every.attended(8192) == pytest.approx(2 * pairs(8192, 4096), rel=1e-3)
    assert every.attended(4096) == replace(every, window=0, windowed=0).attended(4096) == 4096**2
    half = Model.from_config(written(tmp_path, GEMMA2_9B))
    assert (half.window, half.windowed) == (4096, 21)
    assert Model.from_config(written(tmp_path, GPT_OSS)).windowed == 18
    none = Model.from_config(written(tmp_path, QWEN2))
    assert (none.window, none.windowed) == (0, 0)
    some = Model.from_config(
        written(tmp_path, QWEN2 | {"use_sliding_window": True, "sliding_window": 1024})
    )
    assert (some.window, some.windowed) == (1024, 3)
    want = (21 * pairs(8192, 8192) + 3 * pairs(8192, 1024)) / 24
    assert some.attended(8192) == pytest.approx(2 * want, rel=1e-3)
    named = MISTRAL | {"layer_types": ["sliding_attention", "full_attention"] * 16}
    assert Model.from_config(written(tmp_path, named)).windowed == 16
    assert predict(every, Layout()).seconds < predict(replace(every, window=0, windowed=0),
                                                      Layout()).seconds  # fmt: skip


def test_latent_attention_without_a_rank_of_queries(tmp_path: Path):
    """Queries are made of the hidden state, head by head, and so shared out over ranks."""
    model = Model.from_config(written(tmp_path, V2_LITE))
    assert model.attention_weights == (
        (2048, 512 + 64), (2048, 16 * 192), (512, 2 * 16 * 128), (16 * 128, 2048)
    )  # fmt: skip
    seconds = [predict(model, Layout(tp=tp)).seconds for tp in (1, 2)]
    assert seconds[1] < seconds[0]


def test_heads_of_keys_over_ranks(tmp_path: Path):
    config = LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}
    model = Model.from_config(written(tmp_path, config))
    for tp in (1, 2, 6, 12):
        Layout(tp=tp).fits(replace(model, ffn=14400, sequence=8184))
    for tp in (4, 8):
        with pytest.raises(InputError, match=f"tp must be a divisor of the 6 kv heads .* got {tp}"):
            Layout(tp=tp).fits(model)


ODD: tuple[Any, ...] = (
    None, True, False, "", "32", [], [1], {}, {"a": [1]}, 0, -1, 1, 7, 10**30, 2**24, 1e30, 0.5,
    float("nan"), float("inf"), -(10**400),
)  # fmt: skip


def test_any_config_is_predicted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each key of each architecture is left out, or has each odd value; a refusal names a key.

    What takes less memory is looked for in a few layouts only: thousands do not fit either.
    """
    others = memory._others
    monkeypatch.setattr(memory, "_others", lambda *given: islice(others(*given), 3))
    refused, predicted = 0, set[Model]()
    first = {c["architectures"][0]: c for c, _ in reversed(PUBLISHED.values())}
    path = tmp_path / "config.json"
    for config in first.values():
        keys = [*config, "tie_word_embeddings", "sliding_window", "layer_types", "head_dim",
                "_name_or_path"]  # fmt: skip
        changed = [config | {key: odd} for key in keys for odd in ODD]
        changed += [{k: v for k, v in config.items() if k != key} for key in keys]
        for each in changed:
            path.write_text(json.dumps(each))
            try:
                model = Model.from_config(path)
                if model in predicted:
                    continue
                found = predict(model, Layout(tp=2, dp=4), overlap="none")
                assert math.isfinite(found.seconds) and found.seconds > 0, each
                assert math.isfinite(found.flop_per_s) and found.flop_per_s > 0, each
                predicted.add(model)
            except CounterpointError as error:
                said = str(error)
                assert said.startswith("Layout") or any(
                    f"config.json: {key} must be" in said for key in (*keys, "path")
                ), said
                refused += 1
    assert refused > 500 and len(predicted) > 200, (refused, len(predicted))


def test_files_that_are_no_config(tmp_path: Path):
    with pytest.raises(InputError, match=r"path must be of a file that can be read, got .*No such"):
        Model.from_config(tmp_path / "missing.json")
    path = tmp_path / "config.json"
    for text, message in (("{", "path must be of a JSON file"), ("[1]", "of a JSON object")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            predict(path, Layout())
