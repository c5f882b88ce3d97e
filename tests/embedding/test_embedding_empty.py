"""Embedding bags of nothing: no sample, no index, no table, on one rank and on all."""

import ast
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import Draw
from on_ranks import on_ranks

import counterpoint as cp
import counterpoint.nn as cnn
from counterpoint.embedding.gradients import bounds_of, entries_of, scales_of

INT = torch.int64


@pytest.mark.parametrize("kind", [torch.int32, INT])
@pytest.mark.parametrize(("num_offsets", "last"), [(0, False), (0, True), (1, True), (5, True),
                                                   (4, False)])  # fmt: skip
def test_entries_of_nothing_are_whole_numbers(
    kind: torch.dtype, num_offsets: int, last: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of which no library function is asked to repeat any."""
    monkeypatch.delattr(torch, "repeat_interleave")
    offsets = torch.zeros(num_offsets, dtype=kind)
    bounds, entries = bounds_of(offsets, 0, last=last), entries_of(offsets, 0, last=last)
    assert {bounds.dtype, entries.bag.dtype, entries.sizes.dtype, entries.bounds.dtype} == {INT}
    assert entries.bag.shape == (0,) and entries.sizes.shape == (max(len(bounds) - 1, 0),)
    for weights, mean in ((None, True), (torch.empty(0), False)):
        scales = scales_of(entries, weights, mean=mean)
        assert scales is not None and scales.dtype == torch.float32 and scales.shape == (0,)


CASES = [*product(((0, 0), (0, 3), (3, 0), (2, 2)), ((0, 1), (1, 1)), (0, 2), (False, True),
                  ("dense", "sparse", "fused", "adagrad"))]  # fmt: skip


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_steps_of_nothing(rank: int, ranks: int, dtype: torch.dtype, draw: Draw) -> list[str]:
    """The output and every gradient have their shape and dtype; tables that nobody named stay."""
    wrong: list[str] = []
    for batch, owners, longest, last, how in draw(CASES, 12):
        for weighted, mode in ((False, "sum"), (True, "sum"), (False, "mean")):
            bags: Any = cnn.ShardedEmbeddingBags(
                [(7, 8), (5, 4)], owners=owners, mode=mode, sparse=how == "sparse", dtype=dtype
            )
            if how in ("fused", "adagrad"):
                bags.fuse_optimizer(cnn.SGD(0.1) if how == "fused" else cnn.RowWiseAdagrad(0.1))
            before = [w.detach().clone() for w in bags.weights]
            own = len(bags.own) * sum(batch)
            indices = torch.randint(0, 5, (own * longest,))
            offsets = torch.arange(own + last) * longest
            weights = torch.rand(len(indices)).requires_grad_() if weighted else None
            y = bags(indices, offsets, weights, batch=batch, include_last_offset=last)
            y.sum().backward()
            grads = [w.grad for w in bags.weights] if how in ("dense", "sparse") else []
            right = (
                y.shape == (batch[rank], 12)
                and y.dtype == dtype
                and all(g is not None and g.dtype == dtype for g in grads)
                and (weights is None or weights.grad.shape == weights.shape)  # type: ignore[union-attr]
                and all(g.to_dense().any() == bool(len(indices)) for g in grads)
                and (len(indices) or all(map(torch.equal, before, bags.weights)))
            )
            if not right:
                wrong.append(f"{batch} {owners} {longest} {last} {how} {weighted} {mode}")
    return wrong


def test_tensors_of_lists_say_their_dtype():
    """torch.tensor([]) is of floats, whatever a longer list is of."""
    wrong: list[str] = []
    for path in sorted(Path(cp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            names = {keyword.arg for keyword in node.keywords}
            made = ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor")
            if made and not isinstance(node.args[0], ast.Subscript) and "dtype" not in names:
                wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
