"""Run a program: one entry for CPU ranks and GPUs.

A plan is compiled once for a workspace; running it then only fills in the operands.
"""

from types import MappingProxyType
from typing import Protocol

from counterpoint.errors import UnsupportedError
from counterpoint.gpu.device_limits import refused_in
from counterpoint.group.workspace import Operands, Workspace
from counterpoint.plan.bind import Program, bind
from counterpoint.plan.launches import has_kernels
from counterpoint.plan.steps import OWN_PROTOCOL, Plan
from counterpoint.run.compute import Calls
from counterpoint.run.fused import fused_memory
from counterpoint.run.launch import INTERPRETED


class Code(Protocol):
    """A program compiled for one workspace."""

    program: Program
    workspace: Workspace

    @property
    def chains(self) -> bool:
        """Whether calls may be launched together with others that follow them: see `launch`."""
        ...

    def run(self, operands: Operands) -> None:
        """Run one call in stream order.

        Args:
            operands: the user's tensors by buffer name, each 2-D as the plan states.

        Raises:
            PeerTimeoutError: a peer did not signal in time; the group is unusable.
        """
        ...

    def temporaries_of(self, operands: Operands) -> Operands:
        """What a call writes and nobody reads after it, by name; of code that chains."""
        ...

    def launch(self, operands: Operands) -> None:
        """Launch a call on the current stream, of code that chains; its temporaries are operands.

        It neither follows the group's last call nor looks for faults: that is for whoever launches
        all that is chained.
        """
        ...


def compile_plan(
    plan: Plan, workspace: Workspace, calls: Calls = MappingProxyType({}),
    like: Operands | None = None,
) -> Code:  # fmt: skip
    """Bind `plan` for this rank and compile it; collective when the workspace has to grow.

    Args:
        plan: proved, or built by this library.
        workspace: of its group, on the device that it is to run on.
        calls: of each opaque step, by its name: launches on the current stream.
        like: operands of the first call, for kernels that are compiled for what lies how.

    Raises:
        UnsupportedError: it has kernels of ours, and the GPU of a rank does not run them.
    """
    if has_kernels(plan) and (why := refused_in(workspace)):
        raise UnsupportedError(f"{plan.problem.op}: plan {plan.spec} does not run here: {why}")
    workspace.reserve(plan)
    kernels = workspace.device.type == "cuda" or INTERPRETED
    if kernels and any(b.space in OWN_PROTOCOL for b in plan.buffers):
        fused_memory(workspace).reserve(plan)
    program = bind(plan, workspace.rank)
    # imported here: a CPU build of torch has no use for the CUDA half
    if workspace.device.type == "cuda":
        from counterpoint.run.execute_cuda import CudaCode

        return CudaCode(program, workspace, calls, like)
    from counterpoint.run.execute_cpu import CpuCode

    return CpuCode(program, workspace, calls, like)
