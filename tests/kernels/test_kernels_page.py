"""docs/kernels.md: its kernel and its tests run as they stand, as files of a user."""

import importlib
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from rankpool import RankPool

from counterpoint.run.launch import RESERVED_SMS

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def by_name(rank: int, ranks: int, folder: str, name: str, *given: int) -> None:
    """A function of the page's tests, in a process whose kernels are interpreted."""
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        getattr(importlib.import_module("test_silu_gather"), name)(rank, ranks, *given)


def test_its_tests_of_its_kernel_pass(
    tmp_path: Path, pool: RankPool, monkeypatch: pytest.MonkeyPatch
):
    """The first on processes of its own; what needs one that interprets has a warm one."""
    text = PAGE.read_text()
    names = re.findall(r"`(\w+\.py)`", text)
    codes = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, code in zip(names, codes, strict=True):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    page = importlib.import_module("test_silu_gather")
    page.test_on_cpu_ranks()
    page.test_order_of_memory()
    monkeypatch.setattr(
        page, "interpreted_ranks",
        lambda fn, *given: pool.run(by_name, given[0], str(tmp_path), fn.__name__, *given[1:]),
    )  # fmt: skip
    page.test_in_every_order()
    assert sum(name.startswith("test_") for name in vars(page)) == 3


def test_its_numbers_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    assert f"leaves {RESERVED_SMS} SMs free" in text
