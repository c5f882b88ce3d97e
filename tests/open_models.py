"""20 open models: their real heads and vocabularies in small models of their classes, and a table.

PYTHONPATH=src:tests:. python -m open_models   # writes the table of docs/compile.md
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import grid

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "compile.md"
ROWS: dict[str, dict[str, Any]] = {
    row["name"]: row for row in json.loads((HERE / "open_models.json").read_text())
}
LAYERS, RANKS = 2, 2
SMALL = {
    "num_hidden_layers": LAYERS, "intermediate_size": 96, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL_EXPERTS = {"moe_intermediate_size": 32}
# latent attention: what it is made of, not its heads
SMALL_LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "n_group": 2, "topk_group": 1,
                "first_k_dense_replace": 1}  # fmt: skip
NAMES = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def vocabulary(real: int) -> int:
    """A small one, which as many ranks divide, up to 512."""
    ranks = min(real & -real, 512)
    odd = next(n for n in range(1, 99, 2) if n * ranks >= 60)
    return ranks * odd


def config(row: dict[str, Any], **other: Any) -> Any:
    """Of a small model of that class."""
    import transformers  # type: ignore[import-not-found]

    heads = row["sizes"]["num_attention_heads"]
    own = SMALL | {"hidden_size": -(-64 // heads) * heads} | row["sizes"]
    own["vocab_size"] = vocabulary(own["vocab_size"])
    if "num_experts" in own or "n_routed_experts" in own:
        own |= SMALL_EXPERTS
    if "n_routed_experts" in own:
        own |= SMALL_LATENT
    return getattr(transformers, f"{row['kind']}Config")(**own | other)


def model_class(row: dict[str, Any]) -> Any:
    """That of its texts, of a model of texts and pictures."""
    import transformers  # type: ignore[import-not-found]

    return getattr(transformers, f"{row['kind'].removesuffix('Text')}ForCausalLM")


def table() -> str:
    """What is taken in two layers, and what is left."""
    lines: list[list[str]] = []
    for row in ROWS.values():
        heads, shared, width, words = (row["sizes"].get(name, 0) for name in NAMES)
        width = f"x {width}" if width else "latent"
        left = "; ".join(f"`{name}`: {why}" for name, why in row.get("left", {}).items())
        every = row.get("taken", 0) + row.get("others", 0)
        lines.append([
            row["name"], f"{heads} / {shared} {width}", f"{words:,}",
            f"{row['taken']} of {every}" if "taken" in row else "refused",
            left or row["refused"],
        ])  # fmt: skip
    return grid(["model", "heads / KV heads", "vocabulary", "taken", "left, why"], lines)


def main() -> None:
    """Write it."""
    from benchmarks.readme import replace

    replace(PAGE, "models", table())


if __name__ == "__main__":
    main()
