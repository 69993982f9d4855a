"""Trust in users' code: a run folder may name code, and raydfl loads it only if the user has run or approved it before.

The list of approved code belongs to the user: ``raydfl/approved_code`` in the configuration folder of this user on this machine.
``raydfl run`` and ``--trust`` append to it. A run folder cannot: its ``run.json`` lists digests too, but only to detect changes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import content_digest, read_json, user_config, write_durably


def check_code(run_dir: Path, values: Any, trust: bool) -> None:
    """Reject a run folder with unapproved code in its configuration. Loads no code.

    Args:
        values: Content of ``config.yaml``.
        trust: True approves the code.

    Raises:
        RunDirectoryError: The code is not approved, or has changed since the run began.
    """
    if trust:
        approve_code(values)
        return
    try:
        known = read_json(run_dir / "run.json").get("code")
    except Exception:  # noqa: BLE001  (another check reports a damaged file)
        known = None
    approved = _read_approved()
    for reference, place in find_references(values).items():
        for path in find_executed_files(place):
            changed = place.endswith(".py") and isinstance(known, Mapping) and code_digest(path) not in known
            if not changed and _make_entry(path) in approved:
                continue
            problem = (
                "or one of its imports in the same folder has changed since the run began"
                if changed
                else "is code that you have neither run nor approved on this machine"
            )
            raise RunDirectoryError(
                f"{run_dir} names {reference}: {path} {problem}. Code runs with all of your permissions. Read the file and its "
                f"imports. If you trust them, add --trust (in Python: trust=True)"
            )


def approve_code(values: Any) -> None:
    """Approve the code in a configuration for this user on this machine.

    If the list is not writable, nothing is approved and ``--trust`` is needed again.
    """
    files = [path for place in find_references(values).values() for path in find_executed_files(place)]
    new = sorted({_make_entry(path) for path in files} - _read_approved())
    with contextlib.suppress(OSError, RuntimeError):
        file = _locate_approvals()
        if new:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One write in append mode: several processes may approve code at the same time.
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "ab", buffering=0) as opened:
                opened.write("".join(f"{entry}\n" for entry in new).encode())


def _locate_approvals() -> Path:
    return user_config() / "approved_code"


def _read_approved() -> set[str]:
    """Read the approved code: a digest and a path for each file."""
    try:
        return set(_locate_approvals().read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, RuntimeError):
        return set()


def _make_entry(path: Path) -> str:
    # With the path: in another folder, the same file could import other code in ways that its digest does not cover.
    return f"{code_digest(path)} {json.dumps(str(path))}"


def code_of(values: Any) -> dict[str, str]:
    """Return the user's files of code in a configuration, by digest, as in ``code`` of ``run.json``."""
    files = [
        path
        for place in find_references(values).values()
        if place.endswith(".py")
        for path in find_executed_files(place)
    ]
    return {code_digest(path): str(path) for path in files}


def remember_code(run_dir: Path, values: Any) -> bool:
    """Store the current digests of a resumed run's code; return whether the code has changed."""
    path = run_dir / "run.json"
    about = json.loads(path.read_bytes())
    known, now = about.get("code"), code_of(values)
    if known is None or known.keys() == now.keys():
        return False
    write_durably(path, json.dumps({**about, "code": now}, indent=2).encode())
    return True


def code_digest(path: Path) -> str:
    """Compute a digest of a file of code and its imports in the same folder, independent of the folder's path."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(_add_imports(path)):
        digest.update(f"{file.relative_to(path.parent)} {content_digest(file)}\n".encode())
    return digest.hexdigest()


def find_references(values: Any) -> dict[str, str]:
    """Find all references to classes in a configuration, ``my_file.py:Class`` or ``my_module:Class``.

    Returns:
        File or module by reference.
    """
    plain = json.loads(json.dumps(values, default=str, skipkeys=True))
    texts = [text for text in _list_texts(plain) if ":" in text]
    return {text: text.rpartition(":")[0] for text in texts}


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from _list_texts(inner)
    elif isinstance(value, str):
        yield value


def find_executed_files(place: str) -> list[Path]:
    """Find the files that Python executes when it loads a file or module. Executes none of them.

    A module's parent packages execute first. raydfl's own modules and ``__main__`` are already loaded and are omitted.
    """
    if place.endswith(".py"):
        with contextlib.suppress(RuntimeError, ValueError):  # unknown user or invalid path: Python would load nothing
            path = Path(place).expanduser().resolve()
            return [path] if os.path.isfile(path) else []  # noqa: PTH113  (Path.is_file raises for names that are too long)
        return []
    files: list[Path] = []
    name, folders = "", None
    for part in place.split("."):
        name = f"{name}.{part}" if name else part
        if name in ("raydfl", "__main__"):
            break
        try:
            # Only for a top-level module: for others, find_spec of importlib would import the package.
            spec = importlib.util.find_spec(name) if folders is None else PathFinder.find_spec(name, folders)
        except (ImportError, ValueError, AttributeError):
            break
        if spec is None:
            break
        if spec.has_location and spec.origin:
            files.append(Path(spec.origin).resolve())
        folders = [*(spec.submodule_search_locations or ())]
    return files


def _add_imports(path: Path) -> list[Path]:
    """Return a file of code and its direct and indirect imports below the same folder, by static analysis."""
    files = [path]
    for file in files:  # grows during the loop
        try:
            imported = parse_imports(file.read_bytes())
        except Exception:  # noqa: BLE001, S112  (the import itself reports what cannot be parsed)
            continue
        for level, name in imported:
            folder = file.parents[level - 1] if 0 < level <= len(file.parents) else path.parent
            # raydfl is already imported, so a folder of the same name is never loaded.
            if not (name.partition(".")[0] == "raydfl" and folder == path.parent):
                files += [module for module in find_module_files(folder, name) if module not in files]
    return [file for file in files if file.is_relative_to(path.parent)]


@functools.lru_cache(maxsize=256)
def parse_imports(code: bytes) -> tuple[tuple[int, str], ...]:
    """Parse the dotted names of a file's imports, each with its number of leading dots."""
    imports: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            imports += [(node.level, f"{module}{alias.name}") for alias in node.names]
    return tuple(imports)


def find_module_files(folder: Path, name: str) -> Iterator[Path]:
    """Find the files below a folder that the import of a dotted name executes."""
    for part in name.split("."):
        yield from (file for file in (folder / f"{part}.py", folder / part / "__init__.py") if file.is_file())
        folder /= part
