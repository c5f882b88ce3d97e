"""Reading traces: piece by piece the same as at once, and each bad file in clear words."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trace_files import TraceFile

import counterpoint as cp
from counterpoint.advice import events
from counterpoint.advice.events import read_events
from counterpoint.errors import InputError

GOOD = json.dumps({
    "schemaVersion": 1, "traceEvents": [{"ph": "X", "i": i, "s": 'a"]}\\' * i} for i in range(9)],
    "nested": {"traceEvents": [1, {"x": []}]}, "n": -1.5e3,
})  # fmt: skip


def read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    found: list[Any] = []
    return read_events(path, found.append), found


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 10**6])
@pytest.mark.parametrize("packed", [False, True])
def test_piece_by_piece(tmp_path, monkeypatch, chunk, packed):
    """The same facts and events, whatever is read at a time, with gzip or without."""
    monkeypatch.setattr(events, "CHUNK", chunk)
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(GOOD.encode()) if packed else GOOD.encode())
    facts, found = read(path)
    content = json.loads(GOOD)
    assert found == content.pop("traceEvents") and facts == content


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    content=st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
    listed=st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=4),
    indent=st.sampled_from([None, 0, 3]), chunk=st.integers(1, 30),
)  # fmt: skip
def test_any_json(tmp_path_factory, content, listed, indent, chunk):
    path = tmp_path_factory.mktemp("any") / "trace.json"
    path.write_text(json.dumps({**content, "traceEvents": listed}, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "CHUNK", chunk)
        facts, found = read(path)
    assert found == listed
    assert facts == {name: value for name, value in content.items() if name != "traceEvents"}


def test_the_events_alone(tmp_path):
    """A list, as older tools write it; what is no event is left out."""
    path = tmp_path / "trace.json"
    path.write_text('[{"ph": "X"}, 5, null, {"ph": "M"}]')
    assert read(path) == ({}, [{"ph": "X"}, {"ph": "M"}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b" \n", "an empty file"),
        (GOOD[:-40].encode(), "it was cut, or is still written"),
        (GOOD[:120].encode(), "it was cut, or is still written"),
        (gzip.compress(GOOD.encode())[:-9], "gzip that was cut or is damaged"),
        (b"\x1f\x8bnothing of the kind", "gzip that was cut or is damaged"),
        (b"RIFF\x00\x01\x02", "'R' where one of { stands"),
        (GOOD.replace('"i": 3', '"i": oops').encode(), "no JSON: Expecting value, near"),
        (b'{"a": 1}', "without a list of traceEvents, but with a"),
        (b'{"traceEvents": {"a": 1}}', "without a list of traceEvents"),
        (b'{"traceEvents": ' + b"[" * 100_000, "values within values without end"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 2}]}',
         "no activity of a GPU"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 2},'
         b'{"ph": "X", "cat": "kernel", "ts": "5", "dur": []}]}', "no activity of a GPU"),
    ],
)  # fmt: skip
def test_a_bad_file(tmp_path, content, words):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="trace must be a trace") as raised:
        cp.advise(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


def test_a_value_without_end(tmp_path, monkeypatch):
    """Its length is bounded, so that a hostile file cannot fill the memory."""
    monkeypatch.setattr(events, "CHUNK", 100)
    monkeypatch.setattr(events, "LONGEST", 1000)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 5000 + '"}]}')
    with pytest.raises(InputError, match="a value without end"):
        cp.advise(path)


def test_hostile_facts(tmp_path):
    """Facts of another kind than a profiler writes are as if they were not there."""
    trace = TraceFile().gpu("gemm", 0, 100, grid="x")
    path = trace.write(tmp_path / "a.json", distributedInfo=[1], deviceProperties={"a": 1})
    assert cp.advise(path).title.endswith("one rank; GPU unknown")
    trace.events[0]["args"] = "none"
    path = trace.write(tmp_path / "b.json", distributedInfo={"rank": "x", "world_size": [2]})
    assert cp.advise(path).losses[0].rank == 0


@pytest.mark.parametrize(
    "odd",
    [{"ts": 10**400}, {"ts": "12"}, {"dur": None}, {"dur": 0}, {"tid": [1]}, {"name": None},
     {"args": {"device": [1], "grid": [[]], "correlation": {}, "stream": []}},
     {"args": {"Collective name": [1], "dtype": {}, "Group size": "x", "In msg nelems": []}},
     {"cat": "user_annotation", "name": "FSDP::x", "tid": {}},
     {"cat": "cuda_runtime", "args": {"correlation": [1]}}],
)  # fmt: skip
def test_odd_events(tmp_path, odd):
    """They count for nothing, or for what can be made of them; no traceback."""
    trace = TraceFile().step(1, -10, 900).gpu("gemm", 0, 100, asked=-5)
    trace.events.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 5,
                         "args": {}, "tid": 3} | odd)  # fmt: skip
    path = trace.write(tmp_path / "a.json", deviceProperties=[{"id": [0], "name": 5}])
    report = cp.advise(path)
    assert report.losses[0].time_s > 0 and report.verdict in str(report)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "traces must be at least one trace, got none"),
        ((5,), "traces must be a file, or a torch.profiler.profile, got int"),
        (("absent.json",), "absent.json: no such file or directory"),
    ],
)
def test_wrong_calls(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as raised:
        cp.advise(*given)
    assert words in str(raised.value)


def test_steps_and_ranks_that_are_not_there(tmp_path):
    path = TraceFile().step(7, -10, 500).gpu("gemm", 0, 100, asked=-5).write(tmp_path / "a.json")
    with pytest.raises(InputError, match="step must be one of 7, got 3"):
        cp.advise(path, step=3)
    with pytest.raises(InputError, match="rank 0 more than once"):
        cp.advise(path, path)
    unmarked = TraceFile().gpu("gemm", 0, 100).write(tmp_path / "b.json")
    with pytest.raises(InputError, match="left out: the trace marks no ProfilerStep#N"):
        cp.advise(unmarked, step=3)


def test_a_profiler_of_torch():
    """As torch's own profiler hands it over; here it has seen no GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3) + 1
    with pytest.raises(InputError, match="no activity of a GPU"):
        cp.advise(profiler)
