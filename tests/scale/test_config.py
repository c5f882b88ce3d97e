"""Models from the `config.json` of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import InputError
from counterpoint.scale import Layout, Model, predict
from counterpoint.scale.models import MODELS

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
    assert found.parameters == pytest.approx(124e6 + 50257 * 768, rel=0.01)  # its head is tied


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
        ({"intermediate_size": -1}, "ffn must be"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers must be \[\]: layers that differ"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Model.from_config(written(tmp_path, LLAMA | change))


def test_latent_attention_needs_its_ranks(tmp_path: Path):
    with pytest.raises(InputError, match=r"q_lora_rank must be a whole number, .* got None"):
        Model.from_config(written(tmp_path, DEEPSEEK | {"q_lora_rank": None}))
    with pytest.raises(InputError, match="qk_nope_head_dim must be as wide as v_head_dim, 128"):
        Model.from_config(written(tmp_path, DEEPSEEK | {"qk_nope_head_dim": 64}))


def test_files_that_are_no_config(tmp_path: Path):
    with pytest.raises(InputError, match=r"path must be of a file that can be read, got .*No such"):
        Model.from_config(tmp_path / "missing.json")
    path = tmp_path / "config.json"
    for text, message in (("{", "path must be of a JSON file"), ("[1]", "of a JSON object")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            predict(path, Layout())
