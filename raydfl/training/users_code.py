"""Whose code something is: a user's own, or a library's that is trusted to do what it says."""

from __future__ import annotations

import dataclasses
import functools
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from typing import Any

_LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy", "raydfl", "torch"})


def is_users(module: str | None) -> bool:
    """Whether a module of that name is a user's.

    >>> is_users("torch.nn.functional"), is_users("raydfl_user_0f1e2d"), is_users("__main__")
    (False, True, True)
    """
    return (module or "builtins").partition(".")[0] not in _LIBRARIES


def place_of(error: BaseException, otherwise: str = "") -> str:
    """``file.py:12``: where an exception was raised, or the user's line that called the library that raised it.

    Args:
        otherwise: what to return if no line of a user's was running; empty: the line of the library.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    own = [(frame, line) for frame, line in frames if is_users(frame.f_globals.get("__name__"))]
    if otherwise and not own:
        return otherwise
    frame, line = (own or frames)[-1]
    return f"{frame.f_code.co_filename}:{line}"


def outside(roots: Iterable[Any]) -> dict[str, Any]:
    """What users' functions may reach beside their arguments: the values that they name in their modules and classes.

    Found are, by name, variables of modules and attributes of classes, also those that further functions name which they call. It
    is rather too much than too little: a name counts in every module and class that was come across.

    Args:
        roots: functions, methods and classes.
    """
    search = _Search()
    for root in roots:
        search.enter(root, root=True)
    search.run()
    return search.found


class _Search:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._names: dict[str, None] = {}
        self._spaces: list[tuple[str, Mapping[str, Any], frozenset[str]]] = []
        """Name, content, and what of it is looked at elsewhere, of each module and class."""
        self._entered: set[int] = set()

    def enter(self, value: Any, root: bool = False) -> bool:
        """Take in what a function names or a class or module holds; False: it is a plain value."""
        if isinstance(value, (staticmethod, classmethod, property)):
            value = value.fget if isinstance(value, property) else value.__func__
        if isinstance(value, functools.partial):
            for part in (*value.args, *value.keywords.values()):
                self.enter(part)
            value = value.func
        if isinstance(value, types.MethodType):
            self._enter_owner(value.__self__)
            value = value.__func__
        if not isinstance(value, (types.FunctionType, types.ModuleType, type)):
            return isinstance(value, types.MemberDescriptorType)
        if id(value) in self._entered:
            return True
        self._entered.add(id(value))
        if isinstance(value, types.FunctionType):
            self._enter_function(value, root)
        elif isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                self._space(value.__name__, vars(value))
        else:
            for base in value.__mro__:
                if is_users(base.__module__):
                    fields = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
                    # Their values are in the instance.
                    self._space(f"{base.__module__}.{base.__qualname__}", vars(base), [field.name for field in fields])
        return True

    def _enter_owner(self, owner: Any) -> None:
        self.enter(type(owner))
        if id(owner) not in self._entered:
            self._entered.add(id(owner))
            for part in getattr(owner, "__dict__", {}).values():
                self.enter(part)

    def _enter_function(self, function: types.FunctionType, root: bool) -> None:
        own = is_users(function.__module__)
        if own or root:  # a method of the library's that is a root may call one that the user has overridden
            self._names.update(dict.fromkeys(_names(function.__code__)))
        if own:
            self._space(function.__module__, function.__globals__)
            for number, held in enumerate((*cells(function), function.__defaults__, function.__kwdefaults__)):
                if not self.enter(held):
                    self.found[f"{function.__qualname__} {number}"] = held

    def _space(self, name: str, content: Mapping[str, Any], elsewhere: Iterable[str] = ()) -> None:
        if all(known != name for known, *_ in self._spaces):
            self._spaces.append((name, content, frozenset(elsewhere)))

    def run(self) -> None:
        """Follow names until nothing new comes up."""
        size = -1
        while size != (size := len(self._names) + len(self._spaces) + len(self._entered)):
            for space, content, elsewhere in list(self._spaces):
                for name in [name for name in self._names if name in content and name not in elsewhere]:
                    if not self.enter(content[name]):
                        self.found[f"{space}.{name}"] = content[name]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """All names in a function's code that are no local variables, and in the functions in it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return (*code.co_names, *inner)


def cells(function: types.FunctionType) -> list[Any]:
    """What a function has captured."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            contents.append(None)
    return contents
