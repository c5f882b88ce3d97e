"""Each number that an advice says of a step, on traces whose answer is known."""

import json
import random
from pathlib import Path

import pytest
from trace_files import TraceFile

from counterpoint.advice.advise import Report, advise
from counterpoint.advice.cover import Cover
from counterpoint.advice.losses import Losses


def us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def first_of(trace: TraceFile, tmp_path: Path, **options: int) -> Losses:
    return advise(trace.write(tmp_path / "trace.json"), **options).losses[0]


def total(losses: Losses) -> float:
    return (losses.computation_s + losses.exposed_s + losses.late_s + losses.packing_s
            + sum(losses.idle_s.values()))  # fmt: skip


def plain() -> TraceFile:
    """100 us computed; communication hidden for 20, bare for 80; packed for 20; 30 idle; 70."""
    return (
        TraceFile().step(1, -100, 1000)
        .gpu("sm90_gemm", 0, 100, asked=-10)
        .collective("allreduce", 80, 100, asked=-8)
        .gpu("split_with_sizes_copy_out", 180, 20, asked=-6)
        .gpu("sm90_gemm", 230, 70, asked=225)
    )  # fmt: skip


def test_parts_of_a_step(tmp_path):
    """They sum to the step; communication counts before packing, and computation before both."""
    found = first_of(plain(), tmp_path)
    assert (us(found.time_s), us(found.computation_s), us(found.exposed_s)) == (300, 170, 80)
    assert (us(found.packing_s), us(found.packed_s), us(found.late_s)) == (20, 20, 0)
    assert {name: us(s) for name, s in found.idle_s.items() if s} == {
        "launching": 25, "dependencies": 5}  # fmt: skip
    assert us(total(found)) == 300


@pytest.mark.parametrize("cause", ["data", "synchronizing", "host copies"])
def test_causes_of_idleness(tmp_path, cause):
    """30 us in which nothing computed, since the host waited, or copied."""
    trace = plain()
    if cause == "data":
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        trace.event("user_annotation", name, 190, 35)
    elif cause == "synchronizing":
        trace.event("cuda_runtime", "cudaStreamSynchronize", 190, 35)
    else:
        trace.gpu("Memcpy HtoD (Pinned -> Device)", 200, 30, category="gpu_memcpy", asked=-5)
    found = first_of(trace, tmp_path)
    expected = 30 if cause == "host copies" else 25
    assert us(found.idle_s[cause]) == expected and us(total(found)) == 300


def test_a_late_rank(tmp_path):
    """The shortest call of all ranks waited for nobody; the others waited for its rank."""
    paths: list[Path] = []
    for rank, (early, lasts) in enumerate([(0, 100), (60, 40), (0, 100), (10, 90)]):
        trace = TraceFile(rank, 4).step(1, -100, 1000).gpu("gemm", 0, 50, asked=-10)
        trace.collective("allreduce", 50 + early, lasts, elements=10**6, ranks=4, asked=-8)
        trace.gpu("gemm", 150, 50, asked=-6)
        paths.append(trace.write(tmp_path / f"rank{rank}.json"))
    report = advise(*reversed(paths))
    assert [each.rank for each in report.losses] == [0, 1, 2, 3]
    assert [us(each.late_s) for each in report.losses] == [60, 0, 60, 50]
    assert [us(each.exposed_s) for each in report.losses] == [40] * 4
    assert [us(each.idle_s["dependencies"]) for each in report.losses] == [0, 60, 0, 10]
    (row,) = report.losses[0].collectives
    assert row.late_s is not None and us(row.late_s) == 60 and us(row.exposed_s) == 100
    # what waits moves nothing: 2 (n - 1) / n of 2 MB in 40 us
    assert row.bus_bytes_per_s == pytest.approx(1.5 * 2e6 / 40e-6)
    assert us(report.remedies[0].bound_s) == 60 and "equal work" in report.remedies[0].name


@pytest.mark.parametrize(
    ("kind", "name", "factor"),
    [("all_gather", "all-gather", 3 / 4), ("reduce_scatter", "reduce-scatter", 3 / 4),
     ("allreduce", "all-reduce", 6 / 4), ("all_to_all", "all-to-all", 3 / 4),
     ("broadcast", "broadcast", 0.0)],
)  # fmt: skip
def test_rows_of_collectives(tmp_path, kind, name, factor):
    """Calls, bytes, bandwidth, blocks, neighbours: those of all calls of a kind and a group."""
    trace = TraceFile(world=4).step(1, -100, 2000).gpu("nvjet_hsh_128x256", 0, 50, asked=-10)
    for start in (50, 200, 400):
        trace.collective(kind, start, 100, elements=10**6, ranks=4, group="tp", blocks=24)
        trace.gpu("rms_norm_kernel", start + 100, 50, asked=-8)
    found = first_of(trace, tmp_path)
    (row,) = found.collectives
    assert (row.kind, row.group, row.ranks, row.calls) == (name, "tp", 4, 3)
    assert (row.num_bytes, us(row.time_s), us(row.exposed_s), row.blocks) == (2e6, 300, 300, 24)
    assert row.bus_bytes_per_s == pytest.approx(factor * 2e6 / 100e-6)
    assert (row.before, row.after, row.late_s) == ("norm", "norm", None)


def test_what_computation_loses_beside_communication(tmp_path):
    """A kernel of the same name and grid, alone and beside; others are unknown, and said to be."""
    trace = TraceFile().step(1, -100, 5000)
    for i in range(4):
        trace.gpu("gemm", 200 * i, 100, asked=-10, grid=[132, 1, 1])
        trace.gpu("gemm", 1000 + 200 * i, 130, asked=-9, grid=[132, 1, 1])
        trace.gpu("gemm", 2000 + 200 * i, 60, asked=-9, grid=[8, 1, 1])
    trace.collective("all_gather", 1000, 2000, asked=-8)
    found = first_of(trace, tmp_path)
    assert us(found.slowed_s) == 4 * 30
    assert (us(found.compared_s), us(found.beside_s)) == (4 * 130, 4 * 130 + 4 * 60)
    assert us(found.computation_s) == 4 * 100 + 4 * 130 + 4 * 60


def test_steps(tmp_path):
    """A step begins on the GPU with what it launched first; the mean is of all, or of one."""
    trace = TraceFile().step(3, 0, 100).step(4, 100, 100)
    for start, asked, lasts in ((500, 10, 200), (700, 110, 100)):
        trace.gpu("gemm", start, lasts, asked=asked)
        trace.collective("allreduce", start + lasts - 50, 50, asked=asked + 1)
    path = trace.write(tmp_path / "trace.json")
    assert us(advise(path).losses[0].time_s) == 150
    assert [us(advise(path, step=n).losses[0].time_s) for n in (3, 4)] == [200, 100]
    assert advise(path).steps == ("ProfilerStep#3", "ProfilerStep#4")


def test_no_marks_no_launches_no_arguments(tmp_path):
    """Then all is one step, and idleness has no known cause; events stand in any order."""
    trace = TraceFile().gpu("gemm", 0, 100).collective("allreduce", 80, 100).gpu("gemm", 230, 70)
    for event in trace.events:
        event["args"] = {}
    random.Random(0).shuffle(trace.events)
    found = first_of(trace, tmp_path)
    assert (us(found.time_s), us(found.computation_s), us(found.exposed_s)) == (300, 170, 80)
    assert us(found.idle_s["unknown"]) == 50 == us(total(found) - 250e-6)
    (row,) = found.collectives
    assert (row.num_bytes, row.ranks, row.bus_bytes_per_s) == (0, 0, 0)


def test_order_does_not_count(tmp_path):
    trace = plain()
    first = advise(trace.write(tmp_path / "a.json")).as_dict()
    random.Random(1).shuffle(trace.events)
    second = advise(trace.write(tmp_path / "b.json")).as_dict()
    assert {**first, "traces": 0} == {**second, "traces": 0}


def test_other_gpus_of_a_process_are_left_out(tmp_path):
    """One GPU of a trace counts: that with the most work."""
    trace = plain()
    for i in range(20):
        trace.gpu("gemm", 10 * i, 1, asked=-4, device=1)
    report = advise(trace.write(tmp_path / "trace.json"))
    assert us(report.losses[0].time_s) == 300 and "other GPUs left out: 1" in report.title


def test_older_traces_say_it_beside_the_kernel(tmp_path):
    """NCCL's arguments stand in a record of the host; categories had capital letters."""
    trace = TraceFile(world=2).step(1, -100, 1000).gpu("gemm", 0, 50, asked=-10)
    trace.event("cpu_op", "record_param_comms", -20, 5, **{
        "External id": 77, "Collective name": "allreduce", "In msg nelems": 500, "dtype": "Float",
        "Group size": 2})  # fmt: skip
    trace.gpu("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 50, 10, asked=-8,
              category="Kernel", **{"External id": 77})  # fmt: skip
    (row,) = first_of(trace, tmp_path).collectives
    assert (row.kind, row.num_bytes, row.ranks) == ("all-reduce", 2000, 2)


@pytest.mark.parametrize("seed", range(20))
def test_cover_is_what_a_loop_finds(seed):
    rng = random.Random(seed)
    spans = [(a, a + rng.randint(0, 6)) for a in (rng.randint(0, 40) for _ in range(seed))]
    covered = {t for a, b in spans for t in range(a, b)}
    found = Cover(spans)
    for _ in range(20):
        a, b = sorted((rng.randint(-5, 50), rng.randint(-5, 50)))
        assert float(found.within(a, b)) == len(covered & {*range(a, b)})
        free = [t for x, y in found.gaps(a, b) for t in range(int(x), int(y))]
        assert free == sorted({*range(a, b)} - covered)


def test_a_report_as_json(tmp_path):
    report = advise(plain().write(tmp_path / "trace.json"))
    assert isinstance(report, Report)
    content = json.loads(report.to_json())
    assert content["verdict"] == report.verdict
    assert us(content["losses"][0]["exposed_s"]) == 80
    assert content["losses"][0]["idle_s"]["launching"] == report.losses[0].idle_s["launching"]


def three_steps(tmp_path: Path, trace: TraceFile) -> list[tuple[float, float]]:
    """Time and exposed communication of each of steps 0 to 2."""
    path = trace.write(tmp_path / "trace.json")
    found = [advise(path, step=n).losses[0] for n in range(3)]
    return [(us(each.time_s), us(each.exposed_s)) for each in found]


def test_steps_of_a_host_that_runs_ahead(tmp_path):
    """Copies of the next batch, and what was launched before the first step, begin none."""
    trace = TraceFile()
    for i in range(10):
        trace.gpu("gemm", 100 * i, 100)  # launched before the profiler began
    for n in range(3):
        trace.step(n, 100 * n, 100)
        trace.gpu("Memcpy HtoD (Pinned -> Device)", 100 * n + 10, 5, stream=30,
                  category="gpu_memcpy", asked=100 * n + 8)  # fmt: skip
        for i in range(10):
            trace.gpu("gemm", 1000 * (n + 1) + 100 * i, 100, asked=100 * n + 20 + i)
        trace.collective("allreduce", 1000 * (n + 1) + 500, 200, asked=100 * n + 40)
    assert three_steps(tmp_path, trace) == [(1000, 0)] * 3


def test_collectives_that_cross_the_end_of_a_step(tmp_path):
    """What the next step hides is hidden; what it does not is the next step's loss."""
    trace = TraceFile()
    for n in range(3):
        trace.step(n, 100 * n, 100)
        trace.gpu("gemm", 1000 * n, 900, asked=100 * n + 10)
        trace.collective("allgather", 1000 * n + 800, 400, elements=5, ranks=2, asked=100 * n + 20)
    path = trace.write(tmp_path / "trace.json")
    assert three_steps(tmp_path, trace) == [(1000, 100), (1000, 100), (1200, 300)]
    rows = [advise(path, step=n).losses[0].collectives[0] for n in range(3)]
    assert [(us(row.exposed_s), row.calls) for row in rows] == [(100, 1), (100, 1), (300, 1)]
    trace.step(3, 300, 100).gpu("gemm", 3100, 500, asked=310)
    last = advise(trace.write(path), step=3)
    (row,) = last.losses[0].collectives  # one that came in, and none that began
    assert (us(row.exposed_s), row.calls, row.num_bytes) == (0, 0, 0) and last.verdict


def test_rows_that_overlap_add_up_to_what_is_exposed(tmp_path):
    """An instant counts once, for the call that began first."""
    trace = TraceFile(world=2).step(1, -100, 9000).gpu("gemm", 0, 10, asked=-10)
    for i, group in enumerate("abc"):
        trace.collective("all_gather", 10 + 10 * i, 100, elements=5, ranks=2, group=group,
                         stream=20 + i, asked=-9)  # fmt: skip
    found = first_of(trace.gpu("gemm", 130, 10, asked=-8), tmp_path)
    assert [us(row.exposed_s) for row in found.collectives] == [100, 10, 10]
    assert us(found.exposed_s) == 120 and [row.calls for row in found.collectives] == [1] * 3


def files(traces: list[TraceFile], tmp_path: Path) -> list[Path]:
    return [each.write(tmp_path / f"{i}.json") for i, each in enumerate(traces)]


def test_groups_of_equal_words_are_told_apart(tmp_path):
    """Two tensor-parallel groups: none waits for the other's longer calls."""
    traces: list[TraceFile] = []
    for rank in range(4):
        trace = TraceFile(rank, 4).step(1, -100, 9000).gpu("gemm", 0, 10, asked=-10)
        said = {"Process Group Name": str(1 + rank // 2),
                "Process Group Ranks": "[0, 1]" if rank < 2 else "[2, 3]"}  # fmt: skip
        lasts = 100 if rank < 2 else 500
        trace.collective("allreduce", 10, lasts, elements=lasts, ranks=2, group="mesh_tp", asked=-9,
                         **said)  # fmt: skip
        traces.append(trace)
    report = advise(*files(traces, tmp_path))
    assert [each.late_s for each in report.losses] == [0, 0, 0, 0]
    assert [each.collectives[0].late_s for each in report.losses] == [0, 0, 0, 0]


def test_what_is_sent_from_rank_to_rank_waits_for_nobody_else(tmp_path):
    """Stages of a pipeline send unequal amounts; nothing is known of who was late."""
    traces = [
        TraceFile(rank, 4).step(1, -100, 9000).gpu("gemm", 0, 10, asked=-10)
        .collective(f"send {rank}->1", 10, 100 if rank < 2 else 20, ranks=4, group="pp", asked=-9)
        for rank in range(4)
    ]  # fmt: skip
    report = advise(*files(traces, tmp_path))
    assert [each.collectives[0].late_s for each in report.losses] == [None] * 4
    assert [each.collectives[0].kind for each in report.losses] == ["send and receive"] * 4


def test_calls_are_matched_by_the_step_that_launched_them(tmp_path):
    """On one rank each begins in its step's time on the GPU, on the other in the next one's."""
    traces: list[TraceFile] = []
    for rank, early in enumerate((115, 0)):
        trace = TraceFile(rank, 2)
        for n, lasts in enumerate((85, 385, 685)):
            trace.step(n, 100 * n, 100).gpu("gemm", 1000 * n, 890, asked=100 * n + 10)
            start = 1000 * n + 1005 - early
            trace.collective("allreduce", start, lasts + early, elements=5, ranks=2,
                             asked=100 * n + 20)  # fmt: skip
        traces.append(trace)
    report = advise(*files(traces, tmp_path))
    # of 115, in all steps but the last, the next step's gemm hides 5
    assert [us(3 * each.late_s) for each in report.losses] == [110 + 110 + 115, 0]


def test_waiting_that_is_hidden_takes_nothing_from_what_is_exposed(tmp_path):
    first = TraceFile(0, 2).gpu("gemm", 0, 160).collective("allreduce", 40, 160, ranks=2)
    other = TraceFile(1, 2).gpu("gemm", 0, 160).collective("allreduce", 160, 40, ranks=2)
    report = advise(*files([first, other], tmp_path))
    (row,) = report.losses[0].collectives
    assert (us(row.exposed_s), row.late_s) == (40, 0) and us(report.remedies[0].bound_s) == 40


def test_kernels_of_another_shape_are_not_compared(tmp_path):
    """Persistent kernels have equal grids whatever they multiply."""
    trace = TraceFile().step(1, -100, 9000)
    for i in range(4):
        trace.gpu("gemm", 1000 * i, 100, asked=-10).gpu("gemm", 1000 * i + 500, 400, asked=-9)
        trace.collective("all_gather", 1000 * i + 500, 400, asked=-8)
    found = first_of(trace, tmp_path)
    assert (found.slowed_s, found.compared_s, us(found.beside_s)) == (0, 0, 1600)


def test_waiting_in_another_thread_is_no_cause(tmp_path):
    """A thread that launches nothing may wait all the time."""
    trace = plain().event("cuda_runtime", "cudaEventSynchronize", 0, 300, tid=99, correlation=99)
    idle = first_of(trace, tmp_path).idle_s
    assert (idle["synchronizing"], us(idle["launching"])) == (0, 25)


def test_a_copy_that_blocks_was_asked_for_when_its_call_began(tmp_path):
    trace = TraceFile().step(1, -100, 9000).gpu("gemm", 0, 100, asked=-10)
    trace.gpu("Memcpy DtoD (Device -> Device)", 500, 100, category="gpu_memcpy")
    trace.event("cuda_runtime", "cudaMemcpyAsync", 10, 595, correlation=trace.launches)
    idle = first_of(trace, tmp_path).idle_s
    assert (idle["launching"], us(idle["dependencies"])) == (0, 400)


def test_one_persistent_kernel_of_two_shapes_is_told_by_what_runs_beside_it(tmp_path):
    """Layers repeat each other: a norm before the one, an activation before the other."""
    trace = TraceFile().step(1, -100, 9000)
    for i, slow in enumerate((1.0, 1.0, 1.25)):
        start = 2000 * i
        trace.gpu("rms_norm", start, 10, asked=-10).gpu("gemm", start + 10, 100 * slow, asked=-10)
        trace.gpu("silu", start + 200, 10, asked=-10).gpu("gemm", start + 210, 400 * slow, asked=-9)
    trace.gpu("rms_norm", 6000, 10, asked=-9)
    trace.collective("all_gather", 4010, 700, asked=-8)
    found = first_of(trace, tmp_path)
    assert us(found.slowed_s) == 25 + 100
    assert us(found.lost_s) == us(found.exposed_s) + 125
