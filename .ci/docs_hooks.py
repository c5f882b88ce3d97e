"""Examples are pages' neighbours in the checkout, and are copied beside the pages of the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """The examples, as files that are served as they are."""
    for path in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of docs/ to the examples lead to those files."""
    depth = page.file.src_uri.count("/")
    return markdown.replace(f"]({'../' * depth}../examples/", f"]({'../' * depth}examples/")
