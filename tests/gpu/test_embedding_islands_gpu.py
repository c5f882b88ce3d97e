"""Embedding bags between islands of GPUs: chunks by NCCL's exchanges, eager and captured."""

import pytest
import torch
import torch.distributed as dist
from embedding_cases import expected, problem_of, random_bags

import counterpoint as cp
from counterpoint.group.workspace import forget, workspace_of

pytestmark = pytest.mark.hosts

# columns of each rank's tables, and bags of each rank, in turn
CASES = [
    (((64, 128),) * 8, (100,) * 8, {"longest": 20}),
    (((8, 3), (), (5, 16, 16), (1,)) * 2, (50, 90, 0, 33) * 2, {"weighted": True}),
    (((24,), (256,), (), (7,)) * 2, (700, 1, 300, 20) * 2, {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_rows_are_those_of_fp64_eager_and_captured(gpus, case, chunks):
    dims, batch, draw = CASES[case]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dims, batch = dims[:ranks], batch[:ranks]
    p = problem_of(dims, batch, draw.get("dtype", torch.float32))
    everyone = [random_bags(d, p.m, rows=5000, seed=r, **draw) for r, d in enumerate(dims)]
    bags = everyone[rank].to(torch.device("cuda", torch.cuda.current_device()))
    want = expected(everyone, p, rank, mean=False).cuda()
    for size in (size for size in (1, 2, 4) if ranks % size == 0 and ranks > size):
        group = dist.new_group()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COUNTERPOINT_ISLAND", str(rank // size))
            workspace = workspace_of(group, bags.indices.device)
        assert workspace.islands.number == ranks // size

        def call(plan, group=group):
            with torch.no_grad():
                return cp.embedding_bag_all_to_all(
                    bags.tables, bags.indices, bags.offsets, group=group, batch=p.rows,
                    dims=p.tables, dtype=getattr(torch, p.dtype), include_last_offset=True,
                    per_sample_weights=bags.weights, plan=plan,
                )  # fmt: skip

        spec = f"islands chunks={chunks}"
        eps = torch.finfo(getattr(torch, p.dtype)).eps
        for _ in range(6):
            torch.testing.assert_close(call(spec).double(), want, rtol=2 * eps, atol=1e-4)
        if bags.weights is None:  # products may be rounded before they are added, or with it
            assert torch.equal(call(spec), call("serial"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(spec)
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(y.double(), want, rtol=2 * eps, atol=1e-4)
        del graph
        torch.cuda.synchronize()
        cp.check(group)
        dist.barrier()
        forget(workspace)
