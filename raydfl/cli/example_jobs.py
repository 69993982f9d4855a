"""Example jobs, studies and a cluster file, copied by ``raydfl init``."""

from __future__ import annotations

from pathlib import Path

from raydfl.core.errors import InputError

_NAMES = ("cluster.yaml", "jobs", "tune")
"""Example files and folders in the repository. ``setup.py`` copies them into a wheel as ``raydfl/examples``."""


def write_examples(folder: Path) -> list[Path]:
    """Copy the examples into a folder, skipping identical files.

    Returns:
        The new files, relative to ``folder``.

    Raises:
        InputError: a file exists with different content (then nothing is written), or the folder cannot be written.
    """
    examples = _list_examples()
    source = _find_source()
    new = [path for path in examples if not (folder / path).exists()]
    changed = [path for path in examples if path not in new and not _is_same(source / path, folder / path)]
    if changed:
        raise InputError(
            f"{folder} has different files with these names: {', '.join(map(str, changed))}; nothing was written. "
            "Move these files, or choose another folder: raydfl init FOLDER"
        )
    try:
        for path in new:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("xb") as file:
                file.write((source / path).read_bytes())
    except OSError as error:
        raise InputError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}. Choose another folder: raydfl init FOLDER"
        ) from error
    return new


def _find_source() -> Path:
    """Return the folder with the examples: in the wheel, or in the repository of an editable install."""
    package = Path(__file__).parents[1]
    return package / "examples" if (package / "examples").is_dir() else package.parent


def _list_examples() -> list[Path]:
    source = _find_source()
    paths = [path for name in _NAMES for path in (source / name, *(source / name).rglob("*"))]
    files = sorted(path.relative_to(source) for path in paths if path.is_file() and "__pycache__" not in path.parts)
    if not files:
        raise InputError(
            f"The installation of raydfl in {Path(__file__).parent} has no examples. Reinstall raydfl from its wheel."
        )
    return files


def _is_same(source: Path, target: Path) -> bool:
    return target.is_file() and target.read_bytes() == source.read_bytes()
