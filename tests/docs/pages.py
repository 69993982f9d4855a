"""Parse README.md and docs/*.md, with their generated parts, into code blocks, headings and links."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from generate import expand

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDINGS = Path(os.environ.get("RAYDFL_DATA") or ROOT.parent / "shared" / "data")
"""The folder of real recordings, which may be missing."""

_MARK = re.compile(r"<!-- test: (?P<kind>slow|skip|exit)(?:[: ]+(?P<argument>.*?))? -->")
_FILE = re.compile(r"# (?P<path>[\w/-]+\.(?:py|yaml))\n")
_RECORDINGS = "PATH/TO/"
"""The folder of the data sets in the pages' examples."""


@dataclass(frozen=True)
class Block:
    """A fenced block, optionally preceded by the line ``<!-- test: slow -->``, ``skip: REASON`` or ``exit 2: WORDS``.

    The output of a block that ends with an exit code has its words.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    argument: str = ""
    saved: tuple[str, ...] = ()
    """Files of earlier blocks of the page that need recordings."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """File name in the first line, such as ``# my_method.py``. The block is saved to this file instead of run."""
        match = _FILE.match(self.text) if self.language in ("python", "yaml") else None
        return match["path"] if match else None

    @property
    def needs_recordings(self) -> bool:
        return (_RECORDINGS in self.text and self.language != "yaml") or any(file in self.text for file in self.saved)

    @property
    def exit_code(self) -> int:
        return int(self.argument.partition(":")[0]) if self.mark == "exit" else 0

    @property
    def words(self) -> str:
        """Words of the expected error message; empty without an exit code."""
        return self.argument.partition(":")[2].strip() if self.mark == "exit" else ""


@functools.cache
def read(page: Path) -> str:
    """Return the text of a page as the site shows it."""
    return expand(page.name, page.read_text(encoding="utf-8"))


def parse_blocks(page: Path) -> list[Block]:
    """List the fenced blocks of a page, in order."""
    blocks: list[Block] = []
    saved: list[str] = []
    lines = read(page).splitlines()
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        mark = _MARK.fullmatch(lines[opened - 1]) if opened else None
        blocks.append(
            Block(
                page,
                opened + 1,
                lines[opened][3:].strip(),
                "\n".join(lines[opened + 1 : number]) + "\n",
                mark["kind"] if mark else "",
                (mark["argument"] or "") if mark else "",
                tuple(saved),
            )
        )
        if blocks[-1].file is not None and _RECORDINGS in blocks[-1].text:
            saved.append(str(blocks[-1].file))
        opened = None
    assert opened is None, f"{page}: the block of line {opened} is never closed"
    return blocks


def remove_blocks(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


def list_headings(page: Path) -> list[str]:
    """List the headings of a page, without code marks."""
    return [match[1].strip().replace("`", "") for match in re.finditer(r"^#+ (.*)$", remove_blocks(page), re.MULTILINE)]


def make_anchor(heading: str) -> str:
    """Return the URL fragment of a heading on code hosts."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def list_links(page: Path) -> list[str]:
    """List the link targets of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", remove_blocks(page))
