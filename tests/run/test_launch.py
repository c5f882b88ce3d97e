"""The launcher of kernels that wait for peers: grids, residency, arguments by name, refusals."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
from memories import memories, places_of
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from counterpoint.choose.known import Knowledge
from counterpoint.errors import PlanError, UnsupportedError
from counterpoint.gpu import device_limits
from counterpoint.gpu.limits import LIMITS
from counterpoint.machine import CAPABILITIES, kernels_refused
from counterpoint.ops import auto
from counterpoint.ops.auto import choose_spec
from counterpoint.plan.bind import bind
from counterpoint.plan.families import build
from counterpoint.plan.launches import has_kernels
from counterpoint.plan.operation import operation_of
from counterpoint.plan.steps import Plan
from counterpoint.presets import PRESETS, preset
from counterpoint.problem import Problem
from counterpoint.run import launch
from counterpoint.run.execute import compile_plan
from counterpoint.run.launch import RESERVED_SMS, Grid, Launch, Site
from counterpoint.tensor_parallel import launch_fused_sum
from counterpoint.tensor_parallel.kernel_matmul_all_reduce import matmul_all_reduce_kernel

GPU = torch.device("cuda", 0)
SUM = Problem("matmul_all_reduce", 4, 64, 64, 2)


class Kernel:
    """A Triton kernel as far as a launch needs it; notes what it is compiled for and given."""

    __name__ = "some_kernel"

    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self.arg_names, self.error = names, error
        self.warmed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.grids: list[tuple[int, int, int]] = []

    def warmup(self, *arguments: Any, **options: Any) -> "Kernel":
        if self.error:
            raise self.error
        self.warmed.append((arguments, options))
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, stream: self.launched.append(arguments)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of `sms` with room for `blocks` on each; it counts captures in relaxed mode."""
    facts = SimpleNamespace(sms=132, blocks=2, capturing=False, relaxed=0)

    def relaxed() -> Any:
        facts.relaxed += 1
        return nullcontext()

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: facts.capturing)
    monkeypatch.setattr(
        cuda, "get_device_properties",
        lambda _: SimpleNamespace(multi_processor_count=facts.sms),
    )  # fmt: skip
    monkeypatch.setattr(launch, "raw_stream", lambda _: 0)
    monkeypatch.setattr(launch, "limits_here", lambda _: None)
    monkeypatch.setattr(launch, "triton_footprint", lambda _: None)
    monkeypatch.setattr(launch, "occupancy", lambda *_: SimpleNamespace(blocks=facts.blocks))
    monkeypatch.setattr(launch.driver, "relaxed_capture", relaxed)
    return facts


def test_programs_share_the_work_evenly_and_are_never_none():
    draw = random.Random(0)
    cases = [(0, 0, 0), (0, 0, 200), (1, 0, 0), (1, 7, 8), (0, 7, 8), (128, 0, 200), (128, 0, 3)]
    cases += [(draw.randrange(3000), draw.randrange(40), draw.randrange(300)) for _ in range(3000)]
    for work, senders, resident in cases:
        programs = Grid(work, senders).programs(resident) - senders
        room = max(resident - senders, 1)
        assert 1 <= programs <= max(room, 1), (work, senders, resident)
        if not work:
            assert programs == 1
            continue
        rounds = -(-work // programs)
        assert rounds == -(-work // room), "more rounds than it takes"
        assert work > (rounds - 1) * programs, "a program has two items less than another"
        # where nobody waits all have one, and where only the GPU knows the work all there are
        assert Grid(work, each=True).programs(resident) == work
        assert Grid(None, senders).programs(resident) == max(resident, senders + 1)
    assert Grid(0, each=True).programs(8) == 1


def test_resident_blocks_are_those_beside_the_reserve(gpu: SimpleNamespace):
    found = [launch.resident_blocks(None, GPU, "op", Grid(9, reserve=r)) for r in (True, False)]
    assert found == [2 * (132 - RESERVED_SMS), 2 * 132]


@pytest.mark.parametrize(
    ("sms", "blocks", "senders", "reserve", "fits"),
    [
        (RESERVED_SMS + 1, 1, 0, True, True),
        (RESERVED_SMS, 1, 0, True, False),
        (8, 4, 0, True, False),  # fewer than are reserved
        (8, 4, 31, False, True),
        (8, 4, 32, False, False),  # senders, and nobody whom they send to
        (RESERVED_SMS + 8, 4, 31, True, True),
        (RESERVED_SMS + 8, 4, 32, True, False),
        (132, 0, 0, False, False),  # no block fits an SM
    ],
)
def test_a_grid_that_would_wait_for_itself_is_refused(
    gpu: SimpleNamespace, sms: int, blocks: int, senders: int, reserve: bool, fits: bool
):
    gpu.sms, gpu.blocks = sms, blocks
    grid = Grid(100, senders, reserve)
    if fits:
        resident = launch.resident_blocks(None, GPU, "op", grid)
        assert senders < grid.programs(resident) <= resident
        return
    beside = f" beside {RESERVED_SMS} reserved SMs" if reserve else ""
    with pytest.raises(UnsupportedError, match=f"^op: {senders + 1} blocks do not fit{beside}$"):
        launch.resident_blocks(None, GPU, "op", grid)


def launched(kernel: Kernel, given: tuple[str, ...], fixed: dict[str, Any]) -> Launch:
    return Launch(kernel, given, fixed, Grid(300), GPU, "op", {"num_warps": 4})


def test_arguments_reach_a_kernel_by_name(gpu: SimpleNamespace):
    kernel = Kernel("a", "b", "C", "d")
    made = launched(kernel, ("d", "a"), {"b": 2, "C": 3})
    made("dd", "aa")  # compiles itself where nobody has
    made("d", "a")
    assert kernel.launched == [("aa", 2, 3, "dd"), ("a", 2, 3, "d")]
    (warmed,) = kernel.warmed
    assert warmed == (("aa", 2, 3, "dd"), {"grid": (1,), "num_warps": 4})
    # 300 items for 200 blocks: two for each
    assert kernel.grids == [(150, 1, 1)] and made.programs == 150


def test_launches_in_a_row(gpu: SimpleNamespace):
    """Of a kernel that has been compiled, and one that has not; for a number of programs."""
    gpu.sms, gpu.blocks, grid = 1, 1, Grid(7, reserve=False, each=True)
    kernel = Kernel("a", "B")
    first, second = (Launch(kernel, ("a",), {"B": b}, grid, GPU, "op", {}) for b in (1, 2))
    first.compile("x")
    Launch.in_a_row([(first, ("x",)), (second, ("y",)), (first, ("z",))])
    assert kernel.launched == [("x", 1), ("y", 2), ("z", 1)] and len(kernel.warmed) == 2
    assert kernel.grids == [(7, 1, 1)] * 2


@pytest.mark.parametrize(
    ("given", "fixed", "wrong"),
    [(("a",), {}, "b"), (("a",), {"b": 1, "c": 2}, "c"), (("x",), {"a": 1, "b": 2}, "x")],
)
def test_arguments_that_a_kernel_has_not_are_refused(
    given: tuple[str, ...], fixed: dict[str, Any], wrong: str
):
    with pytest.raises(PlanError, match=rf"arguments of some_kernel differ: \['{wrong}'\]"):
        launched(Kernel("a", "b"), given, fixed)


@pytest.mark.parametrize("capturing", [False, True])
def test_what_is_new_in_a_capture_is_loaded_in_relaxed_mode(gpu: SimpleNamespace, capturing: bool):
    gpu.capturing = capturing
    launched(Kernel("a"), ("a",), {}).compile(1)
    assert gpu.relaxed == capturing


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(300_000, 232_448, "shared memory"), CompilationError("", None, "no"),
        PTXASError("Feature '.release' requires .target sm_70 or higher"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_compile_is_unsupported(gpu: SimpleNamespace, error: Exception):
    with pytest.raises(UnsupportedError, match=r"^op: its kernel does not fit: "):
        launched(Kernel("a", error=error), ("a",), {}).compile(1)


@dataclass
class Group:
    """A workspace of rank 0, as far as a plan that has not been compiled needs it.

    Args:
        has: compute capability of each rank's GPU.
    """

    has: Sequence[str]
    device: torch.device = GPU
    kernels_refused: str | None = None
    knowledge: Knowledge = field(default_factory=lambda: Knowledge(preset("h200-2"), {}))
    met: int = 0

    def gather(self, value: str) -> list[str]:
        self.met += 1
        assert value == kernels_refused(self.has[0])
        return [*map(kernels_refused, self.has)]

    def reserve(self, plan: Plan) -> None:
        raise AssertionError(f"{plan.spec} was not refused")


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def made(*has: str) -> Any:
        monkeypatch.setattr(device_limits, "capability_of", lambda _: has[0])
        device_limits.refused_on.cache_clear()
        return Group(has)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made  # type: ignore[misc]
    device_limits.refused_on.cache_clear()


OLD = [("7.5", "7.5"), ("7.5", "9.0"), ("9.0", "12.0")]
GRAPHED = [
    (op, spec)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for spec in operation_of(op).candidates(Problem(op, 4, 64, 64, 2))
]


@pytest.mark.parametrize("has", OLD, ids="+".join)
@pytest.mark.parametrize(("op", "spec"), GRAPHED, ids=" ".join)
def test_a_gpu_without_kernels_takes_serial_and_refuses_all_else(
    op: str, spec: str, has: tuple[str, ...], old_gpu: Callable[..., Any]
):
    """Before memory, compiler or GPU are asked; and on every rank, whoever has the old one."""
    problem, group = Problem(op, 4, 64, 64, 2), old_gpu(*has)
    assert choose_spec(problem, group, ()).spec == "serial"
    plan = build(problem, spec, preset("h200-2"))
    assert has_kernels(plan) == (spec != "serial")
    rank = has.index("9.0") ^ 1 if "9.0" in has else 0
    text = (
        rf"^{op}: plan {spec}.* does not run here: .* 8\.0, .*, not on {has[rank]} of rank {rank}$"
    )
    with pytest.raises(
        AssertionError if spec == "serial" else UnsupportedError,
        match="^serial was not refused$" if spec == "serial" else text,
    ):
        compile_plan(plan, group)
    assert group.met == 1, "ranks meet once"


def test_a_gpu_that_has_kernels_is_asked_once(old_gpu: Callable[..., Any]):
    group = old_gpu("9.0", "10.3")
    assert [device_limits.refused_in(group) for _ in range(2)] == ["", ""]
    assert group.met == 1
    here = old_gpu("9.0", "9.0")
    here.device = torch.device("cpu")
    assert not device_limits.refused_in(here) and not here.met


@pytest.mark.parametrize(
    ("op", "m", "ranks", "rows"),
    [
        ("all_gather_matmul", 8192, 2, [1024, 2048, 4096, 8192]),
        ("matmul_all_reduce", 8192, 2, [1024, 2048, 4096, 8192]),
        ("matmul_all_reduce", 64, 2, [64]),
        ("matmul_all_reduce", 64, 3, []),  # of so many ranks there is no plan but serial
    ],
)
def test_the_library_is_asked_for_tiles_that_a_plan_may_have(
    op: str, m: int, ranks: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    told: list[str] = []

    def gather(spec: str) -> list[str]:
        told.append(spec)
        return [spec, spec]

    monkeypatch.setattr(auto, "matmul_tile", lambda rows, *_: asked.append(rows))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    knowledge = Knowledge(preset(f"h200-{ranks}"), {})
    group: Any = SimpleNamespace(device=GPU, kernels_refused="", knowledge=knowledge, gather=gather)
    spec = choose_spec(Problem(op, m, 4096, 2048, ranks), group, ()).spec
    assert asked == rows and (spec == "serial") == (not rows) and told == [spec] * bool(rows)


def test_a_capture_asks_this_gpu_alone(
    old_gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    group = old_gpu("7.5", "9.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device_limits.refused_in(group).endswith("not on 7.5")
    assert group.kernels_refused is None and not group.met


def test_kernels_run_where_limits_of_an_sm_are_known():
    assert [f"sm_{c.replace('.', '')}" for c in CAPABILITIES] == [a for a in LIMITS if "sm" in a]
    assert not any(kernels_refused(c) for c in ("", *CAPABILITIES))
    named = [m.device.capability for m in PRESETS.values() if not m.source.count("MI")]
    assert set(named) <= {*CAPABILITIES} and len(named) == 6


def site_of(spec: str = "fused two_shot 16x32x3 warps=4", tag: int = 7, **step: Any) -> Site:
    memory = memories(2, 8192)[1]
    memory.workspace.timeout_s = 2.0
    plan = build(SUM, spec)
    (bound,) = bind(plan, 1).steps
    if step:
        bound = SimpleNamespace(step=SimpleNamespace(name="sum", arg=step.get))
    return Site(cast(Any, bound), places_of(memory, plan), tag)


def test_a_fused_sum_passes_all_arguments_and_compiles_for_both_layouts_of_w(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(*cast(Any, matmul_all_reduce_kernel).arg_names)
    monkeypatch.setattr(launch_fused_sum, "matmul_all_reduce_kernel", kernel)
    action = launch_fused_sum.prepare(site_of())
    named = [dict(zip(kernel.arg_names, each, strict=True)) for each, _ in kernel.warmed]
    assert [(each["stride_wk"], each["stride_wn"]) for each in named] == [(64, 1), (1, 64)]
    assert named[0]["x_ptr"] == named[0]["w_ptr"] == torch.bfloat16
    assert kernel.warmed[0][1] == {"grid": (1,), "num_warps": 4, "num_stages": 3}
    tensors = {"x": torch.zeros(4, 64), "w": torch.zeros(64, 64).t(), "y": torch.zeros(4, 64)}
    action(dict(tensors))
    assert len(kernel.warmed) == 2, "compiled at a call"
    given = dict(zip(kernel.arg_names, kernel.launched[0], strict=True))
    assert given["x_ptr"] is tensors["x"] and given["w_ptr"] is tensors["w"]
    assert given["bias_ptr"] is given["y_ptr"] is tensors["y"]
    expected = {
        "M": 4, "N": 64, "K": 64, "stride_xm": 64, "stride_wk": 1, "stride_wn": 64,
        "half_bytes": 4096, "rank": 1, "tag": 7, "timeout_ns": 2_000_000_000, "WORLD": 2,
        "SHOTS": 2, "SCATTER": False, "HAS_BIAS": False, "IN_ORDER": False, "OWN": 4,
        "BLOCK_N": 16, "BLOCK_K": 32,
        "EVEN_N": True, "EVEN_K": True, "STAGES": 3, "NUM_WARPS": 4,
    }  # fmt: skip
    assert {name: given[name] for name in expected} == expected
    # a rank alone may store w in another way, or x where Triton did not compile for
    odd = torch.zeros(4 * 64 + 1)[1:].view(4, 64)
    action({"x": odd, "w": torch.zeros(64, 128)[:, ::2], "y": tensors["y"]})
    given = dict(zip(kernel.arg_names, kernel.launched[1], strict=True))
    assert (given["stride_wk"], given["stride_wn"]) == (128, 2) and len(kernel.warmed) == 3
    assert given["x_ptr"].data_ptr() % launch.ALIGN == 0 and given["x_ptr"] is not odd


def test_a_fused_sum_is_compiled_for_w_as_the_first_call_has_it(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    kernel = Kernel(*cast(Any, matmul_all_reduce_kernel).arg_names)
    monkeypatch.setattr(launch_fused_sum, "matmul_all_reduce_kernel", kernel)
    x, y = torch.zeros(4, 64), torch.zeros(4, 64)
    rows, columns = torch.zeros(64, 64), torch.zeros(64, 64).t()
    odd = torch.zeros(64 * 64 + 1)[1:].view(64, 64)
    for first, later in ((columns, rows), (odd, columns)):
        del kernel.warmed[:], kernel.launched[:]
        action = launch_fused_sum.prepare(site_of()._replace(like={"x": x, "w": first, "y": y}))
        for w, known in ((first, 1), (later, 2), (first, 2)):
            action({"x": x, "w": w, "y": y})
            assert len(kernel.warmed) == known, "compiled too often, or for another w"
        named = [dict(zip(kernel.arg_names, each, strict=True)) for each, _ in kernel.warmed]
        found = [(each["stride_wk"], each["stride_wn"]) for each in named]
        assert found == [first.stride(), later.stride()] and named[0]["w_ptr"] is first


def test_a_step_runs_by_its_kernel_on_gpus_and_by_its_reference_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(launch, "_kernels", {})
    launch.register("mine", lambda _: "kernel", lambda _: "reference")
    site = site_of(kernel="mine")
    assert launch.fused_action(site) == "reference"
    monkeypatch.setattr(launch, "INTERPRETED", True)
    with pytest.raises(UnsupportedError, match="multiplies bf16 numbers wrongly"):
        launch.fused_action(site)
    whole = replace(site.places.plan, problem=replace(SUM, dtype="float16"))
    monkeypatch.setattr(site.places, "plan", whole)
    assert launch.fused_action(site) == "kernel"
    monkeypatch.setattr(launch, "INTERPRETED", False)
    site.places.workspace.device = GPU
    assert launch.fused_action(site) == "kernel"
    with pytest.raises(PlanError, match=r"step sum: no kernel 'other'"):
        launch.fused_action(site_of(kernel="other"))


class Compiled:
    """A kernel as Triton has compiled it: notes what is launched, and how."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, **more: object) -> None:
        self.calls: list[tuple[object, ...]] = []
        found = {"launch": lambda *given: self.calls.append(given), "launch_cooperative_grid": 0,
                 "launch_pdl": 1, "global_scratch_size": 0, "profile_scratch_size": 0}  # fmt: skip
        self.run = SimpleNamespace(**{k: v for k, v in (found | more).items() if v is not None})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, stream: self.calls.append(("plain", grid, given, stream))


def test_tritons_launcher_is_called_without_hooks_where_it_is_known():
    compiled = Compiled()
    run = launch.launcher(compiled, 7)
    run(3, 4, stream=9)
    direct = (7, 1, 1, 9, "function", 0, 1, None, None, "metadata", None, None, None, 3, 4)
    assert compiled.calls == [direct]
    hooks: Any = triton.knobs.runtime.launch_enter_hook  # pyright: ignore[reportAttributeAccessIssue]
    hooks.add(print)
    try:
        run(3, stream=9)
    finally:
        hooks.remove(print)
    plain = ("plain", (7, 1, 1), (3,), 9)
    assert compiled.calls == [direct, plain]
    with pytest.MonkeyPatch.context() as patch:
        for more in ({"profile_scratch_size": 8}, {"launch_pdl": None}):
            other = Compiled(**more)
            launch.launcher(other, 7)(3, stream=9)
            assert other.calls == [plain]
        patch.setattr(triton, "__version__", "3.8.0")
        other = Compiled()
        launch.launcher(other, 7)(3, stream=9)
        assert other.calls == [plain]
