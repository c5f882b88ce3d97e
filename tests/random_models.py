"""Random models, compiled as `compile_options` does, held against torch's own compile and fp64.

    make models                                          # 1,000 as written, 60 by Inductor
    python -m random_models --models 1 --seed 17 --ranks 4    # one of them again

A model is made from its seed: products between collectives, with views, casts, biases and sums of
all sorts around them. Its forward and all gradients, in fp32, may be off from fp64 by twice what
those of torch's own compile are. The quick way runs the rewritten graph as it is written. By
Inductor a model is compiled three times from one cache folder: cold, warm in new processes, and by
another number of ranks; torch has to find its graphs when they are warm.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from compiled import kept_in, local, overlap_pass, quick
from rank_bodies import by_reference
from rankpool import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.measure.timing import relative_error

LEAST_REPLACED = 0.5  # a generator whose models nothing matches tests nothing
# two orders of summation differ by as much, where torch's own is right by chance
CHANCE = 2e-6
CASTS = (
    (torch.int32,), (torch.bool,), (torch.float8_e4m3fn,), (torch.float8_e5m2, torch.bfloat16),
    (torch.float64, torch.int8), (torch.bfloat16,), (torch.float16, torch.int32, torch.bool),
)  # fmt: skip
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu, F.silu, F.gelu, torch.sin, lambda h: h, lambda h: h * 0.5,
)  # fmt: skip
PRODUCTS = ("linear", "matmul", "einsum", "mm", "turned", "addmm")
VIEWS = ("none", "flat", "cut", "clone", "unsqueezed", "swapped", "heads", "rows", "all", "strided")


class Result(NamedTuple):
    """What one rank found of one model.

    Args:
        wrong: in words.
        found: collectives of its graphs.
        replaced: how many of them.
        hits: how often torch had a graph of it in its cache.
    """

    wrong: list[str]
    found: int
    replaced: int
    hits: int


def functional(name: str) -> Any:
    """One of torch's with a gradient, whose names end otherwise before torch 2.13."""
    new, old = (f"{name}_{form}_autograd" for form in ("single", "tensor"))
    return getattr(collectives, new, None) or getattr(collectives, old)


gathered, scattered = functional("all_gather"), functional("reduce_scatter")


class Summed(torch.autograd.Function):
    """An all-reduce, whose gradient is everyone's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, group: Any) -> Tensor:
        ctx.scale = 1 / group.size() if op == "avg" else 1.0
        return collectives.wait_tensor(collectives.all_reduce(x, op, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None, None


class Copied(torch.autograd.Function):
    """What all ranks have, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return collectives.wait_tensor(collectives.all_reduce(grads[0], "sum", ctx.group)), None


class Mlp(nn.Module):
    """Of DTensors."""

    def __init__(self, width: int, hidden: int, bias: bool, function: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


class Model(nn.Module):
    """Made from a seed, the same program on all ranks; parameters and buffers differ by rank.

    Args:
        seed: of it.
        mesh: of the ranks, of one dim or two.
        train: gradients are asked for.
    """

    def __init__(self, seed: int, mesh: DeviceMesh, train: bool) -> None:
        super().__init__()
        self.random, self.train_it, self.mesh = Random(seed), train, mesh
        self.generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank() + 1)
        self.weights, self.shared = nn.ParameterDict(), dict[tuple[int, ...], list[str]]()
        self.parts, self.exact = nn.ModuleDict(), True
        sizes = self.random.choice((1, 2, 3)), 12, self.random.choice((12, 24))
        self.start = self.shape = sizes
        self.steps: list[tuple[Callable[..., Tensor], tuple[Any, ...], bool, str]] = []
        for _ in range(self.random.choice((1, 2, 2, 3))):
            self._step()

    def _step(self) -> None:
        kinds = ["gather", "scatter", "reduce", "pair", "pair", "dtensor", "norm"]
        kind = self.random.choice(kinds)
        group_dim = self.random.randrange(self.mesh.ndim)
        group = self.mesh.get_group(group_dim)
        kept = self.train_it and self.random.random() < 0.2
        steps = {"gather": [self._gather], "scatter": [self._scatter], "reduce": [self._reduce],
                 "pair": [self._gather, self._scatter], "norm": [self._norm]}  # fmt: skip
        if kind == "dtensor":
            given = self._dtensor(group_dim)
            self.steps.append((self.dtensor, given, kept, self.random.choice(VIEWS)))
            return
        for step in steps[kind]:
            found = step(group)
            if found is not None:
                self.steps.append((*found, kept, self.random.choice(VIEWS)))
        self.exact = False

    def _weight(self, *shape: int, small: float = 1.0) -> str:
        """The name of a new parameter, or of one that is there."""
        known = self.shared.setdefault(shape, [])
        if known and self.random.random() < 0.3:
            return self.random.choice(known)
        name = f"w{len(self.weights)}"
        self.weights[name] = nn.Parameter(small * torch.randn(*shape, generator=self.generator))
        known.append(name)
        return name

    def _product(self, columns: int, group: Any) -> tuple[Any, ...]:
        form, k, bias = self.random.choice(PRODUCTS), self.shape[-1], ""
        if form in ("addmm", "linear"):
            of = ("none",) * 2 * (form == "linear")
            bias = self.random.choice(("plain", "shared", "rank", "summed", "buffer", *of))
        w = self._weight(*((columns, k) if form in ("linear", "turned") else (k, columns)),
                         small=k**-0.5)  # fmt: skip
        b = self._weight(columns) if bias not in ("", "none") else ""
        if bias == "buffer":
            name = f"b{len(self.steps)}_{columns}"
            self.register_buffer(name, torch.randn(columns, generator=self.generator))
            b = name
        return form, w, bias, b, group

    def _dim(self, group: Any, *, parted: bool) -> int | None:
        """A dim that can be gathered, or parted."""
        n = group.size()
        fits = [i for i, size in enumerate(self.shape)
                if (size % n == 0 if parted else size * n <= 96)]  # fmt: skip
        return self.random.choice(fits) if fits else None

    def _gather(self, group: Any) -> Any:
        if (dim := self._dim(group, parted=False)) is None:
            return None
        n, shape = group.size(), list(self.shape)
        shape[dim] *= n
        self.shape = tuple(shape)  # type: ignore[assignment]
        casts = self.random.choice(CASTS) if self.exact and self.random.random() < 0.5 else ()
        products = [self._product(12, group) for _ in range(self.random.choice((1, 1, 2)))]
        views = self.random.choice(VIEWS), self.random.choice(VIEWS)
        gate = len(products) == 2 and self.random.random() < 0.5
        function = self.random.choice(FUNCTIONS)
        self.shape = (*self.shape[:-1], 12)
        return self.gather, (dim, group, casts, views, products, function, gate)

    def _scatter(self, group: Any) -> Any:
        products = [self._product(24, group) for _ in range(self.random.choice((1, 1, 2)))]
        self.shape = (*self.shape[:-1], 24)
        if (dim := self._dim(group, parted=True)) is None:
            dim = 2  # 24 columns can be parted by 2, 3 and 4
        shape = list(self.shape)
        shape[dim] //= group.size()
        self.shape = tuple(shape)  # type: ignore[assignment]
        # torch has no gradient of an average
        op = self.random.choice(("sum", "sum", "sum" if self.train_it else "avg"))
        return self.scatter, (dim, group, op, self.random.choice(VIEWS), products)

    def _reduce(self, group: Any) -> Any:
        products = [self._product(12, group)]
        self.shape = (*self.shape[:-1], 12)
        op = self.random.choice(("sum", "sum", "avg") if self.train_it else ("sum", "avg", "max"))
        return self.reduce, (group, op, self.random.choice(VIEWS), products)

    def _norm(self, group: Any) -> Any:
        weight = self._weight(self.shape[-1])
        kind, residual = self.random.choice(("rms", "layer")), self.random.random() < 0.5
        return self.norm, (group, kind, weight, residual)

    def _dtensor(self, mesh_dim: int) -> tuple[Any, ...]:
        mesh = self.mesh[self.mesh.mesh_dim_names[mesh_dim]] if self.mesh.ndim > 1 else self.mesh  # type: ignore[index]
        dim = self.random.choice((0, 1, 2, None))
        if dim is not None and self.shape[dim] * mesh.size() > 96:
            dim = None
        layout: Any = Replicate() if dim is None else Shard(dim)
        torch.manual_seed(self.random.randrange(1 << 30))
        width = self.shape[-1] * (mesh.size() if dim == 2 else 1)
        mlp = Mlp(width, 24, self.random.random() < 0.5, self.random.choice(FUNCTIONS))
        parallelize_module(nn.Sequential(mlp), mesh, {
            "0": PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),)),
            "0.up": ColwiseParallel(), "0.down": RowwiseParallel(output_layouts=layout),
        })  # fmt: skip
        name = f"p{len(self.parts)}"
        self.parts[name] = mlp
        self.exact = False
        return (name,)

    def gather(
        self, x: Tensor, dim: int, group: Any, casts: Sequence[torch.dtype],
        views: tuple[str, str], products: Sequence[Any], function: Any, gate: bool,
    ) -> Tensor:  # fmt: skip
        full = viewed(gathered(x, dim, group), views[0])
        if casts:  # without a gradient: rounded, it would jump where two ways differ a little
            full, dtype = full.detach(), full.dtype
            for each in (*casts, dtype):
                full = full.to(each)
        full = viewed(full, views[1])
        first, *others = [self.product(full, *each) for each in products]
        if gate:
            return function(first) * others[0]
        return sum(others, function(first))

    def scatter(
        self, x: Tensor, dim: int, group: Any, op: str, view: str, products: Sequence[Any]
    ) -> Tensor:
        first, *others = [self.product(x, *each) for each in products]
        return scattered(viewed(sum(others, first), view), op, dim, group)

    def reduce(self, x: Tensor, group: Any, op: str, view: str, products: Sequence[Any]) -> Tensor:
        x = Copied.apply(x, group) if self.train_it else x  # type: ignore[assignment]
        y = viewed(self.product(x, *products[0]), view)
        if self.train_it:
            return Summed.apply(y, op, group)  # type: ignore[return-value]
        return collectives.wait_tensor(collectives.all_reduce(y, op, group))

    def norm(self, x: Tensor, group: Any, kind: str, weight: str, residual: bool) -> Tensor:
        y = torch.sin(x)
        if self.train_it:
            h = Summed.apply(y, "sum", group)
        else:
            h = collectives.wait_tensor(collectives.all_reduce(y, "sum", group))
        h = h + x if residual else h  # type: ignore[operator]
        row, w = (x.shape[-1],), self.weights[weight]
        if kind == "rms":
            return F.rms_norm(h, row, w, 1e-5)  # type: ignore[arg-type]
        return F.layer_norm(h, row, w, None, 1e-5)  # type: ignore[arg-type]

    def dtensor(self, x: Tensor, name: str) -> Tensor:
        y = self.parts[name](x)
        return y.to_local() if hasattr(y, "to_local") else y

    def product(self, x: Tensor, form: str, w: str, bias: str, b: str, group: Any) -> Tensor:
        weight, flat = self.weights[w], x.flatten(0, -2)
        added = self.bias(bias, b, group) if b else None
        if form == "linear":
            return F.linear(x, weight, added)
        if form == "einsum":
            return torch.einsum("abk,kn->abn", x, weight)
        if form == "mm":
            return torch.mm(flat, weight).view(*x.shape[:-1], -1)
        if form == "turned":
            return torch.mm(weight, flat.t()).t().reshape(*x.shape[:-1], -1)
        if form == "addmm":
            assert added is not None
            return torch.addmm(added, flat, weight).view(*x.shape[:-1], -1)
        return x @ weight

    def bias(self, kind: str, name: str, group: Any) -> Tensor:
        if kind == "buffer":
            return self.get_buffer(name) / group.size()
        b = self.weights[name]
        if kind == "shared":
            return b / group.size()
        if kind == "rank":
            return torch.arange(b.numel(), dtype=b.dtype) * (group.rank() + 1) / group.size() + b
        if kind == "summed":
            summed = collectives.wait_tensor(collectives.all_reduce(b.detach(), "sum", group))
            return summed / group.size()
        return b

    def forward(self, x: Tensor) -> Tensor:
        for step, given, kept, view in self.steps:
            y: Any = checkpoint(step, x, *given, use_reentrant=False) if kept else step(x, *given)
            x = viewed(y, view)
        return x


def viewed(x: Tensor, how: str) -> Tensor:
    """The same, by another way."""
    if how == "flat":
        return x.flatten(0, 1).unflatten(0, x.shape[:2])
    if how == "rows":
        return x.flatten(1).view(x.shape)
    if how == "all":
        return x.flatten().view(x.shape)
    if how == "strided":
        return x.contiguous().as_strided((x.numel(),), (1,)).view(x.shape)
    if how == "cut":
        return torch.cat(x.chunk(2, 1), 1)
    if how == "clone":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "unsqueezed":
        return x.unsqueeze(1).squeeze(1)
    if how == "swapped":
        return x.transpose(1, 2).clone().transpose(1, 2)
    if how == "heads":
        return x.unflatten(-1, (2, -1)).transpose(1, 2).transpose(1, 2).flatten(-2)
    return x


def step(model: Model, x: Tensor, call: Any) -> list[Tensor]:
    """The result of a model, and all its gradients."""
    if not model.train_it:
        with torch.no_grad():
            return [call(x)]
    leaves = [x, *model.parameters()]
    y = call(x.requires_grad_())
    at = torch.arange(y.numel(), dtype=torch.float64).sin().view(y.shape).to(y.dtype)
    grads = torch.autograd.grad((y * at).sum(), leaves, allow_unused=True)
    made = [torch.zeros(()) if g is None else local(g) for g in grads]
    return [y.detach(), *made]


def meshes(ranks: int, seed: int) -> DeviceMesh:
    """Of all ranks; of 4 also two by two."""
    if ranks == 4 and seed % 2:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return init_device_mesh("cpu", (ranks,))


def compared(rank: int, ranks: int, seeds: Sequence[int], folder: str) -> list[Result]:
    """Models, each on all ranks; by Inductor where there is a folder for torch's caches."""
    return [_compared(ranks, seed, folder) for seed in seeds]


def _compared(ranks: int, seed: int, folder: str) -> Result:
    mesh, train = meshes(ranks, seed), seed % 3 > 0

    def results(dtype: torch.dtype, compiler: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(seed)
        model = Model(seed, mesh, train).to(dtype)
        x = 3 * torch.randn(*model.start, generator=model.generator)
        return step(model, x.to(dtype), compiler(model))

    hits, overlap = 0, overlap_pass()
    with by_reference(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = results(torch.float64, lambda model: model)
        with quick() as plain:
            torchs = results(torch.float32, lambda m: torch.compile(m, backend=plain))
        if folder:
            options = cp.compile_options()
            overlap = options["joint_custom_pre_pass"]
            with kept_in(folder) as asked:
                ours = results(torch.float32, lambda m: torch.compile(m, options=options))
                hits = asked()
        else:
            with quick(overlap) as backend:
                ours = results(torch.float32, lambda m: torch.compile(m, backend=backend))
    wrong: list[str] = []
    for i, (mine, theirs, exact) in enumerate(zip(ours, torchs, want, strict=True)):
        if torch.equal(mine, exact.to(mine.dtype)):  # all zeros among them
            continue
        error, allowed = relative_error(mine, exact), 2 * relative_error(theirs, exact)
        if not error <= allowed + CHANCE:
            wrong.append(f"result {i} is off by {error:.1e}, torch's by half of {allowed:.1e}")
    found = [one for report in overlap.reports for one in report.found]
    return Result(wrong, len(found), sum(bool(one.operator) for one in found), hits)


class Tally:
    """Results of many models."""

    def __init__(self) -> None:
        self.models = self.found = self.replaced = self.hits = 0
        self.wrong: list[str] = []

    def add(self, seed: int, ranks: int, what: str, each: Sequence[Result]) -> None:
        """Of one model, on each rank."""
        self.models += 1
        self.found += each[0].found
        self.replaced += each[0].replaced
        self.hits += sum(one.hits for one in each)
        for rank, one in enumerate(each):
            self.wrong += [f"seed {seed}, {ranks} ranks, {what}, rank {rank}: {text}"
                           for text in one.wrong]  # fmt: skip

    def failed(self, seed: int, ranks: int, what: str, error: Exception) -> None:
        """One that ended in an error."""
        self.models += 1
        said = [line for line in str(error).splitlines() if line[:1].isalpha()]
        self.wrong.append(f"seed {seed}, {ranks} ranks, {what}: {'; '.join(dict.fromkeys(said))}")

    def __str__(self) -> str:
        return (
            f"{self.models} models, {self.replaced} of {self.found} collectives replaced, "
            f"{len(self.wrong)} wrong"
        )


def run(
    pool: RankPool, seeds: Sequence[int], ranks: int, what: str, tally: Tally, folder: str = ""
) -> None:
    """Models on so many ranks; 0: on 2, 3 and 4 in turn."""
    for seed in seeds:
        number = ranks or 2 + seed % 3
        try:
            each = pool.run(compared, number, [seed], folder)
            tally.add(seed, number, what, [one for (one,) in each])
        except AssertionError as error:
            tally.failed(seed, number, what, error)


def complaints(tally: Tally) -> list[str]:
    """What is wrong with all of them."""
    few = tally.replaced < LEAST_REPLACED * tally.found
    return tally.wrong + [f"fewer than half of the collectives are replaced: {tally}"] * few


def warm_pool() -> RankPool:
    """Ranks on this host."""
    return RankPool(max_ranks=4, env={"TRITON_INTERPRET": "1", "COUNTERPOINT_TIMEOUT_S": "600"})


def as_written(pool: RankPool, seeds: range, ranks: int, step: int = 20) -> list[str]:
    """Models compiled the quick way; what is wrong."""
    tally = Tally()
    for first in range(seeds.start, seeds.stop, step):
        now, told = seeds[first - seeds.start :][:step], len(tally.wrong)
        run(pool, now, ranks, "as written", tally)
        print(f"seeds {now.start} to {now.stop - 1}, as written: {tally}", flush=True)
        print("".join(f"{text}\n" for text in tally.wrong[told:]), end="", flush=True)
    return complaints(tally)


def by_inductor(seeds: range, ranks: int, folder: str) -> list[str]:
    """Models compiled by Inductor, three times from one cache folder; what is wrong."""
    wrong: list[str] = []
    for what, more in ("cold", 0), ("warm", 0), ("other ranks", 1):
        tally = Tally()
        with warm_pool() as pool:
            for seed in seeds:
                number = (ranks or 2 + seed % 3) + more
                run(pool, [seed], number if number < 5 else 2, what, tally, folder)
                print(f"seed {seed}, Inductor, {what}: {tally}, {tally.hits} hits", flush=True)
        if what == "warm" and not tally.hits:
            wrong.append("torch had none of the graphs in its cache")
        wrong += complaints(tally)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0],
        epilog="example: python -m random_models --models 20 --inductor 2 --seed 100 --ranks 4",
    )
    parser.add_argument("--models", type=int, default=1000, help="compiled the quick way")
    parser.add_argument("--inductor", type=int, default=60, help="compiled by Inductor")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--ranks", type=int, default=0, choices=(0, 2, 3, 4),
                        help="of all models; 0: 2, 3 and 4 in turn")  # fmt: skip
    asked = parser.parse_args()
    wrong: list[str] = []
    if asked.models:
        with warm_pool() as pool:
            wrong += as_written(pool, range(asked.seed, asked.seed + asked.models), asked.ranks)
    if asked.inductor:
        with tempfile.TemporaryDirectory() as folder:
            seeds = range(asked.seed, asked.seed + asked.inductor)
            wrong += by_inductor(seeds, asked.ranks, folder)
    print(*wrong, f"{len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
