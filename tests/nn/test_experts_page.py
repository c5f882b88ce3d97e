"""docs/experts.md: its functions compute a layer, and its drawing shows where rows go."""

import re
from pathlib import Path

import torch
from doc_pages import DOCS, blocks, run_page
from rankpool import RankPool

import counterpoint as cp

PAGE = DOCS / "experts.md"


def test_the_functions_compute_a_layer(pool: RankPool, tmp_path: Path):
    names = ["w_up", "w_down", "tokens", "experts", "weights", "y"]
    of_ranks = [found for _, found in run_page(PAGE, pool, tmp_path, names)]
    ups, downs = (torch.cat([found[i] for found in of_ranks]) for i in (0, 1))
    for *_, tokens, experts, weights, y in of_ranks:
        h = torch.nn.functional.silu(torch.einsum("tk,tjkn->tjn", tokens, ups[experts]))
        want = torch.einsum("tj,tjn,tjnk->tk", weights, h, downs[experts])
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)


def placed(rank: int, ranks: int, counts: list[list[int]], owned: list[list[str]]) -> list[str]:
    """The rows that come to this rank, by the names that the drawing gives them."""
    names = sorted({name for row in owned for name in row})
    x = torch.tensor([[float(names.index(name))] for name in owned[rank]])
    rows = cp.all_to_all_matmul(x, torch.ones(2, 1, 1), counts=counts)
    return [names[int(n)] for n in rows.flatten()]


def test_the_drawing(pool: RankPool):
    (drawing,) = (text for text in blocks(PAGE, "") if text.startswith("counts "))
    table, owners, by_expert = re.split(r"^by owner|^by expert", drawing, flags=re.M)
    counts = [list(map(int, re.findall(r"\d", line)))[1:5] for line in table.splitlines()[1:3]]
    owned, wanted = (
        [re.findall(r"\d:e\d", line) for line in part.splitlines() if ":e" in line]
        for part in (owners, by_expert)
    )
    assert [[row.count(f"{r}:e{e}") for e in range(4)] for r, row in enumerate(owned)] == counts
    assert pool.run(placed, 2, counts, owned) == wanted
