"""What a value may be, its kind and its range: of arguments, and of every field that is read.

A class of facts says by its annotations what kind its fields are; RANGES says how large its numbers
may be. What is wrong with a value is so found in one way, whether it was passed or read in a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from operator import index
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from counterpoint.errors import InputError

MAX_COUNT = 2**40  # rows, columns, elements: more is a slip
MAX_RANKS = 2**16
MAX_BYTES = 2**60
T = TypeVar("T")


class Range(NamedTuple):
    """The least and the largest number there may be, and what to do about one that is outside."""

    low: float
    high: float
    fix: str = ""


COUNT, RANKS, BYTES = Range(0, MAX_COUNT), Range(1, MAX_RANKS), Range(0, MAX_BYTES)
PEERS = Range(-MAX_RANKS, MAX_RANKS)
SECONDS = Range(0, 0.1, "pass seconds, not us")
COLLECTIVE_S = Range(0, 1, "pass seconds, not us")  # sockets are slow
FACTOR = Range(1, 10)
# no processor and no link in use is below these: a smaller number carries a prefix that must go
RATE = Range(1e6, 1e18, "pass bytes/s, not GB/s")
FLOP = Range(1e9, 1e20, "pass flop/s, not Tflop/s")
KIB_BYTES = Range(2**10, 2**30, "pass bytes, not KiB")

SIZE, DEGREE = Range(1, 2**24), Range(1, 2**20)
RANGES: Mapping[str, Range] = {
    **{f"Model.{name}": SIZE for name in ("hidden", "heads", "kv_heads", "vocab")},
    "Model.layers": Range(1, 2**12),
    **{f"Model.{name}": Range(0, 2**24) for name in (
        "ffn", "head_dim", "top_k", "expert_ffn", "shared_ffn", "dense_layers",
        "query_rank", "key_rank", "rope_dim", "windowed")},
    "Model.window": Range(0, 2**30),
    "Model.experts": Range(0, 2**12), "Model.sequence": Range(1, 2**30),
    "Dlrm.rows": COUNT, "Dlrm.pooling": Range(1, 2**16), "Dlrm.dim": Range(1, 2**16),
    "Dlrm.features": SIZE, "Dlrm.bottom": SIZE, "Dlrm.top": SIZE, "Dlrm.cross": Range(0, 2**16),
    "Dlrm.batch": Range(0, 2**30),
    "Layout.sequence": Range(0, 2**30),
    "Layout.tp": Range(1, 2**8), "Layout.ep": Range(1, 2**9),
    **{f"Layout.{name}": DEGREE for name in ("pp", "dp", "cp", "virtual_stages", "micro_batch")},
    "Layout.num_micro_batches": Range(0, 2**20),
    "Fabric.nic_bytes_per_s": RATE, "Fabric.nic_latency_s": SECONDS,
    "Fabric.levels": Range(1, 2**40), "Fabric.torus": Range(1, 2**24),
    "Problem.m": COUNT, "Problem.n": COUNT, "Problem.k": COUNT,
    "Problem.ranks": Range(0, MAX_RANKS), "Problem.islands": RANKS,
    "Problem.rows": COUNT, "Problem.scratch_bytes_limit": BYTES, "Problem.splits": COUNT,
    "Problem.experts": Range(0, 2**20), "Problem.top_k": Range(0, 2**20),
    "Problem.tables": COUNT, "Problem.indices": BYTES, "Problem.head_dim": Range(0, 2**16),
    "Problem.scale": Range(0, 1e6), "Problem.eps": Range(0, 1e6),
    "DeviceSpec.num_sms": Range(1, 2**12), "DeviceSpec.max_threads_per_sm": Range(1, 2**16),
    "DeviceSpec.max_warps_per_sm": Range(1, 2**12), "DeviceSpec.max_blocks_per_sm": Range(1, 2**12),
    "DeviceSpec.registers_per_sm": Range(2**10, 2**24, "pass registers, not Ki"),
    "DeviceSpec.shared_bytes_per_sm": KIB_BYTES, "DeviceSpec.shared_bytes_per_block": KIB_BYTES,
    "DeviceSpec.shared_reserved_bytes_per_block": Range(0, 2**20),
    "DeviceSpec.shared_granule_bytes": Range(1, 2**20),
    "DeviceSpec.bf16_flop_per_s": Range(1e9, 1e18, "pass flop/s, not Tflop/s"),
    "DeviceSpec.fp32_flop_per_s": Range(1e9, 1e18, "pass flop/s, not Tflop/s"),
    "DeviceSpec.hbm_bytes_per_s": Range(1e8, 1e16, "pass bytes/s, not GB/s"),
    "DeviceSpec.hbm_bytes": Range(1e9, 1e15, "pass bytes, not GB"),
    "DeviceSpec.l2_bytes": Range(2**19, 2**40, "pass bytes, not MiB"),
    "LinkSpec.bytes_per_s": Range(1e6, 1e15, "pass bytes/s, not GB/s"),
    "LinkSpec.collective_bytes_per_s": Range(1e6, 1e15, "pass bytes/s, not GB/s"),
    # sockets between busy hosts take milliseconds; more is microseconds passed as seconds
    "LinkSpec.latency_s": SECONDS, "LinkSpec.copy_overhead_s": SECONDS,
    "Machine.num_devices": RANKS, "Machine.gemm_tile": Range(1, 2**12),
    "Costs.gemm_flop_per_s": FLOP, "Costs.gemm_settled": FACTOR, "Costs.gemm_settling_s": SECONDS,
    "Costs.hbm_bytes_per_s": RATE, "Costs.kernel_s": SECONDS, "Costs.copy_bytes_per_s": RATE,
    "Costs.copy_overhead_s": SECONDS, "Costs.barrier_s": SECONDS,
    "Costs.collective_bytes_per_s": RATE, "Costs.all_gather_s": COLLECTIVE_S,
    "Costs.reduce_scatter_s": COLLECTIVE_S, "Costs.collective_small_s": COLLECTIVE_S,
    "Costs.direct_bytes_per_s": RATE, "Costs.direct_s": COLLECTIVE_S,
    "Costs.matmul_beside_copy": FACTOR, "Costs.copy_beside_matmul": FACTOR,
    "Costs.host_call_s": SECONDS, "Costs.host_step_s": SECONDS,
    "Buffer.shape": COUNT, "Buffer.chunks": RANKS, "Region.at": PEERS, "Region.shards": PEERS,
    "Region.chunk": Range(0, MAX_RANKS), "Region.rows": COUNT, "Region.cols": COUNT,
    "Region.of": PEERS,
    "Signal.slot": Range(0, 2**30), "Signal.at": PEERS, "Step.args": Range(-(2**63), 2**63),
    "Lane.priority": Range(-1000, 1000), "Lane.num_sms": Range(1, 2**12),
    "Lane.blocks_per_sm": Range(1, 2**12),
    **{name: Range(0, 1e6) for name in (
        "SGD.lr", "SGD.scale", "RowWiseAdagrad.lr", "RowWiseAdagrad.eps", "RowWiseAdagrad.scale")},
    # of a measurement that `counterpoint characterize` wrote
    "row.seconds": Range(1e-12, 1e3), "row.alone_s": Range(1e-12, 1e3),
    "row.other_s": Range(1e-12, 1e3), "row.part": Range(1e-6, 10), "row.num_bytes": COUNT,
    "row.num_steps": COUNT, "row.rows": COUNT, "row.n": COUNT, "row.k": COUNT,
    "row.tile": Range(1, 2**12),
}  # fmt: skip


class Misfit(NamedTuple):
    """What is wrong with a value: where in it, what it must be, what it is, what to do."""

    where: str
    want: str
    got: str
    fix: str = ""


def check(op: str, facts: object) -> None:
    """Refuse a dataclass with a field that is of another kind or out of its range.

    Raises:
        InputError: names the field.
    """
    found = misfit(facts, type(facts), None, "")
    if found is not None:
        raise InputError(op, found.where, want=found.want, got=found.got, fix=found.fix)


def whole(op: str, arg: str, value: Any, low: int = 0, high: int = MAX_COUNT) -> int:
    """A whole number from `low` to `high`; not True or False.

    Raises:
        InputError: it is something else.
    """
    value = plain(value)
    found = misfit(value, int, Range(low, high), arg)
    if found is not None:
        raise InputError(op, arg, want=found.want, got=found.got)
    return value


def instance(op: str, arg: str, value: object, kind: type[T], want: str = "") -> T:
    """`value`, of the class `kind`.

    Raises:
        InputError: it is of another.
    """
    if not isinstance(value, kind):
        raise InputError(op, arg, want=want or _wanted(kind, None), got=_shown(value))
    return value


def plain(value: Any) -> Any:
    """Lists as tuples, numbers of numpy as Python's; all else as it is."""
    if isinstance(value, list | tuple):
        return tuple(plain(v) for v in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if type(value) in (int, bool, str) or not hasattr(type(value), "__index__"):
        return value
    try:
        return index(value)
    except TypeError:  # a tensor of other numbers, or of several
        return value


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The annotations of a class."""
    return get_type_hints(kind)


def misfit(value: Any, hint: Any, limits: Range | None, where: str) -> Misfit | None:
    """What is wrong with a value of that annotation and range; None: nothing."""
    found = _checker(hint, limits)(value)
    return found and found._replace(where=f"{where}{found.where}".removeprefix("."))


Checker = Callable[[Any], Misfit | None]  # whose `where` goes on from that of the value


def _checker(hint: Any, limits: Range | None) -> Checker:
    """What finds a misfit. No cache: compilers trace this, and warn of one."""
    if hint is int or hint is float:
        return partial(_number_misfit, hint, limits)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return partial(_literal_misfit, hint)
    if origin in (Union, UnionType):
        each = [_checker(kind, limits) for kind in args]
        return partial(_union_misfit, each, NoneType in args)
    if origin in (tuple, Sequence):
        several = args[-1:] == (Ellipsis,)
        each = [_checker(kind, limits) for kind in args[: len(args) - several]]
        return partial(_tuple_misfit, hint, each, several)
    kind: Any = hint
    return partial(_facts_misfit if is_dataclass(hint) else _other_misfit, kind)


def _number_misfit(hint: type, limits: Range | None, value: Any) -> Misfit | None:
    number = isinstance(value, int if hint is int else int | float)
    good = number and not isinstance(value, bool)
    if good and (limits is None or limits.low <= value <= limits.high):  # NaN is neither
        return None
    fix = limits.fix if good and limits else ""
    return Misfit("", _wanted(hint, limits), _shown(value), fix)


def _literal_misfit(hint: Any, value: Any) -> Misfit | None:
    good = any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    return None if good else _wrong(hint, value)


def _union_misfit(choices: Sequence[Checker], optional: bool, value: Any) -> Misfit | None:
    if optional and value is None:
        return None
    found: list[Misfit] = []
    for choice in choices:
        wrong = choice(value)
        if wrong is None:
            return None
        found.append(wrong)
    # of a tuple that is one but for an element, that element
    inner = next((f for f in found if f.where), None)
    return inner or Misfit("", " or ".join(f.want for f in found), _shown(value))


def _tuple_misfit(hint: Any, each: Sequence[Checker], several: bool, value: Any) -> Misfit | None:
    if not isinstance(value, tuple):
        return _wrong(hint, value)
    items: tuple[Any, ...] = value
    if not several and len(items) != len(each):
        return _wrong(hint, items)
    for i, item in enumerate(items):
        if wrong := each[0 if several else i](item):
            return wrong._replace(where=f"[{i}]{wrong.where}")
    return None


def _facts_misfit(hint: type, value: object) -> Misfit | None:
    if type(value) is not hint:
        return _wrong(hint, value)
    for name, checker in _fields(hint):
        if wrong := checker(getattr(value, name)):
            return wrong._replace(where=f".{name}{wrong.where}")
    return None


@cache
def _fields(kind: type) -> tuple[tuple[str, Checker], ...]:
    """Of a class of facts."""
    ranges = ((name, RANGES.get(f"{kind.__name__}.{name}")) for name in hints_of(kind))
    return tuple((name, _checker(hints_of(kind)[name], limits)) for name, limits in ranges)


def _other_misfit(hint: type, value: object) -> Misfit | None:
    return None if isinstance(value, hint) else _wrong(hint, value)


def _wrong(hint: Any, value: object) -> Misfit:
    return Misfit("", _wanted(hint, None), _shown(value))


def _wanted(hint: Any, limits: Range | None) -> str:
    """A kind and its range in words."""
    args = get_args(hint)
    if hint in (int, float):
        kind = "a whole number" if hint is int else "a number"
        return f"{kind} from {_number(limits.low)} to {_number(limits.high)}" if limits else kind
    if get_origin(hint) is Literal:
        return f"one of {', '.join(str(arg) or repr('') for arg in args)}"
    if get_origin(hint) is tuple:
        several = args[-1] is Ellipsis or not args
        return "a tuple" if several else f"a tuple of {len(args)}"
    words = {bool: "True or False", str: "text", NoneType: "None"}
    return words.get(hint) or _name(hint)


def _number(value: float) -> str:
    power = abs(value).bit_length() - 1 if isinstance(value, int) else 0
    if power < 16 or abs(value) != 1 << power:
        return f"{value:g}"
    return f"{'-' * (value < 0)}2**{power}"


def _name(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def _shown(value: object) -> str:
    """A value for a message: short ones as they are written, others by their class."""
    if not isinstance(value, bool | int | float | str | bytes | tuple | list | NoneType):
        return type(value).__name__
    try:
        text = repr(value)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
