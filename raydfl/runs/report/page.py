"""The builder of pages: a title, notes and sections, of which each is left out where it has no content."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raydfl.engine import hide_passwords
from raydfl.runs.report.figures import Picture


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, false without content. Text is escaped, unless it is :class:`markupsafe.Markup`."""

    title: str
    """The heading; empty: none."""
    pictures: Sequence[Picture] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The table's lines."""
    hint: str = ""
    """A remark above the table."""
    notes: Sequence[str] = ()
    """Remarks below the table."""
    folded: str = ""
    """The text in the table's place until a reader opens it; empty: the table is open."""
    text: Sequence[str] = ()
    """Paragraphs at the end."""
    commands: Sequence[str] = ()
    """Commands for a shell, after the text."""

    def __bool__(self) -> bool:
        return any((self.pictures, self.rows, self.notes, self.text))


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page as HTML.

    Args:
        title: the heading.
        subtitle: the line below it.
        sections: in order; those without content are left out.
        notes: what a reader must know first.
        tiles: numbers at the top, each with its meaning.
    """
    numbers = itertools.count(1)
    page: str = _template().render(
        title=title,
        subtitle=subtitle,
        sections=list(filter(None, sections)),
        notes=notes,
        tiles=tiles,
        # Safe as it is: Matplotlib escapes every text of a figure, and to_svg the description.
        draw=lambda picture: Markup(draw(picture, f"figure-{next(numbers)}")),
    )
    return page


def draw(picture: Picture, name: str) -> str:
    """Return a picture as SVG."""
    return picture.to_svg(name)


@functools.cache
def _template() -> Any:
    """Return the template, compiled once in a process."""
    return Environment(
        loader=PackageLoader("raydfl.runs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")


def value_text(value: Any) -> str:
    """Return a setting's value in one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(value_text(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {value_text(inner)}" for key, inner in value.items())
    return hide_passwords(str(value))
