"""All private parts of FSDP2 that `cp.overlap` touches, as torch 2.11 to 2.14 have them.

A parameter group of FSDP2 gathers in `unshard` and `wait_for_unshard`, frees in `_to_sharded`, and
reduces gradients in `post_backward`. `Hooks` puts methods of ours in the place of those, on one
group object, and takes them away again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from counterpoint.errors import UnsupportedError

try:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_groups
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
except ImportError:  # another torch: `refusal` says so
    torch_groups = TrainingState = None

METHODS = ("unshard", "wait_for_unshard", "_to_sharded", "post_backward")
OF_GROUP = (*METHODS, "finalize_backward", "reshard", "lazy_init", "_reshard_after_forward")
USES = 3  # of the storage of a parameter: by it, by what it is a view of, and by who counts
Group = Any  # torch's FSDPParamGroup
Param = Any  # torch's FSDPParam


def refusal() -> str:
    """Why this torch's FSDP2 is none that we know, or ""."""
    found = getattr(torch_groups, "FSDPParamGroup", None)
    lacks = [name for name in OF_GROUP if not hasattr(found, name)]
    if found is None or TrainingState is None or lacks:
        what = f" (no FSDPParamGroup.{lacks[0]})" if lacks and found else ""
        return f"torch {torch.__version__} has another FSDP2 than 2.11 to 2.14{what}"
    return ""


def states_of(model: nn.Module) -> list[Any]:
    """The FSDP states of a model, each once, in the order of its modules."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[operator]
            if not any(state is known for known in found):
                found.append(state)
    return found


def groups_of(state: Any) -> list[Group]:
    """The parameter groups of a state: one before torch 2.13, a list since."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


class Fact(NamedTuple):
    """What is known of one parameter.

    Args:
        name: in the model.
        numel: elements of a rank's shard, padding included.
        orig: elements of the whole parameter.
        dtype: in which it is gathered, and its gradients are made.
        trains: whether it has gradients.
        rows: pieces of a shard, each of which lies by itself in the whole; one where it is sharded
            by its first dimension.
    """

    name: str
    numel: int
    orig: int
    dtype: torch.dtype
    trains: bool
    rows: int


def fact_of(p: Param) -> Fact:
    """The facts of a parameter, once FSDP2 has set itself up."""
    dtype = p.param_dtype or p.orig_dtype
    shard, whole = p.padded_sharded_param_size.numel(), p._orig_size.numel()
    rows = max(p._orig_size[: p.fsdp_placement.dim].numel(), 1)
    return Fact(_name(p), shard, whole, dtype, p.sharded_param.requires_grad, rows)


def _name(p: Param) -> str:
    return getattr(p, "_param_fqn", None) or p._module_info.param_name


def _why_not(p: Param) -> str:
    """Why FSDP2 must gather a parameter itself, or ""."""
    if p.offload_to_cpu:
        return f"{_name(p)} is offloaded to the CPU"
    own = hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")
    return f"{_name(p)} has an all-gather of its own" if own else ""


def size_of(g: Group) -> tuple[int, int, int, int]:
    """(elements, those that train, bytes of one as gathered, as the optimizer has it), at any time.

    Of the parameters that it has, by the dtype of the first.
    """
    whole = [(p._orig_size.numel(), p.sharded_param) for p in g.fsdp_params]
    master = whole[0][1].dtype
    gathered = g.mp_policy.param_dtype or master
    trained = sum(n for n, param in whole if param.requires_grad)
    return sum(n for n, _ in whole), trained, gathered.itemsize, master.itemsize


def why_not_gathered(g: Group) -> str:
    """Why FSDP2 must gather a group itself, or ""."""
    kind = type(g.mesh_info).__name__
    if "FSDP" not in kind and "HSDP" not in kind:
        return "it is replicated: nothing is gathered"
    if g.mesh_info.shard_process_group.size() == 1:
        return "its group has one rank"
    if g._use_post_forward_mesh:
        return "reshard_after_forward is to a smaller mesh"
    if type(g._all_gather_comm).__name__ != "DefaultAllGather":
        return "its all-gather was set by set_custom_all_gather, or is from symmetric memory"
    return next((why for p in g.fsdp_params if (why := _why_not(p))), "")


def why_not_scattered(g: Group) -> str:
    """Why FSDP2 must reduce the gradients of a group itself, or ""."""
    trained = [f for f in map(fact_of, g.fsdp_params) if f.trains]
    if not trained:
        return "frozen"
    dtypes = {f.dtype for f in trained}
    if len(dtypes) > 1:
        return "gradients of several dtypes"
    (dtype,) = dtypes
    if dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} gradients are scaled in two steps"
    if (g._reduce_dtype or dtype) not in (torch.float32, dtype):
        return f"{dtype} gradients are reduced in {g._reduce_dtype}"
    if is_replicated(g) and g._orig_dtype != torch.float32:
        return f"HSDP: an all-reduce of {g._orig_dtype} follows"
    if type(g._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
        return (
            "its reduce-scatter was set by set_custom_reduce_scatter, or is from symmetric memory"
        )
    return ""


def shard_group(g: Group) -> Any:
    """The ranks that share a group's parameters; None where they are replicated."""
    return getattr(g.mesh_info, "shard_process_group", None)


def replica_group(g: Group) -> Any:
    """The ranks that have the same shards as this one; None: no other has."""
    return g.mesh_info.replicate_process_group if is_replicated(g) else None


def name_of(g: Group) -> str:
    """Where a group stands in the model."""
    return g._module_fqn or "root"


def masters(g: Group) -> list[Tensor]:
    """This rank's shards, flat and padded, as the optimizer has them now."""
    return [p._sharded_param_data for p in g.fsdp_params]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors, each in the dtype of its target, by as few kernels as there can be."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore


def versions(g: Group) -> list[tuple[int, int, int]]:
    """What changes where a shard is written in place, as a DTensor or as its part, or replaced."""
    shards = (p.sharded_param for p in g.fsdp_params)
    return [(s._local_tensor.data_ptr(), s._local_tensor._version, s._version) for s in shards]


def gathered_versions(g: Group) -> list[tuple[int, int]]:
    """What changes where a gathered parameter is written in place, as a DTensor or as its part."""
    found = [(p._unsharded_param, _gathered_of(p)) for p in g.fsdp_params]
    return [
        (0, 0) if param.is_inference() else (param._version, part._version)
        for param, part in found if part is not None
    ]  # fmt: skip


def is_sharded(g: Group) -> bool:
    """Whether its gathered parameters are not in use."""
    return g.is_sharded


def is_free(g: Group) -> bool:
    """Whether nothing is gathered, and nothing on its way."""
    return g.is_sharded and g._all_gather_result is None


def is_idle(g: Group) -> bool:
    """Whether it is gathered, and neither in its forward nor in its backward."""
    assert TrainingState is not None
    at_rest = (TrainingState.IDLE, TrainingState.POST_BACKWARD)
    return g.is_unsharded and g._training_state in at_rest


def in_backward() -> bool:
    """Whether autograd runs: a forward within is one that is computed again."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def is_outside(g: Group) -> bool:
    """Whether a gather is asked for by hand: in no forward, and in no backward."""
    assert TrainingState is not None
    return g._training_state == TrainingState.IDLE


def skips_gather(g: Group) -> bool:
    """Whether a gather is not needed: it is there or on its way, or not wanted in a backward."""
    assert TrainingState is not None
    if g._all_gather_result is not None or g.is_unsharded:
        return True
    in_backward = g._training_state == TrainingState.PRE_BACKWARD
    return not getattr(g, "unshard_in_backward", True) and in_backward


class Pending:
    """A gather on its way: what torch asks of its own AllGatherResult."""

    all_gather_work = None

    def __init__(self, event: Any) -> None:
        self.all_gather_event = event


def gathering(g: Group, pending: Pending) -> None:
    """Note a gather on its way."""
    g._all_gather_result = pending


def is_pending(g: Group) -> bool:
    """Whether there is a gather that nobody has waited for yet, ours or torch's."""
    return g._all_gather_result is not None


def is_ours(g: Group) -> bool:
    """Whether that gather is ours."""
    return isinstance(g._all_gather_result, Pending)


def gather_event(g: Group) -> Any:
    """The event of that gather; None on CPU ranks."""
    return g._all_gather_result.all_gather_event


def use_gathered(g: Group) -> None:
    """Let modules have the gathered parameters."""
    g._all_gather_result = None
    for p in g.fsdp_params:
        p.init_unsharded_param()
    g._to_unsharded()


def to_sharded(g: Group) -> None:
    """FSDP2's own end of the use of gathered parameters."""
    type(g)._to_sharded(g)


def drop_gathered(g: Group, here: Any) -> None:
    """Shard a group whatever `reshard_after_forward` says, and forget a gather on its way.

    Args:
        here: the current stream, which waits for that.
    """
    pending = g._all_gather_result
    if pending is not None:
        if pending.all_gather_event is not None:
            here.wait_event(pending.all_gather_event)
        if isinstance(pending.all_gather_work, dist.distributed_c10d.Work):
            pending.all_gather_work.wait()
        g._all_gather_result = None
    if not g.is_sharded:
        g._to_sharded()


def by_torch(g: Group, method: str, *given: Any) -> Any:
    """FSDP2's own method."""
    return getattr(type(g), method)(g, *given)


class Current:
    """The current stream of a device, and blocks of code on another; on CPUs what stands for it.

    By the number of a GPU, since to ask for that of the current one costs as much as a launch.
    """

    def __init__(self, device: torch.device) -> None:
        of_gpu = device.type == "cuda"
        self.on: Callable[[Any], Any] = torch.cuda.stream if of_gpu else torch.cpu.stream
        ask: Any = torch.cuda.current_stream if of_gpu else torch.cpu.current_stream
        self.stream: Callable[[], Any] = partial(ask, device.index) if of_gpu else ask


def streams(g: Group) -> tuple[Any, Any, Any] | None:
    """(of gathers, of scatters, of all-reduces); None before the first forward."""
    ctx = g.comm_ctx
    if not hasattr(ctx, "all_gather_stream"):
        return None
    return ctx.all_gather_stream, ctx.reduce_scatter_stream, ctx.all_reduce_stream


def keeps_gathered(g: Group) -> bool:
    """Whether a group stays gathered after its forward."""
    return not g._reshard_after_forward


def frees_what_it_saves(g: Group) -> bool:
    """Whether a backward that runs saves gathered parameters for one more, behind which they go."""
    assert TrainingState is not None
    kept = keeps_gathered(g) and not g.reshard_after_backward
    in_backward = g._training_state == TrainingState.PRE_BACKWARD
    return in_backward and torch.is_grad_enabled() and not kept


def reduces_by_torch(g: Group) -> bool:
    """Whether FSDP2 itself must take the gradients of this backward."""
    own = type(g._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
    partial = is_replicated(g) and not (g.all_reduce_grads and g._partial_reduce_output is None)
    return not g.reduce_grads or partial or own or g._all_reduce_hook is not None


def widens(g: Group, dtype: torch.dtype) -> bool:
    """Whether backwards that reduce nothing keep gradients of a dtype in another one."""
    return g._reduce_dtype not in (None, dtype)


def gathers_by_torch(g: Group) -> bool:
    """Whether the user has set an all-gather since."""
    return type(g._all_gather_comm).__name__ != "DefaultAllGather"


def trains(g: Group) -> list[bool]:
    """Which parameters have gradients now; a user may have unfrozen those that are gathered."""
    whole = (p.__dict__.get("_unsharded_param") for p in g.fsdp_params)
    return [
        p.sharded_param.requires_grad
        or (param is not None and (param.requires_grad or param.grad is not None))
        for p, param in zip(g.fsdp_params, whole, strict=True)
    ]


def is_set_up(state: Any) -> bool:
    """Whether FSDP2 has set up a state: at the first forward of its root."""
    return state._is_root is not None


def is_saved(g: Group) -> bool:
    """Whether a graph of autograd reads memory that the group is gathered to, or somebody else."""
    for p in g.fsdp_params:
        inner = _gathered_of(p)
        if inner is not None:
            of = inner.untyped_storage()
            if torch._C._storage_Use_Count(of._cdata) > USES:  # pyright: ignore
                return True
    return False


def holds_gradients(g: Group) -> bool:
    """Whether there are gradients of whole parameters that are not reduced yet."""
    params = [p.__dict__.get("_unsharded_param") for p in g.fsdp_params]
    kept = any(p.unsharded_accumulated_grad is not None for p in g.fsdp_params)
    return kept or any(param is not None and param.grad is not None for param in params)


def _gathered_of(p: Param) -> Tensor | None:
    """A gathered parameter, its own part of it where it is a DTensor; None: there was none yet."""
    param: Any = p.__dict__.get("_unsharded_param")
    return getattr(param, "_local_tensor", param)


def begin_reduce(g: Group) -> list[tuple[int, Tensor]]:
    """Take the gradients that autograd has made, with their parameters' places, and reshard.

    Of backwards before that did not reduce, too: those are in the dtype of reductions.
    """
    assert TrainingState is not None
    g._training_state = TrainingState.POST_BACKWARD
    found: list[tuple[int, Tensor]] = []
    for i, p in enumerate(g.fsdp_params):
        if not hasattr(p, "_unsharded_param"):
            continue
        p.accumulate_unsharded_grad_if_needed()
        if p.unsharded_accumulated_grad is not None:
            found.append((i, p.unsharded_accumulated_grad_data))
            p.unsharded_accumulated_grad = None
        elif p.unsharded_param.grad is not None:
            found.append((i, p.unsharded_grad_data))
            p.unsharded_param.grad = None
        elif getattr(g, "reduce_scatter_unused_params", False) and p.unsharded_param.requires_grad:
            found.append((i, p.unsharded_zero_grad_data))
    if g.reshard_after_backward:
        g.reshard()
    return found


def watch_gradients(g: Group, of: Sequence[int], watcher: Any) -> Callable[[], None]:
    """Call `whole` of one, with a parameter's place, when its gradient is; what ends that.

    Args:
        g: has been gathered before.
        of: places of parameters.
        watcher: is not held: no collector sees through the hooks of a tensor.
    """
    held = ref(watcher)

    def watched(i: int) -> Any:
        def whole(_: Tensor) -> None:
            if (alive := held()) is not None:
                alive.whole(i)

        untraced: Any = torch._dynamo.disable(whole)  # pyright: ignore
        return g.fsdp_params[i]._unsharded_param.register_post_accumulate_grad_hook(untraced)

    handles = [watched(i) for i in of if g.fsdp_params[i]._unsharded_param.requires_grad]

    def unwatch() -> None:
        for handle in handles:
            handle.remove()

    return unwatch


def has_backward_hooks(g: Group) -> bool:
    """Whether modules have hooks that could change gradients in the midst of a backward."""
    found = (module for of in g.modules for module in of.modules())
    return any(module._backward_hooks or module._backward_pre_hooks for module in found)


def new_gradient(g: Group, i: int) -> Tensor | None:
    """The gradient that autograd has just made, as `begin_reduce` will find it; None: it may not.

    It may differ where earlier backwards reduced nothing, and where it is a DTensor.
    """
    p = g.fsdp_params[i]
    grad = p._unsharded_param.grad
    plain = type(grad) is Tensor and grad.is_contiguous() and not grad.is_inference()
    return grad if plain and p.unsharded_accumulated_grad is None else None


def sums_in_own_dtype(g: Group) -> bool:
    """Whether torch reduces gradients in a dtype narrower than fp32."""
    return g._reduce_dtype is None and any(
        (p.param_dtype or p.orig_dtype) != torch.float32 for p in g.fsdp_params
    )


def is_replicated(g: Group) -> bool:
    """Whether there are replicas of what a group of ranks shares (HSDP)."""
    return "HSDP" in type(g.mesh_info).__name__


def divisor(g: Group) -> float:
    """By what a sum over the ranks that share a group is divided."""
    if is_replicated(g) and g.force_sum_reduction_for_comms:
        return 1.0  # as torch does: behind the sum over replicas
    return float(g.gradient_divide_factor or g.mesh_info.shard_process_group.size())


def sum_over_replicas(g: Group, total: Tensor) -> None:
    """Torch's all-reduce of what the ranks of a replica have summed, on the current stream."""
    factor, replicas = g.gradient_divide_factor, g.mesh_info.replicate_process_group
    forced = g.force_sum_reduction_for_comms
    average = factor is None and not forced
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    dist.all_reduce(total, op=op, group=replicas)
    if forced:
        total.div_(factor or g.mesh_info.shard_process_group.size() * replicas.size())


def give_gradients(g: Group, of: Sequence[tuple[int, Tensor]], event: Callable[[], Any]) -> Any:
    """Let shards have their gradients, add to what they have, and call hooks; the end's event.

    Args:
        of: places of parameters, and their reduced gradients, flat and padded.
        event: records one on the current stream.
    """
    for i, flat in of:
        p = g.fsdp_params[i]
        size, stride = p.sharded_size, p.contiguous_sharded_stride
        new = torch.as_strided(flat, size, stride, flat.storage_offset())
        if p.sharded_param.grad is None:
            p.sharded_param.grad = p.to_sharded_dtensor(new)
        else:
            p.sharded_param.grad._local_tensor += new
        for hook in (getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(p.sharded_param)
    ended = event()
    g._post_reduce_event = ended
    return ended


def note_reduced(g: Group, stream: Any, ended: Any) -> None:
    """Let the end of a backward wait for it; since torch 2.13 by the stream's last event."""
    last = getattr(g.comm_ctx, "_last_post_reduce_events", None)
    if last is not None:
        last[stream] = ended


def grad_dtype(g: Group) -> torch.dtype:
    """Of the gradients of shards."""
    return g._orig_dtype


class Hooks:
    """Methods of ours on one group, and the buffers that its parameters are gathered to.

    Torch's own way uses these buffers, too, while it takes turns. Gathered parameters stay the
    objects that they are, with their gradients, as the nodes of a graph know them; only what they
    are views of is another one. So no graph may have saved views of it: see `is_saved`.

    Args:
        methods: by name, of METHODS; each is called with the arguments of torch's.
        buffers: flat and whole, one a parameter, at the start of its storage.
    """

    def __init__(
        self, g: Group, methods: Mapping[str, Callable[..., Any]], buffers: Sequence[Tensor]
    ) -> None:
        self.g, self._methods = g, methods
        for name, method in methods.items():
            setattr(g, name, method)
        self.move(buffers)
        for p in g.fsdp_params:
            p.free_unsharded_param = _nothing

    def move(self, buffers: Sequence[Tensor]) -> None:
        """Gather to other buffers from now on; the group is sharded, and no graph has saved it."""
        for p, buffer in zip(self.g.fsdp_params, buffers, strict=True):
            inner = _gathered_of(p)
            p.all_gather_outputs = [buffer]
            if inner is not None:
                inner.data = torch.as_strided(buffer, inner.size(), inner.stride(), 0)

    def take(self, buffers: Sequence[Tensor]) -> None:
        """Give everything back to torch; the group is sharded, and no graph has saved it.

        Args:
            buffers: where it is gathered to now.
        """
        for p, buffer in zip(self.g.fsdp_params, buffers, strict=True):
            p.__dict__.pop("free_unsharded_param", None)
            inner, torchs = _gathered_of(p), torch.empty_like(buffer)
            p.all_gather_outputs = [torchs]
            if inner is not None:
                inner.data = torch.as_strided(torchs, inner.size(), inner.stride(), 0)
            torchs.untyped_storage().resize_(0)  # as torch leaves it
        for name in self._methods:
            self.g.__dict__.pop(name, None)


def _nothing() -> None:
    """Gathered parameters are not freed: their memory is used in turn."""


def steps(optimizer: torch.optim.Optimizer, states: Sequence[Any]) -> bool:
    """Whether an optimizer has a parameter of these."""
    own = {id(p.sharded_param) for state in states for g in groups_of(state) for p in g.fsdp_params}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


_TOLD: WeakSet[Any] = WeakSet()  # of each step of an optimizer


def watch_steps(watcher: Any) -> None:
    """Call `behind_step` of one, with the optimizer, behind each step of any, while it lives."""
    _hook()
    _TOLD.add(watcher)


def unwatch_steps(watcher: Any) -> None:
    """Tell it no more."""
    _TOLD.discard(watcher)


@cache
def _hook() -> Any:
    """Torch's hook, made once: none may be taken away while torch walks through them."""

    def behind(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for watcher in _TOLD:
            watcher.behind_step(optimizer)

    untraced: Any = torch._dynamo.disable(behind)  # pyright: ignore
    return register_optimizer_step_post_hook(untraced)


def watch_roots(states: Sequence[Any], begin: Callable[[Any, Any], None]) -> None:
    """Call `begin` before each forward of a root, with its arguments, once FSDP2 is set up."""
    for state in states:

        def root_pre_forward(module: Any, args: Any, kwargs: Any, state: Any = state) -> Any:
            state._lazy_init()
            if state._state_ctx.iter_forward_root is None and not in_backward():
                begin(args, kwargs)
            return type(state)._root_pre_forward(state, module, args, kwargs)

        state._root_pre_forward = root_pre_forward


def unwatch_roots(states: Sequence[Any]) -> None:
    """Watch them no more."""
    for state in states:
        state.__dict__.pop("_root_pre_forward", None)


def need(refused: str) -> None:
    """Raise what `refusal` says.

    Raises:
        UnsupportedError: it says something.
    """
    if refused:
        raise UnsupportedError(f"overlap: {refused}")
