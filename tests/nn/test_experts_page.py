"""docs/experts.md: its code runs as it stands, and its drawing shows where rows go."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from rankpool import RankPool

import counterpoint as cp

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"


@on_ranks(2)
def test_the_code_runs(rank: int, ranks: int):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    ups, downs = torch.randn(8, 16, 24), torch.randn(8, 24, 16)
    torch.manual_seed(1 + rank)
    x, weights = torch.randn(5 + rank, 16), torch.rand(5 + rank, 2)
    experts = torch.randint(8, weights.shape)
    names: dict[str, Any] = {
        "ep": dist.group.WORLD, "x": x, "experts": experts, "weights": weights,
        "w_up": ups.chunk(ranks)[rank], "w_down": downs.chunk(ranks)[rank],
    }  # fmt: skip
    exec(code, names)
    h = torch.nn.functional.silu(torch.einsum("tk,tjkn->tjn", x, ups[experts]))
    want = torch.einsum("tj,tjn,tjnk->tk", weights, h, downs[experts])
    torch.testing.assert_close(names["y"], want, rtol=1e-4, atol=1e-4)


def placed(rank: int, ranks: int, counts: list[list[int]], owned: list[list[str]]) -> list[str]:
    """The rows that come to this rank, by the names that the drawing gives them."""
    names = sorted({name for row in owned for name in row})
    x = torch.tensor([[float(names.index(name))] for name in owned[rank]])
    rows = cp.all_to_all_matmul(x, torch.ones(2, 1, 1), counts=counts)
    return [names[int(n)] for n in rows.flatten()]


def test_the_drawing(pool: RankPool):
    (drawing,) = re.findall(r"^```\n(counts .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    table, owners, by_expert = re.split(r"^by owner|^by expert", drawing, flags=re.M)
    counts = [list(map(int, re.findall(r"\d", line)))[1:5] for line in table.splitlines()[1:3]]
    owned, wanted = (
        [re.findall(r"\d:e\d", line) for line in part.splitlines() if ":e" in line]
        for part in (owners, by_expert)
    )
    assert [[row.count(f"{r}:e{e}") for e in range(4)] for r, row in enumerate(owned)] == counts
    assert pool.run(placed, 2, counts, owned) == wanted
