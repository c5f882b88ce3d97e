"""Sizes of a transformer from a Hugging Face `config.json`, by its `architectures`."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from counterpoint.errors import InputError

SEQUENCE = 8192  # of training, at most: a config says only how long a sequence may be

_LLAMA = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
    "sequence": "max_position_embeddings", "head_dim": "head_dim",
}  # fmt: skip
_EXPERTS = {"top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
_DEEPSEEK = _LLAMA | _EXPERTS | {
    "experts": "n_routed_experts", "dense_layers": "first_k_dense_replace",
    "query_rank": "q_lora_rank", "key_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim",
    "head_dim": "v_head_dim",
}  # fmt: skip
_GPT2 = {
    "hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "kv_heads": "n_head",
    "ffn": "n_inner", "vocab": "vocab_size", "sequence": "n_positions",
}  # fmt: skip
# fields of a Model by those of a config
ARCHITECTURES: dict[str, Mapping[str, str]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA | {
        "experts": "num_local_experts", "top_k": "num_experts_per_tok",
        "expert_ffn": "intermediate_size",
    },
    "Qwen2MoeForCausalLM": _LLAMA | _EXPERTS | {
        "experts": "num_experts", "shared_ffn": "shared_expert_intermediate_size",
    },
    "Qwen3MoeForCausalLM": _LLAMA | _EXPERTS | {"experts": "num_experts"},
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GPT2LMHeadModel": _GPT2,
    "GPTNeoXForCausalLM": _LLAMA,
}  # fmt: skip
PLAIN = ("GPT2LMHeadModel", "GPTNeoXForCausalLM")  # whose MLP has no gate
# fields that must be so, where they are given
ONLY = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1}
DEFAULTS = {"kv_heads": "heads"}
OPTIONAL = ("head_dim",)


def sizes_of(path: str | Path) -> dict[str, Any]:
    """Fields of a `Model` from a config.

    Args:
        path: of `config.json`, or of the folder that has it.

    Raises:
        InputError: there is no such file, it is no JSON object, its architecture is not known, a
            field is missing, or layers differ in a way that a `Model` cannot say.
    """
    path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = _read(path)
    found = config.get("architectures")
    name = found[0] if isinstance(found, list) and found else found
    if name not in ARCHITECTURES:
        near = get_close_matches(str(name), ARCHITECTURES, 1)
        fix = f"did you mean {near[0]}?" if near else "give its sizes by hand: scale.Model(...)"
        _refuse("architectures", f"one of {', '.join(ARCHITECTURES)}", repr(name), fix)
    for field, only in ONLY.items():
        if config.get(field, only) not in (only, None):
            want = f"{only}: layers that differ are not modelled"
            _refuse(field, want, repr(config[field]))
    sizes = _taken(str(name), config)
    if "n_shared_experts" in config:
        sizes["shared_ffn"] = (config["n_shared_experts"] or 0) * sizes["expert_ffn"]
    if sizes.get("query_rank") and config.get("qk_nope_head_dim") != sizes["head_dim"]:
        want = f"as wide as v_head_dim, {sizes['head_dim']}"
        _refuse("qk_nope_head_dim", want, config.get("qk_nope_head_dim"))
    if sizes.get("experts") and name == "MixtralForCausalLM":
        sizes["ffn"] = 0  # every layer has experts
    sizes["sequence"] = min(sizes["sequence"], SEQUENCE)
    source = f"{path}; sequences of {sizes['sequence']} tokens assumed"
    named = config.get("_name_or_path") or path.resolve().parent.name
    return {**sizes, "name": str(named), "gated": name not in PLAIN, "source": source}


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError("config.json", "path", want="of a file that can be read",
                         got=f"{path}: {error.strerror}") from None  # fmt: skip
    except ValueError as error:
        raise InputError("config.json", "path", want="of a JSON file",
                         got=f"{path}: {error}") from None  # fmt: skip
    if not isinstance(config, dict):
        raise InputError("config.json", "path", want="of a JSON object", got=str(path))
    return config


def _taken(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field that the architecture has, by its name in a `Model`."""
    sizes: dict[str, Any] = {}
    for field, key in ARCHITECTURES[name].items():
        value = config.get(key)
        if value is None and field == "ffn" and name == "GPT2LMHeadModel":
            value = 4 * sizes["hidden"]
        if value is None:
            value = sizes.get(DEFAULTS.get(field, ""))
        if value is None and field in OPTIONAL:
            continue
        if type(value) is not int:
            _refuse(key, f"a whole number, as {name} has it", repr(config.get(key, "none")))
        sizes[field] = value
    return sizes


def _refuse(field: str, want: str, got: object, fix: str = "") -> None:
    raise InputError("config.json", field, want=want, got=str(got), fix=fix)
