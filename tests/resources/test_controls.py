"""The text of any controls is read back, and what is no such text is refused, not half read."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.errors import InputError
from counterpoint.resources.controls import MAX_DELAY_S, MODES, OFF, SEQUENTIAL, Controls

NANOSECONDS = st.integers(0, round(MAX_DELAY_S * 1e9)).map(lambda ns: round(ns * 1e-9, 12))


@st.composite
def controls(draw: st.DrawFn, delays_s: Any = NANOSECONDS) -> Controls:
    copies = draw(st.booleans())
    chunks = draw(st.integers(1, 16))
    blocks = draw(st.none() | st.integers(1, 32))
    return Controls(
        priority=not copies and draw(st.booleans()),
        blocks_per_sm=blocks,
        carve_out=blocks is None and draw(st.booleans()),
        delay_s=draw(delays_s),
        chunks=chunks,
        along=draw(st.sampled_from(("m", "n"))) if chunks > 1 else "m",
        transport="copy_engine" if copies else draw(st.sampled_from(("sm", "zero_cta"))),
        max_ctas=0 if copies else draw(st.integers(0, 64)),
        num_sms=draw(st.integers(0, 132)),
        green_sms=draw(st.integers(0, 132)),
    )


@settings(max_examples=300)
@given(controls())
def test_any_controls_are_read_back(some: Controls):
    assert Controls.parse(some.spec) == some
    # and its words in any order
    kind, *words = some.spec.split()
    assert Controls.parse(" ".join([kind, *words[::-1]])) == some


@settings(max_examples=100)
@given(controls(), controls())
def test_different_controls_have_different_text(one: Controls, other: Controls):
    assert (one.spec == other.spec) == (one == other)


@pytest.mark.parametrize(
    ("some", "spec"),
    [
        (SEQUENTIAL, "sequential"), (OFF, "overlap"),
        # a search knows its settings by their text: `Bench.rounds` and `Bench.holding`
        (Controls(delay_s=1.23456789e-5), "overlap delay=12.3456789us"),
        (Controls(chunks=2, along="n"), "overlap chunks=2 along=n"),
    ],
    ids=str,
)  # fmt: skip
def test_unusual_controls_are_read_back(some: Controls, spec: str):
    assert some.spec == spec and Controls.parse(spec) == some


@pytest.mark.parametrize(
    "spec",
    [
        "sequential sequential", "overlap overlap", "overlap chunks", "overlap chunks=",
        "overlap chunks=-1", "overlap chunks=2.5", "overlap delay=us", "overlap delay=nanus",
        "overlap num_sms=0x10", "chunks 4", "Overlap", "overlap Priority",
        "overlap, priority", "overlap chunks=²", "overlap delay=infus",
        "priority", "copy_engine chunks=4", "chunks=4 and more", "overlap chunks=2 chunks=4",
    ],
)  # fmt: skip
def test_other_text_is_refused_whole(spec: str):
    with pytest.raises(InputError) as caught:
        Controls.parse(spec)
    text = str(caught.value)
    assert text.startswith("Controls.parse: spec must be 'sequential', or 'overlap' and words such")
    words = re.search(r", got '(\S+)' in ", text)
    assert words and words[1] in spec and text.endswith(f" in {spec!r}")


OF_COPIES = "must be unset with copy_engine, got"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *(({field: -1}, f"{field} must be >= 0, got -1")
          for field in ("max_ctas", "num_sms", "green_sms")),
        ("overlap chunks=99", "chunks must be from 1 to 16, got 99"),
        ("overlap delay=2000us", "delay_s must be from 0 to 0.001 s, got 0.002"),
        ("overlap along=k", "along must be 'm' or 'n', got k"),
        ("overlap copy_engine priority", f"priority {OF_COPIES} True; it is implied"),
        ("overlap copy_engine max_ctas=4",
         f"max_ctas {OF_COPIES} 4; it is the budget of the library's kernels"),
        ({"chunks": 0}, "chunks must be from 1 to 16, got 0"),
        ({"chunks": 17}, "chunks must be from 1 to 16, got 17"),
        ({"along": "k"}, "along must be 'm' or 'n', got k"),
        ({"along": "n"}, "along must be 'm' where nothing is cut, got n"),
        ({"transport": "nic"}, "transport must be one of sm, copy_engine, zero_cta, got nic"),
        ({"delay_s": 1.0}, "delay_s must be from 0 to 0.001 s, got 1.0"),
        ({"delay_s": float("nan")}, "delay_s must be from 0 to 0.001 s, got nan"),
        ({"blocks_per_sm": 0}, "blocks_per_sm must be >= 1, got 0"),
        ({"blocks_per_sm": 2, "carve_out": True},
         "carve_out must be without blocks_per_sm, got True; shaping implies the carve-out"),
        ({"overlap": False, "priority": True},
         "overlap must be True, with other controls, got False; a sequence shares nothing"),
        # values of another type
        ({"chunks": 2.5}, "chunks must be a whole number, got 2.5"),
        ({"chunks": "4"}, "chunks must be a whole number, got 4"),
        ({"blocks_per_sm": 1.5}, "blocks_per_sm must be None or a whole number, got 1.5"),
        ({"priority": "no"}, "priority must be True or False, got no"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        ({"delay_s": "5us"}, "delay_s must be seconds, got 5us"),
    ],
)  # fmt: skip
def test_wrong_controls_are_refused(given: Any, text: str):
    """By themselves, and as text."""
    with pytest.raises(InputError) as caught:
        Controls.parse(given) if isinstance(given, str) else Controls(**given)
    assert str(caught.value) == f"Controls: {text}"


@settings(max_examples=100)
@given(controls())
def test_the_ways_in_are_of_what_is_set(some: Controls):
    for mode in MODES:
        if some.green_sms and mode == "graph":
            with pytest.raises(InputError, match="green_sms must be unset in mode 'graph', got"):
                some.way_in(mode)
            continue
        ways = some.way_in(mode)
        assert len(ways) == some.num_set and all(ways.values())
        assert all(getattr(some, name) != getattr(OFF, name) for name in ways)


def test_the_ways_in_that_are_known():
    assert Controls(green_sms=96).way_in("eager") == {"green_sms": "a stream of a green context"}
    assert Controls(transport="copy_engine").way_in("graph") == {"transport": "memcpy nodes"}
    assert Controls(delay_s=1e-6).way_in("graph") == {
        "delay_s": "a kernel that waits, in the graph"
    }
    assert OFF.way_in("graph") == SEQUENTIAL.way_in("eager") == {}


def test_controls_are_counted():
    assert (OFF.num_set, SEQUENTIAL.num_set) == (0, 1)
    assert Controls(chunks=2, along="n").num_set == 1
    assert Controls(chunks=2, priority=True, delay_s=1e-6, transport="zero_cta").num_set == 4
