"""Compile a kernel for GPUs that are not here, and check its PTX, registers and spills.

x86 orders stores, so no run on CPU ranks shows a missing acquire, or a missing barrier of the block
before a release. Both stand in the PTX, which Triton makes without a GPU or a driver.

    found = compiled(
        my_kernel, 90, {"x_ptr": "*bf16", "bases_ptr": "*i64", "n": "i32"}, {"BLOCK": 128},
        num_warps=4, aligned=("x_ptr", "bases_ptr"),
    )
    assert not wrong_order(found.ptx) and not found.spills

The process must compile (no TRITON_INTERPRET=1).
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from counterpoint.errors import UnsupportedError
from counterpoint.run.launch import INTERPRETED

CAPABILITIES = [80, 90, 100]  # generations of GPUs: A100, H100 and H200, B200
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Compiled(NamedTuple):
    """A compiled kernel, and what the assembler says of its machine code.

    Attributes:
        ptx: its code as PTX.
        registers: of a thread.
        shared_bytes: static shared memory of a block.
        dynamic_bytes: shared memory that a launch adds.
        local_bytes: of a thread, for what has no register.
        ttgir: in Triton's own form.
        cubin: as the machine runs it.
    """

    ptx: str
    registers: int
    shared_bytes: int
    dynamic_bytes: int
    local_bytes: int
    ttgir: str
    cubin: bytes

    @property
    def sass(self) -> str:
        """The machine code as text, which takes longer than to compile most kernels."""
        return _cuobjdump(self.cubin, "-sass")

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return len(re.findall(r"\b(?:STL|LDL)\b", self.sass)) if self.local_bytes else 0


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
    options: Mapping[str, object] = MappingProxyType({}),
) -> Compiled:
    """Compile `kernel` for a GPU of that capability.

    Args:
        kernel: made by `triton.jit`.
        capability: such as 90; see CAPABILITIES.
        types: of the arguments by name, as Triton writes them: "*bf16", "i32".
        constants: values of its constexpr arguments by name.
        num_warps: an option of Triton.
        num_stages: an option of Triton.
        aligned: arguments that are multiples of 16, which a launch finds out by itself.
        options: others of Triton.

    Raises:
        UnsupportedError: this process interprets kernels.
    """
    if INTERPRETED:
        raise UnsupportedError("ptx.compiled: this process interprets; unset TRITON_INTERPRET")
    signature = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    launch = {"num_warps": num_warps, "num_stages": num_stages, **options}
    found = triton.compile(source, target=target, options=launch)
    said = _cuobjdump(found.asm["cubin"], "-res-usage")
    usage = {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", said)}
    return Compiled(
        found.asm["ptx"], usage["REG"], usage["SHARED"], found.metadata.shared,
        usage["STACK"] + usage["LOCAL"], found.asm["ttgir"], found.asm["cubin"],
    )  # fmt: skip


@cache
def _cuobjdump(cubin: bytes, option: str) -> str:
    # not a pipe: cuobjdump wants a file
    path = Path(f"/proc/{os.getpid()}/fd") / str(fd := os.memfd_create("cubin"))
    try:
        os.write(fd, cubin)
        command = [CUOBJDUMP, option, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        os.close(fd)


# of system scope, in the forms that versions of Triton give them
BARRIER = r"\bbar(?:rier)?\.sync"
RELEASE = r"\batom\.global\.sys\.release\.exch|\batom\.global\.release\.sys"
ACQUIRE = r"atom\.global\.sys\.acquire\.add|ld\.global\.sys\.acquire|atom\.global\.acquire\.sys"
STORE, LOAD = r"\bst\.global", r"\bld\.global\.cg\."
PAYLOAD = r"\bst\.global\.v4\.b32"  # stores of 16 bytes a thread


def lines_with(ptx: str, pattern: str) -> list[int]:
    """Numbers of the lines that match."""
    return [i for i, line in enumerate(ptx.splitlines()) if re.search(pattern, line)]


def in_order(block: str, *patterns: str) -> bool:
    """Whether the last match of each pattern stands before a match of the next one."""
    at = [[m.start() for m in re.finditer(pattern, block)] for pattern in patterns]
    return all(first and any(first[-1] < x for x in second) for first, second in pairwise(at))


def wrong_order(ptx: str, payload: str = STORE) -> list[str]:
    """What of the protocol of flags (`put`, `post`, `wait`, loads by ".cg") does not hold.

    There must be a barrier of the block on every path from a store of a payload to a release, and
    from an acquire to a load.

    Args:
        ptx: of a kernel that posts and waits.
        payload: how it stores tiles.

    Returns:
        A sentence for each fault; an empty list if there is none.
    """
    orders = (("release", RELEASE), ("acquire", ACQUIRE))
    found = [f"no {name} of system scope" for name, kind in orders if not re.search(kind, ptx)]
    if not re.search(payload, ptx):
        found.append("no store of a payload")
    lines = ptx.splitlines()
    if _without_barrier(lines, payload, RELEASE):
        found.append("a release that no barrier parts from the payload")
    if _without_barrier(lines, ACQUIRE, r"\bret;"):
        found.append("an acquire without a barrier behind it")
    if _without_barrier(lines, ACQUIRE, LOAD):
        found.append("loads that no barrier parts from the acquire")
    return found


def _without_barrier(lines: Sequence[str], start: str, goal: str) -> bool:
    """Whether some path leads from a line with `start` to one with `goal` and past no barrier."""
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if line.startswith("$")}
    ahead = [i + 1 for i, line in enumerate(lines) if re.search(start, line)]
    seen = set[int]()
    while ahead:
        i = ahead.pop()
        if i in seen or i == len(lines) or re.search(BARRIER, lines[i]):
            continue
        seen.add(i)
        if re.search(goal, lines[i]):
            return True
        jump = re.search(r"\b(?:bra\S*\s+(\$\w+)|ret);", lines[i])
        if jump and jump[1]:
            ahead.append(labels[jump[1]])
        if not jump or lines[i].lstrip().startswith("@"):  # falls through
            ahead.append(i + 1)
    return False
