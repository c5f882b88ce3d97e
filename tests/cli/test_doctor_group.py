"""`counterpoint doctor --group`: under torchrun, and what it says where ranks differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.cli.group import differences, group, islands_in_words
from counterpoint.errors import InputError

ROOT = Path(__file__).parents[2]


def test_under_torchrun_it_shows_all_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "counterpoint", "doctor", "--group", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    facts = json.loads(found.stdout)
    assert [each["rank"] for each in facts["ranks"]] == [0, 1]
    assert all(each["process"].endswith("alive") for each in facts["ranks"])
    assert facts["differ"] == {}
    assert facts["islands"] == {"number": 1, "ranks of each": 2, "each rank is one, as": None}


def test_islands_in_words():
    def said(*facts: object) -> str:
        return islands_in_words(dict(enumerate(facts)))

    assert said(1, 4, None) == "One island: all ranks reach each other's memory."
    assert said(2, 4, None) == "2 islands of 4 ranks, with NICs alone between them."
    assert said(3, 1, "islands have 1 and 2 ranks").endswith("them, as islands have 1 and 2 ranks.")


def test_what_differs_is_told_with_its_ranks():
    ranks = [{"rank": r, "host": f"h{r}", "torch": "2.11", "NCCL": "2.28"} for r in range(3)]
    assert differences(ranks) == {}
    ranks[1]["torch"] = "2.13"
    assert differences(ranks) == {"torch": {"2.11": [0, 2], "2.13": [1]}}


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(InputError, match=r"--group must be given under torchrun.*torchrun --nproc"):
        group(as_json=False)
