"""Unmodified models under torch.compile: what is matched, and that results stay what they are."""

import pytest
import torch
from compiled import leaves_of, overlap_pass, quick, step
from on_ranks import on_ranks
from rank_bodies import by_reference
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.blocks import DECODE, NAMES, Sizes, made
from counterpoint.measure.timing import relative_error

COLLECTIVES = {"llama": 8, "mixtral": 14, "gpt2": 8, "llama tp": 7, "mixtral tp": 16, "gpt2 tp": 6,
               DECODE: 2}  # fmt: skip


def errors(
    ranks: int, name: str, batch: int, dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Of all results of a step on this rank against fp64: torch's compile, and with the pass."""
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = Sizes(batch=batch)

    def results(dtype: torch.dtype, backend: object) -> list[torch.Tensor]:
        model, x = made(name, sizes, mesh, dtype=dtype)
        leaves = leaves_of(model, x) if name != DECODE else []
        compiled = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        with torch.set_grad_enabled(bool(leaves)):
            return step(compiled, x, leaves)

    want = results(torch.float64, None)
    with quick() as plain:
        torchs = results(dtype, plain)
    overlap = overlap_pass()
    with quick(overlap) as backend:
        ours = results(dtype, backend)
    (report,) = overlap.reports
    form = name.replace(" checkpoint", "").replace(" selective", "")
    assert report.matched == len(report.found) == COLLECTIVES[form], str(report)
    if not name.endswith("tp"):
        less = "checkpoint" not in name  # what is gathered is computed again there anyhow
        assert backend.saved_bytes <= plain.saved_bytes - less, (backend, plain)
    return ([relative_error(a, b) for a, b in zip(torchs, want, strict=True)],
            [relative_error(a, b) for a, b in zip(ours, want, strict=True)])  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_all_collectives_match_and_results_stay(rank: int, world_size: int, name: str):
    with by_reference():
        torchs, ours = errors(world_size, name, 2, torch.float32)
    for theirs, mine in zip(torchs, ours, strict=True):
        assert mine <= 2 * theirs + 1e-7, (mine, theirs)
