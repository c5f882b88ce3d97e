"""Problems as a command line gives them: ops, layers and M,N,K by what is typed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from counterpoint.cli.shared.files import text_of
from counterpoint.cli.shared.usage import meant
from counterpoint.errors import InputError
from counterpoint.machine import Machine
from counterpoint.machine_of import machine_of
from counterpoint.measure.shapes import SHAPES
from counterpoint.operators import op_names
from counterpoint.presets import PRESETS, named
from counterpoint.problem import DType, Norm, Problem
from counterpoint.ranges import MAX_COUNT

Shape = tuple[int, int, int]  # M, N, K
M_N_K = "M over all ranks, N and K of one rank"
BAGS, NORM = "embedding_bag_all_to_all", "all_reduce_norm"
MAX_TABLES = 4096
Fp8 = Literal["", "row", "tensor", "block"]


class Beside(NamedTuple):
    """What a problem may have beside its sizes.

    Args:
        out: of embedding bags, peers write to outputs that the caller keeps.
        bias: a row of it is added.
        fp8: what shares a scale of fp8 operands; of a norm, of its result.
        norm: which one.
        residual: one is added before the norm.
        top_k: experts of a token, by routes; a token is then so many rows of the shape.
        islands: groups of ranks between which there are NICs.
    """

    out: bool = False
    bias: bool = False
    fp8: Fp8 = ""
    norm: Norm = ""
    residual: bool = False
    top_k: int = 0
    islands: int = 1

    def fields(self, op: str, experts: int) -> dict[str, Any]:
        """Those of a problem that are not as they are by default; it refuses what it has none of.

        Raises:
            InputError: a norm gives no fp8 by blocks.
        """
        found: dict[str, Any] = {
            "out": self.out, "bias": self.bias, "residual": self.residual, "norm": self.norm,
            "islands": self.islands, "top_k": self.top_k,
            "counts": "routed" if self.top_k and experts else "",
            "quantized" if op == NORM else "scales": self.fp8,
        }  # fmt: skip
        if op == NORM and self.fp8:
            if self.fp8 == "block":
                raise InputError(op, "--fp8", want="row or tensor, of a result", got=self.fp8)
            found["quantized"] = "rows" if self.fp8 == "row" else self.fp8
        return {name: value for name, value in found.items() if value}


PLAIN = Beside()


def op_of(command: str, option: str, text: str, among: Sequence[str]) -> str:
    """The operator called `text`.

    Raises:
        InputError: it is not `among` those.
    """
    if text not in among:
        want = f"one of {', '.join(among)}"
        raise InputError(command, option, want=want, got=repr(text), fix=meant(text, among))
    return text


def numbers(command: str, option: str, text: str, want: str, *, count: int = 0) -> list[int]:
    """The numbers above 0 of "1,8,32".

    Args:
        want: what there should be, for the error.
        count: how many; 0: any.

    Raises:
        InputError: one is none, or there are fewer or more.
    """
    parts = [part.strip() for part in text.split(",")]
    good = all(p.isdecimal() and len(p) < 20 and 0 < int(p) <= MAX_COUNT for p in parts)
    if (count and len(parts) != count) or not good:
        raise InputError(command, option, want=f"{want} from 1 to 2**40", got=repr(text))
    return [int(part) for part in parts]


def shape_of(command: str, option: str, text: str) -> Shape:
    """M, N and K of "8192,7168,8192".

    Raises:
        InputError: not three numbers above 0.
    """
    m, n, k = numbers(command, option, text, "M,N,K of numbers", count=3)
    return m, n, k


def layers_of(command: str, option: str, text: str) -> list[tuple[str, str]]:
    """Op and M,N,K of the published layers called `text`, or else of all whose names hold it.

    Raises:
        InputError: there is none.
    """
    layers: list[tuple[str, str, Shape]] = [
        (op, name, shape) for op, named in SHAPES.items() for name, shape in named.items()
    ]
    same = [layer for layer in layers if layer[1] == text]
    found = same or [layer for layer in layers if text.lower() in layer[1].lower()]
    if not found:
        want = f"a part of one of {'; '.join(name for _, name, _ in layers)}"
        raise InputError(command, option, want=want, got=repr(text))
    return [(op, ",".join(map(str, shape))) for op, _, shape in found]


def sizes_of(command: str, op: str, shape: str) -> list[int]:
    """M, N and K, or what embedding bags have.

    Raises:
        InputError: these are not as many numbers above 0.
    """
    want, count = ("TABLES,D,POOLING,BATCH", 4) if op == BAGS else ("M,N,K", 3)
    if op == NORM:
        want, count = "M,N", 2
    return numbers(command, "--shape", shape, f"{want} of numbers", count=count)


def wanted(command: str, op: str, shapes: str, layer: str) -> list[tuple[str, str]]:
    """Operators and their shapes: those given, or those of published layers.

    Raises:
        InputError: there are none, or both are given.
    """
    if shapes and layer:
        raise InputError(
            command, "--layer", want="left out where --shape is given", got=repr(layer)
        )
    if shapes and not op:
        want = f"one of {', '.join(op_names())} with --shape"
        raise InputError(command, "--op", want=want, got="none")
    name = op_of(command, "--op", op, op_names()) if op else None
    if name and shapes:
        for text in shapes.split(":"):
            sizes_of(command, name, text)
        return [(name, text) for text in shapes.split(":")]
    layers = layers_of(command, "--layer", layer)
    found = [each for each in layers if name in (None, each[0])]
    if not found:
        fix = "give --shape"
        raise InputError(command, "--op", want="one that has such layers", got=repr(op), fix=fix)
    return found


def problem_of(
    command: str, op: str, shape: str, ranks: int, dtype: DType, experts: int = 0,
    beside: Beside = PLAIN,
) -> Problem:  # fmt: skip
    """The problem of a shape on `ranks` ranks, with equal rows where they are shared out.

    Args:
        shape: M,N,K; of a norm M,N; of embedding bags tables of each GPU, their columns, indices of
            a bag, all bags.

    Raises:
        InputError: there is no such op, `shape` is none, the rows cannot be equal, or the sizes are
            not those of the operator.
    """
    op_of(command, "OP", op, op_names())
    more = beside.fields(op, experts)
    if op == BAGS:
        tables, columns, pooling, batch = sizes_of(command, op, shape)
        if tables > MAX_TABLES:
            want = f"of at most {MAX_TABLES} tables a GPU"
            raise InputError(command, "--shape", want=want, got=repr(shape))
        _shared_evenly(command, shape, 3, ranks, f"a BATCH that {ranks} ranks share")
        return Problem(
            BAGS, batch, ranks=ranks, dtype=dtype, tables=((columns,) * tables,) * ranks,
            indices=(tables * batch * pooling,) * ranks, experts=experts, **more,
        )  # fmt: skip
    m, n, *contracted = sizes_of(command, op, shape)
    k = contracted[0] if contracted else 0
    parts = ranks * (experts or 1)
    # refuses experts, not rows
    problem = Problem(op, parts, n, k, ranks, dtype, experts=experts, **more)
    if problem.operation.shares_rows:
        who = f"{experts} experts on each of {ranks} ranks" if experts else f"{ranks} ranks"
        _shared_evenly(command, shape, 0, parts, f"an M that {who} share")
    return replace(problem, m=m, rows=())


def _shared_evenly(command: str, shape: str, place: int, parts: int, who: str) -> None:
    """Refuse a shape whose number at `place` is no multiple of `parts`, and say which are."""
    numbers = [int(part) for part in shape.split(",")]
    count = numbers[place]
    if count % parts:
        near = [n for n in (count - count % parts, count - count % parts + parts) if n]
        shapes = ([*numbers[:place], n, *numbers[place + 1 :]] for n in near)
        fix = f"take {' or '.join('--shape ' + ','.join(map(str, s)) for s in shapes)}"
        raise InputError(command, "--shape", want=f"of {who} evenly", got=repr(shape), fix=fix)


def machine_at(command: str, text: str) -> Machine:
    """The machine of that name, or in that file.

    Raises:
        InputError: there is none.
    """
    path = Path(text)
    if path.exists() or path.suffix or "/" in text:
        text_of(command, "--machine", path, "a file of a machine")
        return machine_of("machine_of", path)
    if named(text) is None:
        kinds = ", ".join(PRESETS)
        want = f"one of {kinds} with 1 to 8 GPUs (gb200: to 72), such as h200-8, or a file"
        fix = meant(text, [f"{kind}-{n}" for kind in PRESETS for n in range(1, 9)])
        raise InputError(command, "--machine", want=want, got=repr(text), fix=fix)
    return machine_of(command, text)


def check_ranks(command: str, ranks: int, machine: Machine) -> None:
    """Refuse more ranks than the machine has GPUs.

    Raises:
        InputError: there are more; it names a machine of that kind that has as many, if one has.
    """
    if ranks <= machine.num_devices:
        return
    kind, _, _ = machine.name.partition("-")
    enough = kind in PRESETS and ranks <= PRESETS[kind].num_devices
    fix = f"take --machine {kind}-{ranks}" if enough else f"take --ranks {machine.num_devices}"
    want = f"at most the {machine.num_devices} GPUs of {machine.name}"
    raise InputError(command, "--ranks", want=want, got=ranks, fix=fix)
