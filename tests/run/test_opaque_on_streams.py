"""The GPU's executor on streams that only note what is put on them: where calls go, what waits."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counterpoint.plan.bind import bind
from counterpoint.plan.steps import Plan
from counterpoint.resources.controls import SEQUENTIAL, Controls
from counterpoint.resources.rewrites import Touch, plan_of, rewritten
from counterpoint.run import execute_cuda, lanes_cuda
from counterpoint.run.execute_cuda import CudaCode
from counterpoint.run.lanes_cuda import CudaLanes

A, B, C, D, X = (0, 4), (10, 20), (20, 30), (50, 60), (60, 70)
STAGES = [
    Touch("gemm 0", "", [A], [B]), Touch("exchange 0", "all_to_all", [B], [D]),
    Touch("gemm 1", "", [A], [C]), Touch("exchange 1", "all_to_all", [C], [X]),
    Touch("norm", "", [D], [B]),
]  # fmt: skip


class Gpu:
    """Streams by name; a log of (stream, what)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.current = self.stream("main")
        self.events = 0

    def stream(self, name: str, priority: int = 0, num_sms: int | None = None) -> Any:
        full = f"{name}{priority or ''}{f' of {num_sms}' if num_sms else ''}"

        def wait_event(event: Any) -> None:
            self.log.append((full, f"waits for {event.after}"))

        return SimpleNamespace(name=full, cuda_stream=0, wait_event=wait_event)

    def event(self) -> Any:
        self.events += 1
        made = SimpleNamespace(after="nothing")

        def record(stream: Any) -> None:
            made.after = next((what for on, what in self.log[::-1] if on == stream.name), "start")

        made.record = record
        return made

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def calls(self, plan: Plan) -> dict[str, Callable[[], object]]:
        def call(name: str) -> None:
            self.log.append((self.current.name, name))

        return {step.name: partial(call, step.name) for step in plan.steps}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(execute_cuda, "lanes_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def launched(gpu: Gpu, controls: Controls) -> list[tuple[str, str]]:
    """What a call puts on the streams, in the order of launches."""
    plan = rewritten(plan_of(STAGES, 2), controls)
    lanes = SimpleNamespace(
        stream=gpu.stream, fork=gpu.event(), register=lambda *_: 0, follow=lambda _: None,
        replays=SimpleNamespace(run=lambda *_: pytest.fail("the user's calls are not captured")),
    )  # fmt: skip
    workspace: Any = SimpleNamespace(lanes=lanes, device=torch.device("cuda", 0), rank=0)
    CudaCode(bind(plan, 1), workspace, gpu.calls(plan)).run({})
    return gpu.log


def test_stages_overlap_but_for_their_edges(gpu: Gpu):
    assert launched(gpu, Controls(priority=True)) == [
        ("comm-5", "waits for start"),
        ("main", "gemm 0"),
        ("comm-5", "waits for gemm 0"), ("comm-5", "exchange 0"),
        ("main", "gemm 1"),
        ("comm-5", "waits for gemm 1"), ("comm-5", "exchange 1"),
        ("main", "waits for exchange 0"), ("main", "norm"),
        ("main", "waits for exchange 1"),
    ]  # fmt: skip


def test_a_sequence_is_a_list_of_calls(gpu: Gpu):
    assert launched(gpu, SEQUENTIAL) == [("main", stage.name) for stage in STAGES]


def test_a_delay_stands_behind_what_its_stage_waits_for(gpu: Gpu):
    log = launched(gpu, Controls(delay_s=5e-6))
    assert [what for on, what in log if on == "main"] == [
        "gemm 0", "delay before gemm 1", "gemm 1", "waits for exchange 0", "delay before norm",
        "norm", "waits for exchange 1",
    ]  # fmt: skip


def test_a_lane_of_some_sms_is_a_stream_of_its_own(gpu: Gpu):
    log = launched(gpu, Controls(green_sms=96))
    assert [what for on, what in log if on == "compute of 96"] == [
        "waits for start", "gemm 0", "gemm 1", "waits for exchange 0", "norm",
    ]  # fmt: skip
    assert [what for on, what in log if on == "main"] == ["waits for norm", "waits for exchange 1"]


def test_a_capture_of_the_users_calls_holds_none_of_them(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """They may hold the graph, and that has the collectives of a group that is to be destroyed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(execute_cuda.driver, "relaxed_capture", nullcontext)
    plan, kept = rewritten(plan_of(STAGES, 2), SEQUENTIAL), list[object]()
    lanes = SimpleNamespace(register=lambda *_: 0, follow_in_capture=lambda _: None)
    device = torch.device("cuda", 0)
    workspace: Any = SimpleNamespace(lanes=lanes, device=device, keep=kept.append, rank=0)
    code = CudaCode(bind(plan, 1), workspace, gpu.calls(plan))
    code.run({})
    assert not kept and len(gpu.log) == len(STAGES)
    code.opaque = False
    code.run({})
    assert kept == [code], "of others a graph reads the tables"


def test_calls_that_change_streams_make_no_events(gpu: Gpu, monkeypatch: pytest.MonkeyPatch):
    """Each call follows the last one; so does a kernel that waits for peers, of any group."""
    device, streams = torch.device("cuda", 0), [gpu.stream("a"), gpu.stream("b")]
    monkeypatch.setattr(lanes_cuda, "raw_stream", lambda _: gpu.current.name)
    monkeypatch.setattr(lanes_cuda, "_turns", {})
    groups: list[Any] = [object.__new__(CudaLanes) for _ in range(2)]
    for lanes in groups:
        lanes.workspace = SimpleNamespace(device=device)
        lanes._last, lanes._left = ("main", gpu.current), gpu.event()
    lanes_cuda._left_on.cache_clear()
    for i in range(8):
        gpu.log.append((streams[i % 2].name, f"before {i}"))
        with gpu.on(streams[i % 2]):
            groups[i // 2 % 2].follow(spins=True)
            gpu.log.append((streams[i % 2].name, f"call {i}"))
    assert gpu.events == 3, "one of each group, and one of the GPU"
    for i in range(1, 8):
        mine = [what for on, what in gpu.log if on == streams[i % 2].name]
        assert f"waits for call {i - 1}" in mine[: mine.index(f"call {i}")]
    lanes_cuda._left_on.cache_clear()
