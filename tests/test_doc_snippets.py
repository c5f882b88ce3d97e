"""The code of docs/ runs as it stands, and prints what the page says."""

from pathlib import Path

import pytest
from doc_pages import DOCS, blocks, run_page
from rankpool import RankPool

PAGES = sorted(page for page in DOCS.glob("*.md") if blocks(page, "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page: Path, pool: RankPool, tmp_path: Path):
    printed, _ = run_page(page, pool, tmp_path)[0]
    for line in "".join(blocks(page, "text")).splitlines():
        assert line in printed.splitlines(), printed
