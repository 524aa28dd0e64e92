"""What mkdocs asks while it builds the site: the pages at the root, and the public names from their docstrings."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: page of the site -> the file at the root that it shows
PAGES = {"start.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def _link(match: re.Match[str]) -> str:
    """A link between files of the repository, as one between pages of the site."""
    name = match[1].removeprefix("../").removeprefix("docs/")
    return f"]({next((page for page, file in PAGES.items() if file == name), name)}"


def on_files(files: Any, config: Any) -> Any:
    for page, file in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "api.md":
        # The repository has each name's text on this page; the site takes it from the sources, examples included.
        markdown = re.sub(
            r"^### (moefuse\.\S+)\n.*?(?=^##|\Z)", r"::: \1\n\n", markdown, flags=re.DOTALL | re.MULTILINE
        )
    return re.sub(r"\]\(((?:\.\./|docs/)?[\w-]+\.\w+)", _link, markdown)
