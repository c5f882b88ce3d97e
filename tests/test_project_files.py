"""Files that a host of repositories reads: what they name exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import counterpoint
from counterpoint.cli.main import app

yaml = pytest.importorskip("yaml", reason="comes with the extra `docs`")
ROOT = Path(__file__).parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAPERS = {"2606.09200", "2512.10236", "2305.06942"}


def test_the_citation_is_of_this_version_and_of_the_three_papers():
    cited: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["license"] == "Apache-2.0"
    assert cited["version"] == counterpoint.__version__
    for each in cited["references"]:
        (number,) = each["identifiers"]
        assert number["value"] == f"arXiv:{each['url'].rpartition('/')[2]}"
        assert each["title"] and all(author["family-names"] for author in each["authors"])
    named = {each["url"].rpartition("/")[2] for each in cited["references"]}
    assert named == PAPERS
    for page in ("README.md", "docs/results/papers.md"):
        text = (ROOT / page).read_text()
        assert {number for number in PAPERS if number not in text} == set()


def test_the_changelog_has_this_version_below_what_is_not_released():
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(counterpoint.__version__)}\] - \d{{4}}-\d\d-\d\d", heads[1])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_can_be_had(path: Path):
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"] and form["labels"]
    asked = [each["attributes"] for each in form["body"] if each["type"] == "textarea"]
    assert asked and len({each["label"] for each in asked}) == len(asked)
    text = " ".join(f"`{each['label']}` {each.get('description', '')}" for each in asked)
    commands: Any = typer.main.get_group(app).commands
    for line in re.findall(r"`[^`]*\bcounterpoint ([a-z][^`]*)`", text):
        name, *words = shlex.split(line)
        known = {option for each in commands[name].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
    for name in re.findall(r"\bcp\.(\w+)\(", text):
        assert name in counterpoint.__all__
    if path.stem in ("bug", "slower"):
        assert "`counterpoint doctor --json`" in text
