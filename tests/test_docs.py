"""The site: it builds without a warning and fetches nothing, its pages are short, its links lead
somewhere, and its API has every public name."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import typer

import counterpoint
from counterpoint import device, errors, nn, resources, scale
from counterpoint.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = 12_316  # of all pages together, beside tables, code, quoted texts and the API
LEAST = 14  # letters by which one finds a text
SRC = [path for path in sorted((ROOT / "src").rglob("*.py")) if "cli" not in path.parts]
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
        themed = target.suffix == ".svg" and anchor in ("gh-light-mode-only", "gh-dark-mode-only")
        assert not anchor or themed or anchor in anchors(target), link


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
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)", "", text)  # pictures, and where links lead
    if page.name == "troubleshooting.md":
        text = re.sub(r"`[^`]*`", "", text)
    return text


def test_there_is_little_to_read():
    words = {str(page.relative_to(DOCS)): len(re.findall(r"[^\W\d_][\w-]*", prose(page)))
             for page in PAGES[1:] if page.parent.name != "api"}  # fmt: skip
    assert sum(words.values()) <= MOST_WORDS, words


def test_the_api_has_every_public_name():
    def names(page: str) -> list[str]:
        text = (DOCS / "api" / page).read_text()
        assert text.count("\n::: ") == text.count("{heading: ") + text.count("{members: ")
        return sorted(re.findall(r"^::: .*\.(\w+)\n    options: \{heading: [\w.]*\b\1\}$", text,
                                 re.MULTILINE))  # fmt: skip

    assert sorted([*names("index.md"), "nn", "resources", "scale"]) == counterpoint.__all__
    assert names("nn.md") == nn.__all__
    assert names("resources.md") == resources.__all__
    assert names("scale.md") == scale.__all__
    assert set(names("device.md")) >= set(device.__all__)
    adapters = (DOCS / "api" / "frameworks.md").read_text()
    for name in ("transformers", "torchtitan", "torchtitan_experts", "torchrec", "vllm"):
        assert f"::: counterpoint.adapters.{name}\n" in adapters


def said(node: ast.AST) -> list[str]:
    """The parts of a text between what it is filled with."""
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "\0" for each in node.values]
        return "".join(map(str, parts)).split("\0")
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def hints_and_errors(tree: ast.AST) -> Iterator[str]:
    """What a file says where something is missing or late, and what it advises."""
    for node in ast.walk(tree):
        texts: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("UnsupportedError", "PeerTimeoutError"):
                texts += node.args[:1]
            texts += [each.value for each in node.keywords if each.arg == "fix"]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fix":
            texts += [node.value]
        yield from (part for text in texts for part in said(text))


def bare(text: str) -> str:
    return " ".join(text.replace("`", "").split()).strip(" :;,()")


def test_every_error_is_found_on_its_page():
    page = (DOCS / "troubleshooting.md").read_text()
    kinds = {name for name, kind in vars(errors).items()
             if isinstance(kind, type) and issubclass(kind, Exception | Warning)}  # fmt: skip
    assert not {name for name in kinds if f"`{name}`" not in page}
    page = bare(page)
    missing = {f"{path.name}: {bare(text)}" for path in SRC
               for text in hints_and_errors(ast.parse(path.read_text()))
               if len(bare(text)) >= LEAST and bare(text) not in page}  # fmt: skip
    assert not missing


def test_every_text_of_the_page_is_one_of_an_error():
    texts = {bare(part) for path in SRC for node in ast.walk(ast.parse(path.read_text()))
             for part in said(node)}  # fmt: skip
    page = (DOCS / "troubleshooting.md").read_text()
    tables = page.split("| the message has | what to do |")[1:]
    heads = [head for table in tables for head in re.findall(r"^\| (`.*?`) \| ", table, re.M)]
    quoted = [text for head in heads for text in re.findall(r"`([^`]+)`", head)]
    assert len(quoted) > 70
    wrong = [part for text in quoted for part in map(bare, text.split("..."))
             if not any(part in each for each in texts)]  # fmt: skip
    assert not wrong


def tables(html: str) -> list[str]:
    return re.findall(r"<table>.*?</table>", html, re.DOTALL)


def columns(table: str) -> tuple[list[str], list[str]]:
    """Heads of the columns that are seen at 1,280 pixels, and of those at 390."""
    heads = re.findall(r"<th([^>]*)>(.*?)</th>", table, re.DOTALL)
    wide = [(kind, re.sub("<[^>]+>", "", head)) for kind, head in heads if "more" not in kind]
    return [head for _, head in wide], [head for kind, head in wide if "mid" not in kind]


def test_a_group_of_the_site_has_few_pages():
    """On wide screens a group is a tab, and the sidebar has its pages."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    groups = [
        re.findall(r"^      - ", group, re.M) for group in re.split(r"^  - ", text, flags=re.M)
    ]
    assert "navigation.tabs" in (ROOT / "mkdocs.yml").read_text()
    assert 5 < len(groups) - 1 <= 8 and max(map(len, groups)) <= 20
    assert len(re.findall(r"\.md$", text, re.M)) == len(PAGES) - 1


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`: `make docs`")
def test_of_a_wide_table_the_columns_that_matter_are_seen():
    spec = spec_from_file_location("docs_hooks", ROOT / ".ci" / "docs_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    heads = ["op", "M, N, K", "matmul", "NCCL", "serial", "torch", "<strong>auto</strong>", "plan",
             "serial / auto", "torch / auto", "hidden"]  # fmt: skip
    row = "".join(f"<th>{head}</th>" for head in heads)
    html = hooks.fitted(f"<table><thead><tr>{row}</tr></thead></table>")
    wide, few = columns(html)
    assert wide == ["op", "M, N, K", "serial", "auto", "serial / auto", "torch / auto"]
    assert few == ["op", "M, N, K", "serial / auto"] and "all 11 columns" in html
    long = re.search("<code>(.*)</code>", "<code>cp.nn.gather_once(x, --rows)</code>")
    assert hooks.broken(long) == "<code>cp.<wbr>nn.<wbr>gather_<wbr>once(x, --rows)</code>"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`: `make docs`")
@pytest.mark.apart("make test-all")
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
    shown = [columns(table) for page in pages for table in tables(page.read_text())]
    assert len(shown) > 100 and {"auto", "speedup"} <= {head for wide, _ in shown for head in wide}
    assert max(len(wide) for wide, _ in shown) == 6 and max(len(few) for _, few in shown) == 3
    readme = (ROOT / "README.md").read_text()
    front = (tmp_path / "index.html").read_text()
    for said in (*re.findall(r"\d\.\d\dx", readme), "init_process_group", "pip install"):
        assert said in front
    styles = "".join(page.read_text() for page in tmp_path.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:|//)|@import", styles)


def test_contributing_names_files_that_are_there():
    """In 300 words; what stands for an operator's name is that of one that exists."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.split()) <= 300
    paths = re.findall(r"`((?:src|tests|benchmarks)/[\w/<>.-]*)`", text)
    assert len(paths) >= 9
    for path in paths:
        assert (ROOT / path.replace("<operator>", "matmul_all_reduce")).exists(), path
