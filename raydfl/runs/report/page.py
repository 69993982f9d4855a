"""HTML pages made of a title, notes and sections. Empty sections are omitted."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raydfl.engine import hide_passwords
from raydfl.runs.report.figures import Plot

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; script-src 'sha256-{}'"
"""The browser loads nothing from any address, and runs only the script of this package."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page. An empty section is false. Text is escaped, unless it is :class:`markupsafe.Markup`."""

    title: str
    """Heading. Empty: no heading."""
    plots: Sequence[Plot] = ()
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """Rows of the table."""
    hint: str = ""
    """Remark above the table."""
    notes: Sequence[str] = ()
    """Remarks below the table."""
    folded: str = ""
    """Summary of a folded table. Empty: the table is open."""
    text: Sequence[str] = ()
    """Paragraphs at the end."""
    commands: Sequence[str] = ()
    """Shell commands after the text."""

    def __bool__(self) -> bool:
        return any((self.plots, self.rows, self.notes, self.text))


def render_page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    notes: Sequence[str] = (),
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page as HTML.

    Args:
        title: Heading of the page.
        subtitle: Line below the heading.
        sections: Sections in order. Empty sections are omitted.
        notes: Highlighted remarks at the top.
        tiles: Pairs of a value and its meaning, at the top.
    """
    numbers, script = itertools.count(1), _load_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = _load_template().render(
        title=title,
        policy=_POLICY.format(digest),
        script=Markup(script),  # a file of the package
        subtitle=subtitle,
        sections=list(filter(None, sections)),
        notes=notes,
        tiles=tiles,
        # The markup is safe: Matplotlib escapes the texts of a figure, and to_svg escapes the description.
        draw=lambda plot: Markup(draw(plot, f"figure-{next(numbers)}")),
    )
    return page


def draw(plot: Plot, name: str) -> str:
    """Return a plot as SVG."""
    return plot.to_svg(name)


@functools.cache
def _load_script() -> str:
    """Return the script that makes tables sortable."""
    return importlib.resources.files("raydfl.runs.report").joinpath("templates/page.js").read_text()


@functools.cache
def _load_template() -> Any:
    """Return the template, compiled once per process."""
    return Environment(
        loader=PackageLoader("raydfl.runs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")


def format_value(value: Any) -> str:
    """Format a setting's value in one line, without passwords."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {format_value(inner)}" for key, inner in value.items())
    return hide_passwords(str(value))
