"""Controls as values: their text, what contradicts, and their ways in."""

import itertools
import random

import pytest

from counterpoint.errors import InputError
from counterpoint.resources.controls import OFF, SEQUENTIAL, WAYS_IN, Controls


def some_controls(count: int) -> list[Controls]:
    draw, found = random.Random(0), list[Controls]()
    while len(found) < count:
        copies = draw.random() < 0.5
        blocks = draw.choice((None, 1, 3))
        found.append(
            Controls(
                priority=not copies and draw.random() < 0.5,
                blocks_per_sm=blocks,
                carve_out=blocks is None and draw.random() < 0.5,
                delay_s=draw.choice((0.0, 5e-6, 1.25e-5, 1e-3)),
                pieces=(pieces := draw.choice((1, 2, 16))),
                along=draw.choice(("m", "n")) if pieces > 1 else "m",
                transport="copy_engine" if copies else draw.choice(("sm", "zero_cta")),
                max_ctas=0 if copies else draw.choice((0, 16)),
                num_sms=draw.choice((0, 112)),
                green_sms=draw.choice((0, 96)),
            )
        )
    return found


def test_the_text_of_controls_is_read_back():
    for controls in (OFF, SEQUENTIAL, *some_controls(200)):
        assert Controls.parse(controls.spec) == controls
    specs = {controls.spec for controls in some_controls(200)}
    assert len(specs) == len(set(some_controls(200)))


@pytest.mark.parametrize(
    "spec",
    ["", "plain", "sequential priority", "overlap fast", "overlap pieces=x", "overlap delay=5",
     "overlap delay=-1us", "overlap transport=sm", "overlap priority=1"],
)  # fmt: skip
def test_other_text_is_refused(spec: str):
    with pytest.raises(InputError, match=r"spec must be controls as Controls\.spec writes them"):
        Controls.parse(spec)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pieces": 0}, "pieces must be from 1 to 16, got 0"),
        ({"pieces": 17}, "pieces must be from 1 to 16, got 17"),
        ({"along": "k"}, "along must be 'm' or 'n', got k"),
        ({"transport": "nic"}, "transport must be one of sm, copy_engine, zero_cta, got nic"),
        ({"delay_s": 1.0}, "delay_s must be from 0 to 0.001 s, got 1.0"),
        ({"delay_s": float("nan")}, "delay_s must be from 0 to 0.001 s, got nan"),
        ({"blocks_per_sm": 0}, "blocks_per_sm must be >= 1, got 0"),
        ({"max_ctas": -1}, "max_ctas must be >= 0, got -1"),
        ({"blocks_per_sm": 2, "carve_out": True}, "carve_out must be without blocks_per_sm"),
        ({"transport": "copy_engine", "priority": True}, "it is implied"),
        ({"transport": "copy_engine", "max_ctas": 8}, "max_ctas must be unset with copy_engine"),
        ({"overlap": False, "priority": True}, "a sequence shares nothing"),
    ],
)
def test_contradictions_are_refused(given: dict[str, object], text: str):
    with pytest.raises(InputError) as caught:
        Controls(**given)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_every_control_has_a_way_in_or_is_refused():
    everything = Controls(
        priority=True, blocks_per_sm=2, delay_s=5e-6, pieces=2, max_ctas=16, num_sms=100
    )
    for mode in ("graph", "eager"):
        ways = everything.way_in(mode)
        assert set(ways) == {"priority", "blocks_per_sm", "delay_s", "pieces", "max_ctas",
                             "num_sms"}  # fmt: skip
        assert all(ways[name] == WAYS_IN[name][mode] for name in ways)
    green = Controls(green_sms=96)
    assert green.way_in("eager") == {"green_sms": "a stream of a green context"}
    with pytest.raises(InputError, match="green_sms must be unset in mode 'graph', got 96"):
        green.way_in("graph")
    assert Controls(transport="copy_engine").way_in("graph") == {"transport": "memcpy nodes"}
    assert OFF.way_in("graph") == {}


def test_controls_are_counted():
    assert (OFF.num_set, SEQUENTIAL.num_set) == (0, 1)
    assert Controls(pieces=2, along="n").num_set == 1
    values = {"priority": True, "delay_s": 1e-6, "pieces": 4}
    for size in range(4):
        for names in itertools.combinations(values, size):
            given = {name: values[name] for name in names}
            assert Controls(**given).num_set == size  # type: ignore[arg-type]
