"""What the tests of the documentation share: for each page a folder with the example jobs, as users have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pages import RECORDINGS

from raydfl.cli.example_jobs import write_examples


@pytest.fixture(scope="session")
def fast(pytestconfig: pytest.Config) -> bool:
    return pytestconfig.option.markexpr == "not slow"


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory, fast: bool) -> Callable[[Path], Path]:
    """The folder in which a page's blocks run one after another. The recordings lie in PATH/TO, if there are any.

    It is empty for README.md and start.md, which begin with ``raydfl init``, and as that command leaves it for the other pages. In
    the fast suite a round of ``jobs/tiny.yaml`` has one step or two for each client.
    """
    folders: dict[Path, Path] = {}

    def of(page: Path) -> Path:
        if page not in folders:
            folder = tmp_path_factory.mktemp(page.stem) / "project"
            folder.mkdir()
            if page.name not in ("README.md", "start.md"):
                write_examples(folder)
                if fast:
                    tiny = folder / "jobs" / "tiny.yaml"
                    text, usual = tiny.read_text(encoding="utf-8"), "local_epochs: 2, batch_size: 4"
                    assert usual in text
                    tiny.write_text(text.replace(usual, "local_epochs: 1, batch_size: 16"), encoding="utf-8")
            if RECORDINGS.is_dir():
                (folder / "PATH").mkdir()
                (folder / "PATH" / "TO").symlink_to(RECORDINGS.resolve(), target_is_directory=True)
            folders[page] = folder
        return folders[page]

    return of


@pytest.fixture(scope="session")
def documentation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The feature cache of all pages."""
    return tmp_path_factory.mktemp("cache")
