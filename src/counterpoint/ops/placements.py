"""DTensors as arguments: how an operator wants each placed, and how its result is.

An operator takes this rank's parts. Where its checks meet a DTensor they raise `Distributed`, which
the public function catches; `placed` then calls the function again, with parts. So a call of plain
tensors looks for nothing more.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.errors import CounterpointError, InputError
from counterpoint.group.ranks import check_group
from counterpoint.ops.agreement import refused

# placements beside a dim that is sharded, which is an int, or the argument that says it
SUM = "a sum over ranks"  # Partial("sum")
SAME = "equal on all ranks"  # Replicate()
ADDED = "equal on all ranks, each of which adds to a part of the result"  # its gradient is a sum
Place = int | str


class Taken(NamedTuple):
    """What an operator wants of DTensors.

    Args:
        places: of its tensors, by argument; x is a DTensor if any is.
        result: of each of its results.
        others: the names of its other arguments.
        rows: the argument that says of which dim `rows` are the parts, if it has `rows`.
    """

    places: dict[str, Place]
    result: Place
    others: str
    rows: str = ""


_NORM: dict[str, Place] = {"x": SUM, "residual": SAME, "weight": SAME, "bias": SAME, "scale": SAME}
_BEHIND: dict[str, Place] = {
    "x": -1, "w": 0, "bias": SAME, "residual": SAME, "norm_weight": SAME, "norm_bias": SAME,
    "scale": SAME,
}  # fmt: skip
TAKEN = {
    "all_gather_matmul": Taken(
        {"x": "gather_dim", "w": 1, "bias": 0}, -1, "group plan rows gather_dim activation",
        "gather_dim",
    ),
    "matmul_reduce_scatter": Taken(
        {"x": -1, "w": 0, "bias": ADDED}, "scatter_dim", "group plan rows scatter_dim",
        "scatter_dim",
    ),
    "matmul_all_reduce": Taken({"x": -1, "w": 0, "bias": SAME}, SAME, "group plan"),
    "matmul_all_reduce_rms_norm": Taken(_BEHIND, SAME, "group"),
    "matmul_all_reduce_layer_norm": Taken(_BEHIND, SAME, "group"),
    "all_reduce_rms_norm": Taken(_NORM, SAME, "group"),
    "all_reduce_layer_norm": Taken(_NORM, SAME, "group"),
}  # fmt: skip


class Distributed(Exception):
    """An operator of `TAKEN` has met a DTensor."""


def meet(op: str, name: str, tensor: Any) -> None:
    """End a call that has met a DTensor.

    Raises:
        Distributed: it is called again with this rank's parts.
        InputError: it takes no DTensors.
    """
    if op in TAKEN:
        raise Distributed
    raise _refusal(op, name, tensor)


def _refusal(op: str, name: str, tensor: Any) -> InputError:
    want, fix = "a Tensor of this rank", f"pass its own part, {name}.to_local()"
    return InputError(op, name, want=want, got=_shown(tensor.placements), fix=fix)


def _shown(placements: Sequence[Any]) -> str:
    # not by repr, which torch.compile does not trace
    of = (getattr(p, "dim", getattr(p, "reduce_op", "")) for p in placements)
    names = [f"{type(p).__name__}({more})" for p, more in zip(placements, of, strict=True)]
    return f"a DTensor of [{', '.join(names)}]"


def placed(op: str, call: Callable[..., Any], *values: Any) -> Any:
    """Call an operator with this rank's parts of DTensors: its results are DTensors.

    Args:
        op: of `TAKEN`.
        call: it, by names of arguments.
        values: of its arguments: tensors, then others, as in `TAKEN`.

    Raises:
        InputError: an argument is not placed as the operator wants it; nothing was launched.
    """
    given = dict(zip([*TAKEN[op].places, *TAKEN[op].others.split()], values, strict=True))
    try:
        _check_meshes(op, given)
        mesh = given["x"].device_mesh
        of_mesh = mesh.get_group()
        group = check_group(op, of_mesh if given["group"] is None else given["group"])
        here, there = map(dist.get_process_group_ranks, (group, of_mesh))
        if here != there:
            want, got = f"of the ranks {there} of the mesh", f"the ranks {here}"
            raise InputError(op, "group", want=want, got=got)
        size, rows = _shared(op, given, len(here))
        own = {name: _own(op, name, given, len(here)) for name in TAKEN[op].places}
    except CounterpointError as error:
        raise refused(error, given["group"], given["x"]) from None
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        saved = [t for _, t in _tensors(op, given) if is_distributed(t)]
        own = {name: _watched(value, saved) for name, value in own.items()}
    more = {"rows": rows} if rows else {}
    results = call(**given | own | more | {"group": group})
    # of a gather it is x that has them
    size = size if rows and TAKEN[op].rows == TAKEN[op].result else 0
    if isinstance(results, Tensor):
        return _whole(op, results, given, mesh, size)
    return type(results)(_whole(op, y, given, mesh, size) for y in results)


class _Unchanged(torch.autograd.Function):
    """A part of a DTensor, whose backward refuses DTensors that were changed since.

    A change in place of a DTensor leaves the version of its part, which is what is saved.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, *(None for _ in ctx.saved_tensors)


def _watched(value: Any, saved: Sequence[Tensor]) -> Any:
    """A part, or a list of such, as `_Unchanged` has it where it has a gradient."""
    if isinstance(value, list):
        parts: list[Any] = value
        return [_watched(each, saved) for each in parts]
    is_watched = isinstance(value, Tensor) and value.requires_grad
    return _Unchanged.apply(value, *saved) if is_watched else value


def _tensors(op: str, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of a call, those of lists and of a `Scaled` by themselves."""
    for name in TAKEN[op].places:
        value = given[name]
        if hasattr(value, "_fields"):
            yield from ((f"{name}.{key}", each) for key, each in value._asdict().items())
        elif isinstance(value, list | tuple):
            values: Sequence[Any] = value
            yield from ((f"{name}[{i}]", each) for i, each in enumerate(values))
        else:
            yield name, value


def _check_meshes(op: str, given: dict[str, Any]) -> None:
    """Refuse DTensors of several meshes, of one with several axes, and those beside a plain x.

    Raises:
        InputError: names the argument.
    """
    found = {name: t for name, t in _tensors(op, given) if is_distributed(t)}
    first, mesh = next((name, t.device_mesh) for name, t in found.items())
    for name, tensor in found.items():
        if "." in name:
            raise _refusal(op, name, tensor)
        if tensor.device_mesh.ndim != 1:
            got = f"a DTensor on one of {tensor.device_mesh.ndim}"
            fix = f"pass {name}.to_local(), or a DTensor on one axis of it, a slice of the mesh"
            raise InputError(op, name, want="on a mesh of one axis", got=got, fix=fix)
        if tensor.device_mesh != mesh:
            raise InputError(op, name, want=f"on the mesh of {first}", got="another mesh")
    if first != "x":
        got, fix = type(given["x"]).__name__, f"pass {first}.to_local()"
        raise InputError(op, "x", want=f"a DTensor as {first}", got=got, fix=fix)


def is_distributed(tensor: object) -> bool:
    """Whether it is a DTensor."""
    known = sys.modules.get("torch.distributed.tensor")  # else there are none
    return known is not None and isinstance(tensor, known.DTensor)


def _dim(op: str, place: Place, given: dict[str, Any]) -> int:
    """The dim that is sharded, as an argument says it, or as it is."""
    if isinstance(place, int):
        return place
    dim, dims = given[place], given["x"].dim()
    if type(dim) is not int or not -dims <= dim < dims:
        raise InputError(op, place, want=f"a dim of x, 0 to {dims - 1}", got=repr(dim))
    return dim


def _shared(op: str, given: dict[str, Any], ranks: int) -> tuple[int, list[int]]:
    """How large is the dim of which `rows` are parts; and `rows`, where parts are not equal.

    Raises:
        InputError: the caller says `rows`, too.
    """
    place = TAKEN[op].rows
    if not place:
        return 0, []
    if given["rows"] is not None:
        want = "None where x is a DTensor, which says it"
        raise InputError(op, "rows", want=want, got=given["rows"])
    x, w, dim = given["x"], given["w"], _dim(op, place, given)
    of_w = TAKEN[op].result == place and dim in (-1, x.dim() - 1)
    if of_w and not isinstance(w, Tensor):
        raise InputError(op, "w", want="a Tensor", got=type(w).__name__)
    size = w.shape[-1] if of_w else x.shape[dim]
    # as torch chunks a tensor
    most = -(-size // ranks)
    rows = [max(min(most, size - most * r), 0) for r in range(ranks)] if size % ranks else []
    return size, rows


def _own(op: str, name: str, given: dict[str, Any], ranks: int) -> Any:
    """This rank's part of an argument, or of each of a list.

    Raises:
        InputError: it is placed otherwise.
    """
    value, place = given[name], TAKEN[op].places[name]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        values: Sequence[Any] = value
        return [_part(op, f"{name}[{i}]", t, place, given, ranks) for i, t in enumerate(values)]
    return _part(op, name, value, place, given, ranks)


def _part(
    op: str, name: str, tensor: Any, place: Place, given: dict[str, Any], ranks: int
) -> Any:  # fmt: skip
    """This rank's part of a DTensor; the gradient of that is a DTensor placed as it is."""
    from torch.distributed.tensor import Partial

    if not is_distributed(tensor):
        return tensor
    want = _placement(op, place, given, tensor)
    if tensor.placements != (want,):
        fix = f"redistribute it, or pass its own part, {name}.to_local()"
        got = _shown(tensor.placements)
        raise InputError(op, name, want=_shown([want]), got=got, fix=fix)
    if want.is_shard() and place != TAKEN[op].rows and tensor.shape[want.dim] % ranks:
        got = f"{tensor.shape[want.dim]} over {ranks} ranks"
        raise InputError(op, name, want=f"of equal shards of dim {want.dim}", got=got, fix="pad it")
    if place == ADDED:
        # what each rank adds for itself is summed, by the backward of this
        return tensor.redistribute(placements=[want]).to_local(grad_placements=[Partial()])
    return tensor.to_local()


def _placement(op: str, place: Place, given: dict[str, Any], of: Any) -> Any:
    """A place as torch has it, of a tensor of as many dims."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if place == SUM:
        return Partial()
    return (
        Replicate() if place in (SAME, ADDED) else Shard(_dim(op, place, given) % max(of.dim(), 1))
    )


def _whole(op: str, y: Tensor, given: dict[str, Any], mesh: Any, size: int) -> Any:
    """A result as a DTensor.

    Args:
        size: of the dim that is sharded, where shards are not equal.
    """
    from torch.distributed.tensor import DTensor

    placement = _placement(op, TAKEN[op].result, given, y)
    if not (size and placement.is_shard()):
        return DTensor.from_local(y, mesh, [placement], run_check=False)
    shape = torch.Size(size if dim == placement.dim else n for dim, n in enumerate(y.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        y.contiguous(), mesh, [placement], run_check=False, shape=shape, stride=stride
    )
