"""Scores of the residency model: on rows that it made itself, and on what Triton compiles."""

from pathlib import Path
from typing import Any

import pytest
from loop_rows import FACTS

from benchmarks import residency
from benchmarks.kernel_matmul import matmul_kernel
from benchmarks.loop import TRITON, Pair
from benchmarks.residency_model import Constants, Setting, time_ratio
from benchmarks.rows import Row
from counterpoint.testing.ptx import compiled

TRUE = Constants(full_blocks=0.7, full_bytes=20000, sharpness=5, crowding=0.1, drain_waves=1.5)
ALONE_S = {"cb": 4e-3, "mb": 28e-3}


def rows_of(pair: Pair, shift: float = 1.0) -> list[Row]:
    """What a machine would measure that is as the model says, but for a factor."""
    sharing = residency.sharing_of(
        pair.gemm, pair.kernel, pair.collective, ALONE_S[pair.gemm], 3e-3
    )
    most = {"64x64x32": 8, "64x64x64": 4, "128x128x64": 2}[pair.kernel]
    head: dict[str, Any] = FACTS | {
        "pair": pair.label, "gemm": pair.gemm, "kernel": pair.kernel, "mode": "graph", "ranks": 4,
        "collective": pair.collective, "scale": pair.scale,
    }  # fmt: skip
    rows = [
        head | {
            "arm": "shapes", "priority": urgent, "blocks_per_sm": blocks,
            "unshaped": blocks == most,
            "time_ratio": shift * time_ratio(
                sharing, Setting(None if blocks == most else blocks, urgent), TRUE),
        }
        for urgent in (False, True) for blocks in range(1, most + 1)
    ]  # fmt: skip
    alone = {"arm": "plain overlap", "gemm_s": sharing.compute_s, "comm_sm_s": sharing.comm_s}
    return [*rows, head | alone]


FIT = [*rows_of(Pair("cb", "64x64x32", "all_reduce")),
       *rows_of(Pair("cb", "64x64x32", "all_to_all")),
       *rows_of(Pair("cb", "128x128x64", "all_to_all"))]  # fmt: skip


def test_constants_are_found_again():
    found = residency.fit(residency.swept({4: FIT}))
    pairs = residency.swept({4: [*FIT, *rows_of(Pair("mb", "64x64x64", "all_reduce"))]})
    assert [p.fitted for p in pairs] == [True, True, True, False]
    worst = max(abs(e) for pair in pairs for e in pair.errors(found))
    assert worst < 0.03
    assert all(pair.pick(found)[1] < 0.01 for pair in pairs)


def test_only_held_out_pairs_make_the_score():
    held = rows_of(Pair("mb", "64x64x32", "all_reduce"), shift=1 / 1.1)
    text = residency.scores({4: [*FIT, *held]})
    said = text.splitlines()[0]
    assert "on 1 pairs that are held out, 16 settings" in said
    assert "median error **10." in said or "median error **9." in said
    assert "mean regret of the model's pick **0." in said
    assert "Priority alone, in every case, has a mean regret of" in said
    assert text.count("| fitted |") == 3 and text.count("| held out |") == 1
    assert residency.scores({4: FIT}) == "", "nothing is held out"
    assert residency.scores({4: held}) == "", "there is nothing to fit"


def test_a_quick_look_is_no_measurement():
    assert not residency.swept({2: rows_of(Pair("cb", "64x64x32", "all_reduce", scale=8))})


def test_rows_of_another_gpu_are_in_no_table_of_this_one(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def theirs(_: str, gpu: str = "") -> dict[int, list[Row]]:
        asked.append(gpu)
        return {2: [row | {"nccl_threads": 0} for row in FIT]} if gpu == "h100" else {}

    monkeypatch.setattr(residency, "results", theirs)
    assert len(residency.swept({4: FIT})) == 3
    h100 = [row | {"gpu": "NVIDIA H100 80GB HBM3"} for row in FIT]
    assert len(residency.swept({4: h100})) == 6 and asked == ["h200", "h100"]


def test_it_meets_its_bars_on_the_committed_rows():
    pairs = residency.swept(residency.fitted_on())
    constants = residency.fit([pair for pair in pairs if pair.fitted])
    said = residency.said([pair for pair in pairs if not pair.fitted], constants)
    page = Path(__file__).parents[2] / "docs" / "results" / "sharing.md"
    assert said in page.read_text(), "run `make readme`"


@pytest.mark.parametrize("tile", residency.REGISTERS)
def test_blocks_are_what_triton_compiles(tile: str):
    m, n, k, warps, stages = TRITON[tile]
    found = compiled(
        matmul_kernel, 90,
        dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16") | dict.fromkeys("MNK", "i32"),
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps,
        num_stages=stages, aligned=("x_ptr", "w_ptr", "y_ptr", "M", "N", "K"),
    )  # fmt: skip
    block, _ = residency.block_of(tile)
    assert (block.registers_per_thread, block.dynamic_shared_bytes) == (
        found.registers, found.dynamic_bytes,
    )  # fmt: skip


def test_the_picture_says_that_it_is_predicted(tmp_path: Path):
    residency.picture(residency.fitted_on(), tmp_path)
    names = {f"sharing-predicted-{theme}.svg" for theme in ("light", "dark")}
    assert {p.name for p in tmp_path.iterdir()} == names
    residency.picture({4: FIT[:1]}, tmp_path / "none")
    assert not (tmp_path / "none").exists()
