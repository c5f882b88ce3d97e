"""Where torch's collectives of a group are seen: three seams of Python, there while one is guarded.

Methods of `ProcessGroup`, by which torch.distributed and FSDP2 call; operators of
`torch.ops._c10d_functional`, by which DTensor and compiled models do; and for DDP, whose calls are
C++'s, a group in Python that calls those methods.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from counterpoint.group.guard_board import Call, GuardBoard
from counterpoint.group.ranks import group_of

Args = tuple[Any, ...]


class Boards(Protocol):
    """The boards of guarded groups.

    Attributes:
        known: by the id of the group, and by its name; False: it is not guarded.
    """

    known: dict[int | str, "GuardBoard | Literal[False]"]

    def meet(self, group: dist.ProcessGroup) -> "GuardBoard | Literal[False]":
        """Guard a group of which nothing is known yet, if all are guarded."""
        ...


PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}  # others come back as these, or trace
modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore


def _tensors(kind: str, at: int, root: bool, *, nested: bool = False) -> Callable[[Args], Call]:
    """A reader of a method whose `at`-th argument has the tensors that are alike on all ranks."""

    def read(args: Args) -> Call:
        tensors = args[at][0] if nested else args[at]
        first = tensors[0]
        elements = first.numel()
        if not nested and len(tensors) > 1:
            elements = sum(each.numel() for each in tensors)
        return kind, elements, first.dtype, args[-1].rootRank if root else -1

    return read


def _tensor(kind: str, at: int, *, sized: bool = True) -> Callable[[Args], Call]:
    """A reader of a method whose `at`-th argument is one tensor, of a size that ranks share."""

    def read(args: Args) -> Call:
        return kind, args[at].numel() if sized else -1, args[at].dtype, -1

    return read


def _bare(kind: str) -> Callable[[Args], Call]:
    call: Call = kind, -1, None, -1
    return lambda args: call


def _all_to_all(args: Args) -> Call:
    return "all_to_all", -1, args[0][0].dtype, -1


METHODS: dict[str, Callable[[Args], Call]] = {
    "allreduce": _tensors("all_reduce", 0, root=False),
    "allreduce_coalesced": _tensors("all_reduce", 0, root=False),
    "broadcast": _tensors("broadcast", 0, root=True),
    "reduce": _tensors("reduce", 0, root=True),
    "gather": _tensors("gather", 1, root=True),
    "scatter": _tensors("scatter", 0, root=True),
    "allgather": _tensors("all_gather", 0, root=False, nested=True),
    "allgather_coalesced": _tensors("all_gather of lists", 1, root=False),
    "reduce_scatter": _tensors("reduce_scatter", 1, root=False, nested=True),
    "_allgather_base": _tensor("all_gather_into_tensor", 0),
    "all_gather_single": _tensor("all_gather_into_tensor", 0),
    "allgather_into_tensor_coalesced": _tensors("all_gather_into_tensor", 0, root=False),
    "all_gather_single_coalesced": _tensors("all_gather_into_tensor", 0, root=False),
    "_reduce_scatter_base": _tensor("reduce_scatter_tensor", 1),
    "reduce_scatter_single": _tensor("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": _tensors("reduce_scatter_tensor", 1, root=False),
    "reduce_scatter_single_coalesced": _tensors("reduce_scatter_tensor", 1, root=False),
    "alltoall": _all_to_all,
    "alltoall_base": _tensor("all_to_all_single", 0, sized=False),
    "all_to_all_single": _tensor("all_to_all_single", 0, sized=False),
    "barrier": _bare("barrier"),
    "monitored_barrier": _bare("monitored_barrier"),
}
MESSAGES = {"send", "recv", "recv_anysource"}


def _functional(kind: str, factor_at: int = 0, *, root: bool = False, sized: bool = True) -> Any:
    """A reader of a functional operator, in the words of the method that it ends in."""

    def read(args: Args) -> Call:
        first = args[0]
        if first.__class__ is list:
            elements = sum(each.numel() for each in first)
            first = first[0]
        else:
            elements = first.numel()
        if factor_at:
            elements *= args[factor_at]
        return kind, elements if sized else -1, first.dtype, args[1] if root else -1

    return read


FUNCTIONAL: dict[str, Callable[[Args], Call]] = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
                    _functional("all_reduce")),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_out",
                     "all_gather_into_tensor_coalesced"),
                    _functional("all_gather_into_tensor", 1)),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_out",
                     "reduce_scatter_tensor_coalesced"), _functional("reduce_scatter_tensor")),
    "all_to_all_single": _functional("all_to_all_single", sized=False),
    **dict.fromkeys(("broadcast", "broadcast_"), _functional("broadcast", root=True)),
}  # fmt: skip


def _method(original: Any, read: Callable[[Args], Call], boards: Boards) -> Any:
    known = boards.known

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        board = known.get(id(group))
        if board is None:
            board = boards.meet(group)
        if board:
            board.jot(read(args))
        return original(group, *args, **kwargs)

    return method


def _message(original: Any, boards: Boards) -> Any:
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        # the group is met at a collective: not all of its ranks come to a message
        if board := boards.known.get(id(group)):
            board.jot_to(args[1] if len(args) > 2 else -1)  # -1: from any rank
        return original(group, *args, **kwargs)

    return method


class _Operator:
    """A functional operator that is seen: where it runs, not where it is traced."""

    def __init__(self, original: Any, read: Callable[[Args], Call], boards: Boards) -> None:
        self._original, self._read = original, read
        self._known, self._meet = boards.known, boards.meet
        self._hash = hash(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if first.__class__ is list:
            first = first[0]
        if first.__class__ in PLAIN and not modes():  # a mode calls it again, below itself
            group = args[-1]
            key = group if group.__class__ is str else id(group)
            board = self._known.get(key)
            if board is None:
                board = self._meet(group_of(group) if key is group else group)
            if board:
                board.jot(self._read(args))
        return self._original(*args, **kwargs)

    # what has the operator as a key finds it again
    def __hash__(self) -> int:
        return self._hash

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _SeenGroup(dist.ProcessGroup):
    """A group for C++, which calls its collectives in Python, where they are seen."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # pyright: ignore  (not in its stub)
        self.group: Any = group
        kinds = dist.ProcessGroup.BackendType
        for device in self.group._device_types:
            backend = self.group._get_backend(device)
            kind = getattr(kinds, backend.name().upper(), kinds.CUSTOM)
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)


def _by_group(name: str) -> Any:
    def method(self: _SeenGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.group, name)(*args, **kwargs)

    return method


for _name in ("allreduce", "broadcast", "allgather", "getBackendName"):
    setattr(_SeenGroup, _name, _by_group("name" if _name == "getBackendName" else _name))


_Reducer: Any = dist.Reducer  # pyright: ignore  (of what DDP takes from there)


class _SeenReducer(_Reducer):
    """DDP's reducer."""

    def __init__(self, *args: Any) -> None:
        self._seen = [_seen(each) for each in args]  # a group of Python's lives as long
        super().__init__(*self._seen)


def _seen(value: object) -> object:
    return _SeenGroup(value) if isinstance(value, dist.ProcessGroup) else value


def _by_seen(original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*[_seen(each) for each in args], **kwargs)

    return function


class Seams:
    """What stands in the place of torch's own, until `undo`.

    Args:
        boards: what is told of each call.
    """

    def __init__(self, boards: Boards) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        group: Any = dist.ProcessGroup
        for name, read in METHODS.items():
            if hasattr(group, name):  # names differ by torch
                self._put(group, name, _method(getattr(group, name), read, boards))
        for name in MESSAGES:
            self._put(group, name, _message(getattr(group, name), boards))
        for name, read in FUNCTIONAL.items():
            packet = getattr(torch.ops._c10d_functional, name)
            for operator in (packet, packet.default):
                self._put(operator, "_op", _Operator(operator._op, read, boards))
        self._put(dist, "Reducer", _SeenReducer)
        for name in ("_broadcast_coalesced", "_verify_params_across_processes"):
            self._put(dist, name, _by_seen(getattr(dist, name)))

    def _put(self, at: Any, name: str, seen: Any) -> None:
        # as it is kept: read from its class, a method of C++ is bound to nothing any more
        self._undo.append((at, name, vars(at)[name]))
        setattr(at, name, seen)

    def undo(self) -> None:
        """Put torch's own back."""
        for at, name, original in reversed(self._undo):
            setattr(at, name, original)
        self._undo.clear()
