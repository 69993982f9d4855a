"""Generated parts of the pages: tables of options, and sections from docstrings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from generate import expand, format_docstrings, format_table

from raydfl.rules import RULES


@dataclass
class Example:
    """Summary, which the section omits.

    The first ``size`` values, see docs/data.md#terms:

        a <- b

    The command:

        data:
          name: fsdd

        raydfl run jobs/tiny.yaml \\
            method=fedavg
    """

    size: int = 3
    name: str | None = None


def test_a_table_has_a_row_for_each_option() -> None:
    assert format_table(Example, {"name"}) == [
        "| option | default | meaning |",
        "| --- | --- | --- |",
        "| `size` | `3` |  |",
    ]
    assert format_table(Example, {"size"}, {"name": "data.md"})[2] == "| [`name`](data.md) | `null` |  |"
    with pytest.raises(ValueError, match="Example has no option length"):
        format_table(Example, links={"length": "data.md"})


def test_docstrings_become_paragraphs_and_blocks() -> None:
    assert format_docstrings(Example) == [
        "Generated parts of the pages: tables of options, and sections from docstrings.",
        "",
        "The first `size` values, see [data](data.md#terms):",
        "",
        "```text",
        "a <- b",
        "```",
        "",
        "The command:",
        "",
        "```yaml",
        "data:",
        "  name: fsdd",
        "```",
        "",
        "```bash",
        "raydfl run jobs/tiny.yaml \\",
        "    method=fedavg",
        "```",
        "",
    ]


def test_directives_are_replaced() -> None:
    page = expand("methods.md", "# Methods\n\n<!-- sections: ### rules -->\n<!-- table: rules -->\n")
    for name in RULES:
        assert f"\n### {name}\n" in page
        assert f"\n| [`{name}`](#{name}) | " in page
    assert "| `byzantine` | `0.2` | Expected fraction of attackers" in page
    assert "<!--" not in page
    with pytest.raises(ValueError, match=r"docs/methods.md: nothing with the name 'Methods' has options"):
        expand("methods.md", "# Methods\n\n<!-- options -->\n")
