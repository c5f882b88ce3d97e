"""Which way of embedding bags is fastest where: what the rule in launch_embedding.py stands on.

    torchrun --nproc-per-node=4 benchmarks/embedding_ways.py

Prints, for tables and poolings, the milliseconds of the lookup alone and of the fused kernel by
each way, and those of only reading the same rows.
"""

import argparse
import faulthandler
from collections.abc import Callable
from itertools import count

import torch
from embedding import ROWS, Case, made, tables_of
from embedding_floors import gathers
from torch import Tensor

from counterpoint.cli.launch import nccl_group
from counterpoint.measure.timing import rotate
from counterpoint.ops.pooled_outputs import PooledOutputs
from counterpoint.runtime.embedding_layout import Facts, Way, way_for
from counterpoint.runtime.fused import fused_memory
from counterpoint.runtime.launch_embedding import Lookup, Sender, place_of
from counterpoint.runtime.workspace import workspace_of

WAYS = (Way(8192, 1, 4), Way(8192, 2, 8), Way(4096, 1, 4), Way(4096, 2, 4), Way(4096, 4, 4),
        Way(2048, 4, 4), Way(2048, 8, 4), Way(1024, 8, 2))  # fmt: skip
POOLINGS = (1, 2, 5, 10, 20, 100)
TABLES = ((8, 128), (64, 64), (16, 256))


def main() -> None:
    """Time every way; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16384)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(150, exit=True)
    with nccl_group() as (group, device):
        workspace = workspace_of(group, device)
        rank, ranks = group.rank(), group.size()
        memory = fused_memory(workspace)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        for t, d in TABLES:
            tables = tables_of([ROWS] * t, d, device)
            for pooling in POOLINGS:
                dims = [(d,) * t] * ranks
                case = made("", dims, args.batch, tables, (pooling,) * t, group, 0)
                layout = case.layout
                facts = Facts(layout, False, None, torch.int64, torch.int64)
                out = PooledOutputs(layout.columns, layout.dtype, layout.batch, group=group)
                place = place_of(memory, layout, own_outputs=True)
                sent = torch.empty(args.batch, t * d, dtype=layout.dtype, device=device)
                arms: dict[str, Callable[[], object]] = {}
                for way in WAYS:
                    name = f"{way.tile_bytes}x{way.unroll}x{way.num_warps}"
                    lookup = Lookup(facts, rank, device, way)
                    arms[f"lookup {name}"] = _lookup(lookup, case, sent)
                    sender = Sender(facts, memory, place, 0, way)
                    arms[f"fused {name}"] = _fused(sender, case, out)
                edges = case.offsets[:: layout.num_bags].contiguous()
                for name, arm in gathers(tables, case.sets, edges, sms).items():
                    arms[name] = _read(arm)
                times = rotate(arms, group=group, device=device, rounds=7, soak_s=0.05)
                if rank == 0:
                    kinds = ("lookup", "fused", "gather")
                    taken = way_for(case.sets[0].numel(), args.batch * t)
                    name = f"{taken.tile_bytes}x{taken.unroll}x{taken.num_warps}"
                    head = f"{t} tables, D {d}, pooling {pooling}, batch {args.batch}"
                    print(f"{head}; the rule takes {name}")
                    for kind in kinds:
                        some = {n: times[n].median_s * 1e3 for n in times if n.startswith(kind)}
                        best = min(some, key=lambda n: some[n])
                        text = ", ".join(f"{n.split()[1]} {s:.3f}" for n, s in some.items())
                        print(f"  {kind}: {text}; best {best.split()[1]}", flush=True)
                del out, arms


def _lookup(lookup: Lookup, case: Case, sent: Tensor) -> Callable[[], object]:
    calls = count()
    return lambda: lookup(
        case.tables, case.sets[next(calls) % len(case.sets)], case.offsets, None, sent
    )


def _read(arm: Callable[[int], object]) -> Callable[[], object]:
    calls = count()
    return lambda: arm(next(calls))


def _fused(sender: Sender, case: Case, out: PooledOutputs) -> Callable[[], object]:
    calls = count()

    def run() -> None:
        where = out.bases, out.turn_bytes, out.take()
        indices = case.sets[next(calls) % len(case.sets)]
        sender(case.tables, indices, case.offsets, None, where)

    return run


if __name__ == "__main__":
    main()
