"""Our own measured steps, predicted, and the tables and picture of them."""

from pathlib import Path
from statistics import median

from benchmarks.scale_steps import own_steps, picture, sections


def test_errors_of_our_own_steps():
    """The worst are of experts at 1024 tokens, eager: their matmuls and routing take longer."""
    errors = {step.point.label: abs(step.point.error) for step in own_steps()}
    assert len(errors) == 28
    assert median(errors.values()) <= 0.08
    over = {label for label, error in errors.items() if error > 0.15}
    assert len(over) <= 5 and all("1024" in label or "Qwen3" in label for label in over)
    assert max(errors.values()) <= 0.23


def test_tables_and_picture(tmp_path: Path):
    found = sections()
    assert found["scale-published"].count("\n| ") == 29 + 5 + 2 + 1
    assert found["scale-own"].count("\n| ") == 28 + 1
    assert "Median error" in found["scale-own"] and "2x NVIDIA H200" in found["scale-own"]
    assert "MCore-H100" in picture(tmp_path).read_text()
