"""Sizes of a transformer from a Hugging Face `config.json`, by its `architectures`."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from counterpoint.errors import InputError
from counterpoint.ranges import RANGES

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
    "GptOssForCausalLM": _LLAMA | {
        "experts": "num_local_experts", "top_k": "num_experts_per_tok",
        "expert_ffn": "intermediate_size",
    },
    "GemmaForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _LLAMA,
    "Olmo2ForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "GPT2LMHeadModel": _GPT2,
    "GPTNeoXForCausalLM": _LLAMA,
}  # fmt: skip
PLAIN = ("GPT2LMHeadModel", "GPTNeoXForCausalLM")  # whose MLP has no gate
# fields that must be so, where they are given
ONLY = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1}
DEFAULTS = {"kv_heads": "heads"}
OPTIONAL = ("head_dim",)  # the width of heads of latent attention is not
NULL = ("query_rank",)  # may be null, which is 0
ZERO = (*NULL, "dense_layers", "shared_ffn")
TIED = (
    "GPT2LMHeadModel",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
)  # where a config does not say it
WINDOWS = "sliding_window"
# where it counts; of Qwen only with "use_sliding_window", from layer "max_window_layers" on
WINDOWED = ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
HALF = ("Gemma2ForCausalLM", "GptOssForCausalLM")  # every second layer has one, the first does
ONLY_EXPERTS = ("MixtralForCausalLM", "GptOssForCausalLM")  # in every layer
SOME = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


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
    if not isinstance(name, str) or name not in ARCHITECTURES:
        near = get_close_matches(str(name), ARCHITECTURES, 1)
        fix = f"did you mean {near[0]}?" if near else "give its sizes by hand: scale.Model(...)"
        _refuse("architectures", f"one of {', '.join(ARCHITECTURES)}", repr(name), fix)
    for field, only in ONLY.items():
        if config.get(field, only) not in (only, None):
            want = f"{only}: layers that differ are not modelled"
            _refuse(field, want, repr(config[field]))
    sizes = _taken(name, config)
    if sizes["heads"] % sizes["kv_heads"]:
        key = ARCHITECTURES[name]["kv_heads"]
        _refuse(key, f"a divisor of the {sizes['heads']} heads", sizes["kv_heads"])
    if "head_dim" not in sizes and sizes["hidden"] % sizes["heads"]:
        keys = ARCHITECTURES[name]
        _refuse(keys["hidden"], f"a multiple of the {sizes['heads']} heads", sizes["hidden"],
                "" if "head_dim" not in keys else f"give {keys['head_dim']}")  # fmt: skip
    if "experts" in sizes:
        if not 0 < sizes["top_k"] <= sizes["experts"]:
            key, want = ARCHITECTURES[name]["top_k"], f"1 to the {sizes['experts']} experts"
            _refuse(key, want, sizes["top_k"])
        if config.get("n_shared_experts") is not None:
            most = int(RANGES["Model.shared_ffn"].high) // sizes["expert_ffn"]
            count = _whole("n_shared_experts", config["n_shared_experts"], 0, most, name)
            sizes["shared_ffn"] = count * sizes["expert_ffn"]
    if sizes.get("key_rank") and config.get("qk_nope_head_dim") != sizes["head_dim"]:
        want = f"as wide as v_head_dim, {sizes['head_dim']}"
        _refuse("qk_nope_head_dim", want, config.get("qk_nope_head_dim"))
    if sizes.get("experts") and name in ONLY_EXPERTS:
        sizes["ffn"] = 0
    sizes["tied"] = _flag("tie_word_embeddings", config, default=name in TIED)
    sizes |= _windows(name, config, sizes["layers"])
    sizes["sequence"] = min(sizes["sequence"], SEQUENCE)
    source = f"{path}; sequences of {sizes['sequence']} tokens assumed"
    named = config.get("_name_or_path")
    if not isinstance(named, str) or not named.strip() or not named.isprintable():
        named = path.resolve().parent.name
    return {**sizes, "name": named, "gated": name not in PLAIN, "source": source}


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError("config.json", "path", want="of a file that can be read",
                         got=f"{path}: {error.strerror}") from None  # fmt: skip
    except (ValueError, RecursionError) as error:
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
        if value is None and key in OPTIONAL:
            continue
        if value is None and field in NULL and key in config:
            value = 0
        least = 0 if field in ZERO else 1
        sizes[field] = _whole(key, value, least, int(RANGES[f"Model.{field}"].high), name)
    return sizes


def _whole(key: str, value: Any, least: int, most: int, name: str) -> int:
    """A whole number of a config, in a range."""
    if type(value) is not int or not least <= value <= most:
        want = f"a whole number, as {name} has it, from {least} to {most}"
        _refuse(key, want, "none" if value is None else repr(value))
    return value


def _flag(key: str, config: Mapping[str, Any], *, default: bool) -> bool:
    value = default if config.get(key) is None else config[key]
    if type(value) is not bool:
        _refuse(key, "true or false", repr(value))
    return value


def _windows(name: str, config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """The window of a model's layers, and how many have it."""
    window, kinds = config.get(WINDOWS), config.get("layer_types")
    if name in SOME and not _flag("use_sliding_window", config, default=False):
        window = None
    if window is not None and name not in (*WINDOWED, *SOME, *HALF):
        _refuse(WINDOWS, f"null: {name} has none", repr(window))
    if window is not None:
        window = _whole(WINDOWS, window, 1, int(RANGES["Model.window"].high), name)
    if kinds is not None:
        known = ["full_attention", "sliding_attention"]
        fits = isinstance(kinds, list) and len(kinds) == layers
        if not fits or any(kind not in known for kind in kinds):
            want = f"{' or '.join(known)} for each of {layers} layers"
            _refuse("layer_types", want, repr(kinds))
        windowed = kinds.count("sliding_attention")
        if windowed and window is None:
            _refuse(WINDOWS, "given, as layer_types has sliding_attention", "none")
    elif name in SOME and window is not None:
        first = config.get("max_window_layers")
        windowed = max(layers - _whole("max_window_layers", first, 0, 2**24, name), 0)
    elif name in HALF:
        windowed = (layers + 1) // 2 if window is not None else 0
    else:
        windowed = layers if window is not None else 0
    return {"window": window or 0, "windowed": windowed} if windowed else {}


def _refuse(field: str, want: str, got: object, fix: str = "") -> NoReturn:
    raise InputError("config.json", field, want=want, got=str(got), fix=fix)
