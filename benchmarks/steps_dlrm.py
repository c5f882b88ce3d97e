"""Steps of the DLRM of examples/05_dlrm.py, three ways.

    fused    bags and their all-to-all in one kernel, into outputs of their own
    torch    a torch.nn.EmbeddingBag for each table, all_to_all_single, cat
    lookup   our batched lookup and its gradient, all_to_all_single, cat

All else is the same code: bottom, cross network and top under autocast, gradients averaged by
DistributedDataParallel, dense gradients of tables; no optimizer.
"""

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import counterpoint.nn as cnn
from counterpoint.errors import CounterpointError
from counterpoint.measure.timing import relative_error
from counterpoint.ops.embedding_gradients import pooled_on_cpu, table_gradients
from counterpoint.runtime.embedding_layout import Facts, Layout, way_for
from counterpoint.runtime.launch_embedding import Lookup

Arm = Callable[[int], object]
SETS = 3  # batches in rotation
EXACT = 2**-9  # a relative error as small as that is of rounding to bf16 alone
WAYS = ("fused", "torch", "lookup")
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "05_dlrm.py"


def loaded() -> Any:
    """The example as a module: its name begins with a digit."""
    spec = importlib.util.spec_from_file_location("dlrm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dlrm = loaded()


class _Looked(torch.autograd.Function):
    """Pooled rows of own tables for the global batch, by one launch for all tables."""

    @staticmethod
    def forward(ctx: Any, way: "InLookup", indices: Tensor, *tables: Tensor) -> Tensor:
        ctx.save_for_backward(indices, *tables)
        ctx.offsets = way.starts
        if way.lookup is None:
            return pooled_on_cpu(tables, indices, way.starts, None, way.bags, last=False,
                                 mean=False, dtype=tables[0].dtype)  # fmt: skip
        pooled = tables[0].new_empty(way.bags, sum(t.shape[1] for t in tables))
        way.lookup(tables, indices, way.starts, None, pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        indices, *tables = ctx.saved_tensors
        grads = table_gradients(dy[0].contiguous(), tables, indices, ctx.offsets, None, last=False,
                                mean=False, sparse=False)  # fmt: skip
        return None, None, *grads


class InLookup(dlrm.InThree):
    """As the example's way in three, but that one launch pools all tables."""

    def __init__(self, s: Any, bags: cnn.ShardedEmbeddingBags, device: torch.device) -> None:
        super().__init__(s, bags, device)
        counts = torch.tensor([dlrm.POOLING[t] for t in bags.own]).repeat_interleave(s.batch)
        counts = counts.to(device)
        self.starts, self.bags = counts.cumsum(0) - counts, s.batch
        self.lookup: Lookup | None = None
        if device.type == "cuda":
            ranks, dtype = len(bags.dims), bags.weights[0].dtype
            layout = Layout(bags.dims, (s.batch // ranks,) * ranks, dtype)
            facts = Facts(layout, False, None, torch.int64, torch.int64)
            way = way_for(sum(self.lengths), s.batch * len(bags.own))
            self.lookup = Lookup(facts, dist.get_rank(bags.group), device, way)

    def pooled(self, indices: Tensor) -> Tensor:
        """[samples of all ranks, columns of own tables]."""
        return _Looked.apply(self, indices, *(t.weight for t in self.tables))  # type: ignore[no-any-return]


class Steps(NamedTuple):
    """What is timed, and what is known of it."""

    arms: dict[tuple[str, str], Arm]  # (what, by which way), each by the number of a batch
    errors: dict[str, float]  # of gradients, against fp64
    facts: dict[str, Any]


def made(s: Any, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> Steps:
    """Build the model three times, check losses and gradients, and return what to time.

    Args:
        s: sizes, of the example's class.
        dtype: of tables, and of activations by autocast.

    Raises:
        CounterpointError: a loss differs, or gradients are further off than twice torch's.
    """
    ranks, rank = group.size(), group.rank()
    torch.manual_seed(rank)
    owners, work = dlrm.balanced(ranks)
    rows = [min(n, s.rows) for n in dlrm.ROWS]
    bags = cnn.ShardedEmbeddingBags(
        [(n, s.dim) for n in rows], owners=owners, device=device, dtype=dtype
    )
    for weight in bags.weights:
        nn.init.uniform_(weight, -(len(weight) ** -0.5), len(weight) ** -0.5)
    dense = dlrm.Dense(s).to(device)
    tables = {"fused": dlrm.InOneCall(s, bags, device), "torch": dlrm.InThree(s, bags, device),
              "lookup": InLookup(s, bags, device)}  # fmt: skip
    ways = {n: dlrm.Training(s, t, copy.deepcopy(dense), dtype) for n, t in tables.items()}
    batches = [dlrm.batch_of(s, bags.own, seed, device) for seed in range(SETS)]
    errors = _checked(s, ways, bags, dense, batches, device)
    torch_s, lookup = tables["torch"], tables["lookup"]
    with torch.no_grad():
        pooled = torch_s.pooled(batches[0].indices)

    def alone(call: Callable[[Any], Tensor]) -> Arm:
        return torch.no_grad()(lambda i: call(batches[i % SETS]))

    arms: dict[tuple[str, str], Arm] = {
        ("pooling", "torch"): alone(lambda b: torch_s.pooled(b.indices)),
        ("pooling", "lookup"): alone(lambda b: lookup.pooled(b.indices)),
        ("exchange", ""): alone(lambda _: torch_s.exchanged(pooled)),
    }
    for name, way in ways.items():
        arms |= {
            ("tables", name): alone(lambda b, way=way: way.tables(b.indices)),
            ("forward", name): alone(way.forward),
            ("forward + backward", name):
                lambda i, way=way: way.forward_backward(batches[i % SETS]),
        }  # fmt: skip
    facts = {
        "model": "DLRM-DCNv2", "batch": s.batch, "size": s.batch, "dim": s.dim, "rows": s.rows,
        "pooled": work, "bottom": s.bottom, "cross": s.cross, "top": s.top, "sets": SETS,
    }  # fmt: skip
    return Steps(arms, errors, facts)


def _checked(
    s: Any, ways: dict[str, Any], bags: cnn.ShardedEmbeddingBags, dense: nn.Module,
    batches: list[Any], device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """The worst error of gradients; the last batch: what is left of others would be seen."""
    exact = dlrm.Training(
        s, dlrm.InThree(s, bags, device).double(), copy.deepcopy(dense).double(), torch.float32
    )
    batch = batches[-1]
    loss = exact.forward_backward(batch._replace(features=batch.features.double())).double()
    want = _gradients(exact)
    found: dict[str, list[float]] = {}
    most: dict[str, float] = {}
    for name in ("torch", "lookup", "fused"):
        way = ways[name]
        way.forward_backward(batches[0])
        got = way.forward_backward(batch)
        off = [(got.double() - loss).abs().item() / loss.item()]
        found[name] = [relative_error(a, b) for a, b in zip(_gradients(way), want, strict=True)]
        # each table by itself: one of few rows is little of the norm of all
        over = max(e / max(t, EXACT) for e, t in zip(found[name], found["torch"], strict=True))
        worst = torch.tensor([*off, over, max(found[name])], device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        of_loss, over, most[name] = worst.tolist()
        if not (of_loss <= 5e-3 and over <= 2):
            raise CounterpointError(
                f"DLRM {name}: loss off by {of_loss:.1e}, a gradient {over:.1f} times as far as "
                f"torch's, gradients by {most[name]:.1e} at most"
            )
    for way in ways.values():
        way.optimizer.zero_grad()
    return most


def _gradients(training: Any) -> list[Tensor]:
    """Of each table, and of all else as one vector."""
    dense = torch.cat([p.grad.flatten() for p in training.dense.parameters()])
    return [*(p.grad for p in training.tables.parameters()), dense]
