"""Changes of the pages for the site: generated parts are added, and links to files outside the site become text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path
from generate import expand

_NAME = re.compile(r"^from (raydfl[\w.]*) import (\w+) as \w+$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files of the repository by their names, and add the generated parts."""
    markdown = expand(page.file.src_uri, markdown)
    if page.file.src_uri == "reference.md":
        markdown += _format_docstrings(
            Path(config.config_file_path).parent / "raydfl" / "__init__.pyi"
        )
    markdown = _ROW.sub(
        lambda row: _OUTSIDE.sub(r"\1", row[0]), markdown
    )  # a table has no space for paths
    return _OUTSIDE.sub(_format_link, markdown)


def _format_docstrings(file: Path) -> str:
    """Format references to the docstrings of all public names in the package's list, by room."""
    rooms: dict[str, list[str]] = {}
    for module, name in _NAME.findall(file.read_text(encoding="utf-8")):
        if not name.startswith("_") and module != "raydfl":
            rooms.setdefault(module.split(".")[1], []).append(f"::: {module}.{name}\n")
    return "".join(f"\n## {room}\n\n" + "\n".join(names) for room, names in sorted(rooms.items()))


def _format_link(found: re.Match[str]) -> str:
    """Format a link as its text and the name of its file, unless the text contains the name."""
    text, path = found[1], found[2].removeprefix("../").partition("#")[0]
    return text if path in text.strip("`") else f"{text} (`{path}`)"
