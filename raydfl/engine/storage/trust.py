"""Code that a run's folder names: found without running it, remembered with the run, and asked about before it is run.

A class of one's own is code. One that lies in the run's folder came with that folder, perhaps from a stranger; one that has changed
since the run began is not what the run began with. Neither is loaded before somebody has said that it may be.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import content_digest, write_durably


def check_code(run_dir: Path, values: Any, trust: bool) -> None:
    """Refuse a run's folder whose configuration names code that nobody has said to trust; nothing of it is loaded.

    Args:
        values: what ``config.yaml`` says.
        trust: somebody has said so.

    Raises:
        RunDirectoryError: naming the file, and how to say so.
    """
    if trust:
        return
    try:
        known = json.loads((run_dir / "run.json").read_bytes()).get("code")
    except (OSError, ValueError, AttributeError):
        known = None  # of an earlier version, or damaged, which is said elsewhere
    for reference in _references(values):
        place = reference.rpartition(":")[0]
        path = _located(place)
        if path is None:
            continue  # there is nothing to load, which is said where it is tried
        if path.is_relative_to(run_dir.resolve()):
            why = f"lies in the run's folder and came with it ({path})"
        elif place.endswith(".py") and not Path(place).is_absolute():
            why = "is named by a path that depends on the current folder, which raydfl never writes"
        elif place.endswith(".py") and isinstance(known, Mapping) and code_digest(path) not in known:
            why = f"is not what it was when the run began: {path}, or a file beside it that it imports, has changed"
        else:
            continue
        raise RunDirectoryError(
            f"{run_dir} names code, {Path(place).name}:{reference.rpartition(':')[2]}, which {why}. Code can do whatever you can "
            f"do: read it, and if you trust it, add --trust (in Python trust=True)"
        )


def code_of(values: Any) -> dict[str, str]:
    """Return the files of one's own classes that a configuration names, by the digest of their code: ``code`` in ``run.json``."""
    places = (reference.rpartition(":")[0] for reference in _references(values))
    files = (_located(place) for place in places if place.endswith(".py"))
    return {code_digest(path): str(path) for path in files if path is not None}


def remember_code(run_dir: Path, values: Any) -> bool:
    """Write down that a run goes on with the code as it is now; return whether that has changed."""
    path = run_dir / "run.json"
    about = json.loads(path.read_bytes())
    known, now = about.get("code"), code_of(values)
    if known is None or known.keys() == now.keys():
        return False
    write_durably(path, json.dumps({**about, "code": now}, indent=2).encode())
    return True


def code_digest(path: Path) -> str:
    """Return a digest of a file of code and of those beside it that it imports, wherever their folder lies."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(_with_neighbours(path)):
        digest.update(f"{file.relative_to(path.parent)} {content_digest(file)}\n".encode())
    return digest.hexdigest()


def _references(value: Any) -> Iterator[str]:
    """Find everything in a configuration that could name a class, ``my_file.py:Class`` or ``my_module:Class``."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)
    elif isinstance(value, str) and re.fullmatch(r".+\.py:\w+|[\w.]+:\w+", value, re.DOTALL):
        yield value


def _located(place: str) -> Path | None:
    """Return the file of a class's module, found without running anything; ``None``: there is none."""
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        return path if path.is_file() else None
    folders: list[str] | None = None
    name = origin = ""
    for part in place.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, folders)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        origin, folders = spec.origin or "", list(spec.submodule_search_locations or ())
        if not origin and folders:
            origin = folders[0]
    return Path(origin).resolve() if origin else None


def _with_neighbours(path: Path) -> list[Path]:
    """Return a file of code, and those below its folder that it imports, directly or through others, by what their text says."""
    found = [path]
    for file in found:
        try:
            imported = _imported(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for level, name in imported:
            folder = file.parents[level - 1] if 0 < level <= len(file.parents) else path.parent
            # raydfl itself is there before them, whatever lies in their folder.
            if not (name.partition(".")[0] == "raydfl" and folder == path.parent):
                found += [near for near in _files_of(folder, name) if near not in found]
    return [file for file in found if file.is_relative_to(path.parent)]


@functools.lru_cache(maxsize=256)
def _imported(code: bytes) -> tuple[tuple[int, str], ...]:
    """Return the dotted names that a file's code imports, each with the number of dots before it."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            found += [(node.level, f"{module}{alias.name}") for alias in node.names]
    return tuple(found)


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """Find the files that importing a dotted name would run, of those below a folder."""
    for part in name.split("."):
        yield from (file for file in (folder / f"{part}.py", folder / part / "__init__.py") if file.is_file())
        folder /= part
