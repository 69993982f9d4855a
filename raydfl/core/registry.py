"""Finding methods, data sets and rules by name, and building them from a configuration.

A built-in is one file of a package and its file name is its name in a configuration. A user's own class is named as
``my_file.py:Class`` or ``my_module:Class``; such a file may import what lies beside it. The fields of the class (a pydantic
dataclass) are its options: there is no second schema, and a wrong key or value is an error that names the place and the nearest
valid key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import explain, unknown_key
from raydfl.core.users_code import FAILURES

T = TypeVar("T")
_PREFIX = "raydfl_user_"
"""Beginning of the names of modules that are users' files."""


def names(package: str) -> list[str]:
    """Return the built-in names of a package (``"raydfl.methods"``): its public modules, sorted."""
    return list(_names(package))


@functools.cache
def _names(package: str) -> tuple[str, ...]:
    module = importlib.import_module(package)
    return tuple(sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_")))


class _SourceLoader(SourceFileLoader):
    """Loader that compiles the source itself: a cached file beside it could hold other code than the user has read."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


@functools.cache
def load_file(path: Path) -> ModuleType:
    """Load a module from a file; its name depends only on the path, so that classes pickle between processes that share it."""
    name = f"{_PREFIX}{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; name your class as my_file.py:Class")
    _NEIGHBOURS.admit(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def loaded_files() -> list[Path]:
    """Return the files of users' code that this process has loaded."""
    return [Path(str(module.__file__)) for name, module in [*sys.modules.items()] if name.startswith(_PREFIX)]


class _Neighbours(MetaPathFinder):
    """Finds what lies beside users' files, so that they can import it, but only what Python finds nowhere else.

    A module is known to a whole process by its name: two folders cannot both have a ``helpers.py`` that is imported.
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._found: dict[str, Path] = {}

    def admit(self, folder: Path) -> None:
        """Find modules in this folder too.

        Raises:
            ConfigError: one of its modules has the name of one that was imported from another folder.
        """
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        if folder in self._folders:
            return
        for name, other in self._found.items():
            if name in sys.modules and self._spec(name, folder) is not None:
                raise _twice(name, other, folder)
        self._folders.append(folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        if path is not None:
            return None  # a package finds its own parts
        specs = {folder: spec for folder in self._folders if (spec := self._spec(fullname, folder)) is not None}
        if len(specs) > 1:
            raise _twice(fullname, *list(specs)[:2])
        for folder, spec in specs.items():
            self._found[fullname] = folder
            return spec
        return None

    @staticmethod
    def _spec(name: str, folder: Path) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(folder)])
        # Source alone: nobody can read a compiled file before approving it. A folder without __init__.py has no loader.
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _SourceLoader(name, spec.loader.path)
        return spec


_NEIGHBOURS = _Neighbours()


def _twice(name: str, one: Path, other: Path) -> ConfigError:
    return ConfigError(
        f"there is a module {name!r} in {one} and one in {other}, and Python knows only one of a name: rename one of them"
    )


def load_object(reference: str) -> Any:
    """Import what ``file.py:Name`` or ``module:Name`` points to.

    Raises:
        ConfigError: the file, the module or the name does not exist (in this process, where it is ``__main__``), or importing it
            fails.
    """
    place, _, name = reference.rpartition(":")
    try:
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise ConfigError(f"{reference!r}: there is no file {path}")
            module = load_file(path)
        else:
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except FAILURES as error:  # whatever a user's module does at import
        raise ConfigError(f"{reference!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        if place == "__main__":
            raise ConfigError(
                f"{reference!r}: what a script defines is not to be found by other processes, in which the server and the clients "
                f"are; put {name} into a file of its own and name it FILE.py:{name}, or set ray.actors=0 in that script"
            )
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{reference!r}: {place} has no {name!r}; {nearest(name, public)}")
    return getattr(module, name)


def find(package: str, name: str, base: type[T], what: str) -> type[T]:
    """Find the subclass of ``base`` called ``name``: the one defined in ``package/name.py``, or the user's ``file.py:Class``.

    Args:
        what: how an error names the kind of thing, ``"method"``.

    Raises:
        ConfigError: no such name (the nearest is named), or it is not a subclass of ``base``.
    """
    if ":" in name:
        found = load_object(name)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(f"{what} {name!r} is not a subclass of raydfl.{base.__name__}")
        return found
    known = names(package)
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}; {nearest(name, known)} Your own class: my_file.py:Class")
    module = importlib.import_module(f"{package}.{name}")
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if not classes:
        raise ConfigError(f"{what} file {module.__name__} defines no subclass of {base.__name__}")
    return classes[-1]  # helpers may stand before it; the last class of the file is the one it is named for


def build(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Build ``cls(**options)``, with every option checked against the class's fields.

    Args:
        where: the place in the configuration, ``"method"``, for the messages.

    Raises:
        ConfigError: unknown option (the nearest is named), wrong type, or a value out of range.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
    for key in options:
        if key not in known:
            raise unknown_key(key, known, where, f" for {cls.__name__}")
    try:
        # A plain dataclass of a user's is checked as strictly as our own.
        return TypeAdapter(cls).validate_python(dict(options))
    except ValidationError as error:
        raise ConfigError(explain(error, where, dict(options), cls)) from error
