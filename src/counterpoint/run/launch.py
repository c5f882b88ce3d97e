"""The one launcher of kernels that talk to their peers: compiled, resident, past Triton's binder.

A kernel that waits for its peers needs what it waits for to be running: so all that a call may
launch is compiled before the ranks meet, no more programs are launched than are on the GPU at once,
and SMs are left for a collective of another group, which may have been launched first elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from counterpoint.errors import PlanError, UnsupportedError
from counterpoint.gpu import driver
from counterpoint.gpu.device_limits import limits_here
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.gpu.occupancy import occupancy
from counterpoint.group.workspace import Action, Operands, Places
from counterpoint.plan.bind import BoundStep
from counterpoint.run.lanes_cuda import raw_stream

RESERVED_SMS = 32  # left to collectives of other groups, should they be there
ALIGN = 16  # bytes: what Triton compiles for, if an address is a multiple of it
INTERPRETED: bool = triton.knobs.runtime.interpret  # pyright: ignore
LAUNCHES_LIKE = "3.6."  # Triton whose launcher takes what `launcher` gives it
INTERPRETED_BLOCKS = 2  # resident where a program runs after the other: most have several tiles


@dataclass(frozen=True)
class Grid:
    """How many programs a kernel has.

    Args:
        work: items that programs share; a program each where all fit. None: only the GPU knows how
            many there are, and all programs that are resident take them in turn.
        senders: programs before those, that have none of them.
        reserve: SMs are left to other groups. A kernel that leaves none says why in its file.
        each: a program for each item, however many fit: of a kernel that waits for nobody.
    """

    work: int | None
    senders: int = 0
    reserve: bool = True
    each: bool = False

    def programs(self, resident: int) -> int:
        """Programs of which `resident` can be at once: equal work for each, and never none."""
        if self.work is None:
            return max(resident, self.senders + 1)
        if self.each:
            return max(1, self.work)
        room = max(resident - self.senders, 1)
        rounds = -(-self.work // room)
        return self.senders + max(1, -(-self.work // max(rounds, 1)))


class Launch:
    """One kernel with all arguments that do not change from call to call.

    Args:
        kernel: Triton's.
        given: names of the arguments that each call passes, in its order.
        fixed: all other arguments by name.
        grid: how many programs share what.
        device: it runs on.
        name: of the operator, for errors.
        options: of Triton: num_warps, num_stages.

    Raises:
        PlanError: arguments are missing, or are none of the kernel.
    """

    def __init__(
        self, kernel: Any, given: Sequence[str], fixed: Mapping[str, Any], grid: Grid,
        device: torch.device, name: str, options: Mapping[str, int],
    ) -> None:  # fmt: skip
        names: list[str] = list(kernel.arg_names)
        if different := {*given, *fixed} ^ set(names):
            raise PlanError(name, f"arguments of {kernel.__name__} differ: {sorted(different)}")
        self._kernel, self._grid, self._device, self._name = kernel, grid, device, name
        self._options = dict(options)
        self._places = [names.index(each) for each in given]
        self._template = [fixed.get(each) for each in names]
        self._fixed = fixed  # once compiled, the template has no more than addresses
        self._compiled: Any = None
        self._run: Callable[..., None] | None = None
        self.programs = grid.programs(INTERPRETED_BLOCKS)

    def compile(self, *given: object) -> "Launch":
        """Compile and load for arguments like these, tensors or their dtypes; launches nothing.

        Raises:
            UnsupportedError: no block of it fits this GPU, or it does not compile for it.
        """
        if INTERPRETED:
            return self
        arguments = self._arguments(given)
        capturing = torch.cuda.is_current_stream_capturing()
        with driver.relaxed_capture() if capturing else nullcontext():
            try:
                compiled = self._kernel.warmup(*arguments, grid=(1,), **self._options)
                resident = resident_blocks(compiled, self._device, self._name, self._grid)
            except (OutOfResources, CompilationError, PTXASError) as error:
                raise UnsupportedError(f"{self._name}: its kernel does not fit: {error}") from error
        self.programs = self._grid.programs(resident)
        self._compiled, self._run = compiled, launcher(compiled, self.programs)
        # the binder asks the driver about each tensor, at each launch
        self._template = [v.data_ptr() if isinstance(v, Tensor) else v for v in self._template]
        return self

    def over(self, work: int) -> "Launch":
        """The same kernel for so many items, where each has a program: not compiled again."""
        assert self._grid.each
        found = copy(self)
        found._grid = Grid(work, reserve=self._grid.reserve, each=True)
        found.programs = found._grid.programs(0)
        if self._compiled is not None:
            found._run = launcher(self._compiled, found.programs)
        return found

    def __call__(self, *given: object) -> None:
        """Launch on the current stream; tensors lie as those that it was compiled for."""
        if self._run is None:
            if not INTERPRETED:
                self.compile(*given)
                return self(*given)
            self._kernel[(self.programs,)](*self._arguments(given), **self._options)
            return None
        arguments = self._template.copy()
        for place, value in zip(self._places, given, strict=True):
            arguments[place] = value
        self._run(*arguments, stream=raw_stream(self._device.index))
        return None

    @staticmethod
    def in_a_row(launches: "Sequence[tuple[Launch, tuple[object, ...]]]") -> None:
        """Launch kernels, each with its arguments, one after another on the current stream."""
        for launch, given in launches:
            if launch._run is None:
                launch(*given)
                continue
            arguments = launch._template.copy()
            for place, value in zip(launch._places, given, strict=True):
                arguments[place] = value
            launch._run(*arguments, stream=raw_stream(launch._device.index))

    def _arguments(self, given: Sequence[object]) -> list[Any]:
        arguments = self._template.copy()
        for place, value in zip(self._places, given, strict=True):
            arguments[place] = value
        return arguments


def launcher(compiled: Any, programs: int) -> Callable[..., None]:
    """compiled[(programs, 1, 1)], without what Triton makes at each launch for hooks of nobody.

    It takes half the host's time. What it calls is private to Triton: of versions that nobody has
    tried, and of AMD's, its own way is taken.
    """
    plain, own = compiled[(programs, 1, 1)], getattr(compiled, "run", None)
    names = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size",
             "profile_scratch_size")  # fmt: skip
    if not (triton.__version__.startswith(LAUNCHES_LIKE) and hasattr(own, "launch_pdl")):
        return plain
    knobs: Any = triton.knobs.runtime  # pyright: ignore
    launch, *options, of_all, of_profile = (getattr(own, name) for name in names)
    if of_all or of_profile:  # memory that Triton takes for each launch
        return plain
    function, metadata = compiled.function, compiled.packed_metadata

    def run(*arguments: object, stream: int) -> None:
        if knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls:
            plain(*arguments, stream=stream)
        else:
            launch(programs, 1, 1, stream, function, *options, None, None, metadata, None, None,
                   None, *arguments)  # fmt: skip

    return run


def resident_blocks(compiled: Any, device: torch.device, name: str, grid: Grid) -> int:
    """Blocks of a compiled Triton kernel that are on the GPU at once, beside the reserve.

    Raises:
        UnsupportedError: senders and one more do not fit, or nobody knows this architecture.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    sms -= RESERVED_SMS if grid.reserve else 0
    blocks = occupancy(triton_footprint(compiled), limits_here(device)).blocks * sms
    if blocks < (1 if grid.work is None else grid.senders + 1):
        beside = f" beside {RESERVED_SMS} reserved SMs" if grid.reserve else ""
        raise UnsupportedError(f"{name}: {grid.senders + 1} blocks do not fit{beside}")
    return blocks


At = int | Tensor  # where something begins, as kernels are given it


def at(tensor: Tensor, start: int) -> At:
    """Where tensor[start:] begins, without making it: its address, or interpreted that tensor."""
    return tensor[start:] if INTERPRETED else tensor.data_ptr() + start * tensor.itemsize


def aligned(tensor: Tensor) -> bool:
    """Whether Triton compiles for an address like this one's."""
    return tensor.data_ptr() % ALIGN == 0


Fixed = tuple[tuple[str, int], ...]  # arguments that do not change, by name


def launch_alone(
    kernel: Any, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], fixed: Fixed,
    launched: tuple[int, int], name: str,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream.

    Args:
        kernel: Triton's; its arguments are tensors, then sizes that it is not specialized for.
        tensors: those that it writes have no gaps, and begin at a multiple of 16 bytes.
        fixed: all other arguments.
        launched: programs, and warps of each.
        name: of the operator, for errors.

    Raises:
        UnsupportedError: it does not fit this GPU.
    """
    given = [t if t.is_contiguous() and aligned(t) else _placed(t) for t in tensors]
    device = given[0].device
    known = kernel, tuple(t.dtype for t in given), len(sizes), fixed, launched, device, name
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_of(*known)(*given, *sizes)
    else:
        launch_of(*known)(*given, *sizes)


def _placed(t: Tensor) -> Tensor:
    """Without gaps, from a multiple of 16 bytes on."""
    t = t.contiguous()
    return t if aligned(t) else t.clone()


@lru_cache(maxsize=1024)
def launch_of(
    kernel: Any, dtypes: tuple[torch.dtype, ...], sizes: int, fixed: Fixed,
    launched: tuple[int, int], device: torch.device, name: str,
) -> Launch:  # fmt: skip
    """The kernel, compiled for tensors like these, with `sizes` numbers behind them."""
    programs, num_warps = launched
    known = dict(fixed)
    given = tuple(each for each in kernel.arg_names if each not in known)
    grid = Grid(programs, reserve=False, each=True)
    launch = Launch(kernel, given, known, grid, device, name, {"num_warps": num_warps})
    return launch.compile(*dtypes, *(0,) * sizes)


class Site(NamedTuple):
    """Where a fused step stands: in a program of one rank, compiled for its workspace.

    Args:
        bound: the step.
        places: of the boxes that it reads and writes.
        tag: that a fault word names it by.
        like: the operands of the first call, which kernels are compiled for; None: not known yet.
    """

    bound: BoundStep
    places: Places
    tag: int
    like: Operands | None = None


# what a fused action writes and nobody reads after it, by name. It is made before the action runs,
# as what is made while a graph is captured stays with the graph
Temporaries = Callable[[Operands], Operands]
temporaries: "WeakKeyDictionary[Action, Temporaries]" = WeakKeyDictionary()


class Kernel(NamedTuple):
    """How a fused step of one name runs; see `register`."""

    prepare: "Callable[[Site], Action]"
    reference: "Callable[[Site], Action]"


_kernels: dict[str, Kernel] = {}


def register(
    name: str, prepare: "Callable[[Site], Action]", reference: "Callable[[Site], Action]"
) -> None:
    """Say how steps run whose kernel has that name: called once, by `ops/<name>.py`.

    Args:
        prepare: compiles the kernel for a step, and returns its launch.
        reference: the same by torch and gloo, for CPU ranks that do not interpret kernels.
    """
    _kernels[name] = Kernel(prepare, reference)


def fused_action(site: Site) -> Action:
    """What runs a fused step, compiled where it is a kernel.

    Raises:
        PlanError: no operator has registered the step's kernel.
        UnsupportedError: the kernel does not fit this GPU, or would be wrong in the interpreter.
    """
    name, plan = str(site.bound.step.arg("kernel")), site.places.plan
    if name not in _kernels:
        raise PlanError(plan.spec, f"no kernel {name!r}", step=site.bound.step.name)
    # drop when a Triton interprets tl.dot of bf16 numbers as they are
    if INTERPRETED and plan.problem.k and plan.problem.dtype == "bfloat16":
        raise UnsupportedError(
            f"plan {plan.spec}: Triton's interpreter multiplies bf16 numbers wrongly; "
            "use fp16 or fp32"
        )
    on_gpu = site.places.workspace.device.type == "cuda"
    kernel = _kernels[name]
    return (kernel.prepare if on_gpu or INTERPRETED else kernel.reference)(site)
