"""Open models by transformers' own plan: what is taken, and what is left. Skipped without it."""

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import open_models
import pytest
import torch
import torch.distributed as dist
from compiled import overlap_pass, quick
from open_models import ROWS
from rankpool import RankPool
from test_transformers import environment

import counterpoint as cp
from counterpoint.measure.timing import relative_error

present = importlib.util.find_spec("transformers") is not None
needed = pytest.mark.skipif(not present, reason="transformers is not installed")


def sharded(row: dict[str, Any], folder: Path, **sizes: Any) -> tuple[Any, Any]:
    """The model as it is, and by tp_plan="auto"; no parameter of it is 0 or 1."""
    from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]

    kind = open_models.model_class(row)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        model = kind(open_models.config(row, **sizes))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
        model.save_pretrained(folder)
    dist.barrier()
    whole = kind.from_pretrained(folder, dtype=torch.float32)
    plan = DistributedConfig(tp_plan="auto")
    return whole, kind.from_pretrained(folder, dtype=torch.float32, distributed_config=plan)


def inferred(rank: int, ranks: int, folder: Path, name: str) -> None:
    row = ROWS[name]
    ids = torch.arange(32).view(2, 16) % open_models.vocabulary(row["sizes"]["vocab_size"])
    with environment(rank, ranks), torch.no_grad():
        whole, model = sharded(row, folder)
        want = whole(input_ids=ids).logits
        if "refused" in row:
            with pytest.raises(RuntimeError, match="is invalid for input of size"):
                model(input_ids=ids)
            return
        overlap = overlap_pass()
        with quick(overlap) as backend:
            got = torch.compile(model, backend=backend)(input_ids=ids).logits
    assert relative_error(got, want) < 1e-5
    found = [one for report in overlap.reports for one in report.found]
    said = "\n".join(map(str, found))
    left = {one.module.split(".")[-1]: one.reason for one in found if one.reason}
    assert sum(bool(one.operator) for one in found) == row["taken"], said
    assert sum(bool(one.reason) for one in found) == row["others"], said
    assert left.keys() == row["left"].keys(), said
    assert all(left[at].startswith(why) for at, why in row["left"].items()), said


@needed
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ROWS)
def test_what_is_taken_of(pool: RankPool, tmp_path: Path, name: str):
    """Logits are those of the whole model, run eagerly."""
    pool.run(inferred, open_models.RANKS, tmp_path, name)


def refused(rank: int, ranks: int, folder: Path) -> None:
    ids = torch.arange(32).view(2, 16)
    with environment(rank, ranks), torch.no_grad():
        whole, model = sharded(ROWS["Llama-3.1-8B"], folder, intermediate_size=97)
        assert relative_error(model(input_ids=ids).logits, whole(input_ids=ids).logits) < 1e-5
        said = r"x.shape must be equal on all ranks, \(32, 49\)"
        with quick(overlap_pass()) as backend, pytest.raises(cp.InputError, match=said):
            torch.compile(model, backend=backend)(input_ids=ids)


@needed
def test_an_inner_width_that_ranks_do_not_divide_is_refused(pool: RankPool, tmp_path: Path):
    """Before anything is launched, on all ranks."""
    pool.run(refused, 2, tmp_path)


@needed
def test_sizes_that_are_transformers_own():
    import transformers  # type: ignore[import-not-found]

    rows = [row for row in ROWS.values() if row["source"] == "transformers"]
    assert rows
    for row in rows:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            default = getattr(transformers, f"{row['kind']}Config")()
        for name in (*open_models.NAMES, "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"):
            if name in row["sizes"]:
                assert getattr(default, name) == row["sizes"][name]


def test_the_table_of_the_docs():
    assert len(ROWS) == 20
    page = open_models.PAGE.read_text()
    (shown,) = re.findall(r"<!-- models:start -->\n(.*?)\n<!-- models:end -->", page, re.DOTALL)
    assert shown.strip() == open_models.table().strip()
