"""Kernels as launches would compile them, and what their code must be, without a GPU.

Types of arguments go by their names. A kernel that several tests look at is compiled once.
"""

import re
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import pytest

from counterpoint.gpu.limits import LIMITS
from counterpoint.gpu.occupancy import Kernel, occupancy
from counterpoint.testing.ptx import ACQUIRE, BARRIER, RELEASE, Compiled, compiled, lines_with

# of pointers whose name means one thing in all kernels; any other points to the dtype of the data
POINTERS = {
    "i32": "state routes moves sent index starts spans named",
    "i64": "words flags fault rows chunks outs over indices offsets bases counts",
    "fp32": "one scale scales weights",
}
NUMBERS = {"eps": "fp32", "timeout_ns": "i64"}  # any other is an i32
COUNTED = r"\batom\.global\.gpu\.acq_rel\.add|\batom\.global\.acq_rel\.gpu"
WIDE = ("v4.b32", "v2.b64")  # 16 bytes at a time


def generations(count: int) -> list[Any]:
    """All kernels for Hopper, and of the other two generations so many in all of a test."""
    others = [pytest.param(each, marks=pytest.mark.drawn(count)) for each in (80, 100)]
    return [90, *others]


def code(
    kernel: Any, capability: int = 90, *, dtype: str = "bf16",
    pointers: Mapping[str, str] | None = None, types: Mapping[str, str] | None = None,
    sizes: str = "", plain: str = "", num_warps: int = 4, num_stages: int = 3,
    options: Mapping[str, object] | None = None, **constants: Any,
) -> Compiled:  # fmt: skip
    """`kernel` compiled; pointers are multiples of 16.

    Args:
        dtype: of what pointers point to, as Triton writes it.
        pointers: names of pointers, without "_ptr", by what they point to, where that is another.
        types: of other arguments, where they are no i32.
        sizes: names of numbers that are multiples of 16.
        plain: names of pointers, without "_ptr", that are no such multiples; or "all".
        options: of Triton.
        constants: values of constexpr arguments.
    """
    known = {
        f"{name}_ptr": f"*{kind}"
        for some in (POINTERS, pointers or {})
        for kind, names in some.items()
        for name in names.split()
    } | NUMBERS | dict(types or {})  # fmt: skip
    given = tuple(
        (name, known.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32"))
        for name in kernel.arg_names if name not in constants
    )  # fmt: skip
    left_out = {f"{name}_ptr" for name in plain.split()}
    aligned = tuple(
        name for name, kind in given
        if name in sizes.split() or (kind[0] == "*" and plain != "all" and name not in left_out)
    )  # fmt: skip
    settled = tuple(sorted(constants.items())), tuple((options or {}).items())
    return _code(kernel, capability, given, *settled, aligned, num_warps, num_stages)


@cache
def _code(
    kernel: Any, capability: int, types: Any, constants: Any, options: Any,
    aligned: tuple[str, ...], num_warps: int, num_stages: int,
) -> Compiled:  # fmt: skip
    return compiled(
        kernel, capability, dict(types), dict(constants), num_warps=num_warps,
        num_stages=num_stages, aligned=aligned, options=dict(options),
    )  # fmt: skip


def blocks_of(found: Compiled, num_warps: int, capability: int = 90) -> int:
    """Blocks of a kernel that are on an SM at once."""
    block = Kernel(32 * num_warps, found.registers, found.shared_bytes, found.dynamic_bytes)
    return occupancy(block, LIMITS[f"sm_{capability}"]).blocks


def at(text: str, pattern: str) -> list[int]:
    """Where a pattern matches."""
    return [match.start() for match in re.finditer(pattern, text)]


def wide(
    found: Compiled, *, loads: int | None = None, stores: int | None = None, narrow: str = ".*",
    spills: int = 0,
) -> None:  # fmt: skip
    """Memory is read and written 16 bytes at a time, and nothing spills.

    Args:
        loads: of 16 bytes; None: any number.
        stores: likewise.
        narrow: a pattern of all other accesses, in order.
    """
    accesses = re.findall(r"\b(ld|st)\.global\.(\S+)", found.ptx)
    sizes = {op: [size for kind, size in accesses if kind == op and size in WIDE]
             for op in ("ld", "st")}  # fmt: skip
    for op, count in (("ld", loads), ("st", stores)):
        assert len(sizes[op]) == count if count is not None else sizes[op], (op, accesses)
    rest = " ".join(f"{op}.{size}" for op, size in accesses if size not in WIDE)
    assert re.fullmatch(narrow, rest), rest
    assert found.spills <= spills


def words(found: Compiled, *, stores: int, width: str = r"\.v4") -> None:
    """Words arrive whole: each is one element of a store and of a poll, which is never cached.

    Nothing is fenced.

    Args:
        stores: of words, at least.
        width: of each access, as PTX writes it.
    """
    polls = re.findall(r"\bld\.volatile\S*", found.ptx)
    assert polls and all(re.search(rf"{width}\.b32$", name) for name in polls), polls
    assert len(lines_with(found.ptx, rf"\bst\.global{width}\.b32")) >= stores
    assert not lines_with(found.ptx, rf"{RELEASE}|{ACQUIRE}")


def polled(found: Compiled) -> list[int]:
    """Words of each poll."""
    kind = r"tt\.load .*isVolatile = true.*: tensor<([0-9x]+)x!tt\.ptr<i32>"
    return [prod(map(int, shape.split("x"))) for shape in re.findall(kind, found.ttgir)]


def parted(ptx: str, *patterns: str) -> bool:
    """Whether the last match of each stands before the first of the next, a barrier between."""
    lines, found = ptx.splitlines(), [lines_with(ptx, pattern) for pattern in patterns]
    return all(
        before and behind and before[-1] < behind[0]
        and any(re.search(BARRIER, line) for line in lines[before[-1] : behind[0]])
        for before, behind in zip(found, found[1:], strict=False)
    )  # fmt: skip
