"""read_trace on a small hand-made trace in the format of `prof.export_chrome_trace`."""

import json

import pytest
from activities import Activity, Ran, copy_activities, device_activities

from counterpoint.errors import CounterpointError, InputError
from counterpoint.measure.trace import read_trace

HOST, MAIN, COPIER = 4242, 4242, 4243  # process, thread of the SM lanes, thread of the copies


def annotation(name, start_us, end_us, *, thread=MAIN):
    return {
        "ph": "X", "cat": "user_annotation", "name": name, "pid": HOST, "tid": thread,
        "ts": start_us, "dur": end_us - start_us,
        "args": {"External id": 1, "Record function id": 0, "Ev Idx": 1},
    }  # fmt: skip


def launch(correlation, at_us, *, thread=MAIN, cat="cuda_runtime", name="cudaLaunchKernel"):
    return {
        "ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": thread, "ts": at_us, "dur": 2.5,
        "args": {"External id": 1, "cbid": 211, "correlation": correlation},
    }  # fmt: skip


def activity(correlation, start_us, dur_us, stream, *, cat="kernel", name="nvjet_tst"):
    args = {"External id": 1, "device": 0, "context": 1, "stream": stream}
    args["correlation"] = correlation
    if cat == "gpu_memcpy":
        args |= {"bytes": 1 << 20, "memory bandwidth (GB/s)": 380.0}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start_us,
        "dur": dur_us, "args": args,
    }  # fmt: skip


def trace():
    memcpy = {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)"}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790000000000000000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "args": {"name": "python"}},
            annotation("counterpoint/call", 100, 400),
            annotation("counterpoint/compute/matmul/gemm 0", 110, 150),
            annotation("counterpoint/compute/reduce/sum/all", 120, 130),  # inside gemm 0
            annotation("someone else's range", 135, 149),
            annotation("counterpoint/copy/copy/pull 0", 105, 160, thread=COPIER),
            annotation("counterpoint/copy/copy/pull 1", 200, 240, thread=COPIER),
            annotation("counterpoint/copy/copy/pull 2", 250, 260, thread=COPIER),
            launch(1, 112),
            launch(2, 125, cat="cuda_driver", name="cuLaunchKernelEx"),
            launch(3, 140),
            launch(4, 120, thread=COPIER, name="cudaMemcpyAsync"),
            launch(5, 205, thread=COPIER, name="cudaMemcpyAsync"),
            launch(6, 210, thread=COPIER),
            launch(7, 300),
            launch(8, 500, thread=COPIER, name="cudaMemcpyAsync"),
            {"ph": "s", "id": 1, "pid": HOST, "tid": MAIN, "ts": 112, "cat": "ac2g", "name": "x"},
            activity(1, 1000.5, 50, 7),
            activity(2, 1060, 5, 7, name="sum_kernel"),
            activity(3, 1070, 50, 7),
            activity(4, 1001, 30, 20, **memcpy),
            activity(4, 1031, 30, 20, **memcpy),  # a batched copy: one launch, two activities
            activity(5, 1080, 10, 20, **memcpy),
            activity(6, 1090, 10, 20, name="vectorized_elementwise_kernel"),
            activity(7, 1200, 1, 7, cat="gpu_memset", name="Memset (Device)"),
            activity(8, 1300, 1, 20, **memcpy),
            activity(99, 1400, 1, 7, name="launched before the profiler"),
            # the GPU side of our own ranges is no activity
            annotation("counterpoint/copy/copy/pull 0", 1001, 1061)
            | {"cat": "gpu_user_annotation", "pid": 0, "tid": 20},
        ],
    }


def test_each_activity_gets_the_innermost_step_of_its_thread():
    spans = read_trace(trace(), rank=3)
    memcpy = "Memcpy PtoP (Device -> Device)"
    want = [
        ("compute", 1000.5, 1050.5, "matmul", "gemm 0"),
        ("copy", 1001, 1031, "copy", "pull 0"),
        ("copy", 1031, 1061, "copy", "pull 0"),
        ("compute", 1060, 1065, "reduce", "sum/all"),
        ("compute", 1070, 1120, "matmul", "gemm 0"),
        ("copy", 1080, 1090, "copy", "pull 1"),
        ("copy", 1090, 1100, "copy", "pull 1"),
        ("stream 7", 1200, 1201, "other", "Memset (Device)"),
        ("stream 20", 1300, 1301, "other", memcpy),
        ("stream 7", 1400, 1401, "other", "launched before the profiler"),
    ]
    assert {span.rank for span in spans} == {3}
    assert [
        (s.lane, round(s.start_s * 1e6, 3), round(s.end_s * 1e6, 3), s.kind, s.label) for s in spans
    ] == want


def test_a_wait_is_told_from_the_step_behind_it():
    content = trace()
    content["traceEvents"] += [
        annotation("counterpoint/compute/wait/gemm 0", 90, 99),
        launch(10, 95),
        activity(10, 990, 9, 7, name="signal_kernel"),
    ]
    assert [(s.kind, s.label) for s in read_trace(content)[:2]] == [
        ("wait", "wait for gemm 0"),
        ("matmul", "gemm 0"),
    ]


def test_copy_steps_that_used_a_kernel_or_nothing_are_seen():
    assert copy_activities(trace()) == {
        "pull 0": Ran(num_memcpy=2, num_kernels=0),
        "pull 1": Ran(num_memcpy=1, num_kernels=1),
        "pull 2": Ran(num_memcpy=0, num_kernels=0),
    }


def test_activities_have_their_bytes_and_steps():
    memcpy, mib = "Memcpy PtoP (Device -> Device)", 1 << 20
    found = device_activities(trace())
    assert [a for a in found if a.step == "pull 0"] == [Activity(memcpy, mib, "copy", "pull 0")] * 2
    assert Activity("sum_kernel", 0, "reduce", "sum/all") in found
    assert Activity(memcpy, mib, "", "") in found, "outside of steps"


def test_order_of_events_in_the_file_does_not_matter():
    shuffled = trace()
    shuffled["traceEvents"].reverse()
    assert set(read_trace(shuffled)) == set(read_trace(trace()))


def test_a_trace_without_gpu_activity_raises():
    cpu_only = trace()
    cpu_only["traceEvents"] = [e for e in cpu_only["traceEvents"] if e["pid"] == HOST]
    with pytest.raises(CounterpointError, match="no GPU activity in the trace; profile with"):
        read_trace(cpu_only)


def test_a_range_of_another_kind_is_refused():
    bad = trace()
    bad["traceEvents"].append(annotation("counterpoint/compute/matmull/x", 0, 1))
    with pytest.raises(InputError, match="got 'counterpoint/compute/matmull/x'"):
        read_trace(bad)


def test_ranges_of_the_installed_torch_have_the_names_we_look_for(tmp_path):
    torch = pytest.importorskip("torch")
    only_cpu = [torch.profiler.ProfilerActivity.CPU]
    ours = torch.profiler.record_function("counterpoint/copy/copy/pull 0")
    with torch.profiler.profile(activities=only_cpu) as prof, ours:
        torch.zeros(4).add_(1)
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    (ours,) = (e for e in content["traceEvents"] if e["name"].startswith("counterpoint/"))
    assert (ours["cat"], ours["ph"]) == ("user_annotation", "X")
    at_us = ours["ts"] + ours["dur"] / 2
    added = [launch(1, at_us), activity(1, at_us + 10, 5, 20, cat="gpu_memcpy", name="Memcpy")]
    added[0] |= {"pid": ours["pid"], "tid": ours["tid"]}
    content["traceEvents"] += added
    assert copy_activities(content) == {"pull 0": (1, 0)}
