"""What was done with a graph that torch takes from its cache, where no pass runs.

With a compiled graph torch keeps what its compilation added to `torch._dynamo.utils.counters`, and
adds that again when it takes the graph from its cache. A pass behind the last of torch's counts the
report of `OverlapPass` there, as JSON; at the end of a compilation it is taken out. It is in the
key of the graph as well, so what comes again is the report of the whole: forward and backward.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from torch import fx
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._inductor import custom_graph_pass

from counterpoint.adapters.explain import Report
from counterpoint.adapters.graph.depends_on import uuids_of
from counterpoint.adapters.graph.rewriter import depends

KEY = "counterpoint "
# passes that torch tells whether a graph is of inference; torch 2.11 has none
InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
Base: Any = InferenceAware or custom_graph_pass.CustomGraphPass


class Told(Protocol):
    """Who has reports of graphs."""

    def tell(self, report: Report) -> None:
        """Keep one more."""
        ...


class Retold(Base):
    """What `compile_options` hands to torch for the end of its passes.

    Args:
        told: who has the reports.
        before: the user's own passes in the same place; they run first.
    """

    def __init__(self, told: Told, before: Sequence[Any]) -> None:
        self._told, self._before = told, before
        self._report, self._context = "", None  # of the compilation that ran the first pass last
        self._echoes: Counter[str] = Counter()

    def __deepcopy__(self, memo: object) -> "Retold":
        return self

    def asked(self) -> None:
        """What torch takes from its cache from now on is told there."""
        global _asked  # of all passes of a process torch asks one at a time
        _asked = self
        if collect not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(collect)

    def note(self, report: Report) -> None:
        """Keep the report of the graph that is being compiled."""
        context: Any = TracingContext.try_get()
        self._report = report.to_json() if report.found else ""
        self._context = None if context is None else ref(context)
        if self._current():
            self._echoes[self._report] += 1

    def _current(self) -> str:
        """The report of the graph that is being compiled; "" before its first pass."""
        context = TracingContext.try_get()
        here = self._context is not None and context is not None and self._context() is context
        return self._report if here else ""

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        """Count the report, with the graph of the forward alone."""
        for each in self._before:
            asks = InferenceAware is not None and isinstance(each, InferenceAware)
            each(graph, **({"is_inference": is_inference} if asks else {}))
        if (text := self._current()) and not depends(graph):
            counters["inductor"][KEY + text] += 1

    def uuid(self) -> Any:
        """What torch's caches know this pass by."""
        before = uuids_of(self._before)
        return None if before is None else (KEY, before, self._current())

    def retell(self, text: str, times: int) -> None:
        """Tell what came from torch's cache; not what its own first pass has told."""
        own = min(times, self._echoes[text])
        self._echoes[text] -= own
        for _ in range(times - own):
            self._told.tell(Report.from_json(text))


_asked: Retold | None = None


def collect(*_: object) -> None:
    """Take reports out of torch's counters."""
    for key in [key for key in counters["inductor"] if str(key).startswith(KEY)]:
        times = counters["inductor"].pop(key)
        if _asked is not None:
            _asked.retell(key.removeprefix(KEY), times)
