"""The example of a fused kernel of one's own: on interpreted CPU ranks, and compiled for GPUs."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
from processes import python
from ptx import ACQUIRE, CAPABILITIES, RELEASE, compiled, wrong_order

SCRIPT = Path(__file__).parents[2] / "examples" / "03_write_a_fused_kernel.py"

# what numpy 2.3 warns of and later ones refuse: a number made of an array of one element
FROM_NUMPY_2_4 = "error:Conversion of an array with ndim:DeprecationWarning"


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_agrees_with_the_libraries(ranks: int):
    said = python("-W", FROM_NUMPY_2_4, str(SCRIPT), "--ranks", str(ranks))
    assert f"five calls on {ranks} ranks agree with matmul, bias and all-to-all" in said


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_it_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch, capability: int):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else it would be interpreted
    kernel = runpy.run_path(str(SCRIPT))["matmul_all_to_all_kernel"]
    source = inspect.getsource(kernel.fn)
    assert len(source.splitlines()) < 60
    tensors = dict.fromkeys(("x_ptr", "w_ptr", "b_ptr", "out_ptr"), "*bf16")
    types = tensors | {"bases_ptr": "*i64", "epoch_ptr": "*i32", "stop_ptr": "*i32"}
    types |= dict.fromkeys(("N", "K", "half_bytes", "rank"), "i32")
    constants = {"WORLD": 4, "M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    found = compiled(
        kernel, capability, types, constants, num_warps=4,
        aligned=tuple(name for name in types if name != "rank"),
    )  # fmt: skip
    assert not wrong_order(found.ptx, payload=r"\bst\.global")
    assert re.search(RELEASE, found.ptx) and re.search(ACQUIRE, found.ptx)
    assert not found.spills
    # the check can fail: barriers taken out, orders made weaker
    assert "an acquire without a barrier behind it" in wrong_order(
        re.sub(r".*\bbar\.sync.*\n", "", found.ptx), payload=r"\bst\.global"
    )
    for name, order in (("release", RELEASE), ("acquire", ACQUIRE)):
        weaker = re.sub(order, "relaxed", found.ptx)
        assert f"no {name} of system scope" in wrong_order(weaker, payload=r"\bst\.global")
