"""Unmodified models under torch.compile: what is matched, and that results stay what they are."""

import contextlib
import os
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from compiled import SEAM, leaves_of, overlap_pass, quick, step, worse
from on_ranks import on_ranks
from rank_bodies import by_reference
from rankpool import RankPool
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy

import counterpoint as cp
from benchmarks.blocks import DECODE, NAMES, Sizes, made
from counterpoint.adapters.graph.rewriter import Rewriter
from counterpoint.errors import CounterpointWarning, InputError
from counterpoint.group.workspace import workspace_of

COLLECTIVES = {"llama": 8, "mixtral": 14, "gpt2": 8, "llama tp": 7, "mixtral tp": 16, "gpt2 tp": 6,
               DECODE: 2}  # fmt: skip
# in a training step of a block: those whose sums of all-reduces are joined
MERGED = {"llama tp": 4, "gpt2 tp": 4}
DIM, HIDDEN, S = 16, 32, 20


def functional(name: str) -> Any:
    """One of torch's functional collectives, whose names end otherwise before torch 2.13."""
    new, old = (f"{name}_{form}_autograd" for form in ("single", "tensor"))
    return getattr(collectives, new, None) or getattr(collectives, old)


gathered, scattered = functional("all_gather"), functional("reduce_scatter")


class Mlp(nn.Module):
    """Two linear layers, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp(dim: int, ranks: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """One whose activations between layers are sharded along that dim, and its input."""
    torch.manual_seed(3)
    model, x = Mlp().to(dtype), torch.randn(3 * ranks, S, DIM).to(dtype)
    plan = {"up": ColwiseParallel(input_layouts=Shard(dim)),
            "down": RowwiseParallel(output_layouts=Shard(dim))}  # fmt: skip
    mesh = init_device_mesh("cpu", (ranks,))
    return parallelize_module(model, mesh, plan), x.chunk(ranks, dim)[dist.get_rank()].clone()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_models_of_torch(rank: int, world_size: int, name: str):
    """All collectives of a block become operators; its results and gradients stay."""
    form = name.replace(" checkpoint", "").replace(" selective", "")

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        mesh = init_device_mesh("cpu", (world_size,))
        return made(name, Sizes(batch=2), mesh, dtype=dtype)

    return worse(make, matched=COLLECTIVES[form], train=name != DECODE)


@pytest.mark.apart("make test-all")
@pytest.mark.parametrize("name", ["llama", "gpt2 tp"])
@on_ranks(4)
def test_models_on_4_ranks_in_bf16(rank: int, world_size: int, name: str):
    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        mesh = init_device_mesh("cpu", (world_size,))
        return made(name, Sizes(batch=1), mesh, dtype=dtype)

    return worse(make, matched=COLLECTIVES[name], dtype=torch.bfloat16)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(2)
def test_any_dim_is_gathered_and_scattered(rank: int, world_size: int, dim: int):
    return worse(lambda dtype: mlp(dim, world_size, dtype), matched=4)


@on_ranks(2)
def test_sizes_that_differ_from_call_to_call(rank: int, world_size: int):
    """Torch 2.13 itself compiles no gradient of such a gather along the first or the last dim."""
    return worse(lambda dtype: mlp(1, world_size, dtype), matched=4, dynamic=True)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", MERGED)
@on_ranks(2)
def test_sums_of_all_reduces_are_joined_where_asked(rank: int, world_size: int, name: str):
    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        mesh = init_device_mesh("cpu", (world_size,))
        return made(name, Sizes(batch=1), mesh, dtype=dtype)

    return worse(make, matched=MERGED[name], merge_reductions=True)


@on_ranks(2)
def test_inductor_and_what_is_explained(rank: int, world_size: int):
    """The whole of torch.compile, in inference; and the plans that have run."""
    reports: list[str] = []
    with by_reference(), torch.no_grad():
        for form in ("anew", "fullgraph", "in place"):
            torch._dynamo.reset()
            model, x = mlp(1, world_size, torch.float32)
            want, options = model(x), cp.compile_options()
            if form == "fullgraph":  # a forward within one of *args, as frameworks write them
                model.__class__ = type(
                    "Within", (Mlp,), {"forward": lambda *args: Mlp.forward(*args)}
                )
            with fresh_cache():
                if form == "in place":
                    model.compile(options=options)
                else:
                    model = torch.compile(model, options=options, fullgraph=form == "fullgraph")
                assert "has not run yet" in str(cp.explain(model))
                torch.testing.assert_close(model(x), want)
                reports.append(str(cp.explain(model)))
    assert reports[0] == reports[1] == reports[2]
    total, gather, scatter = reports[0].splitlines()
    assert total == "2 of 2 collectives are parts of operators"
    assert re.fullmatch(
        r"forward +all-gather of 6x10x16 float32, up: "
        r"all_gather_matmul with relu \(up\), plan \w+.*", gather,
    )  # fmt: skip
    assert re.fullmatch(
        r"forward +reduce-scatter of 12x10x16 float32, down: "
        r"matmul_reduce_scatter \(down\), plan \w+.*", scatter,
    )  # fmt: skip
    with pytest.raises(InputError, match="explain: model must be compiled with compile_options"):
        cp.explain(nn.Linear(2, 2))


class Kept(nn.Module):
    """Collectives that no matmul stands beside, or that cannot go."""

    def __init__(self, group: str, form: str) -> None:
        super().__init__()
        self.group, self.form, self.linear = group, form, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        if self.form == "reduced":
            y = self.linear(x)
            return ops.wait_tensor(ops.all_reduce(y * 2, "sum", self.group))
        if self.form == "largest":
            return ops.wait_tensor(ops.all_reduce(self.linear(x), "max", self.group))
        full = ops.wait_tensor(ops.all_gather_into_tensor(x, 2, self.group))
        if self.form == "batched":
            return torch.bmm(full.view(2, -1, DIM), self.linear.weight.view(2, DIM, -1))
        return full.relu() if self.form == "alone" else self.linear(full) + full


@pytest.mark.parametrize(("form", "why"), [
    ("reduced", "mul stands before it"),
    ("largest", "it reduces by max"),
    ("alone", "no matmul reads it, but relu"),
    ("added", "it is also read by add"),
    ("batched", "there is no operator for bmm"),
])  # fmt: skip
@on_ranks(2)
def test_what_cannot_be_matched_is_left_and_said(rank: int, world_size: int, form: str, why: str):
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model, x = Kept(group.group_name, form), torch.randn(4, DIM)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        want = model(x)
        with quick(overlap_pass()) as backend:
            torch.testing.assert_close(torch.compile(model, backend=backend)(x), want)
    (told,) = (str(w.message) for w in caught if w.category is CounterpointWarning)
    assert re.search(f"none of 1 collectives is replaced; .*{why}", told), told


class Form(nn.Module):
    """Two matmuls between an all-gather and a reduce-scatter, written in one of several ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        shape = (DIM, DIM) if form == "matmul" else (4, DIM, DIM // 4)
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [3, S, DIM]
        group = dist.group.WORLD
        full = gathered(x, 1, group)
        if self.form == "matmul":
            y = (full @ self.up).relu() @ self.down
        else:
            y = torch.einsum("bsd,hdc->bshc", full, self.up).relu()
            y = torch.einsum("bshc,hdc->bsd", y, self.down)
        return scattered(y, "sum", 1, group)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", ["matmul", "einsum"])
@on_ranks(2)
def test_other_ways_to_write_a_product(rank: int, world_size: int, form: str):
    """Batches of one matrix; and slices, in which torch's gradients of collectives are."""

    def make(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model = Form(form).to(dtype)
        torch.manual_seed(1 + rank)
        return model, torch.randn(3, S, DIM).to(dtype)

    return worse(make, matched=4)


@on_ranks(2)
def test_autocast_is_gathered_in_what_matmuls_read(rank: int, world_size: int):
    """Gradients are reduced in fp32, which no operator for bf16 does: those are torch's."""
    overlap, results = overlap_pass(), []
    with by_reference():
        for backend_pass in (None, overlap):
            model, x = mlp(1, world_size, torch.float32)
            with quick(backend_pass) as backend, torch.autocast("cpu", torch.bfloat16):
                call = torch.compile(model, backend=backend)
                results.append(step(call, x, leaves_of(model, x)))
    for ours, torchs in zip(results[1], results[0], strict=True):
        assert ours.dtype == torchs.dtype
        torch.testing.assert_close(ours, torchs, rtol=2e-2, atol=2e-2)
    (report,) = overlap.reports
    assert report.found[0].operator == "all_gather_matmul and all_gather_matmul_wgrad", str(report)
    assert report.found[-1].reason == "it reduces in another dtype than its matmul's", str(report)


class Odd(nn.Module):
    """Collectives whose operators would be wrong, or no gain."""

    state: Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("state", torch.ones(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        if self.form == "coalesced":
            ops = torch.ops._c10d_functional
            both = ops.all_gather_into_tensor_coalesced([x, x * 2], group.size(), group.group_name)
            a, b = map(ops.wait_tensor, both)
            return self.linear(a) + self.linear(b)
        if self.form in ("written", "circle"):
            other = x.repeat(group.size(), 1)
        else:
            other = gathered(x.sin(), 0, group)
        if self.form == "circle":
            x = scattered(self.linear(other), "sum", 0, group).sin()
        full = gathered(x, 0, group)
        if self.form in ("both", "circle"):
            return full.t() @ other
        if self.form == "written":
            y = full @ self.state
            self.state.mul_(2)
            return y
        return scattered(self.linear(full), "sum", 0, group)


@pytest.mark.parametrize(("form", "train", "matched", "why"), [
    ("coalesced", False, 0, "there is no operator for it"),
    ("written", False, 0, "it reads an input that the graph writes"),
    ("circle", False, 1, "one of its matmuls depends on another"),
    ("both", True, 2, "its matmul is a part of another operator"),
    ("between", True, 2, "its matmul is a part of another operator"),
])  # fmt: skip
@on_ranks(2)
def test_an_operator_that_would_be_wrong_is_not_made(
    rank: int, world_size: int, form: str, train: bool, matched: int, why: str
):
    results: list[list[Tensor]] = []
    overlap = overlap_pass()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Odd(form)
        torch.manual_seed(1 + rank)
        x = torch.randn(4, DIM)
        leaves = [x.requires_grad_()] if train else []
        with torch.set_grad_enabled(train), by_reference(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=CounterpointWarning)
            with quick(overlap) as backend:
                call = torch.compile(model, backend=backend) if compiled else model
                results.append([*step(call, x, leaves), model.state.clone()])
    torch.testing.assert_close(results[1], results[0])
    (report,) = overlap.reports
    assert any(one.reason == why for one in report.found), str(report)
    assert report.matched == matched, str(report)


@on_ranks(2)
def test_an_error_of_the_pass_is_said_and_ends_nothing(rank: int, world_size: int):
    def broken(*_: object) -> None:
        raise ValueError("not so\nat all")

    model, x = mlp(1, world_size, torch.float32)
    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("counterpoint.adapters.graph.reductions.reduce", broken)
        with quick(overlap) as backend:
            torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (report,) = overlap.reports
    assert report.found[0].operator == "all_gather_matmul with relu"
    assert report.found[1].reason == "an error of the pass, ValueError: not so"


@on_ranks(2)
def test_a_compiled_model_is_in_the_mode_that_it_runs_in(rank: int, world_size: int):
    """Compiled outside of batch_invariant; what was matched in its forward keeps to it."""
    torch.manual_seed(rank)
    w, x = torch.randn(72, 40), torch.randn(6, 72)
    group = dist.group.WORLD
    assert group is not None

    def layer(x: Tensor) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x @ w, "sum", group)) + 0

    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), quick(overlap) as backend:
        compiled = torch.compile(layer, backend=backend)
        plain = compiled(x)
        assert overlap.reports[0].found[0].operator == "matmul_all_reduce"
        assert torch.equal(plain, cp.matmul_all_reduce(x, w))
        with cp.batch_invariant():
            inside, want = compiled(x), cp.matmul_all_reduce(x, w)
        assert torch.equal(inside, want) and not torch.equal(inside, plain)
        assert torch.equal(compiled(x), plain)
    for _ in range(2):
        assert set(overlap.reports[0].found[0].plans) == {"serial", "serial invariant"}
        workspace_of(group, x.device).drop_code()  # as where memory grows


@on_ranks(2)
def test_gradients_of_a_compiled_model_are_computed_in_the_mode_too(rank: int, world_size: int):
    model, x = mlp(1, world_size, torch.float32)
    found: list[Tensor] = []
    with by_reference(), quick(overlap_pass()) as backend:
        compiled = torch.compile(model, backend=backend)
        for mode in (contextlib.nullcontext(), cp.batch_invariant()):
            given = x.clone().requires_grad_()
            with mode:
                compiled(given).square().sum().backward()
            assert given.grad is not None
            found.append(given.grad)
    torch.testing.assert_close(*found)


def test_what_checkpointing_saves_is_saved_as_an_operator():
    """Not its views; and not computed again where only one of what it replaces was saved."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x"), *(graph.call_function(torch.relu) for _ in range(2))]
    with FakeTensorMode():
        nodes[0].meta["val"] = torch.empty(4, 4)
    for node, policy in zip(nodes[1:], ("MUST_SAVE", "PREFER_RECOMPUTE"), strict=True):
        node.meta = {"recompute": CheckpointPolicy[policy], "ac_graph_id": 3}
    to = Rewriter(graph, {})
    with to.before(nodes[1:]):
        made = [to.emit(target, nodes[0], *args) for target, args in [
            (torch.ops.aten.permute.default, ([1, 0],)),
            (torch.ops.counterpoint.matmul_all_reduce.default, (nodes[0], None, "auto", "g", 2)),
        ]]  # fmt: skip
    policies = [node.meta["recompute"].name for node in made]
    assert policies == ["PREFER_RECOMPUTE", "MUST_SAVE"]
    assert all(node.meta["ac_graph_id"] == 3 for node in made)


@on_ranks(2)
def test_a_graph_break_inside_a_block(rank: int, world_size: int):
    """What stands in another graph is matched there, or left; results stay."""

    class Broken(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            torch._dynamo.graph_break()
            return self.down(torch.relu(y))

    model, x = mlp(1, world_size, torch.float32)
    model.__class__ = Broken
    overlap = overlap_pass()
    with torch.no_grad(), by_reference(), quick(overlap) as backend:
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert [(report.matched, len(report.found)) for report in overlap.reports] == [(1, 1), (1, 1)]


def one_rank_is_not_compiled(rank: int, world_size: int, said: str) -> str:
    model, x = mlp(0, world_size, torch.float32)
    bound = mock.patch.dict(os.environ, COUNTERPOINT_TIMEOUT_S="2")
    own = overlap_pass() if rank else None
    with bound, by_reference(), torch.no_grad(), quick(own) as backend:
        try:
            torch.compile(model, backend=backend)(x)
            cp.check()
        except (cp.PeerTimeoutError, RuntimeError) as error:
            if rank:  # as a script ends
                Path(said).write_text(str(error))
                os._exit(1)
            return str(error)
    return ""


def test_a_rank_that_is_compiled_otherwise_is_an_error(pool: RankPool, tmp_path: Path):
    """One calls an operator, the other torch's collective, which ends when the first one does."""
    told = pool.run(one_rank_is_not_compiled, 2, str(tmp_path / "said"), expect_dead=[1])
    assert told[0]
    said = (tmp_path / "said").read_text()
    assert "rank 0 did not come to a meeting of the group within 2 s" in said


@on_ranks(2)
def test_a_recompile_on_one_rank_only(rank: int, world_size: int):
    """A rank that compiles again, for another reason than its sizes, calls the same operators."""
    model, x = mlp(1, world_size, torch.float32)
    with by_reference(), torch.no_grad(), quick(overlap_pass()) as backend:
        want = model(x)
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(x), want)
        if rank:
            torch._dynamo.reset()
        torch.testing.assert_close(compiled(x), want)


@on_ranks(2)
def test_matmuls_that_torch_pads_on_one_rank_only(rank: int, world_size: int):
    """Torch measures on each rank whether padding pays: both call the same operators anyway."""
    with by_reference(), contextlib.ExitStack() as padded:
        for name in ("check_device", "has_triton") if rank == 0 else ():
            where = f"torch._inductor.fx_passes.pad_mm.{name}"
            padded.enter_context(mock.patch(where, return_value=True))
            padded.enter_context(torch._inductor.config.patch(force_shape_pad=True))
        mesh = init_device_mesh("cpu", (world_size,))
        sizes = Sizes(batch=2)  # tokens: torch would make them 4
        return worse(lambda dtype: made(DECODE, sizes, mesh, dtype=dtype), matched=2, train=False)


def test_a_pass_of_the_users_own_is_chained():
    calls: list[str] = []

    class Own(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            calls.append("own")

        def uuid(self) -> Any:
            return b"own"

    mine = cp.compile_options({SEAM: Own(), "max_autotune": False})
    assert mine["max_autotune"] is False
    graph = torch.fx.Graph()
    graph.output(None)
    mine[SEAM](graph)
    assert calls == ["own"]
    assert mine[SEAM].uuid() != cp.compile_options()[SEAM].uuid() is not None
    with torch._inductor.config.patch({SEAM: Own()}):
        cp.compile_options()[SEAM](graph)
    assert calls == ["own", "own"]
