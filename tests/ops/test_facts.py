"""Every argument of every public name: ranks compare it, or may differ in it.

What ranks compare is tried with one that differs, at a first call and at a warm one: all of them
hear of it, by the argument's name. What may differ is tried with ranks that do.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from drawing import Draw
from on_ranks import on_ranks
from rank_bodies import world
from torch import Tensor

import counterpoint as cp
from counterpoint import nn as cnn

# equal: shape, dtype, whether it is there and whether a gradient is asked for, as far as ranks have
# them alike, or the value of what is no tensor. values: those of tensors are equal by contract, and
# not looked at. own: of each rank. group: says which ranks. alone: nothing is done with other ranks
EQUAL, VALUES, OWN, GROUP, ALONE = "equal", "values", "own", "group", "alone"
BOTH = (EQUAL, OWN)  # a tensor's facts are equal, its numbers are each rank's own
MUST = (EQUAL, VALUES)
TABLE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "all_gather_attention": {
        "q": BOTH, "k": BOTH, "v": BOTH, "group": GROUP, "causal": EQUAL, "scale": EQUAL,
        "plan": EQUAL, "layout": EQUAL,
    },
    "all_gather_matmul": {
        "x": BOTH, "w": BOTH, "group": GROUP, "bias": BOTH, "plan": EQUAL, "rows": EQUAL,
        "gather_dim": EQUAL, "activation": EQUAL,
    },
    "matmul_reduce_scatter": {
        "x": BOTH, "w": BOTH, "group": GROUP, "bias": BOTH, "plan": EQUAL, "rows": EQUAL,
        "scatter_dim": EQUAL,
    },
    "matmul_all_reduce": {"x": BOTH, "w": BOTH, "group": GROUP, "bias": MUST, "plan": EQUAL},
    "matmul_all_reduce_rms_norm": {
        "x": BOTH, "w": BOTH, "residual": MUST, "norm_weight": VALUES, "eps": EQUAL,
        "group": GROUP, "bias": MUST, "plan": EQUAL, "out_dtype": EQUAL, "scale": MUST,
    },
    "matmul_all_reduce_layer_norm": {
        "x": BOTH, "w": BOTH, "residual": MUST, "norm_weight": VALUES, "norm_bias": MUST,
        "eps": EQUAL, "group": GROUP, "bias": MUST, "plan": EQUAL, "out_dtype": EQUAL,
        "scale": MUST,
    },
    "all_reduce_rms_norm": {
        "x": BOTH, "residual": MUST, "weight": VALUES, "eps": EQUAL, "group": GROUP,
        "plan": EQUAL, "out_dtype": EQUAL, "scale": MUST,
    },
    "all_reduce_layer_norm": {
        "x": BOTH, "residual": MUST, "weight": VALUES, "bias": MUST, "eps": EQUAL, "group": GROUP,
        "plan": EQUAL, "out_dtype": EQUAL, "scale": MUST,
    },
    "all_to_all_matmul": {
        "x": BOTH, "w": BOTH, "counts": MUST, "group": GROUP, "max_rows": OWN, "plan": EQUAL,
        "return_rows": OWN,
    },
    "matmul_all_to_all": {
        "x": BOTH, "w": BOTH, "counts": MUST, "group": GROUP, "max_rows": OWN, "plan": EQUAL,
        "sum_of": OWN,
    },
    "exchange_counts": {"counts": BOTH, "group": GROUP},
    "exchange_routes": {
        "experts": BOTH, "weights": BOTH, "num_experts": EQUAL, "group": GROUP,
        "max_rows": EQUAL, "capacity": EQUAL,
    },
    "embedding_bag_all_to_all": {
        "tables": BOTH, "indices": OWN, "offsets": BOTH, "group": GROUP, "mode": EQUAL,
        "per_sample_weights": OWN, "include_last_offset": OWN, "batch": EQUAL, "dims": EQUAL,
        "dtype": OWN, "sparse": OWN, "out": EQUAL, "plan": EQUAL,
    },
    "PooledOutputs": {
        "columns": EQUAL, "dtype": EQUAL, "batch": EQUAL, "group": GROUP, "device": OWN,
        "turns": EQUAL, "captured": EQUAL,
    },
    "batch_invariant": {"self": EQUAL},
    "check": {"group": GROUP}, "release": {"group": GROUP},
    "nn.copy_to_group": {"parameter": MUST, "group": GROUP},
    # layers hand what they are given to the operators above
    "nn.ColumnParallelLinear.forward": {"x": BOTH},
    "nn.RowParallelLinear.forward": {"x": BOTH},
    "nn.FullyShardedLinear.forward": {"x": BOTH},
    "nn.gather_once": {"x": BOTH, "layers": BOTH},
    "nn.gather_gated": {"x": BOTH, "gate": BOTH, "up": BOTH, "activation": EQUAL},
    "nn.ExpertParallelMLP.forward": {
        "x": BOTH, "experts": BOTH, "weights": OWN, "logits": OWN, "top_k": EQUAL,
        "renormalize": OWN,
    },
    "nn.ShardedEmbeddingBags.forward": {
        "indices": OWN, "offsets": BOTH, "per_sample_weights": OWN, "batch": EQUAL,
        "include_last_offset": OWN, "out": EQUAL,
    },
}  # fmt: skip
# what talks to no other rank when it is called: values, plans, models, and what layers and models
# that are overlapped are made of, which is compared when they are called. tune, profile and
# run_on_ranks make groups of their own
NOT_COLLECTIVE = {
    "Choice", "Costs", "CounterpointError", "CounterpointWarning", "DeviceSpec", "InputError",
    "LinkSpec", "Machine", "Overlapped", "PeerTimeoutError", "Plan", "PlanError", "Problem",
    "Report", "Routes", "Scaled", "Timeline", "UnsupportedError", "advise", "bind", "build",
    "choose", "compile_options", "estimate", "explain", "overlap", "preset", "profile",
    "run_on_ranks", "stats", "tune", "validate",
    "nn.ColumnParallelLinear", "nn.RowParallelLinear", "nn.FullyShardedLinear",
    "nn.ExpertParallelMLP", "nn.ShardedEmbeddingBags", "nn.RowWiseAdagrad", "nn.SGD", "nn.to_fp8",
}  # fmt: skip
PACKAGES = {"nn", "resources", "scale"}


def test_the_table_has_every_argument():
    """A new name, or a new argument, fails until it is decided what ranks may do with it."""
    found: dict[str, list[str]] = {}
    for name in [*cp.__all__, *(f"nn.{name}" for name in cnn.__all__)]:
        if name in PACKAGES:
            continue
        thing: Any = getattr(cnn, name[3:]) if name.startswith("nn.") else getattr(cp, name)
        if name not in NOT_COLLECTIVE:
            found[name] = [*inspect.signature(thing).parameters] or ["self"]
        if inspect.isclass(thing) and issubclass(thing, torch.nn.Module):
            found[f"{name}.forward"] = [*inspect.signature(thing.forward).parameters][1:]
    assert {name: [*rules] for name, rules in TABLE.items()} == found


def test_every_rule_is_tried():
    """What is equal by a rank that differs, what may differ likewise."""
    tried = {(each.name, each.argument) for each in DIFFERENCES}
    free = set(MAY_DIFFER)
    for name, rules in TABLE.items():
        for argument, rule in rules.items():
            if name.startswith("nn.") and argument not in ("parameter", "activation"):
                continue  # the operators' are
            rule = (rule,) if isinstance(rule, str) else rule
            assert EQUAL not in rule or (name, argument) in tried, (name, argument)
            assert OWN not in rule or (name, argument) in free or rule == BOTH, (name, argument)


def ones(*shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


S = (4, 4)
TABLE_OF = torch.full((2, 4), 1)
EXPERTS = torch.arange(8).view(4, 2) % 4
BAG = torch.arange(4)
DIMS = [[4], [4]]
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "all_gather_attention": lambda: {name: ones(1, 4, 4, 8) for name in "qkv"},
    "all_gather_matmul": lambda: {"x": ones(4, 4, 4), "w": ones(*S), "plan": "serial"},
    "matmul_reduce_scatter": lambda: {"x": ones(4, 4, 4), "w": ones(*S), "plan": "serial"},
    "matmul_all_reduce": lambda: {"x": ones(*S), "w": ones(*S), "plan": "serial"},
    "matmul_all_reduce_rms_norm": lambda: {
        "x": ones(*S), "w": ones(*S), "residual": ones(*S), "norm_weight": ones(4)},
    "matmul_all_reduce_layer_norm": lambda: {
        "x": ones(*S), "w": ones(*S), "residual": ones(*S), "norm_weight": ones(4)},
    "all_reduce_rms_norm": lambda: {"x": ones(*S), "residual": ones(*S), "weight": ones(4)},
    "all_reduce_layer_norm": lambda: {"x": ones(*S), "residual": ones(*S), "weight": ones(4)},
    "all_to_all_matmul": lambda: {"x": ones(*S), "w": ones(2, 4, 4), "counts": TABLE_OF},
    "matmul_all_to_all": lambda: {"x": ones(*S), "w": ones(2, 4, 4), "counts": TABLE_OF},
    "exchange_counts": lambda: {"counts": torch.ones(4, dtype=torch.int64)},
    "exchange_routes": lambda: {"experts": EXPERTS, "weights": ones(4, 2), "num_experts": 4},
    "embedding_bag_all_to_all": lambda: {
        "tables": [ones(4, 4)], "indices": BAG, "offsets": BAG, "dims": DIMS,
        "out": None},
    "PooledOutputs": lambda: {"columns": 4, "dtype": torch.float32, "batch": 4},
    "batch_invariant": lambda: {"x": ones(*S), "w": ones(*S)},
    "nn.copy_to_group": lambda: {"parameter": ones(4, grad=True)},
    "nn.gather_gated": lambda: {"x": ones(*S), "gate": ones(*S), "up": ones(*S)},
}  # fmt: skip


def call(name: str, group: Any, given: dict[str, Any]) -> Any:
    if name == "batch_invariant":
        given = dict(given)
        if given.pop("self", None):
            with cp.batch_invariant():
                return cp.matmul_all_reduce(group=group, **given)
        return cp.matmul_all_reduce(group=group, **given)
    if name == "nn.copy_to_group":
        return (cnn.copy_to_group(given["parameter"], group=group) * 2).sum().backward()
    if name == "nn.gather_gated":
        gate, up = (cnn.ColumnParallelLinear(4, 4, group=group, bias=False) for _ in range(2))
        return cnn.gather_gated(given["x"], gate, up, given.get("activation", "silu_mul"))
    if "out" in given:  # all ranks make them
        out = cp.PooledOutputs(8, torch.float32, 4, group=group)
        given = given | {"out": out if given["out"] else None}
    return getattr(cp, name)(group=group, **given)


class Difference(NamedTuple):
    """What one rank alone passes, and what is named.

    Args:
        warm: both ways are known when ranks differ; else it is a first call.
    """

    name: str
    argument: str
    other: dict[str, Any]
    says: str
    warm: bool = True


HALF = torch.bfloat16
PLANS = {"plan": "shard_p2p"}
FP8 = torch.float8_e4m3fn
DIFFERENCES = [
    *(Difference("all_gather_attention", n, {m: ones(1, 4, 4, 8, grad=m == n) for m in "qkv"},
                 "requires_grad") for n in "qkv"),
    Difference("all_gather_attention", "q", {n: ones(1, 6, 4, 8) for n in "qkv"}, "q.shape"),
    Difference("all_gather_attention", "k", {n: ones(1, 4, 2, 8) for n in "kv"}, "k.shape"),
    Difference("all_gather_attention", "q", {n: ones(1, 4, 4, 8, dtype=HALF) for n in "qkv"},
               "q.dtype"),
    Difference("all_gather_attention", "causal", {"causal": True}, "causal"),
    Difference("all_gather_attention", "scale", {"scale": 2.0}, "scale"),
    Difference("all_gather_attention", "plan", PLANS, "plan"),
    Difference("all_gather_attention", "layout", {"layout": "bhsd"}, "layout"),
    Difference("all_gather_matmul", "x", {"x": ones(4, 4, 4, grad=True)}, "requires_grad"),
    Difference("all_gather_matmul", "x", {"x": ones(2, 4, 4)}, "x.shape"),
    Difference("all_gather_matmul", "x", {"x": ones(4, 4, 4, dtype=HALF),
                                          "w": ones(*S, dtype=HALF)}, "x.dtype"),
    Difference("all_gather_matmul", "w", {"w": ones(*S, grad=True)}, "requires_grad"),
    Difference("all_gather_matmul", "w", {"w": ones(4, 2)}, "w.shape"),
    Difference("all_gather_matmul", "w", {"w": [ones(*S), ones(*S)]}, "w"),
    Difference("all_gather_matmul", "bias", {"bias": ones(4)}, "bias"),
    Difference("all_gather_matmul", "plan", PLANS, "plan"),
    Difference("all_gather_matmul", "rows", {"rows": [4, 4]}, "rows"),
    Difference("all_gather_matmul", "gather_dim", {"gather_dim": 1}, "gather_dim"),
    Difference("all_gather_matmul", "gather_dim", {"gather_dim": 2, "w": ones(8, 4)}, "gather_dim"),
    Difference("all_gather_matmul", "activation", {"activation": "relu"}, "activation"),
    Difference("matmul_reduce_scatter", "x", {"x": ones(4, 4, 4, grad=True)}, "requires_grad"),
    Difference("matmul_reduce_scatter", "x", {"x": ones(2, 4, 4)}, "x.shape"),
    Difference("matmul_reduce_scatter", "w", {"w": ones(*S, grad=True)}, "requires_grad"),
    Difference("matmul_reduce_scatter", "w", {"w": ones(4, 2)}, "w.shape"),
    Difference("matmul_reduce_scatter", "bias", {"bias": ones(4)}, "bias"),
    Difference("matmul_reduce_scatter", "plan", PLANS, "plan"),
    Difference("matmul_reduce_scatter", "rows", {"rows": [3, 1]}, "rows"),
    Difference("matmul_reduce_scatter", "scatter_dim", {"scatter_dim": 1}, "scatter_dim"),
    Difference("matmul_reduce_scatter", "scatter_dim", {"scatter_dim": 2}, "scatter_dim"),
    Difference("matmul_all_reduce", "x", {"x": ones(2, 4)}, "x.shape"),
    Difference("matmul_all_reduce", "w", {"w": ones(4, 2)}, "w.shape"),
    Difference("matmul_all_reduce", "bias", {"bias": ones(4)}, "bias"),
    Difference("matmul_all_reduce", "plan", PLANS, "plan"),
    *(Difference(f"matmul_all_reduce_{kind}_norm", argument, other, says)
      for kind in ("rms", "layer") for argument, other, says in (
        ("x", {"x": ones(2, 4), "residual": ones(2, 4)}, "x.shape"),
        ("w", {"w": ones(4, 2), "residual": ones(4, 2), "norm_weight": ones(2)}, "w.shape"),
        ("residual", {"residual": None}, "residual"), ("eps", {"eps": 1e-3}, "eps"),
        ("bias", {"bias": ones(4)}, "bias"), ("plan", PLANS, "plan"),
        ("out_dtype", {"out_dtype": FP8}, "out_dtype"))),
    Difference("matmul_all_reduce_layer_norm", "norm_bias", {"norm_bias": ones(4)}, "norm_bias"),
    *(Difference(f"all_reduce_{kind}_norm", argument, other, says)
      for kind in ("rms", "layer") for argument, other, says in (
        ("x", {"x": ones(2, 4), "residual": ones(2, 4)}, "x.shape"),
        ("residual", {"residual": None}, "residual"), ("eps", {"eps": 1e-3}, "eps"),
        ("plan", {"plan": "serial"}, "plan"), ("out_dtype", {"out_dtype": FP8}, "out_dtype"))),
    Difference("all_reduce_layer_norm", "bias", {"bias": ones(4)}, "bias"),
    *(Difference(op, "scale", {"out_dtype": FP8, "scale": ones(1)}, "out_dtype|scale")
      for op in ("all_reduce_rms_norm", "all_reduce_layer_norm", "matmul_all_reduce_rms_norm",
                 "matmul_all_reduce_layer_norm")),
    *(Difference(op, argument, other, says) for op in ("all_to_all_matmul", "matmul_all_to_all")
      for argument, other, says in (
        ("x", {"x": ones(*S, grad=True)}, "requires_grad"),
        ("x", {"x": ones(*S, dtype=HALF), "w": ones(2, 4, 4, dtype=HALF)}, "x.dtype"),
        ("w", {"w": ones(2, 4, 3)}, "w.shape"), ("plan", {"plan": "serial"}, "plan"))),
    Difference("matmul_all_to_all", "w", {"w": ones(2, 4, 4, grad=True)}, "requires_grad"),
    *(Difference(op, "counts", {"counts": torch.tensor([[2, 0, 1, 1]] * 2)}, "counts|rows", False)
      for op in ("all_to_all_matmul", "matmul_all_to_all")),
    Difference("exchange_counts", "counts", {"counts": torch.ones(4, dtype=torch.int32)}, "counts"),
    Difference("exchange_counts", "counts", {"counts": torch.ones(2, dtype=torch.int64)}, "counts"),
    Difference("exchange_routes", "experts", {"experts": EXPERTS[:, :1], "weights": ones(4, 1)},
               "top_k"),
    Difference("exchange_routes", "weights", {"weights": ones(4, 2, grad=True)}, "requires_grad"),
    Difference("exchange_routes", "num_experts", {"num_experts": 6}, "num_experts"),
    Difference("exchange_routes", "max_rows", {"max_rows": 16}, "max_rows"),
    Difference("exchange_routes", "capacity", {"max_rows": 16, "capacity": "drop"},
               "capacity|max_rows"),
    Difference("embedding_bag_all_to_all", "tables", {
        "tables": [ones(4, 4, dtype=HALF)]}, "tables"),
    Difference("embedding_bag_all_to_all", "offsets", {"offsets": BAG[:2], "indices": BAG},
               "offsets"),
    Difference("embedding_bag_all_to_all", "mode", {"mode": "mean"}, "mode"),
    Difference("embedding_bag_all_to_all", "batch", {"batch": [1, 3]}, "batch"),
    Difference("embedding_bag_all_to_all", "dims", {"dims": None}, "dims"),
    Difference("embedding_bag_all_to_all", "plan", {"plan": "serial"}, "plan"),
    Difference("embedding_bag_all_to_all", "out", {"out": True}, "out"),
    *(Difference("PooledOutputs", argument, {argument: value}, argument, False)
      for argument, value in (("columns", 6), ("dtype", HALF), ("batch", [1, 3]), ("turns", 3),
                              ("captured", 1))),
    Difference("batch_invariant", "self", {"self": True}, "plan|invariant"),
    Difference("nn.copy_to_group", "parameter", {"parameter": ones(2, grad=True)}, "parameter"),
    Difference("nn.gather_gated", "activation", {"activation": "relu_mul"}, "activation"),
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@on_ranks(2)
def test_ranks_that_differ_hear_of_it(rank: int, ranks: int, name: str, draw: Draw) -> list[str]:
    """All of them, at the first call and at later ones."""
    wrong: list[str] = []
    of_name = [each for each in DIFFERENCES if each.name == name]
    for each in draw(of_name, 1 + len(of_name) // 2):
        for warm in (False, True) if each.warm else (False,):
            group = dist.new_group([*range(ranks)])
            good, other = GOOD[name](), GOOD[name]() | each.other
            grads = any(isinstance(t, Tensor) and t.requires_grad for t in other.values())
            with torch.set_grad_enabled(grads):
                for given in (good, other, good, other) if warm else ():
                    call(name, group, given)
                try:
                    call(name, group, other if rank else good)
                    cp.check(group)
                    found = "nothing"
                except cp.InputError as error:
                    found = str(error)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
            if not any(text in found.split("must be")[0] for text in each.says.split("|")):
                wrong.append(f"{name} {each.argument}, {'warm' if warm else 'first'}: {found}")
    return wrong


@on_ranks(2)
def test_bags_of_which_one_rank_asks_for_no_gradient(rank: int, ranks: int) -> None:
    given = GOOD["embedding_bag_all_to_all"]()
    for warm in (False, True):
        group = dist.new_group([*range(ranks)])
        for grads in (False, True) if warm else ():
            with torch.set_grad_enabled(grads):
                cp.embedding_bag_all_to_all(group=group, **given)
        with torch.set_grad_enabled(rank == 1), pytest.raises(cp.InputError, match="requires_grad"):
            cp.embedding_bag_all_to_all(group=group, **given)


@on_ranks(2)
def test_copies_of_which_ranks_train_others(rank: int, ranks: int) -> None:
    """Gradients of one size are not taken for one another's."""
    world()
    first, second = ones(4, grad=rank == 0), ones(4, grad=rank == 1)
    y = cnn.copy_to_group(first) + cnn.copy_to_group(second)
    with pytest.raises(cp.InputError, match="use must be equal on all ranks"):
        y.sum().backward()


def experts_that_differ(rank: int, argument: str) -> list[str]:
    """One rank alone passes it, with the results of ranks that do not."""
    counts = torch.tensor([[1, 2, 0, 1], [2, 1, 1, 0]])
    op = cp.all_to_all_matmul if argument != "sum_of" else cp.matmul_all_to_all
    rows = 4 if op is cp.all_to_all_matmul else int(counts[:, 2 * rank : 2 * rank + 2].sum())
    x, w = torch.randn(rows, 4), torch.randn(2, 4, 3)
    want: Any = op(x, w, counts=counts)
    if argument == "sum_of":
        index, weights = torch.tensor([[0, 3], [2, 1]]), torch.rand(2, 2)
        got: Any = op(x, w, counts=counts, sum_of=(index, weights) if rank else None)
        want = (want[index] * weights[..., None]).sum(1) if rank else want
    else:
        value = {"max_rows": 9, "return_rows": True}[argument]
        got = op(x, w, counts=counts, **({argument: value} if rank else {}))
        got = got[0] if isinstance(got, tuple) else got
    return [] if torch.allclose(got, want) else [f"{argument}: {got} is not {want}"]


def max_rows_of_combine(rank: int) -> list[str]:
    counts = torch.tensor([[1, 2, 0, 1], [2, 1, 1, 0]])
    x, w = torch.randn(int(counts[:, 2 * rank : 2 * rank + 2].sum()), 4), torch.randn(2, 4, 3)
    want = cp.matmul_all_to_all(x, w, counts=counts)
    got = cp.matmul_all_to_all(x, w, counts=counts, max_rows=9 if rank else None)
    return [] if torch.equal(got, want) else ["max_rows"]


def bags_that_differ(rank: int, argument: str) -> list[str]:
    """Results and gradients of tables, as without what one rank alone passes."""
    wrong: list[str] = []
    own = torch.randn(5, 4)
    every = [torch.empty(5, 4) for _ in range(2)]
    dist.all_gather(every, own)
    indices = [torch.tensor([0, 1, 4, 2, 3]), torch.tensor([3, 3, 1, 0])]
    offsets = [torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 1, 3])]
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0])
    more: dict[str, Any] = {
        "per_sample_weights": {"per_sample_weights": weights}, "dtype": {"dtype": torch.float32},
        "include_last_offset": {"include_last_offset": True}, "sparse": {"sparse": True},
        "indices": {},
    }[argument]  # fmt: skip
    for dims in (None, DIMS):
        table = own.clone().requires_grad_()
        ends = offsets[rank]
        if rank and argument == "include_last_offset":
            ends = torch.cat([ends, torch.tensor([4])])
        y = cp.embedding_bag_all_to_all(
            [table], indices[rank], ends, dims=dims, **(more if rank else {})
        )
        tables = [t.clone().requires_grad_() for t in every]
        pooled = [
            torch.nn.functional.embedding_bag(
                indices[r], tables[r], offsets[r], mode="sum",
                per_sample_weights=weights if r and argument == "per_sample_weights" else None,
            )
            for r in range(2)
        ]  # fmt: skip
        want = torch.cat(pooled, 1)
        if not torch.allclose(y, want[2 * rank : 2 * rank + 2]):
            wrong.append(f"{argument}: {y} is not {want[2 * rank : 2 * rank + 2]}")
        scale = torch.arange(1.0, 33).view(4, 8)
        (y * scale[2 * rank : 2 * rank + 2]).sum().backward()
        (want * scale).sum().backward()
        grad = table.grad
        assert grad is not None
        if not torch.allclose(grad.to_dense(), tables[rank].grad):  # type: ignore[arg-type]
            wrong.append(f"{argument}: a gradient of {grad}")
    return wrong


def outputs_on_own_devices(rank: int) -> list[str]:
    out = cp.PooledOutputs(4, torch.float32, 4, device="cpu" if rank else torch.device("cpu"))
    return [] if out.device.type == "cpu" else ["device"]


MAY_DIFFER: dict[tuple[str, str], Callable[[int], list[str]]] = {
    ("all_to_all_matmul", "max_rows"): lambda rank: experts_that_differ(rank, "max_rows"),
    ("all_to_all_matmul", "return_rows"): lambda rank: experts_that_differ(rank, "return_rows"),
    ("matmul_all_to_all", "max_rows"): max_rows_of_combine,
    ("matmul_all_to_all", "sum_of"): lambda rank: experts_that_differ(rank, "sum_of"),
    **{("embedding_bag_all_to_all", argument): lambda rank, argument=argument: bags_that_differ(
        rank, argument) for argument in ("indices", "per_sample_weights", "include_last_offset",
                                         "dtype", "sparse")},
    ("PooledOutputs", "device"): outputs_on_own_devices,
}  # fmt: skip


@on_ranks(2)
def test_what_may_differ(rank: int, ranks: int) -> list[str]:
    world()
    torch.manual_seed(rank)
    return [text for run in MAY_DIFFER.values() for text in run(rank)]
