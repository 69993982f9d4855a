"""Where code lives: what import-linter (pyproject.toml, ``make check``), which holds who imports whom, does not see."""

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

PACKAGE = Path(raydfl.__file__).parent


def imports_for_types() -> Iterator[tuple[str, str]]:
    """File and module of each import of raydfl that only a type checker sees."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for block in ast.walk(ast.parse(path.read_text())):
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
                for node in ast.walk(block):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raydfl"):
                        yield path.relative_to(PACKAGE).as_posix(), node.module or ""


def test_only_the_doors_lie_at_the_root() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "ops.py"}


def test_no_circle_is_hidden_from_who_checks_for_circles() -> None:
    """But for three files: importing what they name would make ``raydfl --help``, or reading a configuration, wait for PyTorch."""
    assert {file for file, _ in imports_for_types()} <= {"cli/main.py", "cli/_arguments.py", "data/views.py"}


def test_every_public_name_is_where_the_stub_says() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [alias.name for line in stub.body if isinstance(line, ast.ImportFrom) for alias in line.names]
    assert names
    assert sorted(names) == sorted(set(names)) == sorted(raydfl.__all__)
    assert all(getattr(raydfl, name) is not None for name in names)
    assert set(names) <= set(dir(raydfl))
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        raydfl.no_such_name  # noqa: B018


def test_the_map_at_the_door_has_every_room() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^- ``(\w+)``: ", raydfl.__doc__ or "", re.MULTILINE)) == rooms


def test_every_room_has_a_face() -> None:
    """A docstring that says what it is, and where to begin reading; and the names that other rooms may use."""
    for path in PACKAGE.glob("*/__init__.py"):
        face = ast.parse(path.read_text())
        said = ast.get_docstring(face) or ""
        start = re.search(r"\b(Begin with|Start with|Read)\s", said)
        assert start, path.parent.name
        assert re.search(r"\b[Ii]mports\s", said), path.parent.name
        for file in re.findall(r"\b[\w/]+\.py\b", said[start.end() :].partition("\n\n")[0]):
            assert (path.parent / file).is_file(), (path.parent.name, file)


# Packages whose modules are doors themselves, as their ``__all__`` says, and why.
MODULES_ARE_DOORS = {
    "raydfl.core": "twenty small modules that have nothing in common; one list of their names would explain nothing",
    "raydfl.cli": "no room imports it; its one door is the command, main.py",
    "raydfl.runs.report": "figures.py is the vocabulary of those who draw; its names mean little without it",
}


def package_file(package: str) -> Path:
    return PACKAGE.joinpath(*package.split(".")[1:], "__init__.py")


def names_at_the_door(package: str) -> list[str] | None:
    """``__all__`` of a package, as it stands there or in the stub beside it; ``None``: it has none."""
    file = package_file(package)
    if file.with_suffix(".pyi").is_file():
        lines = ast.parse(file.with_suffix(".pyi").read_text()).body
        return [alias.name for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def is_by_the_door(module: str, name: str) -> bool:
    """Whether ``from module import name`` is how other rooms may import that name."""
    if package_file(module).is_file():
        return name in (names_at_the_door(module) or ())
    package, _, door = module.rpartition(".")
    return package in MODULES_ARE_DOORS and door in (names_at_the_door(package) or ()) and not re.match("_[a-z]", name)


def imports() -> Iterator[tuple[str, str, str, str]]:
    """The importing module's package and file, and the module and name of each import of raydfl in raydfl."""
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


def test_rooms_are_entered_by_the_door() -> None:
    """From outside a room only names in ``__all__`` of its ``__init__``, or of that of a folder in it, are imported."""
    entered, past_the_door = 0, set()
    for package, file, module, name in imports():
        room = module.split(".")[1] if "." in module else ""
        if room in package.split(".")[1:2]:
            continue
        entered += 1
        if not is_by_the_door(module, name):
            past_the_door.add((file, module, name))
    assert entered > 500
    assert not past_the_door


def test_nobody_in_a_room_goes_out_and_comes_in_again() -> None:
    """Modules of a room import each other, never what their own ``__init__`` collects: that would be a circle."""
    found = set()
    for package, file, module, name in imports():
        within = f"{package}.".startswith(f"{module}.") and module.count(".") > 0
        beside = package_file(module).parent
        if within and not ((beside / f"{name}.py").is_file() or (beside / name).is_dir()):
            found.add((file, module, name))
    assert not found


def test_what_stands_at_a_door_is_there() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if names_at_the_door(f"raydfl.{room}") is None} == set()
    for path in PACKAGE.glob("**/__init__.py"):
        package = ".".join(("raydfl", *path.relative_to(PACKAGE).parent.parts))
        names = names_at_the_door(package) or []
        assert len(names) == len(set(names)), package
        for name in names:
            module = path.with_name(f"{name}.py").is_file() or path.with_name(name).is_dir()
            assert module or getattr(importlib.import_module(package), name) is not None, (package, name)
        if package in MODULES_ARE_DOORS:
            assert any(path.with_name(f"{name}.py").is_file() for name in names), package


def test_a_module_is_not_named_like_what_it_gives() -> None:
    """``raydfl.runs.run`` would be the module as soon as that is imported, no longer the function: so it is ``_run.py``."""
    stubs = list(PACKAGE.glob("*/**/__init__.pyi"))
    assert stubs
    for stub in stubs:
        package = ".".join(("raydfl", *stub.relative_to(PACKAGE).parent.parts))
        modules = {path.stem for path in stub.parent.glob("*.py")} | {
            path.parent.name for path in stub.parent.glob("*/*.py")
        }
        assert not modules & set(names_at_the_door(package) or ()), package


def test_faces_that_wait_import_nothing_heavy() -> None:
    """Opening the package and the rooms whose names are imported when they are used takes no PyTorch, Ray or Arrow."""
    program = "import sys, raydfl, raydfl.core, raydfl.data, raydfl.runs, raydfl.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "raydfl.runs" in loaded
    assert not {"torch", "ray", "numpy", "pyarrow", "pydantic", "pandas", "matplotlib"} & set(loaded)


# A function's docstring begins with a verb; that of a class or module with a noun phrase.
NO_BEGINNING = {"What", "Whether", "How", "Who", "Whom", "Whose", "Of", "Where", "When", "Which", "Why"}
NO_VERB = {
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


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    checked, found = 0, set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not ast.get_docstring(node):
                continue
            checked += 1
            first = (ast.get_docstring(node) or "").split()[0]
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            acts = isinstance(node, ast.FunctionDef) and not any("property" in each for each in decorators)
            if first in NO_BEGINNING | (NO_VERB if acts else set()):
                found.add((file.as_posix(), getattr(node, "name", ""), first))
    assert checked > 1000
    assert not found
