"""What the site has, and a checkout says otherwise: examples, the front page, wide tables.

- Examples are the pages' neighbours in the checkout, and are copied beside the pages of the site.
- The front page has the README's head, which is said once.
- Of a wide table a screen shows the columns that matter; a box above it shows all, in a table that
  scrolls beside its first column.
- A long name may break behind its dots and underscores, and nowhere else.
"""

import re
from itertools import count
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
README, LAST = "<!-- README -->", "## Read on"
WIDE, NARROW = 6, 3  # columns, at 1,280 pixels and at 390
LONG = 18  # letters of a name, from which on it may break


def on_files(files: Files, config: Any) -> Files:
    """The examples, as files that are served as they are."""
    for path in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The README's head in the front page; links that lead out of docs/ to the examples."""
    if README in markdown:
        markdown = markdown.replace(README, head())
    depth = page.file.src_uri.count("/")
    return markdown.replace(f"]({'../' * depth}../examples/", f"]({'../' * depth}examples/")


def head() -> str:
    """All of the README above its links, as a page of docs/ has it."""
    text = (ROOT / "README.md").read_text().partition(LAST)[0]
    picture = r'<picture>.*srcset="([^"]+)".*alt="([^"]+)" src="([^"]+)".*</picture>'
    both = r"![\2](\3#gh-light-mode-only)\n![\2](\1#gh-dark-mode-only)"
    return re.sub(picture, both, text, flags=re.DOTALL).replace("](docs/", "](")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Wide tables, and long names."""
    html = re.sub(r"<table>.*?</table>", lambda found: fitted(found[0]), html, flags=re.DOTALL)
    return re.sub(r"(?<!<pre>)(?<!<span></span>)<code>([^<]*)</code>", broken, html)


def broken(found: re.Match[str]) -> str:
    """A name in which a browser may break lines where a reader would."""
    longest = max(map(len, found[1].split()), default=0)
    name = (
        re.sub(r"(?<=\w)([./_,=:-]+)(?=\w)", r"\1<wbr>", found[1]) if longest >= LONG else found[1]
    )
    return f"<code>{name}</code>"


def fitted(table: str) -> str:
    """A table whose cells say on which screens they are seen."""
    heads = [re.sub("<[^>]+>", "", h) if "<strong>" not in h else "auto"
             for h in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]  # fmt: skip
    if len(heads) <= NARROW:
        return table
    order = by_importance(heads)
    kinds = ["more" if i in order[WIDE:] else "mid" if i in order[NARROW:] else ""
             for i in range(len(heads))]  # fmt: skip

    def row(found: re.Match[str]) -> str:
        at = count()

        def cell(start: re.Match[str]) -> str:
            kind = kinds[next(at)]
            return f'<{start[1]} class="{kind}"' if kind else start[0]

        return re.sub(r"<(t[hd])\b", cell, found[0])

    table = re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL)
    seen = "columns" if len(heads) > WIDE else "columns narrow"
    box = f'<label class="{seen}"><input type="checkbox"> all {len(heads)} columns</label>'
    return f'<div class="fitted">\n{box}\n{table}\n</div>'


def by_importance(heads: list[str]) -> list[int]:
    """Columns: what a row is of, the first speedup, what came out, what that is compared with."""
    ratios = [i for i, head in enumerate(heads) if re.search("speedup|verdict| / ", head)]

    def key(i: int) -> tuple[bool, bool, bool, int, int]:
        found = re.search("(auto$)|(speedup| / )|(serial|ours|counterpoint|tuned|fused$)", heads[i])
        kind = found.lastindex if found and found.lastindex else 4
        return i > 0, not heads[i].startswith("M, N"), i not in ratios[:1], kind, i

    return sorted(range(len(heads)), key=key)
