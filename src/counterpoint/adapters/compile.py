"""torch.compile of a model that stays as it is: its tensor-parallel collectives overlap.

    model = torch.compile(model, options=cp.compile_options())
    print(cp.explain(model))

A pass over torch's joint graph, which has forward and backward, replaces collectives and the
matmuls beside them by operators, whose plans are chosen when they run, serial included. What it
leaves is torch's, as it was.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from counterpoint.adapters import find, rewrite
from counterpoint.adapters.explain import Report
from counterpoint.errors import CounterpointWarning, InputError, UnsupportedError
from counterpoint.runtime.ranks import group_of

try:
    from torch._inductor import config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
except ImportError as error:
    what = f"torch {torch.__version__} has no torch._inductor.custom_graph_pass"
    raise UnsupportedError(f"compile_options: {what}; it needs torch 2.11 or newer") from error

SEAM = "joint_custom_post_pass"
logger = logging.getLogger(__name__)


class OverlapPass(CustomGraphPass):
    """What `compile_options` hands to torch.

    Args:
        before: a pass of the user's own in the same place; it runs first.
        merge_reductions: see `compile_options`.
    """

    def __init__(self, before: Any, merge_reductions: bool) -> None:
        self.reports: list[Report] = []
        self._before = before
        self._merge = merge_reductions

    def __deepcopy__(self, memo: object) -> "OverlapPass":
        return self  # torch copies its options; what is reported stays in one place

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a joint graph, or one of inference, in place."""
        if self._before is not None:
            self._before(graph)
        groups = _groups(graph)
        found = rewrite.rewrite(graph, groups, merge_reductions=self._merge)
        report = Report.of(found)
        self.reports.append(report)
        if found:
            logger.info("%s", report)
        if found and not report.matched:
            what = f"compile_options: {report.nearest_miss()}"
            warnings.warn(what, CounterpointWarning, stacklevel=2)

    def uuid(self) -> Any:
        """What torch's caches of compiled graphs know this pass by; None: they are not used."""
        before = None
        if self._before is not None:
            before = getattr(self._before, "uuid", lambda: None)()
            if before is None:
                return None
        return get_hash_for_files(rewrite.FILES, f"{before} {self._merge}")


def compile_options(
    options: Mapping[str, Any] | None = None, *, merge_reductions: bool = False
) -> dict[str, Any]:
    """Options for torch.compile, by which a model's collectives overlap with their matmuls.

    The model is torch's own, sharded by `parallelize_module`. Its all-gathers, reduce-scatters and
    all-reduces that stand beside matmuls, forward and backward, become operators of this library;
    the rest stays torch's. Results change by the order of summation only. `explain` says what was
    done with each.

    In inference (`torch.no_grad` or `torch.inference_mode`) an operator also applies the activation
    behind what it gathers and multiplies, unless that is predicted to be slower: ReLU, SiLU or GELU
    of one product, or such a gate times up, of two weights or of one that is chunked. And other
    all-reduces before a norm become one operator with it: by RMS as `torch.nn` or transformers
    write it, or a LayerNorm.

    Args:
        options: further options of torch.compile. A pass of yours at "joint_custom_post_pass",
            here or in torch's own configuration, runs before ours.
        merge_reductions: sum before an all-reduce where torch sums two all-reduces, as for the
            gradients of layers that share an input. Fewer collectives, with other rounding.

    Returns:
        For `torch.compile(model, options=...)` or `model.compile(options=...)`.

    Raises:
        InputError: an argument is wrong.
        UnsupportedError: this torch has no place for a pass.

    Example:
        >>> model = torch.compile(model, options=counterpoint.compile_options())  # doctest: +SKIP
    """
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore
        raise InputError("compile_options", "options", want="a mapping", got=type(options).__name__)
    if type(merge_reductions) is not bool:
        want = "True or False"
        raise InputError("compile_options", "merge_reductions", want=want, got=merge_reductions)
    if not hasattr(inductor, SEAM):
        what = f"torch {torch.__version__} has no torch._inductor.config.{SEAM}"
        raise UnsupportedError(f"compile_options: {what}; it needs torch 2.11 or newer")
    found = dict(options or {})
    before = found.get(SEAM, getattr(inductor, SEAM))
    if before is not None and not callable(before):
        raise InputError("compile_options", SEAM, want="a pass that can be called", got=before)
    if isinstance(before, OverlapPass):
        before = None
    found[SEAM] = OverlapPass(before, merge_reductions)
    return found


def _groups(graph: fx.Graph) -> dict[str, dist.ProcessGroup]:
    """The groups of a graph's collectives whose ranks are on one host, by name."""
    names = {
        str(node.args[-1]) for node in graph.nodes
        if node.target in find.KINDS
    }  # fmt: skip
    found: dict[str, dist.ProcessGroup] = {}
    for name in names:
        try:
            group = group_of(name)
        except (InputError, UnsupportedError):
            continue
        if on_one_host(group):
            found[name] = group
    return found


def on_one_host(group: dist.ProcessGroup) -> bool:
    """As torchrun says; without it a host has as many ranks as GPUs, or all on CPUs."""
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return len({rank // local for rank in dist.get_process_group_ranks(group)}) == 1
