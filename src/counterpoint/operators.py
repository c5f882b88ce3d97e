"""Which operators there are: what plans are made of, and what torch calls, before code is loaded.

A saved graph (torch.export, AOTInductor) names operators. It loads in a process that has imported
counterpoint and torch, in either order: the code of an operator is imported when it first runs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# by operator, those of gradients included: its family's folder; the plan_ file of its name there
# declares it as OPERATION
FAMILIES = {
    name: family for family, names in {
        "attention": ("all_gather_attention", "all_gather_attention_backward"),
        "embedding": ("embedding_bag_all_to_all",),
        "experts": ("all_to_all_matmul", "matmul_all_to_all"),
        "norms": ("all_reduce_norm",),
        "tensor_parallel": (
            "all_gather_matmul", "all_gather_matmul_backward", "all_gather_matmul_wgrad",
            "matmul_all_reduce", "matmul_reduce_scatter", "matmul_reduce_scatter_backward",
        ),
    }.items() for name in names
}  # fmt: skip
# what a plan may be of, and no user calls
INNER = {"gather_shards": "fsdp", "pipeline": "resources", "scatter_shards": "fsdp"}
# whose steps have kinds, or read operands, that only the family knows: the module that runs them
STEPS = {"attention": "attention.steps", "experts": "experts.steps"}
# where the file does not have the operator's name
ELSEWHERE = {
    "all_to_all_matmul": ("plan_operators", "DISPATCH"),
    "matmul_all_to_all": ("plan_operators", "COMBINE"),
}

GROUP = "str plan, str group_name, int group_size"
ROWS = "str plan, int[] rows, str group_name, int group_size"
SCALES = "Tensor? x_scale=None, Tensor? w_scale=None"
GRAD = 'str requires_grad=""'
NORM = (
    "Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? scale, str kind, float eps, "
    "bool fp8"
)

# by module: name, arguments and results of its operators, as torch writes them
SCHEMAS = {
    "nn.replicated": ("sum_over_group(Tensor x, str group_name, int use) -> Tensor",),
    "ops.activations": (
        "activated(Tensor h, Tensor? up, str activation, Tensor? counts, int rank) -> Tensor",
        "activated_gradient(Tensor dy, Tensor h, Tensor? up, str activation, Tensor? counts, "
        "int rank) -> Tensor[]",
    ),
    "attention.all_gather_attention": (
        f"all_gather_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, {GROUP}, "
        f'str layout="bshd", {GRAD}) -> (Tensor, Tensor)',
        f"all_gather_attention_backward(Tensor[] given, bool causal, float scale, {GROUP}) -> "
        "Tensor[]",
    ),
    "tensor_parallel.all_gather_matmul": (
        f"all_gather_matmul(Tensor x, Tensor w, Tensor? bias, {ROWS}, {SCALES}, "
        f"int gather_dim=0, {GRAD}) -> Tensor",
        f"all_gather_matmul_list(Tensor x, Tensor[] w, {ROWS}, int gather_dim=0, {GRAD}) -> "
        "Tensor[]",
        f"all_gather_matmul_contracted(Tensor xt, Tensor w, {ROWS}, int rank, int gather_dim=0, "
        f"{GRAD}) -> Tensor",
        "all_gather_matmul_activated(Tensor x, Tensor[] w, Tensor? bias, str activation, "
        f"{ROWS}, {SCALES}, Tensor? up_scale=None, int gather_dim=0) -> Tensor",
    ),
    "norms.all_reduce_norm": (f"all_reduce_norm({NORM}, str plan, str group_name) -> Tensor[]",),
    "tensor_parallel.backward": (
        f"all_gather_matmul_backward(Tensor[] dy, Tensor x, Tensor[] w, {ROWS}, int rank) -> "
        "Tensor[]",
        f"matmul_reduce_scatter_backward(Tensor dy, Tensor x, Tensor w, {ROWS}, int rank) -> "
        "(Tensor, Tensor)",
        f"all_gather_matmul_wgrad(Tensor x, Tensor[] dy, bool transposed, {ROWS}, int rank) -> "
        "Tensor[]",
    ),
    "embedding.autograd": (
        "embedding_bag_gradients(Tensor dy, Tensor[] tables, Tensor indices, Tensor offsets, "
        "Tensor? weights, bool last, bool mean, int[] dims, int[] batch, int rank, "
        "str group_name, str of_tables, bool of_weights) -> Tensor[]",
    ),
    "embedding.embedding_bag_all_to_all": (
        "embedding_bag_all_to_all(Tensor[] tables, Tensor indices, Tensor offsets, "
        "Tensor? weights, Tensor? anchor, bool mean, bool last, bool sparse, int[] dims, "
        "int[] batch, ScalarType dtype, int rank, str plan, str group_name, str update, "
        "Tensor? rates, Tensor[] sums) -> Tensor",
    ),
    "embedding.updates": (
        "embedding_bag_update(Tensor dy, Tensor(a!)[] tables, Tensor(b!)[] sums, Tensor rates, "
        "Tensor indices, Tensor offsets, Tensor? weights, bool last, bool mean, str kind, "
        "int[] dims, int[] batch, int rank, str group_name, bool of_weights) -> (Tensor, "
        "Tensor)",
    ),
    "experts.routes.exchange_counts": (
        "exchange_counts(Tensor counts, str group_name, int group_size) -> Tensor",
    ),
    "experts.routes.exchange_routes": (
        "exchange_routes(Tensor experts, Tensor weights, int num_experts, SymInt? max_rows, "
        f"int islands, bool drops, str group_name, int group_size, {GRAD}) -> (Tensor, Tensor, "
        "Tensor, Tensor, Tensor)",
        "weights_back(Tensor each, Tensor numbers, Tensor lists, SymInt tokens, SymInt top, "
        "bool on_device, str group_name, int group_size) -> Tensor",
    ),
    "experts.gradients": (
        "experts_weight_gradient(Tensor x, Tensor dy, Tensor counts, bool transposed, "
        "str group_name, int group_size) -> Tensor",
    ),
    "experts.operators": (
        "all_to_all_matmul(Tensor x, Tensor w, Tensor counts, SymInt rows, bool host, "
        f"bool keep, bool shown, bool clear, {GROUP}, {GRAD}) -> (Tensor, Tensor)",
        "matmul_all_to_all(Tensor x, Tensor w, Tensor counts, Tensor? add, SymInt rows, "
        f"bool host, bool clear, {GROUP}, {GRAD}) -> Tensor",
        "matmul_all_to_all_sum(Tensor x, Tensor w, Tensor counts, Tensor index, Tensor weights, "
        f"SymInt rows, bool host, bool keep, {GROUP}, {GRAD}) -> (Tensor, Tensor)",
    ),
    "tensor_parallel.matmul_all_reduce": (
        f'matmul_all_reduce(Tensor x, Tensor w, Tensor? bias, {GROUP}, {SCALES}, str behind="") '
        "-> Tensor",
    ),
    "tensor_parallel.matmul_reduce_scatter": (
        f"matmul_reduce_scatter(Tensor x, Tensor w, Tensor? bias, {ROWS}, int rank, {SCALES}, "
        f"int scatter_dim=0, {GRAD}) -> Tensor",
        f"matmul_reduce_scatter_sum(Tensor[] x, Tensor[] w, {ROWS}, int rank) -> Tensor",
    ),
    "tensor_parallel.sum_of_biases": ("sum_of_biases(Tensor bias, str group_name) -> Tensor",),
    "norms.norms": (f"add_norm({NORM}) -> Tensor[]",),
    "experts.routed_operators": (
        "all_to_all_matmul_routed(Tensor x, Tensor w, Tensor counts, Tensor routes, "
        f"Tensor lists, SymInt rows, bool keep, SymInt top, {GROUP}, {GRAD}) -> (Tensor, Tensor)",
        "matmul_all_to_all_routed(Tensor x, Tensor w, Tensor counts, Tensor routes, "
        f"Tensor lists, Tensor? weights, Tensor? add, SymInt tokens, SymInt top, {GROUP}, "
        f"{GRAD}) -> Tensor",
    ),
    "experts.routes.router": (
        "choose_experts(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)",
        "choose_experts_gradient(Tensor dweights, Tensor weights, Tensor experts, "
        "Tensor logits, bool renormalize) -> Tensor",
        "order_by_expert(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)",
    ),
    "experts.fused.sums": (
        "token_sum(Tensor rows, Tensor index) -> Tensor",
        "token_sum_gradient(Tensor dout, Tensor index, Tensor weights, SymInt rows, Tensor? y) "
        "-> (Tensor, Tensor)",
    ),
    "experts.fused.weighted_rows": (
        "weighted_rows(Tensor rows, Tensor weights, Tensor? other, Tensor? counts, "
        "str group_name) -> (Tensor, Tensor)",
    ),
}
MODULES = {s.partition("(")[0]: module for module, schemas in SCHEMAS.items() for s in schemas}
# no other rank takes part in these: a compiler may leave out a call whose result is ignored
ALONE = {
    "activated", "activated_gradient", "add_norm", "token_sum", "token_sum_gradient",
    "experts_weight_gradient", "weighted_rows", "choose_experts", "choose_experts_gradient",
    "order_by_expert",
}  # fmt: skip
WITHOUT_GRADIENT = {
    "all_gather_matmul_activated", "embedding_bag_update", "exchange_counts", "order_by_expert",
    "sum_of_biases",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Implementation:
    """What an operator does; see `ops/register.py`, which makes them."""

    run: Callable[..., Any]
    fake: Callable[..., Any]
    backward: Callable[..., Any] | None
    save: Callable[..., None] | None
    transformed: Callable[..., Any]
    keep: Callable[..., None] | None


IMPLEMENTED: dict[str, Implementation] = {}


@cache
def _declared(op: str) -> Any:
    module, name = ELSEWHERE.get(op, (f"plan_{op}", "OPERATION"))
    return getattr(import_module(f"counterpoint.{(FAMILIES | INNER)[op]}.{module}"), name)


def declaration(op: object) -> Any:
    """What plans of an operator are made of, an Operation of plan/operation.py; None: no such."""
    return _declared(op) if isinstance(op, str) and op in FAMILIES | INNER else None


@cache
def own_steps(op: str) -> Any:
    """What runs steps that only an operator's family knows: its `actions`; None: it has none."""
    module = STEPS.get((FAMILIES | INNER)[op])
    return module and import_module(f"counterpoint.{module}")


def op_names() -> tuple[str, ...]:
    """All operators, those of gradients included, in alphabetical order."""
    return tuple(sorted(FAMILIES))


def implementation(op: str) -> Implementation:
    """Of an operator, whose module is imported if it is not yet."""
    if op not in IMPLEMENTED:
        import_module(f"counterpoint.{MODULES[op]}")
    return IMPLEMENTED[op]


def declare_with_torch() -> None:
    """Declare all operators: now where torch is there, else as soon as it has been imported."""
    if sys.modules.get("torch") is not None:
        import_module("counterpoint.ops.declare")
    else:
        sys.meta_path.insert(0, _BehindTorch())


class _BehindTorch(MetaPathFinder):
    """Finds torch as others do, and declares our operators once it is loaded."""

    looks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or self.looks:
            return None
        self.looks = True
        try:
            spec = find_spec(fullname)
        finally:
            self.looks = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                sys.meta_path.remove(self)
                import_module("counterpoint.ops.declare")

            spec.loader.exec_module = loaded
        return spec
