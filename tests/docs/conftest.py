"""Fixtures for the tests of the documentation: a folder with the example jobs for each page."""

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
    """Return a function that makes the working folder of a page. PATH/TO links to the recordings, if there are any.

    The folder is empty for README.md and start.md, because they begin with ``raydfl init``. For other pages it is initialised. The
    fast suite shortens ``jobs/tiny.yaml`` to one or two steps for each client and round.
    """
    folders: dict[Path, Path] = {}

    def make_folder(page: Path) -> Path:
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

    return make_folder


@pytest.fixture(scope="session")
def documentation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the feature cache that all pages share."""
    return tmp_path_factory.mktemp("cache")
