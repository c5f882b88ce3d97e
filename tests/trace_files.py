"""Traces as torch.profiler writes them, made by hand, so that each number has a known answer."""

import json
from pathlib import Path
from typing import Any, Self


class TraceFile:
    """Events of a trace, in microseconds.

    Args:
        rank, world: of the file.
        zero: added to all times: files count from when the machine started, or from 1970.
    """

    def __init__(self, rank: int = 0, world: int = 1, zero: float = 1e12) -> None:
        self.rank, self.world, self.zero = rank, world, zero
        self.events: list[dict[str, Any]] = []
        self.launches = 0

    def event(self, category: str, name: str, start: float, lasts: float, **args: Any) -> Self:
        """Any event that has a start and an end."""
        self.events.append({
            "ph": "X", "cat": category, "name": name, "pid": 0, "tid": args.pop("tid", 1),
            "ts": self.zero + start, "dur": lasts, "args": args,
        })  # fmt: skip
        return self

    def gpu(
        self, name: str, start: float, lasts: float, *, asked: float | None = None, stream: int = 7,
        category: str = "kernel", tid: int = 1, **args: Any,
    ) -> Self:  # fmt: skip
        """What the GPU runs, and the launch that asked for it, which ended at `asked`."""
        self.launches += 1
        if asked is not None:
            self.event("cuda_runtime", "cudaLaunchKernel", asked - 2, 2, tid=tid,
                       correlation=self.launches)  # fmt: skip
        given: dict[str, Any] = {"device": 0, "stream": stream, "correlation": self.launches}
        given |= {"grid": [64, 1, 1]} if category.lower() == "kernel" else {}
        return self.event(category, name, start, lasts, **{**given, **args})

    def collective(
        self, kind: str, start: float, lasts: float, *, elements: int = 0, ranks: int = 0,
        group: str = "", blocks: int = 16, **options: Any,
    ) -> Self:  # fmt: skip
        """NCCL's kernel, with what the profiler says of it where `ranks` are given."""
        said = {
            "Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements,
            "dtype": "BFloat16", "Group size": ranks, "Process Group Description": group,
        } if ranks else {}  # fmt: skip
        name = f"ncclDevKernel_{kind.replace('_', '')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return self.gpu(
            name, start, lasts, stream=options.pop("stream", 20), grid=[blocks, 1, 1], **said,
            **options,
        )  # fmt: skip

    def step(self, number: int, start: float, lasts: float) -> Self:
        """The profiler's mark."""
        return self.event("user_annotation", f"ProfilerStep#{number}", start, lasts)

    def write(self, path: Path, **facts: Any) -> Path:
        """Write the file."""
        content = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            **facts, "traceEvents": self.events, "traceName": "made by hand",
        }  # fmt: skip
        path.write_text(json.dumps(content))
        return path
