"""README.md and docs/*.md taken apart: their code blocks, tables of options, headings and links."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDINGS = Path(os.environ.get("RAYDFL_DATA") or ROOT.parent / "shared" / "data")
"""Real recordings, where there are any."""

_MARK = re.compile(r"<!-- test: (?P<what>slow|skip|exit)(?:[: ]+(?P<more>.*?))? -->")
_FILE = re.compile(r"# (?P<path>[\w/-]+\.(?:py|yaml))\n")
_RECORDINGS = "PATH/TO/"
"""Where the pages' examples have the data sets."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``<!-- test: slow -->``, ``skip: why`` or ``exit 2`` may stand on the line before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    more: str = ""
    saved: tuple[str, ...] = ()
    """Files of blocks before it on its page that need recordings."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """A block whose first line is ``# my_method.py`` is that file's content, to be saved and not run."""
        found = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return found["path"] if found else None

    @property
    def needs_recordings(self) -> bool:
        return (_RECORDINGS in self.text and self.language != "yaml") or any(file in self.text for file in self.saved)

    @property
    def exit_code(self) -> int:
        return int(self.more) if self.mark == "exit" else 0


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    saved: list[str] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        mark = _MARK.fullmatch(lines[opened - 1]) if opened else None
        found.append(
            Block(
                page,
                opened + 1,
                lines[opened][3:].strip(),
                "\n".join(lines[opened + 1 : number]) + "\n",
                mark["what"] if mark else "",
                (mark["more"] or "") if mark else "",
                tuple(saved),
            )
        )
        if found[-1].file is not None and _RECORDINGS in found[-1].text:
            saved.append(str(found[-1].file))
        opened = None
    assert opened is None, f"{page}: the block of line {opened} is never closed"
    return found


def without_blocks(page: Path) -> str:
    """A page's text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> list[str]:
    """The texts of a page's headings, without marks of emphasis or code."""
    return [
        found[1].strip().replace("`", "") for found in re.finditer(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    ]


def anchor(heading: str) -> str:
    """The fragment that a link to this heading has on code hosts."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
