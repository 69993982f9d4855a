"""Digests of the code behind a configuration, for policies of sites.

A digest covers the options in the configuration, the file or module of the class, its helper modules, the versions of further
packages, and the source of raydfl. Nothing is loaded: imports are found by static analysis.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

from raydfl.core.files import content_digest
from raydfl.core.version import describe_source
from raydfl.engine.storage.trust import find_executed_files, find_module_files, find_references, parse_imports

_KNOWN = frozenset({*sys.stdlib_module_names, "raydfl"})
"""Modules without a search: the standard library, and raydfl with a digest of its own."""
_LOADERS = frozenset(
    {"__import__", "import_module", "exec", "eval", "run_path", "run_module", "spec_from_file_location"}
)
"""Functions for code with a computed name, unknown to static analysis."""


@dataclass(frozen=True)
class ComponentDigest:
    """Digest of a method, a rule or another class in a configuration, with the covered code."""

    kind: str
    """``"method"``, ``"rule"`` or ``"code"`` (a user's class anywhere else in the configuration)."""
    name: str
    digest: str
    """SHA-256, 64 hexadecimal digits."""
    files: tuple[str, ...]
    """Files of the user's code."""
    packages: Mapping[str, str]
    """Version and digest of the installed files of each imported package, by its name."""
    unresolved: tuple[str, ...]
    """Lines with a computed name of code: ``file.py:12``. The digest does not cover this code."""


def digest_values(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a configuration's plain values, resources included. Load no code."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def digest_components(values: Mapping[str, Any]) -> list[ComponentDigest]:
    """Compute the digests of the method, its rule, and each user's class in a configuration. Load no code.

    A default rule belongs to its method. The digest of the method covers all its options but ``rule``.

    Args:
        values: Plain values of the configuration.
    """
    method = dict(values["method"])
    rule = method.pop("rule", None)
    components = [_digest_component("method", str(method.get("name")), method)]
    if rule is not None:
        setting = {"name": rule} if isinstance(rule, str) else dict(rule)
        components.append(_digest_component("rule", str(setting.get("name")), setting))
    others = {key: value for key, value in values.items() if key != "method"}
    for reference, place in sorted(find_references(others).items()):
        if find_executed_files(place):
            components.append(_digest_component("code", reference, reference))
    return components


def _digest_component(kind: str, name: str, setting: Any) -> ComponentDigest:
    covered = _CoveredCode()
    for place in find_references([setting]).values():
        for path in find_executed_files(place):
            covered.add(path, "" if place.endswith(".py") else place.partition(".")[0])
    content = {
        "kind": kind,
        # The folder of a file differs between machines.
        "setting": re.sub(r'"[^"]*/([^"/]+\.py:\w+)"', r'"\1"', json.dumps(setting, sort_keys=True, default=str)),
        "raydfl": describe_source(),
        "files": sorted(covered.files.values()),
        "packages": covered.packages,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    files = tuple(map(str, covered.files))
    return ComponentDigest(kind, name.rpartition("/")[2], digest, files, covered.packages, tuple(covered.unresolved))


class _CoveredCode:
    """Code of a class: its file, and all modules with a direct or indirect import."""

    def __init__(self) -> None:
        self.files: dict[Path, tuple[str, str]] = {}
        """Path relative to the folder of the import, and digest of the content, by file."""
        self.packages: dict[str, str] = {}
        self.unresolved: list[str] = []

    def add(self, start: Path, top: str) -> None:
        """Add a file with its imports, or its installed package.

        Args:
            start: The file.
            top: Name of its top-level module; empty: it is not imported by name.
        """
        if top and self._add_package(top, start):
            return
        queue = [(start, start.parent)]
        for path, root in queue:  # grows during the loop
            if path in self.files:
                continue
            self.files[path] = os.path.relpath(path, root), content_digest(path)
            code = path.read_bytes() if path.suffix == ".py" else b""
            try:
                lines, imports = _list_computed_imports(code), parse_imports(code)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # Python cannot import it either
            self.unresolved += [f"{path.name}:{line}" for line in lines]
            for level, name in imports:
                if 0 < level <= len(path.parents):
                    queue += [(file, root) for file in find_module_files(path.parents[level - 1], name)]
                elif not level:
                    queue += self._find(name, start.parent)

    def _add_package(self, top: str, path: Path) -> bool:
        """Add the installed package with a module. Return False if no package has installed it."""
        package = _find_package(top, path)
        if package is not None:
            self.packages[package.name] = _describe_package(package)
        return package is not None

    def _find(self, name: str, folder: Path) -> list[tuple[Path, Path]]:
        """Find the executed files of an import, each with the folder of the import. Add an installed package instead.

        Args:
            name: Dotted name of the module.
            folder: Folder of the user's file. Its neighbours can be imported after the modules of Python's own path.
        """
        top = name.partition(".")[0]
        if top in _KNOWN:
            return []
        found: list[tuple[Path, Path]] = []
        for path in (None, [str(folder)]):
            # Processes may differ in Python's path, so a module of the same name counts in both places.
            spec = PathFinder.find_spec(top, path)
            if spec is None:
                continue
            own = [Path(str(spec.origin))] if spec.has_location else []
            locations = [Path(location) for location in spec.submodule_search_locations or ()] or own
            if not locations or self._add_package(top, locations[0]):
                continue
            for root in (location.parent.resolve() for location in locations):
                found += [(file, root) for file in find_module_files(root, name)]
            found += [(file, file.parent) for file in own if file.suffix != ".py"]  # a compiled module
        return found


@functools.cache
def _map_packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def _find_package(top: str, path: Path) -> Distribution | None:
    """Return the installed package of a top-level module, unless its code is elsewhere, as after an editable installation."""
    # Most packages have the name of their module. The table of all packages takes seconds.
    return _match_package(top, path) or next(
        (found for name in _map_packages().get(top, ()) if (found := _match_package(name, path))), None
    )


def _match_package(name: str, path: Path) -> Distribution | None:
    with contextlib.suppress(PackageNotFoundError):
        package = distribution(name)
        folder = Path(str(package.locate_file(""))).resolve()
        top = path.resolve().relative_to(folder).parts[0] if path.resolve().is_relative_to(folder) else ""
        if any(file.parts[0] == top for file in package.files or ()):
            return package
    return None


def _describe_package(package: Distribution) -> str:
    """Return a package's version, and a digest of the recorded digests of its files."""
    recorded = sorted(
        f"{file} {file.hash.value}"
        for file in package.files or ()
        if file.hash is not None and file.suffix in (".py", ".so") and file.parts[0] != ".."
    )
    return f"{package.version} {hashlib.sha256(json.dumps(recorded).encode()).hexdigest()[:16]}"


def _list_computed_imports(code: bytes) -> list[int]:
    """List the lines with a call of a function of :data:`_LOADERS`."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    names = [call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "") for call in calls]
    return sorted(call.lineno for call, name in zip(calls, names, strict=True) if name in _LOADERS)
