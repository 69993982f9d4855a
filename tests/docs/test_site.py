"""The documentation site: ``make docs`` accepts the pages and rejects a broken link; figures have colours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

pytest.importorskip("mkdocs", reason="not installed: pip install 'raydfl[dev]'")


@pytest.mark.slow
def test_the_site_builds_and_rejects_a_broken_anchor(tmp_path: Path) -> None:
    command = re.findall(r"bin/(mkdocs build .*)", (ROOT / "Makefile").read_text())
    assert len(command) == 1
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("docs", "raydfl"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def build() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command[0].split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    result = build()
    assert result.returncode == 0, result.stderr
    start = (tmp_path / "build/docs" / "start" / "index.html").read_text(encoding="utf-8")
    numbers = re.findall(r'<ol start="(\d+)">', start)
    assert numbers == [*"234568", "9", "10"]  # The list continues after a code block.
    with (tmp_path / "docs" / "start.md").open("a", encoding="utf-8") as page:
        page.write("\n[broken](data.md#nowhere)\n")
    broken = build()
    assert broken.returncode != 0
    assert "#nowhere" in broken.stderr


@pytest.mark.parametrize("figure", sorted((ROOT / "docs").glob("*.svg")), ids=lambda figure: figure.name)
def test_a_figure_needs_no_colours_of_its_page(figure: Path) -> None:
    """A page shows these files as images. Images know neither the variables nor the text colour of the page."""
    text = figure.read_text(encoding="utf-8")
    assert "currentColor" not in text
    assert "var(--" not in text
