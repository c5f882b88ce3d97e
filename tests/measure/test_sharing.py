"""Rows of the experiment, read pair by pair, and what is drawn of them."""

from pathlib import Path

import pytest
from counterpoint.measure.loop import Pair
from counterpoint.measure.sharing import draw_shapes, draw_timed, energy_text, machine_text, timed
from loop_rows import arm_rows, shape_rows
from test_draw import words

from counterpoint.errors import InputError

PAIR = Pair("cb", "cuBLAS", "all_to_all")
TRITON = Pair("cb", "64x64x32", "all_to_all")
TIMES = {"sequential": 20.0, "plain overlap": 16.0, "priority": 14.0, "tuned": 11.0}
RATIOS = {False: {1: 0.9, 2: 0.8, 9: 0.85}, True: {1: 0.8, 2: 0.7, 9: 0.75}}


def test_arms_are_found_by_pair_and_mode():
    refused = {"pair": PAIR.label, "mode": "eager", "arm": "overlap carve_out", "refused": "no way"}
    eager = arm_rows(PAIR, {"plain overlap": 18.0}, mode="eager")
    graph, other = timed([*arm_rows(PAIR, TIMES), *eager, refused, *shape_rows(TRITON, RATIOS)])
    assert (graph.label, graph.mode, list(graph.arms)) == (PAIR.label, "graph", list(TIMES))
    assert graph.less("priority") == pytest.approx(1 / 8)
    assert (graph.fastest, graph.ideal_s) == ("tuned", pytest.approx(10e-3))
    assert graph.ideal_ratio == pytest.approx(11 / 20)
    assert (other.mode, list(other.arms), other.refused) == (
        "eager", ["plain overlap"], {"overlap carve_out": "no way"},
    )  # fmt: skip


def test_an_arm_measured_twice_counts_once():
    (one,) = timed([*arm_rows(PAIR, TIMES), *arm_rows(PAIR, TIMES | {"tuned": 12.0})])
    assert one.seconds("tuned") == pytest.approx(12e-3)


def test_a_pair_of_which_all_was_refused_has_no_times():
    refused = {"pair": "p", "mode": "graph", "arm": "overlap", "refused": "no"}
    assert timed([refused]) == []


def test_energy_that_was_not_read_is_no_energy():
    read, unread, still = arm_rows(
        PAIR, {"plain overlap": 16.0, "priority": 14.0, "tuned": 11.0},
        joules={"plain overlap": 62.0, "tuned": 0.0},
    )  # fmt: skip
    assert [energy_text(row) for row in (read, unread, still)] == ["62.0 J, 1755 MHz", "", ""]


def test_the_source_says_what_differs_from_the_published_size():
    text = machine_text(arm_rows(PAIR, TIMES)[0])
    assert text == (
        "8x NVIDIA H200, bf16, driver 580.1, torch 2.11.0, Triton 3.6.0, NCCL 2.28.9, NVLink "
        "multicast off, graph registration off, 2026-11-21, commit abc1234"
    )
    small = Pair("cb", "cuBLAS", "all_to_all", scale=8)
    assert machine_text(arm_rows(small, TIMES)[0]) == f"{text}, 1/8 of the published size"


def test_arms_are_drawn_with_their_energy(tmp_path: Path):
    found = timed(arm_rows(PAIR, TIMES, joules={"tuned": 7.4}))
    seen = words(draw_timed(found, tmp_path / "a.svg", title="a title"))
    assert {"a title", PAIR.label, "11.0 ms", "-31.2%", "7.40 J, 1755 MHz"} <= set(seen)


def test_a_line_for_the_ideal_only_where_all_kernels_have_it(tmp_path: Path):
    rows = [*arm_rows(TRITON, TIMES), *shape_rows(TRITON, RATIOS)]
    seen = words(draw_shapes(rows, tmp_path / "a.svg", title="a title"))
    assert {"cb + all-to-all", "ideal 0.55", "without priority"} <= set(seen)
    other = Pair("cb", "128x128x64", "all_to_all")
    rows += [*arm_rows(other, TIMES, ideal_sm_ms=13.0), *shape_rows(other, RATIOS)]
    seen = words(draw_shapes(rows, tmp_path / "b.svg", title="a title"))
    assert "cb + all-to-all, ideal 0.55 to 0.65" in seen
    assert "ideal 0.55" not in seen


def test_nothing_to_draw(tmp_path: Path):
    with pytest.raises(InputError, match="pairs must be at least one pair"):
        draw_timed([], tmp_path / "a.svg", title="")
    with pytest.raises(InputError, match="panels must be at least one panel"):
        draw_shapes(arm_rows(PAIR, TIMES), tmp_path / "a.svg", title="")
