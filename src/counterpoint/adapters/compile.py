"""torch.compile of a model that stays as it is: its tensor-parallel collectives overlap.

    model = torch.compile(model, options=cp.compile_options())
    print(cp.explain(model))

A pass over torch's joint graph, which has forward and backward, replaces collectives and the
matmuls beside them by operators, whose plans are chosen when they run, serial included. What it
leaves is torch's, as it was.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx

from counterpoint.adapters.explain import Report
from counterpoint.adapters.graph import find, rewrite
from counterpoint.adapters.graph.depends_on import facts, uuids_of
from counterpoint.adapters.graph.retold import Retold, collect
from counterpoint.errors import CounterpointWarning, InputError, UnsupportedError
from counterpoint.group.ranks import group_of
from counterpoint.log import with_rank

try:
    from torch._inductor import config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass
except ImportError as error:
    what = f"torch {torch.__version__} has no torch._inductor.custom_graph_pass"
    raise UnsupportedError(f"compile_options: {what}; it needs torch 2.11 or newer") from error

# before torch pads matmuls: each rank measures whether that pays, and ranks would see other graphs
SEAM, LAST = "joint_custom_pre_pass", "post_grad_custom_post_pass"
logger = logging.getLogger(__name__)
logger.addFilter(with_rank)


class OverlapPass(CustomGraphPass):
    """What `compile_options` hands to torch.

    Args:
        before: the user's own passes in the same place; they run first.
        merge_reductions: see `compile_options`.
        last: the user's own passes at the end of all.
    """

    def __init__(
        self, before: Sequence[Any], merge_reductions: bool, last: Sequence[Any] = ()
    ) -> None:
        self._reports: list[Report] = []
        self.retold = Retold(self, last)
        self._before = before
        self._merge = merge_reductions

    def __deepcopy__(self, memo: object) -> "OverlapPass":
        return self  # torch copies its options; what is reported stays in one place

    @property
    def reports(self) -> list[Report]:
        """Of each graph so far, those from torch's cache among them."""
        collect()
        return self._reports

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a joint graph, or one of inference, in place."""
        self.retold.asked()
        for each in self._before:
            each(graph)
        groups = _groups(graph)
        if groups:
            _remove_no_ops(graph)
        report = Report.of(rewrite.rewrite(graph, groups, merge_reductions=self._merge))
        self.retold.note(report)
        self.tell(report)

    def tell(self, report: Report) -> None:
        """Keep what was done with the collectives of a graph, and say it."""
        self._reports.append(report)
        if report.found:
            logger.info("%s", report)
        if report.found and not report.matched:
            what = f"compile_options: {report.nearest_miss()}"
            warnings.warn(what, CounterpointWarning, stacklevel=2)

    def uuid(self) -> Any:
        """What torch's caches of compiled graphs know this pass by; None: they are not used."""
        self.retold.asked()
        found, before = facts(), uuids_of(self._before)
        return None if found is None or before is None else (*found, before, self._merge)


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
        options: further options of torch.compile. Passes of yours at "joint_custom_pre_pass" or
            "post_grad_custom_post_pass", here or in torch's own configuration, run before ours.
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
    missing = [seam for seam in (SEAM, LAST) if not hasattr(inductor, seam)]
    if missing:
        what = f"torch {torch.__version__} has no torch._inductor.config.{missing[0]}"
        raise UnsupportedError(f"compile_options: {what}; it needs torch 2.11 or newer")
    found = dict(options or {})
    overlap = OverlapPass(_passes(found, SEAM), merge_reductions, _passes(found, LAST))
    return found | {SEAM: overlap, LAST: overlap.retold}


def _passes(options: Mapping[str, Any], seam: str) -> tuple[Any, ...]:
    """The user's own passes in one place: none, one, or from torch 2.13 on a list of them.

    Raises:
        InputError: something else is there.
    """
    given = options.get(seam, getattr(inductor, seam))
    given = given if isinstance(given, list | tuple) else [] if given is None else [given]
    passes: tuple[Any, ...] = tuple(cast(Sequence[Any], given))
    for each in passes:
        if not callable(each):
            raise InputError("compile_options", seam, want="a pass that can be called", got=each)
    return tuple(each for each in passes if not isinstance(each, OverlapPass | Retold))


def _remove_no_ops(graph: fx.Graph) -> None:
    """Do what torch does next: slices of dynamic sizes hide matmuls."""
    # not at the top: it imports what warns; a compiler that calls this has imported it
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(graph)


def _groups(graph: fx.Graph) -> dict[str, dist.ProcessGroup]:
    """The groups of a graph's collectives, by name."""
    names = {
        str(node.args[-1]) for node in graph.nodes
        if node.target in find.KINDS
    }  # fmt: skip
    found: dict[str, dist.ProcessGroup] = {}
    for name in names:
        with suppress(InputError, UnsupportedError):
            found[name] = group_of(name)
    return found
