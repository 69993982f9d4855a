"""Architecture laws beyond the import contracts of import-linter (pyproject.toml, ``make check``)."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydfl

pytestmark = pytest.mark.slow  # `make check` runs this file

PACKAGE = Path(raydfl.__file__).parent


def list_type_checking_imports() -> Iterator[tuple[str, str]]:
    """Yield file and module of each import of raydfl inside ``if TYPE_CHECKING``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for block in ast.walk(ast.parse(path.read_text())):
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
                for node in ast.walk(block):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raydfl"):
                        yield path.relative_to(PACKAGE).as_posix(), node.module or ""


def test_the_root_contains_only_public_modules() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "ops.py"}


def test_type_checking_imports_hide_no_circular_import() -> None:
    """Allow three files. Their real imports would make ``raydfl --help`` or reading a configuration wait for PyTorch."""
    assert {file for file, _ in list_type_checking_imports()} <= {"cli/main.py", "cli/_arguments.py", "data/views.py"}


def test_every_name_of_the_stub_is_public() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [alias.name for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert names
    assert sorted(names) == sorted(set(names)) == sorted(raydfl.__all__)
    assert all(getattr(raydfl, name) is not None for name in names)
    assert set(names) <= set(dir(raydfl))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        raydfl.no_such_name  # noqa: B018


def test_the_package_docstring_lists_every_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^- ``(\w+)``: ", raydfl.__doc__ or "", re.MULTILINE)) == rooms


def test_every_room_is_documented() -> None:
    """Require a docstring with the room's purpose, a place to start reading and its imports; named files must exist."""
    for path in PACKAGE.glob("*/__init__.py"):
        tree = ast.parse(path.read_text())
        docstring = ast.get_docstring(tree) or ""
        start = re.search(r"\b(Begin with|Start with|Read)\s", docstring)
        assert start, path.parent.name
        assert re.search(r"\b[Ii]mports\s", docstring), path.parent.name
        for file in re.findall(r"\b[\w/]+\.py\b", docstring[start.end() :].partition("\n\n")[0]):
            assert (path.parent / file).is_file(), (path.parent.name, file)


# Packages with public modules, listed in their ``__all__``, and the reasons.
MODULES_ARE_PUBLIC = {
    "raydfl.core": "twenty small, unrelated modules; a common list of their names would explain nothing",
    "raydfl.cli": "no room imports it; its only entry point is the command, main.py",
    "raydfl.runs.report": "figures.py is the vocabulary of the drawing modules; its names mean little without the module's name",
}


def package_file(package: str) -> Path:
    return PACKAGE.joinpath(*package.split(".")[1:], "__init__.py")


def list_public_names(package: str) -> list[str] | None:
    """Return ``__all__`` of a package or the names of its stub; ``None`` if it has neither."""
    file = package_file(package)
    if file.with_suffix(".pyi").is_file():
        lines = ast.parse(file.with_suffix(".pyi").read_text()).body
        return [alias.name for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def is_public(module: str, name: str) -> bool:
    """Return whether ``from module import name`` is allowed in all rooms."""
    if package_file(module).is_file():
        return name in (list_public_names(module) or ())
    package, _, door = module.rpartition(".")
    return package in MODULES_ARE_PUBLIC and door in (list_public_names(package) or ()) and not re.match("_[a-z]", name)


def list_imports() -> Iterator[tuple[str, str, str, str]]:
    """Yield package and file of the importing module, and module and name, for each import of raydfl in raydfl."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        package = ".".join(("raydfl", *path.relative_to(PACKAGE).parent.parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("raydfl") for alias in node.names), (
                    f"{file}: write from ... import"
                )
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("raydfl."):
                for alias in node.names:
                    yield package, file, node.module or "", alias.name


def test_rooms_import_only_public_names_of_other_rooms() -> None:
    """Imports between rooms use only names in ``__all__`` of a room or of a folder in it."""
    crossings, violations = 0, set()
    for package, file, module, name in list_imports():
        room = module.split(".")[1] if "." in module else ""
        if room in package.split(".")[1:2]:
            continue
        crossings += 1
        if not is_public(module, name):
            violations.add((file, module, name))
    assert crossings > 500
    assert not violations


def test_modules_never_import_through_their_own_package() -> None:
    """Modules of a room import each other directly. Importing from their own ``__init__`` would be circular."""
    violations = set()
    for package, file, module, name in list_imports():
        own_package = f"{package}.".startswith(f"{module}.") and module.count(".") > 0
        folder = package_file(module).parent
        if own_package and not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            violations.add((file, module, name))
    assert not violations


def test_every_public_name_exists() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if list_public_names(f"raydfl.{room}") is None} == set()
    for path in PACKAGE.glob("**/__init__.py"):
        package = ".".join(("raydfl", *path.relative_to(PACKAGE).parent.parts))
        names = list_public_names(package) or []
        assert len(names) == len(set(names)), package
        for name in names:
            module = path.with_name(f"{name}.py").is_file() or path.with_name(name).is_dir()
            assert module or getattr(importlib.import_module(package), name) is not None, (package, name)
        if package in MODULES_ARE_PUBLIC:
            assert any(path.with_name(f"{name}.py").is_file() for name in names), package


def test_no_module_has_the_name_of_a_public_name() -> None:
    """Importing a module ``runs/run.py`` would replace the function ``raydfl.runs.run``."""
    stubs = list(PACKAGE.glob("*/**/__init__.pyi"))
    assert stubs
    for stub in stubs:
        package = ".".join(("raydfl", *stub.relative_to(PACKAGE).parent.parts))
        modules = {path.stem for path in stub.parent.glob("*.py")} | {
            path.parent.name for path in stub.parent.glob("*/*.py")
        }
        assert not modules & set(list_public_names(package) or ()), package


def test_lazy_rooms_import_no_heavy_package() -> None:
    """Importing the package and its lazy rooms loads no PyTorch, Ray or Arrow."""
    program = "import sys, raydfl, raydfl.core, raydfl.data, raydfl.runs, raydfl.cli; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "raydfl.runs" in modules
    assert not {"torch", "ray", "numpy", "pyarrow", "pydantic", "pandas", "matplotlib"} & set(modules)


# Docstrings of functions start with a verb, and docstrings of classes and modules with a noun phrase.
BAD_FIRST_WORDS = {"What", "Whether", "How", "Who", "Whom", "Whose", "Of", "Where", "When", "Which", "Why"}
BAD_FIRST_WORDS_OF_FUNCTIONS = {
    "The",
    "A",
    "An",
    "All",
    "These",
    "Those",
    "Each",
    "Writes",
    "Refuses",
    "Reads",
    "Makes",
    "Turns",
    "Says",
    "Returns",
}


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    count, violations = 0, set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not ast.get_docstring(node):
                continue
            count += 1
            first = (ast.get_docstring(node) or "").split()[0]
            decorators = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
            acts = isinstance(node, ast.FunctionDef) and not any("property" in decorator for decorator in decorators)
            if first in BAD_FIRST_WORDS | (BAD_FIRST_WORDS_OF_FUNCTIONS if acts else set()):
                violations.add((file.as_posix(), getattr(node, "name", ""), first))
    assert count > 1000
    assert not violations
