"""Predicted times of embedding bags: against measured rows, and by what they must depend on."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import counterpoint as cp
from counterpoint.choose.known import shipped
from counterpoint.model.embedding import Predicted, predict

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
MACHINE = shipped("NVIDIA H200", 4) or cp.preset("h200-4")
UNIFORM = cp.EmbeddingProblem(((128,) * 8,) * 4, 16384, (16384 * 8 * 5,) * 4, out=True)


def test_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """Of every case in the rows; the constants are fitted to them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import embedding_prediction as prediction

    cases = prediction.read(prediction.ROWS)
    present = [case for case in cases if "fused" in case.seconds]
    assert len(cases) >= 78 and len(present) >= 39

    def guess(problem: cp.EmbeddingProblem) -> Predicted:
        machine = shipped("NVIDIA H200", problem.ranks)
        assert machine is not None and machine.measured
        return predict(problem, machine)

    each = [prediction.times(case, guess) for case in cases]
    for arm in ("lookup", "serial", "fused", "fused copy"):
        off = sorted(abs(t[arm][0] / t[arm][1] - 1) for t in each if arm in t)
        assert off[len(off) // 2] < 0.06 and off[-1] < 0.25, arm
    over = prediction.choices(cases, guess)
    assert len(over) == 2 * len(present) and sum(over) / len(over) < 1.01
    right = sum(ratio <= 1.02 for ratio in over)
    assert f"faster way in {right} of {len(over)}" in prediction.said(cases, guess)


@pytest.mark.parametrize("machine", ["h200-4", "a100-8", "mi300x-8"])
def test_more_takes_longer(machine: str):
    where = cp.preset(machine)
    first = predict(UNIFORM, where)
    more = (
        replace(UNIFORM, batch=32768), replace(UNIFORM, indices=(16384 * 8 * 50,) * 4),
        replace(UNIFORM, dims=((256,) * 8,) * 4), replace(UNIFORM, dtype="float32"),
        replace(UNIFORM, indices=(*UNIFORM.indices[:3], 16384 * 8 * 90)),
    )  # fmt: skip
    for problem in more:
        guess = predict(problem, where)
        assert guess.serial_s > first.serial_s and guess.fused_s > first.fused_s, problem
    copied = predict(replace(UNIFORM, out=False), where)
    assert copied.fused_s > first.fused_s and copied.serial_s == first.serial_s


def test_one_rank_and_nothing():
    where = cp.preset("h200-2")
    alone = predict(cp.EmbeddingProblem(((64,),), 100, (500,)), where)
    assert alone.serial_s == alone.fused_s == alone.lookup_s > 0 and not alone.fused
    empty = predict(cp.EmbeddingProblem(((64,), ()), 0, (0, 0)), where)
    assert all(s >= 0 for s in asdict(empty).values())


def test_why():
    choice = cp.choose(UNIFORM, MACHINE)
    assert choice.plan == "fused" and isinstance(choice, cp.EmbeddingChoice)
    guess = predict(UNIFORM, MACHINE)
    assert choice.seconds == guess.fused_s and choice.serial_s == guess.serial_s
    text = choice.explain()
    assert f"fused, {guess.fused_s * 1e6:.0f} us, {guess.serial_s / guess.fused_s:.2f}x" in text
    assert "8/8/8/8 tables, 4096 columns, 16384 bags of 5/5/5/5 indices, bfloat16" in text
    assert "serial" in text and "slower" in text and "measured rates" in text
    # where a peer's memory is stored to slowly
    slow = replace(MACHINE, measured=replace(MACHINE.costs, copy_bytes_per_s=1e9))
    assert cp.choose(UNIFORM, slow).plan == "serial"
    assert "not 3% faster than serial" in cp.choose(UNIFORM, slow).explain()


def test_dtypes_of_torch():
    problem = replace(UNIFORM, dtype=torch.float16)  # type: ignore[arg-type]
    assert problem == replace(UNIFORM, dtype="float16") and problem.dtype == "float16"


def test_what_is_refused():
    def refused(**more: object) -> str:
        facts: dict[str, object] = {"dims": ((8,), ()), "batch": 4, "indices": (9, 0)}
        with pytest.raises(cp.InputError) as error:
            cp.EmbeddingProblem(**facts | more)  # type: ignore[arg-type]
        return str(error.value)

    assert "dims must be columns >= 1" in refused(dims=((), ()))
    assert "dims must be columns >= 1" in refused(dims=((8,), (0,)))
    assert "batch must be a multiple of 2 ranks" in refused(batch=5)
    assert "batch must be 2 counts >= 0" in refused(batch=(4,))
    assert "indices must be 2 counts >= 0" in refused(indices=(-1, 0))
    assert "indices must be 0 where a rank has no tables" in refused(indices=(1, 1))
    assert "dtype must be one of" in refused(dtype="int8")
    assert "dtype must be one of bfloat16, float16, float32, got torch.int8" in refused(
        dtype=torch.int8
    )
    for flat in ((64, 64), 64, ((8.5,), ())):
        text = refused(dims=flat)
        assert f"some at least, got {flat}; of two ranks ((64, 64), (64,)), for example" in text
    assert "indices must be 2 counts >= 0, got 40960" in refused(indices=40960)
    assert "indices must be 2 counts >= 0, got (1.5, 0)" in refused(indices=(1.5, 0))
    assert "batch must be 2 counts >= 0, got 4.0" in refused(batch=4.0)
    with pytest.raises(cp.InputError, match="by='model' and eager=False of embedding bags"):
        cp.choose(UNIFORM, "h200-4", by="rule")
    with pytest.raises(cp.InputError, match="machine of 4 GPUs or more"):
        cp.choose(UNIFORM, "h200-2")
