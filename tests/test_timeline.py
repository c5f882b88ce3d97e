"""Timeline: interval arithmetic against a count on a grid, and what it writes."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from counterpoint.errors import CounterpointError, InputError
from counterpoint.spans import COMMUNICATION_KINDS, COMPUTE_KINDS, KINDS, Span
from counterpoint.timeline import Timeline


def span(start_s, end_s, kind="matmul", *, rank=0, lane="compute", label="step"):
    return Span(rank, lane, start_s, end_s, kind, label)


def pipeline():
    return Timeline(
        spans=(
            span(1.0, 3.0, "copy", lane="copy", label="pull 0"),
            span(2.0, 6.0, "matmul", label="gemm 0"),
            span(5.0, 8.0, "copy", lane="copy", label="pull 1"),
            span(8.5, 9.0, "wait", label="wait 1"),
            span(0.0, 10.0, "opaque", rank=1, label="their step"),
        ),
        title="a title",
        source="made up",
    )


def random_timeline(seed):
    # whole seconds, so that sets of seconds can be counted
    rng = random.Random(seed)
    spans = []
    for _ in range(rng.randint(1, 12)):
        start, length = rng.randint(0, 30), rng.randint(0, 9)
        lane, kind = rng.choice("abc"), rng.choice(KINDS)
        spans.append(span(start, start + length, kind, rank=rng.randint(0, 1), lane=lane))
    return Timeline(tuple(spans))


def seconds(spans):
    return {second for s in spans for second in range(s.start_s, s.end_s)}


@pytest.mark.parametrize("seed", range(50))
def test_times_equal_a_count_of_seconds(seed):
    timeline = random_timeline(seed)
    for rank in timeline.ranks:
        spans = [s for s in timeline.spans if s.rank == rank]
        for lane in timeline.lanes(rank):
            busy = len(seconds(s for s in spans if s.lane == lane))
            assert timeline.busy_s(rank, lane) == busy
            assert timeline.idle_s(rank, lane) == timeline.duration_s - busy
        communication = seconds(s for s in spans if s.kind in COMMUNICATION_KINDS)
        compute = seconds(s for s in spans if s.kind in COMPUTE_KINDS)
        assert timeline.communication_s(rank) == len(communication)
        assert timeline.exposed_s(rank) == len(communication - compute)


def test_exposed_intervals_and_ends():
    timeline = pipeline()
    assert (timeline.start_s, timeline.end_s, timeline.duration_s) == (0.0, 10.0, 10.0)
    assert timeline.ranks == (0, 1)
    assert timeline.lanes(0) == ("compute", "copy")
    assert timeline.exposed(0) == ((1.0, 2.0), (6.0, 8.0), (8.5, 9.0))
    assert timeline.exposed_s(1) == 0.0


@pytest.mark.parametrize("to_zero_s", [None, 4.0])
def test_shifted_moves_every_span_alike(to_zero_s):
    timeline = Timeline((span(3.0, 5.0), span(4.0, 8.0, rank=1)))
    moved = timeline.shifted(to_zero_s)
    by_s = 3.0 if to_zero_s is None else to_zero_s
    assert [s.start_s for s in moved.spans] == [3.0 - by_s, 4.0 - by_s]
    assert [s.end_s for s in moved.spans] == [5.0 - by_s, 8.0 - by_s]


def test_json_round_trip():
    assert Timeline.from_json(pipeline().to_json()) == pipeline()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spans": [{"rank": 0}], "title": ""}'])
def test_json_of_something_else_is_refused(text):
    with pytest.raises(InputError, match=r"text must be JSON written by Timeline.to_json, got"):
        Timeline.from_json(text)


def test_perfetto_has_each_span_and_each_name():
    timeline = pipeline()
    trace = json.loads(timeline.to_perfetto())
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert processes == {0: "rank 0", 1: "rank 1"}
    drawn = [
        (e["pid"], threads[e["pid"], e["tid"]], e["ts"], e["ts"] + e["dur"], e["cat"], e["name"])
        for e in events
        if e["ph"] == "X"
    ]
    assert drawn == [
        (s.rank, s.lane, s.start_s * 1e6, s.end_s * 1e6, s.kind, s.label) for s in timeline.spans
    ]
    assert trace["otherData"] == {"title": "a title", "source": "made up"}


def test_perfetto_spans_that_touch_do_not_overlap():
    edges_s = [i * 1.1e-7 / 3 for i in range(200)]
    spans = [span(a, b) for a, b in pairwise(edges_s)]
    events = json.loads(Timeline(tuple(spans)).to_perfetto())["traceEvents"]
    in_ns = [(round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in events if e["ph"] == "X"]
    for (start, length), (following, _) in pairwise(in_ns):
        assert start + length == following


def test_lanes_have_one_order_on_all_ranks_and_in_perfetto():
    appearances = (("stream 9", "copy", "compute", "stream 7", "signal"), ("stream 7", "stream 9"))
    spans = (span(0, 1, rank=r, lane=lane) for r, lanes in enumerate(appearances) for lane in lanes)
    timeline = Timeline(tuple(spans))
    wanted = {0: ("compute", "signal", "copy", "stream 9", "stream 7"), 1: ("stream 9", "stream 7")}
    assert {rank: timeline.lanes(rank) for rank in timeline.ranks} == wanted
    events = json.loads(timeline.to_perfetto())["traceEvents"]
    for rank, lanes in wanted.items():
        mine = [e for e in events if e["pid"] == rank]
        order = {e["tid"]: e["args"]["sort_index"] for e in mine if "thread_sort" in e["name"]}
        names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert tuple(names[tid] for tid in sorted(order, key=order.__getitem__)) == lanes
        assert rank not in names, "a main thread, which is shown on top"


@pytest.mark.parametrize("swapped", [False, True])
def test_perfetto_pair_has_both_as_processes_of_their_own_from_zero(swapped):
    predicted = replace(pipeline(), source="predicted for 4x H200")
    measured = replace(pipeline().shifted(-7.0), title="", source="measured on 4x H200")
    both = (measured, predicted) if swapped else (predicted, measured)
    trace = json.loads(both[0].to_perfetto(beside=both[1]))
    events = trace["traceEvents"]
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"].startswith("process_s")}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == [
        "predicted: rank 0", "measured: rank 0", "predicted: rank 1", "measured: rank 1",
    ]  # fmt: skip
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert len({tid for _, tid in threads}) == len(threads) == 2 * 3
    assert not {tid for _, tid in threads} & set(names), "a main thread, which is shown on top"
    for name in ("predicted", "measured"):
        drawn = [
            (names[e["pid"]], e["name"], e["ts"], e["dur"])
            for e in events
            if e["ph"] == "X" and (e["pid"], e["tid"]) in threads
            if names[e["pid"]].startswith(name)
        ]
        assert drawn == [
            (f"{name}: rank {s.rank}", s.label, s.start_s * 1e6, s.duration_s * 1e6)
            for s in pipeline().spans
        ]
    assert trace["otherData"] == {
        "predicted: title": "a title", "predicted: source": "predicted for 4x H200",
        "measured: title": "", "measured: source": "measured on 4x H200",
    }  # fmt: skip


def test_two_of_the_same_kind_are_first_and_second():
    other = replace(pipeline(), title="other").shifted(5.0)
    shown = other.beside(pipeline())
    assert {name: t.title for name, t in shown.items()} == {"first": "other", "second": "a title"}
    assert [t.start_s for t in shown.values()] == [0.0, 0.0]


def test_save_is_by_its_suffix_and_makes_the_folder(tmp_path):
    path = pipeline().save(tmp_path / "new" / "folder" / "plan.json")
    assert path.read_text(encoding="utf-8") == pipeline().to_perfetto()
    path = pipeline().save(tmp_path / "plan.json", beside=pipeline())
    assert path.read_text(encoding="utf-8") == pipeline().to_perfetto(beside=pipeline())
    with pytest.raises(InputError, match=r"ranks must be left out for a Perfetto .*, got \(0,\)"):
        pipeline().save(tmp_path / "new" / "plan.json", ranks=[0])
    with pytest.raises(InputError, match="dark must be left out for a trace, got True"):
        pipeline().save(tmp_path / "new" / "plan.json", dark=True)
    with pytest.raises(InputError, match=r"path must be a file name that ends in .png.*got .*gif"):
        pipeline().save(tmp_path / "other" / "plan.gif")
    assert not (tmp_path / "other").exists()


def test_spans_that_are_none_are_refused():
    for end_s in (0.9, math.nan):
        text = r"end_s must be at or after start_s=1 \('step'\), got"
        with pytest.raises(InputError, match=text):
            span(1.0, end_s)
    with pytest.raises(InputError, match=r"kind must be one of matmul.*, got 'matmull'"):
        span(0.0, 1.0, "matmull")


def test_what_is_not_there_raises_instead_of_reading_zero():
    with pytest.raises(CounterpointError, match="spans must be at least one span, got none"):
        Timeline(())
    for ask in (Timeline.lanes, Timeline.exposed, Timeline.exposed_s, Timeline.communication_s):
        with pytest.raises(InputError, match=r"rank must be one of \(0, 1\), got 7"):
            ask(pipeline(), 7)
    for ask in (Timeline.busy_s, Timeline.idle_s):
        with pytest.raises(InputError, match=r"lane must be one of \('compute', 'copy'\), got 'x'"):
            ask(pipeline(), 0, "x")
