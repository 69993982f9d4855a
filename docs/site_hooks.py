"""What the site has beside the pages: the docstrings of the public names, and no links to files that are not on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"^from (raydfl[\w.]*) import (\w+) as \w+$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Name files of the repository instead of linking to them, and add the docstrings to the reference."""
    if page.file.src_uri == "reference.md":
        markdown += _docstrings(Path(config.config_file_path).parent / "raydfl" / "__init__.pyi")
    return _OUTSIDE.sub(_named, markdown)


def _docstrings(file: Path) -> str:
    """Return where the docstrings of the names in the package's list of them are, by room."""
    rooms: dict[str, list[str]] = {}
    for module, name in _NAME.findall(file.read_text(encoding="utf-8")):
        if not name.startswith("_") and module != "raydfl":
            rooms.setdefault(module.split(".")[1], []).append(f"::: {module}.{name}\n")
    return "".join(f"\n## {room}\n\n" + "\n".join(names) for room, names in sorted(rooms.items()))


def _named(found: re.Match[str]) -> str:
    """Return a link's text and the file that it leads to; the text may be its name already."""
    text, path = found[1], found[2].removeprefix("../").partition("#")[0]
    return text if path in text.strip("`") else f"{text} (`{path}`)"
