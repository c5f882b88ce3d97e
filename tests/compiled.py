"""Steps of compiled models, without inductor's code: its passes over graphs and its partitioner."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from rank_bodies import by_reference
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.utils import clear_caches
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from counterpoint.adapters.compile import OverlapPass, compile_options
from counterpoint.measure.timing import relative_error

aten: Any = torch.ops.aten
SEAM = "joint_custom_pre_pass"


class Quick:
    """A backend that runs the graphs of inductor's joint passes node by node."""

    def __init__(self) -> None:
        self.saved_bytes = 0  # for the backward, without what are inputs anyhow
        self.saved_copies: list[str] = []  # of it, what could be fused into all that reads it

    def __call__(self, module: Any, inputs: Any) -> Any:
        def partition(joint: Any, args: Any, **options: Any) -> Any:
            joint_graph_passes(joint)
            options.pop("compiler", None)
            forward, backward = min_cut_rematerialization_partition(
                joint, args, compiler="inductor", **options
            )
            for node in forward.graph.output_node().args[0][options["num_fwd_outputs"] :]:
                val = getattr(node, "meta", {}).get("val")
                if isinstance(val, Tensor) and node.op != "placeholder":
                    self.saved_bytes += val.numel() * val.element_size()
                    if made_by(node) is aten.clone.default and is_fused(backward, node.name):
                        self.saved_copies.append(node.name)
            return forward, backward

        def run(graph: Any, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        def infer(graph: Any, _: Any) -> Any:
            joint_graph_passes(graph)
            return run(graph, _)

        return aot_autograd(
            fw_compiler=run, bw_compiler=run, inference_compiler=infer, partition_fn=partition,
            decompositions=select_decomp_table, keep_inference_input_mutations=True,
        )(module, inputs)  # fmt: skip


def made_by(node: fx.Node) -> Any:
    """The operator whose result a node is, or is a view of."""
    while getattr(node.target, "is_view", False):
        node = cast(fx.Node, node.args[0])
    return node.target


def is_fused(backward: fx.GraphModule, name: str) -> bool:
    """Whether all that read an input of that name can be computed while it is put in order."""
    left = [node for node in backward.graph.nodes if node.name == name]
    while left:
        node = left.pop()
        for user in node.users:
            if getattr(user.target, "is_view", False):
                left.append(user)
            elif torch.Tag.pointwise not in getattr(user.target, "tags", ()):
                return False
    return True


@contextmanager
def quick(overlap: OverlapPass | None = None) -> Iterator[Quick]:
    """The backend, with that pass."""
    torch._dynamo.reset()
    with config.patch({SEAM: overlap}):
        yield Quick()


@contextmanager
def kept_in(folder: str) -> Iterator[Callable[[], int]]:
    """Torch's caches of graphs in a folder, as in a new process; how often they had one."""
    with pytest.MonkeyPatch.context() as patch, inductor_caches():
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")
        yield lambda: sum(
            counters[of][name] for of, name in (
                ("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"),
            )
        )  # fmt: skip


@contextmanager
def inductor_caches() -> Iterator[None]:
    """Both of torch's, whatever the environment says, and nothing in memory."""
    torch._dynamo.reset()
    clear_caches()
    counters.clear()
    with config.patch(fx_graph_cache=True), functorch.patch(enable_autograd_cache=True):
        yield


def overlap_pass(**options: Any) -> OverlapPass:
    """What `compile_options` hands to torch."""
    return compile_options(**options)[SEAM]


def step(model: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The result of a model and, where they are asked for, the gradients of what `leaves` are."""
    y = model(x)
    if not leaves:
        return [y]
    at = torch.arange(y.numel(), dtype=torch.float64, device=y.device).sin().view(y.shape)
    grads = torch.autograd.grad((y * at.to(y.dtype)).sum(), leaves)
    return [local(t) for t in (y.detach(), *grads)]


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def leaves_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All that a step has gradients of."""
    return [x.requires_grad_(), *model.parameters()]


def worse(
    make: Callable[[torch.dtype], tuple[nn.Module, Tensor]], *, matched: int,
    left: Sequence[str] = (), train: bool = True, dtype: torch.dtype = torch.float32,
    dynamic: bool | None = None, operators: Sequence[str] = (), apart: str | None = None,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Results of a step that are farther from fp64 than torch's: of its own compile, or, where
    nothing is saved for a backward, of the model as it is.

    Args:
        make: a model in a dtype, and its input on this rank.
        matched: how many of its collectives become parts of operators.
        left: why each of the others does not.
        train: compute gradients, too.
        dtype: of the model that is compiled.
        dynamic: as of torch.compile.
        operators: that are there; none: any.
        apart: what is said of an activation that no operator applies; None: anything.
        options: of `compile_options`.
    """

    def results(dtype: torch.dtype, backend: Any, dynamic: bool | None = None) -> list[Tensor]:
        model, x = make(dtype)
        leaves = leaves_of(model, x) if train else []
        with torch.set_grad_enabled(train):
            if backend is None:
                return step(model, x, leaves)
            return step(torch.compile(model, backend=backend, dynamic=dynamic), x, leaves)

    overlap = overlap_pass(**options)
    with by_reference():
        want = results(torch.float64, None)
        with quick() as plain:
            torchs = results(dtype, plain if train else None)
        with quick(overlap) as backend:
            ours = results(dtype, backend, dynamic)
    (report,) = overlap.reports
    assert report.matched == len(report.found) - len(left) == matched, str(report)
    assert [one.reason for one in report.found if one.reason] == list(left), str(report)
    assert not operators or [one.operator for one in report.found] == [*operators], str(report)
    assert apart in (None, "".join(one.apart for one in report.found)), str(report)
    assert backend.saved_bytes <= plain.saved_bytes
    # what was only put in another order is saved as it was
    assert not backend.saved_copies, backend.saved_copies
    found: list[str] = []
    for i, (mine, theirs, exact) in enumerate(zip(ours, torchs, want, strict=True)):
        error, allowed = relative_error(mine, exact), 2 * relative_error(theirs, exact)
        if not error <= allowed + 1e-7:
            found.append(f"result {i} is off by {error:.1e}, torch's by half of {allowed:.1e}")
    return found


def sequence_parallel(
    mlp: nn.Module, last: str, dtype: torch.dtype, shape: Sequence[int],
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, Tensor]:  # fmt: skip
    """A part of a model between a gather and a scatter, and this rank's part of its input.

    Args:
        mlp: whose linear layers take the gathered input, but one.
        last: name of that one.
        shape: of the whole input, [sequences, tokens, features].
        mesh: of the ranks; None: all of them, on CPUs.
    """
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=shape[-1] ** -0.5)
    plan: dict[str, Any] = {
        f"0.{name}": ColwiseParallel() for name, layer in mlp.named_children()
        if isinstance(layer, nn.Linear)
    }  # fmt: skip
    plan |= {
        "0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        f"0.{last}": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(mlp).to(mesh.device_type, dtype)
    parallelize_module(model, mesh, plan)
    torch.manual_seed(1)
    x = torch.randn(*shape).to(mesh.device_type, dtype)
    return model, x.chunk(mesh.size(), 1)[dist.get_rank()].clone()
