"""torchtitan's override: on torchtitan where it is installed, else on stand-ins for its seam.

The stand-ins have the names and the signatures of torchtitan 0.3.0.
"""

import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch
from fsdp_models import Step, batch, made, mesh_of
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import FSDPModule

import counterpoint as cp
from counterpoint.adapters.compile import LAST, SEAM, OverlapPass
from counterpoint.measure.timing import relative_error

NAME = "counterpoint.adapters.torchtitan"
EXPERTS = "counterpoint.adapters.torchtitan_experts"
LAYERS, STEPS = 2, 4
installed = importlib.util.find_spec("torchtitan") is not None


def override(
    *, target: type, fqns: list[str] | None = None, description: str = "", exact: bool = False
) -> Callable[[Any], Any]:
    assert isinstance(target, type)
    return lambda factory: factory


class Rate:
    """What torchtitan has of a learning rate, and what is made by it."""

    __slots__ = ("steps",)

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def build(self, *, optimizers: Any, training_steps: int) -> Any:
        return self.steps, optimizers, training_steps


@contextmanager
def stand_ins(**config: Any) -> Iterator[None]:
    """torchtitan's modules, and ours imported anew."""
    rates = type("LRSchedulersContainer", (), {"Config": Rate})
    with pytest.MonkeyPatch.context() as patch, inductor.patch({SEAM: None, LAST: None}):
        patch.setitem(sys.modules, "torchtitan", Named())
        patch.setitem(sys.modules, "torchtitan.config", Named(**config))
        patch.setitem(
            sys.modules, "torchtitan.components.optimizer", Named(LRSchedulersContainer=rates)
        )
        patch.delitem(sys.modules, NAME, raising=False)
        yield
        sys.modules.pop(NAME, None)


@pytest.mark.skipif(installed, reason="torchtitan itself is tested")
def test_the_override_sets_torchs_configuration():
    with stand_ins(override=override):
        overlap = importlib.import_module(NAME).overlap
        rate = Rate(3)
        assert overlap(rate, merge_reductions=True) is rate
        first = getattr(inductor, SEAM)
        assert isinstance(first, OverlapPass)
        assert overlap(rate) is rate
        assert getattr(inductor, SEAM).uuid() != first.uuid()
        assert "has not run yet" in str(cp.explain(torch.nn.Linear(1, 1)))
        with pytest.raises(cp.InputError, match="merge_reductions must be True or False"):
            overlap(rate, merge_reductions=1)
        with pytest.raises(cp.InputError, match="fsdp must be True, False or options, got 'yes'"):
            overlap(rate, fsdp="yes")


@pytest.mark.skipif(installed, reason="torchtitan itself is tested")
@on_ranks(2)
def test_sharded_models_are_overlapped_when_their_scheduler_is_made(rank: int, world_size: int):
    with stand_ins(override=override):
        ours = importlib.import_module(NAME)
        for fsdp, seen in ((True, 1), (False, 0), ({"memory": "ring"}, 1)):
            ours.overlapped.clear()
            parts = made(Step(), mesh_of(world_size)), torch.nn.Linear(1, 1)
            optimizers, rate = Named(model_parts=parts), ours.overlap(Rate(3), fsdp=fsdp)
            assert rate.build(optimizers=optimizers, training_steps=5) == (3, optimizers, 5)
            parts[0](batch(rank, 0))
            assert len(ours.overlapped) == seen
            for each in ours.overlapped:
                assert (each.num_bytes()["published"] > 0) == (fsdp is True)


def test_torchtitan_that_has_moved():
    seam = r"its adapter needs torchtitan.config: override, as in torchtitan 0\.3\.0$"
    with stand_ins(), pytest.raises(cp.UnsupportedError, match=seam):
        importlib.import_module(NAME)


LINES = [
    line
    for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    for line in re.findall(r"`([^`]*--override\.imports [^`]+)`", page.read_text())
]


@pytest.mark.skipif(not installed, reason="torchtitan is not installed")
@pytest.mark.parametrize("line", LINES)
def test_lines_of_the_docs(line: str):
    """torchtitan reads them, and applies what they name."""
    from torchtitan import config as titan  # type: ignore[import-not-found]

    kind = ["qwen3", "qwen3_moe_debug"] if "experts" in line else ["llama3", "llama3_debugmodel"]
    with warnings.catch_warnings(), inductor.patch({SEAM: None, LAST: None}):
        warnings.simplefilter("ignore")  # of torchtitan, in its own code
        given = ["--module", kind[0], "--config", kind[1], *line.split()]
        config = titan.ConfigManager().parse_args(given)
        assert config.compile.enable == ("--compile.enable" in line)
        titan.apply_overrides(config.override, config)
        assert (getattr(inductor, SEAM) is None) == ("experts" in line)
    experts = [layer.moe for layer in config.model_spec.model.layers] if "experts" in line else []
    for each in experts:
        assert type(each.routed_experts).__module__ == EXPERTS


def llama(
    *imports: str, degree: str, mixed: str, compiled: bool, experts: bool = False
) -> tuple[Any, Any]:
    """torchtitan's Llama on two ranks, or its Qwen3 of experts, and its configuration."""
    from torchtitan import config as titan  # type: ignore[import-not-found]
    from torchtitan.distributed import parallel_dims, utils  # type: ignore[import-not-found]
    from torchtitan.models.common import attention  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import config_registry  # type: ignore[import-not-found]
    from torchtitan.models.qwen3 import config_registry as qwen3  # type: ignore[import-not-found]

    config = qwen3.qwen3_moe_debug() if experts else config_registry.llama3_debugmodel()
    config.compile.enable = compiled
    if experts:
        config.parallelism.expert_parallel_degree = 2
    setattr(config.parallelism, degree, 2)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.mixed_precision_param = mixed
    config.override.imports = list(imports)
    utils.set_spmd_backend("partial_dtensor")
    parallel_dims.device_type = "cpu"
    attend = attention.ScaledDotProductAttention
    attend.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]
    dims = parallel_dims.ParallelDims.from_config(config.parallelism, 2)
    dims.build_mesh()
    model_config = config.model_spec.model
    # of experts one: of the second's tokens some, rounded otherwise, would choose others
    model_config.layers = model_config.layers[: 1 if experts else LAYERS]
    model_config.update_from_config(config=config)
    for layer in model_config.layers:  # flex attention has no gradient on CPU
        layer.attention.inner_attention = attend.Config(
            sharding_config=layer.attention.inner_attention.sharding_config
        )
    titan.apply_overrides(config.override, config)
    with torch.device("meta"):
        model = model_config.build()
    model = config.model_spec.parallelize_fn(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model, config


def loss_of(model: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Its output for random tokens, and a loss."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, 100, (2, 32))
    y = model(tokens, positions=torch.arange(32).expand(2, -1).contiguous())
    return y.detach(), y.float().square().mean()


def step(*imports: str) -> tuple[list[Tensor], Any]:
    """The output and gradients of a step of tensor-parallel blocks, compiled."""
    model, _ = llama(
        *imports, degree="tensor_parallel_degree", mixed="float32", compiled=True
    )  # fmt: skip
    y, loss = loss_of(model, 1)
    loss.backward()
    return [y, *(p.grad.full_tensor() for p in model.parameters())], model


def trained(rank: int, *imports: str, experts: bool = False) -> list[Tensor]:
    """Of steps of blocks that FSDP2 shards, by torchtitan's own optimizer: losses, the gradients of
    the first, and weights."""
    model, config = llama(
        *imports, degree="data_parallel_shard_degree", mixed="bfloat16", compiled=False,
        experts=experts,
    )  # fmt: skip
    if experts:
        said = importlib.import_module(EXPERTS).explain_experts(model).splitlines()
        way = "routed_experts: counterpoint" if imports else "no experts go by counterpoint"
        assert len(said) == 1 and said[0].endswith(way), said
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    optimizers = config.optimizer.build(model_parts=[model])
    rates = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    out = list[Tensor]()
    for i in range(STEPS):
        _, loss = loss_of(model, 10 * i + rank)
        loss.backward()
        out.append(loss.detach())
        if i == 0:
            out += [p.grad.to_local().clone() for p in model.parameters()]
        optimizers.step()
        rates.step()
        optimizers.zero_grad()
    return [*out, *(p.detach().to_local().clone() for p in model.parameters())]


@pytest.mark.skipif(not installed, reason="torchtitan is not installed")
@on_ranks(2)
def test_steps_of_torchtitans_llama_sharded_by_fsdp2(rank: int, world_size: int):
    """The override overlaps it: the same bits."""
    with warnings.catch_warnings(), inductor.patch({SEAM: None, LAST: None}):
        warnings.simplefilter("ignore")  # of torchtitan and of torch, in their own code
        want, got = trained(rank), trained(rank, f"{NAME}.overlap")
    (overlapped,) = importlib.import_module(NAME).overlapped
    assert all("pushed in place" in str(group) for group in overlapped.found)
    assert len(overlapped.found) == LAYERS + 2
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not installed, reason="torchtitan is not installed")
@pytest.mark.parametrize("more", [(), (f"{NAME}.overlap",)], ids=["alone", "overlapped"])
@on_ranks(2)
def test_steps_of_torchtitans_experts(rank: int, world_size: int, more: tuple[str, ...]):
    """The override of experts, under FSDP2: losses and gradients of torchtitan's, but for bf16."""
    with warnings.catch_warnings(), by_reference(), inductor.patch({SEAM: None, LAST: None}):
        warnings.simplefilter("ignore")  # of torchtitan and of torch, in their own code
        want = trained(rank, experts=True)
        got = trained(rank, f"{EXPERTS}.experts", *more, experts=True)
    assert len(want) == len(got)
    # the first loss, and the gradients behind it: later ones are of other weights
    number = 1 + (len(want) - STEPS) // 2
    off = [
        relative_error(a, b) for a, b in zip(got[:number], want[:number], strict=True) if b.any()
    ]
    assert len(off) >= number - 1 and max(off) < 3e-2, off


@pytest.mark.skipif(not installed, reason="torchtitan is not installed")
@on_ranks(2)
def test_a_step_of_torchtitans_llama(rank: int, world_size: int):
    """All collectives of its compiled blocks become parts of operators; gradients stay."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    ours = logging.getLogger("counterpoint.adapters.compile")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    with (
        warnings.catch_warnings(),
        by_reference(),
        inductor.patch({SEAM: None, LAST: None}),
        fresh_cache(),
    ):
        warnings.simplefilter("ignore")  # of torchtitan and of torch, in their own code
        want, _ = step()
        torch._dynamo.reset()
        mine, model = step(f"{NAME}.overlap")
        report = cp.explain(model)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b)
    assert {*(text.splitlines()[0] for text in told)} == {
        "8 of 8 collectives are parts of operators"
    }
    graphs = len(told)  # since torch 2.14 equal layers share one
    assert report.matched == len(report.found) == 8 * graphs and graphs in (1, LAYERS), str(report)
    assert {one.matmuls for one in report.found if one.kind == "reduce-scatter"} >= {
        ("attention.wo",), ("feed_forward.w2",)
    }  # fmt: skip
