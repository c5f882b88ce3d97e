"""Triton kernels in another shape: through the numbers by which each of their launches is made."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from counterpoint.errors import UnsupportedError
from counterpoint.gpu import graph_nodes
from counterpoint.gpu.footprint import triton_footprint
from counterpoint.gpu.limits import SmLimits
from counterpoint.resources.shape import ALL_SHARED_MEMORY, Shape, allowing, refusal


@contextmanager
def triton_launches(
    kernels: Sequence[Any], shape: Shape, limits: SmLimits
) -> Generator[dict[str, int]]:
    """Launch Triton kernels in another shape, while the context is entered.

    Triton reads the shared memory of a launch from the compiled kernel at each launch; the number
    is changed there and brought back.

    Args:
        kernels: compiled: what `kernel[grid](...)` returns.
        shape: of all of them.
        limits: of the SMs.

    Yields:
        Dynamic shared memory of each kernel, by its name.

    Raises:
        InputError: what is passed is no compiled kernel, or cannot be brought to this shape.
        UnsupportedError: a kernel cannot be shaped, and why; or this Triton keeps its launches
            otherwise.
    """
    with ExitStack() as undo:
        found: dict[str, int] = {}
        for kernel, of in [(k, triton_footprint(k)) for k in kernels]:
            why = refusal(of, limits)
            if why:
                raise UnsupportedError(f"shape: {of.short_name} cannot be shaped: {why}")
            num_bytes = shape.bytes_of(of, limits)
            function = int(kernel.function)
            undo.enter_context(allowing(function, of, limits))
            if shape.carve_out:
                before = graph_nodes.prefer_carve_out(function, ALL_SHARED_MEMORY)
                undo.callback(graph_nodes.prefer_carve_out, function, before)
            undo.callback(_launch_with(kernel, num_bytes))
            found[of.short_name] = num_bytes
        yield found


# of a function that is shaped: its own launch numbers, and those of all who have shaped it
_launches: dict[int, tuple[tuple[int, ...], dict[object, tuple[int, ...]]]] = {}


def _launch_with(kernel: Any, num_bytes: int) -> Callable[[], None]:
    """Launch a compiled kernel with this much shared memory; what undoes it, in any order.

    Its launch numbers are private to Triton 3.6: (num_warps, num_ctas, shared memory).
    """
    function, packed, metadata = (
        int(kernel.function),
        tuple(kernel.packed_metadata),
        kernel.metadata,
    )
    if function not in _launches and packed != (
        metadata.num_warps, metadata.num_ctas, metadata.shared
    ):  # fmt: skip
        raise UnsupportedError(f"shape: this Triton launches by {packed}; Triton 3.6 is known")
    own, shaped = _launches.setdefault(function, (packed, {}))
    mine = object()
    shaped[mine] = kernel.packed_metadata = (*own[:2], num_bytes)

    def undo() -> None:
        del shaped[mine]
        kernel.packed_metadata = [own, *shaped.values()][-1]
        if not shaped:
            del _launches[function]

    return undo
