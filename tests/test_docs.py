"""The site: it builds without a warning and fetches nothing, its pages are short, its links lead
somewhere, and its API has every public name."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import counterpoint
from counterpoint import nn, resources
from counterpoint.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = 10_000  # of all pages together, beside tables, code, quoted texts and the API
GENERATED = r"<!-- ([\w-]+):start -->.*?<!-- \1:end -->"


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", head)).strip().lower() for head in heads)
    return {re.sub(r"[\s-]+", "-", head) for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b(?=[`\s]* *(?:#|`|$))", text)) <= targets
    assert set(re.findall(r"\bcounterpoint ([a-z]+)`", text)) <= set(
        typer.main.get_group(app).commands
    )


def prose(page: Path) -> str:
    """What a page says in its own words."""
    text = re.sub(GENERATED, "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    if page.name == "troubleshooting.md":
        text = re.sub(r"`[^`]*`", "", text)
    return text


def test_there_is_little_to_read():
    words = {page.relative_to(DOCS): len(prose(page).split())
             for page in PAGES[1:] if page.parent.name != "api"}  # fmt: skip
    assert sum(words.values()) <= MOST_WORDS, words


def test_the_api_has_every_public_name():
    def names(page: str) -> list[str]:
        text = (DOCS / "api" / page).read_text()
        assert text.count("\n::: ") == text.count("{heading: ")
        return sorted(re.findall(r"^::: .*\.(\w+)\n    options: \{heading: cp\.[\w.]*\b\1\}$", text,
                                 re.MULTILINE))  # fmt: skip

    assert names("index.md") == counterpoint.__all__
    assert names("nn.md") == nn.__all__
    assert names("resources.md") == resources.__all__


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`: `make docs`")
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loads = r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)|<link\b[^>]*\bhref="([^"]+)'
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        loaded = ["".join(each) for each in re.findall(loads, page.read_text())]
        assert loaded and not [each for each in loaded if ":" in each or each.startswith("//")]
    styles = "".join(page.read_text() for page in tmp_path.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:|//)|@import", styles)
