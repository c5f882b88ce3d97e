"""Which settings share a captured graph, what holds while one is timed, and refusals by any rank.

Graphs and clocks are stubs: what is measured is tested on GPUs.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_bodies import world

from counterpoint.errors import CounterpointError, InputError, UnsupportedError
from counterpoint.measure import settings, tune_resources
from counterpoint.measure.settings import Bench
from counterpoint.measure.tune_resources import Tuned
from counterpoint.resources.controls import OFF, SEQUENTIAL, Controls
from counterpoint.resources.search import Found, Space


class Graph:
    """A Captured that keeps what it is told."""

    def __init__(self, pipeline: Any, controls: Controls = OFF) -> None:
        controls.way_in("graph")
        self.pipeline, self.captured, self.controls = pipeline, controls, controls
        self.entered = 0
        pipeline.made.append(self)

    def __enter__(self) -> "Graph":
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.entered -= 1

    def set(self, controls: Controls) -> None:
        """As a rank that has no kernel to shape."""
        if controls.blocks_per_sm == 1:
            raise UnsupportedError("shape: nothing can be shaped; no kernels")
        self.controls = controls

    def __call__(self) -> None:
        self.pipeline.ran.append((self, self.controls))


def a_bench(patch: pytest.MonkeyPatch, mode: Any = "graph") -> Bench:
    """Its pipeline keeps the graphs that were made, and what was run with which controls."""
    patch.setattr(settings, "Captured", Graph)
    patch.setattr(settings, "Eager", Graph)
    for module in (settings, tune_resources):
        patch.setattr(module, "gather_object", lambda value, group: [value])
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    pipeline = SimpleNamespace(group=None, device=torch.device("cpu"), made=[], ran=[])
    return Bench(pipeline, mode)  # type: ignore[arg-type]


def rotate_once(arms: Any, *, around: Any, rounds: int, **_: object) -> dict[str, Any]:
    """As `timing.rotate`, without a clock."""
    for name, arm in arms.items():
        for _ in range(rounds):
            with around(name):
                arm()
    return {name: SimpleNamespace(rounds_s=(1.0,) * rounds) for name in arms}


SETTINGS = (
    OFF, SEQUENTIAL, Controls(blocks_per_sm=2), Controls(blocks_per_sm=4), Controls(priority=True),
    Controls(priority=True, blocks_per_sm=2), Controls(carve_out=True), Controls(delay_s=5e-6),
    Controls(chunks=2), Controls(chunks=2, along="n"), Controls(transport="copy_engine"),
    Controls(transport="zero_cta", max_ctas=8), Controls(num_sms=100),
)  # fmt: skip


def test_shapes_share_a_graph_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings, "rotate", rotate_once)
    with a_bench(monkeypatch) as bench:
        pipeline: Any = bench.pipeline
        found = bench.rounds(SETTINGS, 3)
        assert found == dict.fromkeys(SETTINGS, (1.0,) * 3)
        # three pairs differ in blocks_per_sm alone
        assert len(pipeline.made) == len(SETTINGS) - 3
        assert all(graph.entered == 1 for graph in pipeline.made)
        # each arm ran with its own controls, on a graph that was captured for them
        assert [controls for _, controls in pipeline.ran] == [c for c in SETTINGS for _ in range(3)]
        for graph, controls in pipeline.ran:
            for name in ("overlap", "delay_s", "chunks", "along", "transport", "max_ctas",
                         "num_sms"):  # fmt: skip
                assert getattr(graph.captured, name) == getattr(controls, name)
        bench.rounds(SETTINGS[::-1], 2)
        assert len(pipeline.made) == len(SETTINGS) - 3, "a second rotation captures nothing"
    assert all(graph.entered == 0 for graph in pipeline.made)


def test_eager_settings_hold_while_they_are_timed_only(monkeypatch: pytest.MonkeyPatch):
    bench = a_bench(monkeypatch, "eager")
    monkeypatch.setattr(settings, "Captured", type("NoGraph", (), {}))
    some = (OFF, Controls(blocks_per_sm=2), Controls(blocks_per_sm=4))
    with bench:
        for controls in some:
            assert bench.able(controls)
        one, two, four = bench.pipeline.made  # type: ignore[attr-defined]
        assert [graph.captured for graph in (one, two, four)] == list(some)
        with bench.holding("overlap blocks_per_sm=2"):
            assert (one.entered, two.entered, four.entered) == (0, 1, 0)
        assert two.entered == 0


def test_what_cannot_be_had_is_left_out_and_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settings, "rotate", rotate_once)
    wrong = Controls(blocks_per_sm=1)
    with a_bench(monkeypatch) as bench:
        assert bench.rounds([OFF, wrong, Controls(green_sms=8)], 2) == {OFF: (1.0, 1.0)}
        assert bench.refused == {
            wrong.spec: "shape: nothing can be shaped; no kernels",
            "overlap green_sms=8": "Controls: green_sms must be unset in mode 'graph', got 8",
        }
        monkeypatch.setattr(Graph, "set", lambda *_: pytest.fail("tried again"))
        assert not bench.able(wrong)


@on_ranks(3)
def test_a_setting_that_one_rank_cannot_have_is_refused_on_all(rank: int, ranks: int):
    """The second setting cannot be had on rank 1, the third on no rank."""
    gather = settings.gather_object
    with pytest.MonkeyPatch.context() as patch:
        bench = a_bench(patch)
        patch.setattr(settings, "gather_object", gather)
        bench.pipeline.group = world()
        priority, blocks = Controls(priority=True), Controls(blocks_per_sm=1)

        def set_(self: Graph, controls: Controls) -> None:
            if controls == blocks or (controls == priority and rank == 1):
                raise InputError("set", controls.spec, want="had", got=f"rank {rank}")

        patch.setattr(Graph, "set", set_)
        assert [bench.able(c) for c in (OFF, priority, blocks, OFF)] == [True, False, False, True]
    assert bench.refused == {
        "overlap priority": "set: overlap priority must be had, got rank 1",
        "overlap blocks_per_sm=1": "set: overlap blocks_per_sm=1 must be had, got rank 0",
    }


def test_a_search_that_ends_where_plain_overlap_cannot_run(monkeypatch: pytest.MonkeyPatch):
    bench = a_bench(monkeypatch)
    monkeypatch.setattr(settings, "rotate", rotate_once)
    monkeypatch.setattr(
        Graph, "set", lambda *_: (_ for _ in ()).throw(UnsupportedError("a stage synchronises"))
    )
    with pytest.raises(
        CounterpointError, match=r"^tune: the pipeline cannot run: a stage synchronises"
    ):
        tune_resources._search(bench.pipeline, "graph", Space(), 60.0, lambda _: None)
    assert all(graph.entered == 0 for graph in bench.pipeline.made)  # type: ignore[attr-defined]


def test_a_search_keeps_what_was_refused_and_tells_its_progress(monkeypatch: pytest.MonkeyPatch):
    bench = a_bench(monkeypatch)
    monkeypatch.setattr(settings, "rotate", rotate_once)
    said: list[str] = []
    space = Space(blocks_per_sm=(4, 1), chunks=(), delays_s=())
    found = tune_resources._search(bench.pipeline, "graph", space, 60.0, said.append)
    assert found.best == OFF and not found.timed_out
    assert found.refused == {"overlap blocks_per_sm=1": "shape: nothing can be shaped; no kernels"}
    assert said == [
        "each control by itself: 5 settings",
        "two controls together: 2 settings",
        "the best: 2 settings",
    ]


def test_a_tuned_pipeline_runs_its_runner():
    runs: list[str] = []
    runner: Any = lambda: runs.append("run")  # noqa: E731
    tuned = Tuned(None, "graph", Found(OFF, (), ""), False, runner)  # type: ignore[arg-type]
    tuned()
    tuned()
    assert runs == ["run", "run"]
