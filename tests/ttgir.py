"""What must stand in the intermediate code of kernels that wait."""

import re


def all_stop_alike(ir: str) -> int:
    """Waits of a kernel, of each of which all threads stop at once: by the atomic's answer alone.

    A clock, which each thread reads for itself, may part them.
    """
    lines = ir.splitlines()
    verdicts = re.findall(r"(%\S+) = tt\.atomic_rmw or,", ir)
    for verdict in verdicts:
        uses = [line for line in lines if re.search(rf"= .*{verdict}\b", line)]
        assert [re.search(r"= (\S+)", line)[1] for line in uses] == ["arith.cmpi"], uses  # type: ignore[index]
    for number, line in enumerate(lines):
        if found := re.search(r"tt\.atomic_rmw or, relaxed, gpu, \S+, (%\w+)", line):
            late = re.escape(found[1])  # a name that another region may have, too
            first = max(at for at in range(number) if re.search(rf"^\s*{late} = ", lines[at]))
            again = (
                at for at in range(number, len(lines)) if re.search(rf"^\s*{late} = ", lines[at])
            )
            others = [
                use for use in lines[first : next(again, None)] if re.search(rf"= .*{late}\b", use)
            ]
            assert len(others) == 1, others  # what the clock says goes into the atomic alone
    clock = re.findall(r"(%\S+) = tt\.elementwise_inline_asm .*globaltimer", ir)
    assert len(clock) >= 2 * len(verdicts)
    return len(verdicts)
