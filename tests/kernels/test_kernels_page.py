"""docs/kernels.md: its kernel and its tests run as they stand, as files of a user."""

import re
from pathlib import Path

from processes import python

from counterpoint.run.launch import RESERVED_SMS

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_its_tests_of_its_kernel_pass(tmp_path: Path):
    text = PAGE.read_text()
    names = re.findall(r"`(\w+\.py)`", text)
    codes = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for name, code in zip(names, codes, strict=True):
        (tmp_path / name).write_text(code)
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert "3 passed" in said, said


def test_its_numbers_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    assert f"leaves {RESERVED_SMS} SMs free" in text
