"""Sizes of transformers, by name, with where they are published; and any model by its name."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from counterpoint.errors import InputError
from counterpoint.ranges import check
from counterpoint.scale.config import sizes_of
from counterpoint.scale.recommenders.dlrm import DLRMS, Dlrm


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a decoder-only transformer.

    Args:
        name: for texts.
        hidden: width of the hidden state.
        layers: how many.
        heads: of the queries.
        kv_heads: of keys and values; as many as `heads` where they are not shared.
        ffn: inner width of an MLP that is not one of experts; 0 where all layers have experts.
        vocab: rows of the embedding.
        sequence: tokens of a sequence in training.
        gated: whether the MLP has a gate beside its first matmul.
        head_dim: width of a head; 0: hidden / heads.
        experts: of a layer, in all; 0: none.
        top_k: experts of one token.
        expert_ffn: inner width of an expert.
        shared_ffn: inner width of the expert that every token goes through; 0: none.
        dense_layers: layers at the front without experts.
        key_rank: of latent attention, width that keys and values are made of; 0: no latent
            attention.
        query_rank: likewise, of queries; 0: they are made of the hidden state.
        rope_dim: likewise, width of a head that carries positions, beside `head_dim`.
        tied: whether the embedding and the matmul of logits are one weight.
        window: tokens that a token attends to at most, in some layers; 0: all before it.
        windowed: those layers, how many.
        source: where the sizes are published.

    Raises:
        InputError: a size is of another kind or out of its range.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rope_dim: int = 0
    tied: bool = False
    window: int = 0
    windowed: int = 0
    source: str = "sizes given by hand"

    def __post_init__(self) -> None:
        op = f"Model {self.name}"
        check(op, self)
        if self.experts and not 0 < self.top_k <= self.experts:
            raise InputError(op, "top_k", want=f"1 to {self.experts} experts", got=self.top_k)
        if self.experts and not self.expert_ffn:
            raise InputError(op, "expert_ffn", want="at least 1, with experts", got=0)
        if not self.ffn and (not self.experts or self.dense_layers):
            raise InputError(op, "ffn", want="at least 1, of layers without experts", got=0)
        if self.heads % self.kv_heads:
            want = f"a divisor of the {self.heads} heads"
            raise InputError(op, "kv_heads", want=want, got=self.kv_heads)
        if not self.head_dim and self.hidden % self.heads:
            want = f"given, as {self.hidden} is no multiple of the {self.heads} heads"
            raise InputError(op, "head_dim", want=want, got=0)
        if (self.query_rank or self.rope_dim) and not self.key_rank:
            raise InputError(op, "key_rank", want="at least 1, of latent attention", got=0)
        if self.windowed > self.layers or bool(self.windowed) != bool(self.window):
            want = f"from 1 to the {self.layers} layers with a window, else 0"
            raise InputError(op, "windowed", want=want, got=self.windowed)

    @classmethod
    def from_config(cls, path: str | Path) -> "Model":
        """The model of a Hugging Face `config.json`.

        Known are Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, OLMo 2, Phi-3, Mixtral, Qwen2-MoE,
        Qwen3-MoE, gpt-oss, DeepSeek-V2 and -V3, GPT-2 and GPT-NeoX. Sequences
        have 8192 tokens, or fewer where the model takes fewer.

        Args:
            path: of the file, or of the folder that has it.

        Raises:
            InputError: there is no such file, its architecture is not known, a field is missing,
                or layers differ in a way that is not modelled.
        """
        return cls(**sizes_of(path))

    @property
    def width(self) -> int:
        """Of one head of the values."""
        return self.head_dim or self.hidden // self.heads

    @property
    def key_width(self) -> int:
        """Of one head of the queries and keys."""
        return self.width + self.rope_dim

    @property
    def num_dense(self) -> int:
        """Layers without experts."""
        return min(self.dense_layers, self.layers) if self.experts else self.layers

    @property
    def attention_weights(self) -> tuple[tuple[int, int], ...]:
        """(contracted size, columns) of each matmul before and after attention, of all ranks.

        Of latent attention the first is of all heads together, the others are head by head.
        """
        out = (self.heads * self.width, self.hidden)
        if not self.key_rank:
            columns = (self.heads + 2 * self.kv_heads) * self.width
            return ((self.hidden, columns), out)
        return (
            (self.hidden, self.query_rank + self.key_rank + self.rope_dim),
            (self.query_rank or self.hidden, self.heads * self.key_width),
            (self.key_rank, 2 * self.heads * self.width),
            out,
        )

    def attended(self, length: int) -> float:
        """Twice the pairs of tokens that attend to each other in a sequence; mean of the layers."""
        near = min(self.window, length) if self.windowed else length
        share = self.windowed / self.layers
        return (1 - share) * length * length + share * near * (2 * length - near)

    def mlp_parameters(self, inner: int) -> int:
        """Of one MLP, or one expert, of that inner width."""
        return (2 + self.gated) * self.hidden * inner

    @property
    def parameters(self) -> int:
        """In all; norms and biases are left out."""
        attention = self.layers * sum(k * n for k, n in self.attention_weights)
        dense = self.num_dense * self.mlp_parameters(self.ffn)
        expert = self.experts * self.mlp_parameters(self.expert_ffn)
        sparse = (self.layers - self.num_dense) * (expert + self.mlp_parameters(self.shared_ffn))
        return attention + dense + sparse + (2 - self.tied) * self.vocab * self.hidden

    @property
    def multiplied(self) -> int:
        """Parameters of matmuls: an embedding is looked up."""
        return self.parameters - (not self.tied) * self.vocab * self.hidden


_LLAMA, _GPT3 = "arXiv 2407.21783, table 3", "arXiv 2005.14165, table 2.1; Megatron's vocabulary"

MODELS = {
    model.name: model
    for model in (
        Model(name="llama3-8b", hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336,
              vocab=128256, sequence=8192, source=_LLAMA),
        Model(name="llama3-70b", hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672,
              vocab=128256, sequence=8192, source=_LLAMA),
        Model(name="llama3-405b", hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248,
              vocab=128256, sequence=8192, source=_LLAMA),
        Model(name="gpt3-175b", hidden=12288, layers=96, heads=96, kv_heads=96, ffn=49152,
              vocab=51200, sequence=2048, gated=False, source=_GPT3),
        Model(name="mixtral-8x7b", hidden=4096, layers=32, heads=32, kv_heads=8, ffn=0,
              vocab=32000, sequence=8192, experts=8, top_k=2, expert_ffn=14336,
              source="arXiv 2401.04088, table 1; sequence assumed"),
        Model(name="deepseek-v3", hidden=7168, layers=61, heads=128, kv_heads=128, ffn=18432,
              vocab=129280, sequence=4096, head_dim=128, experts=256, top_k=8, expert_ffn=2048,
              shared_ffn=2048, dense_layers=3, query_rank=1536, key_rank=512, rope_dim=64,
              source="arXiv 2412.19437, section 4.2; bf16 here, fp8 there"),
        Model(name="qwen3-235b", hidden=4096, layers=94, heads=64, kv_heads=4, ffn=0,
              vocab=151936, sequence=4096, head_dim=128, experts=128, top_k=8, expert_ffn=1536,
              source="arXiv 2505.09388, table 2, and its config.json"),
    )
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Of all models that are known."""
    return (*MODELS, *DLRMS)


def model_of(op: str, model: object, arg: str = "model") -> Model | Dlrm:
    """The model that is meant: itself, by its name, or by the path of its config.

    Args:
        op: that asks, for errors.
        model: what was given.
        arg: the argument that it was given as, for errors.

    Raises:
        InputError: there is none of that name, or the config cannot be read.
    """
    if isinstance(model, Model | Dlrm):
        return model
    if isinstance(model, Path) or (isinstance(model, str) and ("/" in model or "." in model)):
        return Model.from_config(model)
    known: dict[str, Model | Dlrm] = {**MODELS, **DLRMS}
    if not isinstance(model, str) or model not in known:
        near = get_close_matches(str(model), known, 1)
        fix = f"did you mean {near[0]!r}?" if near else ""
        want = f"one of {', '.join(known)}, or the path of a config.json"
        want += ", a scale.Model or a scale.Dlrm" * (arg == "model")
        raise InputError(op, arg, want=want, got=repr(model), fix=fix)
    return known[model]
