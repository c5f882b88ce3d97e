"""Kernels compiled for GPUs that are not here: their PTX, registers, and the order of memory in it.

x86 orders stores, so no run on CPU ranks shows a missing release, or a missing barrier before it.
"""

import os
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = [80, 90, 100]
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


class Compiled(NamedTuple):
    """The PTX, and what the assembler says of the machine code."""

    ptx: str
    registers: int
    shared_bytes: int  # static; what a launch adds is below
    spills: int  # loads and stores of local memory
    dynamic_bytes: int
    ttgir: str
    sass: str


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> Compiled:
    """`kernel` for arguments of `types`; those `aligned` are multiples of 16."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "here kernels are compiled"
    signature = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = triton.compile(source, target=target, options=options)
    usage = _cuobjdump(found.asm["cubin"], "-res-usage")
    names = ("REG", "SHARED")
    registers, shared = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in names)  # type: ignore[index]
    sass = _cuobjdump(found.asm["cubin"], "-sass")
    spills = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return Compiled(
        found.asm["ptx"], registers, shared, spills, found.metadata.shared, found.asm["ttgir"], sass
    )


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


def lines_with(ptx: str, pattern: str) -> list[int]:
    return [i for i, line in enumerate(ptx.splitlines()) if re.search(pattern, line)]


BARRIER = r"\bbar(rier)?\.sync"
RELEASE = r"\batom\.global\.sys\.release\.exch|\batom\.global\.release\.sys"
ACQUIRE = r"atom\.global\.sys\.acquire\.add|ld\.global\.sys\.acquire|atom\.global\.acquire\.sys"
PAYLOAD = r"\bst\.global\.v4\.b32"
LOAD = r"\bld\.global\.cg\."


def blocks(ptx: str) -> list[str]:
    """The basic blocks, in the compiler's order; one runs from its first line to its last."""
    return re.split(r"^\$L__BB\S+:", ptx, flags=re.MULTILINE)


def in_order(block: str, *patterns: str) -> bool:
    """Whether the last of the first kind stands before the second, and so on."""
    at = [[m.start() for m in re.finditer(pattern, block)] for pattern in patterns]
    return all(first and any(first[-1] < x for x in second) for first, second in pairwise(at))


def all_stop_alike(ir: str) -> int:
    """Waits of a kernel, of each of which all threads stop at once: by the atomic's answer alone.

    A clock, which each thread reads for itself, may part them.
    """
    verdicts = re.findall(r"(%\S+) = tt\.atomic_rmw or,", ir)
    for verdict in verdicts:
        uses = [line for line in ir.splitlines() if re.search(rf"= .*{verdict}\b", line)]
        assert [re.search(r"= (\S+)", line)[1] for line in uses] == ["arith.cmpi"], uses  # type: ignore[index]
    for late in re.findall(r"tt\.atomic_rmw or, relaxed, gpu, \S+, (%\w+)", ir):
        others = [line for line in ir.splitlines() if re.search(rf"= .*{late}\b", line)]
        assert len(others) == 1, others  # what the clock says goes into the atomic and nowhere else
    clock = re.findall(r"(%\S+) = tt\.elementwise_inline_asm .*globaltimer", ir)
    assert len(clock) >= 2 * len(verdicts)
    return len(verdicts)


def wrong_order(ptx: str, payload: str = PAYLOAD) -> list[str]:
    """What of the protocol of flags does not hold in a kernel; `payload` is how it stores tiles."""
    orders = (("release", RELEASE), ("acquire", ACQUIRE))
    found = [f"no {name} of system scope" for name, kind in orders if not re.search(kind, ptx)]
    for block in blocks(ptx):
        if re.search(RELEASE, block) and not in_order(
            block.partition("release")[0] + "release", payload, BARRIER, "release"
        ):
            found.append("a release that no barrier parts from the payload")
        if re.search(ACQUIRE, block) and not in_order(block, ACQUIRE, BARRIER):
            found.append("an acquire without a barrier behind it")
        if re.search(LOAD, block) and not in_order(block.partition(".cg.")[0] + ".cg.",
                                                   BARRIER, r"\.cg\."):  # fmt: skip
            found.append("loads that no barrier parts from the acquire")
    return found
