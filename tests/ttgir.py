"""What must stand in the intermediate code of kernels that wait."""

import re


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
