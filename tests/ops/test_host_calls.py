"""A warm eager call runs few functions of ours: counted with the executor of GPUs, on CPU ranks."""

import gc
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_bodies import by_torch
from on_ranks import on_ranks
from own_calls import own_calls, too_many
from rank_bodies import by_reference, world

import counterpoint as cp
from counterpoint.experts import matmul_all_to_all
from counterpoint.experts.fused import launch as fused_experts
from counterpoint.experts.fused import memory as expert_launches
from counterpoint.group.workspace import Places, Workspace, workspace_of
from counterpoint.plan.bind import Program
from counterpoint.run import lanes_cuda, launch
from counterpoint.run.execute_cuda import CudaCode
from counterpoint.run.fused import fused_memory
from counterpoint.run.lanes_cuda import CudaLanes
from counterpoint.run.launch import Site
from counterpoint.run.replay import Replays
from counterpoint.tensor_parallel import launch_fused_sum

RAW = "None"  # the handle of the only stream


class Graphs(dict[object, Any]):
    """Where each call has been captured."""

    replayed = 0

    def get(self, key: object, default: object = None) -> Any:
        hash(key)
        return self

    def move_to_end(self, key: object) -> None:
        pass

    def replay(self) -> None:
        self.replayed += 1


class Kernel:
    """A kernel of Triton's that does nothing; counts its launches."""

    __name__ = "some_kernel"
    launches = 0

    def __init__(self, names: list[str]) -> None:
        self.arg_names = names

    def warmup(self, *_: object, **__: object) -> "Kernel":
        return self

    def __getitem__(self, _: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *_: object, **__: object) -> None:
        self.launches += 1


def as_on_gpu(
    program: Program, workspace: Workspace, prepare: Callable[[Site], Any], graphs: Graphs
) -> CudaCode:
    """The program as a GPU's executor runs it once it is warm: one kernel, or a captured graph."""
    code, lanes = object.__new__(CudaCode), object.__new__(CudaLanes)
    lanes.workspace, lanes._last = workspace, (RAW, None)  # type: ignore[assignment]
    lanes.replays = object.__new__(Replays)
    lanes.replays.graphs, lanes.replays._used, lanes.replays._calls = graphs, {}, 0  # type: ignore[assignment]
    code.program, code.workspace, code.lanes = program, workspace, lanes
    code.tag, code.constants, code.ran = 0, {}, True
    code.spins = any(step.spins for step in program.plan.steps)
    code.replayable, code.sized, code.temporaries = len(program.steps) > 1, False, []
    code.plain = None
    if not code.replayable:
        code.plain = [prepare(Site(program.steps[0], Places(workspace, program.plan), 0))]
    return code


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("op", "plan"),
    [
        ("all_gather_matmul", "shard_p2p"), ("all_gather_matmul", "direct"),
        ("matmul_reduce_scatter", "graded"), ("matmul_reduce_scatter", "fused"),
        ("matmul_all_reduce", "direct"), ("matmul_all_reduce", "fused"),
    ],
)  # fmt: skip  # fmt: skip
@pytest.mark.parametrize("own", [False, True], ids=["default_group", "group"])
@pytest.mark.parametrize("trains", [False, True], ids=["", "gradient"])
@on_ranks(2)
def test_a_warm_call_runs_few_functions_of_ours(
    rank: int, ranks: int, op: str, plan: str, trains: bool, own: bool
) -> list[str]:
    """What is wrong with a warm call."""
    x, w = torch.randn(2 * ranks, 16).half(), torch.randn(16, 32).half().requires_grad_(trains)
    run, problems = getattr(cp, op), list[str]()
    group = world() if own else None
    with by_reference(), pytest.MonkeyPatch.context() as patch:
        kernel, graphs = Kernel(list(launch_fused_sum.matmul_all_reduce_kernel.arg_names)), Graphs()
        run(x, w, plan=plan, group=group)
        run(x, w, plan=plan, group=group)
        workspace = workspace_of(world(), torch.device("cpu"))
        patch.setattr(launch_fused_sum, "matmul_all_reduce_kernel", kernel)
        patch.setattr(launch, "resident_blocks", lambda *_: 100)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in (lanes_cuda, launch):
            patch.setattr(module, "raw_stream", repr)  # in C, as torch's
        patch.setitem(lanes_cuda._turns, workspace.device, (RAW, None))
        for ready in workspace.known.values():
            ready = getattr(ready, "ready", ready)  # of one with a gradient
            workspace.fused = workspace.fused or SimpleNamespace(
                words=SimpleNamespace(bases=None, half_bytes=0), state=None, fault=None
            )
            program = ready.code.program
            ready.code = as_on_gpu(program, workspace, launch_fused_sum.prepare, graphs)
        done = kernel.launches + graphs.replayed
        found = own_calls(lambda: run(x, w, plan=plan, group=group))
        if kernel.launches + graphs.replayed != done + 1:
            problems.append("it was not one launch")
        if wrong := too_many(found):
            problems.append(wrong)
        if not {"ops/call.py key_of", "run/execute_cuda.py run"} < {*found}:
            problems.append(f"it was not the warm road: {found}")
    return problems


@pytest.mark.drawn(3)
@pytest.mark.parametrize("known", ["host", "device"])
@pytest.mark.parametrize(
    ("op", "sums"),
    [("all_to_all_matmul", False), ("matmul_all_to_all", False), ("matmul_all_to_all", True)],
)  # fmt: skip
@on_ranks(2)
def test_a_warm_call_of_experts_runs_few(
    rank: int, ranks: int, op: str, known: str, sums: bool
) -> list[str]:
    """What is wrong with a warm call of one kernel."""
    counts = torch.tensor([[3, 1, 2, 2], [0, 4, 1, 3]])
    rows = counts.view(2, 2, 2).sum((0, 2)) if op == "matmul_all_to_all" else counts.sum(1)
    x, w = torch.randn(int(rows[rank]), 16).half(), torch.randn(2, 16, 32).half()
    options: dict[str, Any] = {"counts": counts, "plan": "fused"}
    if known == "device":
        x, options["max_rows"] = torch.cat((x, x.new_zeros(12 - len(x), 16))), 12
    if sums:
        options["sum_of"] = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    run, problems, kernels = getattr(cp, op), list[str](), dict[str, Kernel]()
    small = ("arrival_kernel", "collect_kernel") if op == "matmul_all_to_all" else None
    with by_torch(known), pytest.MonkeyPatch.context() as patch:
        # indices on a GPU are not read
        patch.setattr(matmul_all_to_all, "on_host", lambda _: False)
        run(x, w, **options)
        workspace = workspace_of(world(), torch.device("cpu"))
        for module in (fused_experts, expert_launches):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                kernels[name] = Kernel(list(getattr(module, name).arg_names))
                patch.setattr(module, name, kernels[name])
        patch.setattr(launch, "resident_blocks", lambda *_: 100)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for module in (lanes_cuda, launch):
            patch.setattr(module, "raw_stream", repr)
        patch.setitem(lanes_cuda._turns, workspace.device, (RAW, None))
        for ready in workspace.known.values():
            fused_memory(workspace).reserve(ready.code.program.plan)
            prepare = fused_experts.dispatch if small is None else fused_experts.combine
            ready.code = as_on_gpu(ready.code.program, workspace, prepare, Graphs())
        run(x, w, **options)
        done = {name: kernel.launches for name, kernel in kernels.items()}
        found = own_calls(lambda: run(x, w, **options))
        launched = {name for name, kernel in kernels.items() if kernel.launches > done[name]}
        if launched != {"routes_kernel", f"{op}_kernel", *(small or ())}:
            problems.append(f"it was not the warm road: {launched}")
        if wrong := too_many(found):
            problems.append(wrong)
    return problems


def test_what_is_counted():
    """Functions of ours alone, those behind others of torch's too; and the bar can be broken."""
    problem = cp.Problem("all_gather_matmul", 8, 4, 4, 2)
    found = own_calls(lambda: list(map(operator.attrgetter("item_bytes"), [problem] * 2)))
    assert found == ["problem.py item_bytes"] * 2
    assert too_many(found) == "" and too_many([]) and too_many(found * 7)
    assert too_many([f"{i}.py f" for i in range(9)])


def test_garbage_is_not_counted():
    """A group of an earlier test that is collected meanwhile runs functions of ours, too."""
    problem = cp.Problem("all_gather_matmul", 8, 4, 4, 2)

    def leave() -> None:
        """A cycle that runs one when it is collected, and enough for a collection."""
        cycle = Graphs()
        cycle[0] = cycle
        weakref.finalize(cycle, getattr, problem, "item_bytes")
        del cycle
        [[] for _ in range(3 * gc.get_threshold()[0])]

    leave()
    assert own_calls(leave) == []
    assert own_calls(lambda: leave() or gc.collect()) == ["problem.py item_bytes"]
