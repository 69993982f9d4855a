"""Fixtures of the documentation tests: a project folder for each page, with the example jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pages import RECORDINGS

from raydfl.cli.example_jobs import write_examples


@pytest.fixture(scope="session")
def fast(pytestconfig: pytest.Config) -> bool:
    """Return whether slow tests are excluded."""
    return pytestconfig.option.markexpr == "not slow"


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory, fast: bool) -> Callable[[Path], Path]:
    """Return a function from a page to the working folder of its blocks.

    PATH/TO is a link to the recordings, if they are available. The folder is empty for README.md and start.md, which start with
    ``raydfl init``. For all further pages it has the files of that command. In the fast suite, a client trains for at most two
    steps in a round of ``jobs/tiny.yaml``.
    """
    folders: dict[Path, Path] = {}

    def get_folder(page: Path) -> Path:
        if page not in folders:
            folder = tmp_path_factory.mktemp(page.stem) / "project"
            folder.mkdir()
            if page.name not in ("README.md", "start.md"):
                write_examples(folder)
                if fast:
                    tiny = folder / "jobs" / "tiny.yaml"
                    text, original = tiny.read_text(encoding="utf-8"), "local_epochs: 2, batch_size: 4"
                    assert original in text
                    tiny.write_text(text.replace(original, "local_epochs: 1, batch_size: 16"), encoding="utf-8")
            if RECORDINGS.is_dir():
                (folder / "PATH").mkdir()
                (folder / "PATH" / "TO").symlink_to(RECORDINGS.resolve(), target_is_directory=True)
            folders[page] = folder
        return folders[page]

    return get_folder


@pytest.fixture(scope="session")
def documentation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the feature cache shared by all pages."""
    return tmp_path_factory.mktemp("cache")
