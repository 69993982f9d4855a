"""Options in words: ranges, wrong values within lists and alternatives, and classes with options that JSON does not know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from pydantic import Field, ValidationError, create_model

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.options import Option, describe_field, explain, options_of, path_options, plain
from raydfl.core.settings import Settings, StrictTypes


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({}, "share"),
        ({"minimum": 1}, "share (at least 1)"),
        ({"exclusiveMinimum": 0}, "share (above 0)"),
        ({"maximum": 2.5}, "share (at most 2.5)"),
        ({"minimum": 0, "maximum": 1}, "share (0 to 1)"),
        ({"exclusiveMinimum": 0, "maximum": 1}, "share (above 0, to 1)"),
        ({"minimum": 0, "exclusiveMaximum": 1}, "share (at least 0, below 1)"),
        ({"enum": ["a", "b"]}, "share (one of a, b)"),
        ({"anyOf": [{"minimum": 1, "maximum": 512}, {"type": "null"}]}, "share (1 to 512)"),
    ],
)
def test_ranges_in_words(limits: dict[str, Any], words: str) -> None:
    assert describe_field({"description": "share", **limits}) == words


def test_a_range_that_the_meaning_names_is_not_repeated() -> None:
    assert describe_field({"description": "Hz. 1 to 512.", "minimum": 1, "maximum": 512}) == "Hz. 1 to 512."
    assert describe_field({"description": "first or mean", "enum": ["first", "mean"]}) == "first or mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    """Options of many kinds, written as a user might."""

    size: Annotated[int, Field(ge=1, description="how large")]
    activation: Callable[[float], float] = abs
    names: tuple[str, ...] = ("a",)
    either: Annotated[int | Literal["all"], Field(description="a number, or all")] = 3
    folder: Path | None = None
    pair: tuple[float, float] = (0.0, 1.0)


def test_options_of_any_class_can_be_told() -> None:
    options = {option.name: option for option in options_of(Mine)}
    assert options["size"] == Option("size", None, True, "how large (at least 1)")
    assert options["names"].default == ["a"]
    assert not options["activation"].required
    assert path_options(Mine) == ["folder"]


def test_what_is_not_plain_becomes_text_without_addresses() -> None:
    """The digest of a configuration is made of this: it must not change from one process to the next."""
    told = plain(Mine(size=2, folder=Path("/x"), activation=lambda x: x))
    assert told["folder"] == "/x"
    assert told["names"] == ["a"]
    assert "0x" not in told["activation"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "mine.size is missing\n  mine.size: how large (at least 1)"),
        ({"size": 0}, "mine.size is 0; it must be at least 1\n  mine.size: how large (at least 1)"),
        ({"size": 1, "names": "abc"}, 'mine.names is "abc"; it must be a list'),
        ({"size": 1, "names": ["a", 2]}, "mine.names.1 is 2; it must be text (put it in quotes)"),
        ({"size": 1, "names": ["a", True]}, "mine.names.1 is true; it must be text (put it in quotes)"),
        (
            {"size": 1, "either": "al"},
            "mine.either is \"al\"; it must be a whole number or all; did you mean 'all'?\n  mine.either: a number, or all",
        ),
        ({"size": 1, "pair": [1]}, "mine.pair.1 is missing"),
        ({"size": 1, "pair": [1, 2, 3]}, "mine.pair is [1, 2, 3]; it must be at most 2 items long"),
        ({"size": 1, "pair": [1, "x"]}, 'mine.pair.1 is "x"; it must be a number'),
        ({"size": 1, "folder": 5}, "mine.folder is 5; it must be a path"),
        (
            {"size": "x" * 200},
            f'mine.size is "{"x" * 79} ...; it must be a whole number\n  mine.size: how large (at least 1)',
        ),
        (
            {"size": 0, "either": 0.5},
            "mine.size is 0; it must be at least 1\n  mine.size: how large (at least 1)\n"
            "mine.either is 0.5; it must be a whole number or all\n  mine.either: a number, or all",
        ),
        ({"sise": 1}, "mine: unknown key 'sise' for Mine; did you mean 'size'?"),
    ],
)
def test_what_is_wrong_with_an_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(Mine, options, "mine")
    assert str(caught.value) == message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds(StrictTypes):
    """An option of each kind."""

    whole: int = 1
    number: float = 1.0
    switch: bool = False
    text: str = ""
    words: list[str] = dataclasses.field(default_factory=list)
    pair: tuple[float, float] = (0.0, 1.0)
    group: dict[str, int] = dataclasses.field(default_factory=dict)
    folder: Path = Path()
    share: int | float = 1
    either: int | Literal["all"] = 1
    perhaps: float | None = None
    boundless: Annotated[float, Field(allow_inf_nan=True)] = 1.0


_FIELDS: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(Kinds, include_extras=True).items()}
GroupOfKinds = create_model("GroupOfKinds", __base__=Settings, **_FIELDS)
_VALUES = [
    True,
    "5",
    "all",
    5,
    5.0,
    2.5,
    math.inf,
    math.nan,
    None,
    [],
    ["a"],
    [True],
    [1, 2.5],
    [1, "2"],
    {},
    {"a": 1},
    {"a": True},
]
_ACCEPTED: dict[str, list[Any]] = {
    "whole": [5],
    "number": [5, 5.0, 2.5],
    "switch": [True],
    "text": ["5", "all"],
    "words": [[], ["a"]],
    "pair": [[1, 2.5]],
    "group": [{}, {"a": 1}],
    "folder": ["5", "all"],
    "share": [5, 5.0, 2.5],
    "either": ["all", 5],
    "perhaps": [5, 5.0, 2.5, None],
    "boundless": [5, 5.0, 2.5, math.inf, math.nan],
}


@pytest.mark.parametrize("field", _ACCEPTED)
def test_an_option_accepts_values_of_its_own_type_alone(field: str) -> None:
    def accepts(value: Any) -> bool:
        try:
            built = getattr(registry.build(Kinds, {field: value}, "kinds"), field)
        except ConfigError:
            with pytest.raises(ValidationError):
                GroupOfKinds.model_validate({field: value})
            return False
        assert repr(built) == repr(getattr(GroupOfKinds.model_validate({field: value}), field))
        assert plain(built) == value or value != value  # also a share keeps its type
        return True

    accepted = [value for value in _VALUES if accepts(value)]
    assert [(type(value), repr(value)) for value in accepted] == [
        (type(value), repr(value)) for value in _ACCEPTED[field]
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"whole": True}, "kinds.whole is true; it must be a whole number (earlier versions read 1)"),
        ({"whole": 5.0}, "kinds.whole is 5.0; it must be a whole number (earlier versions read 5)"),
        ({"whole": "5"}, 'kinds.whole is "5"; it must be a whole number (earlier versions read 5)'),
        ({"number": True}, "kinds.number is true; it must be a number (earlier versions read 1.0)"),
        ({"switch": 1}, "kinds.switch is 1; it must be true or false (earlier versions read true)"),
        ({"share": True}, "kinds.share is true; it must be a number (earlier versions read 1)"),
        ({"whole": "9" * 5000}, "it must be a whole number"),
        ({"number": math.inf}, "kinds.number is Infinity; it must be a finite number"),
    ],
)
def test_a_value_that_earlier_versions_converted_is_refused_with_both_readings(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(Kinds, options, "kinds")
    assert str(caught.value).endswith(message)


def test_a_wrong_group_among_groups_of_the_users_names_its_settings() -> None:
    class Group(Settings):
        size: int = 1

    class Groups(Settings):
        named: dict[str, Group]

    with pytest.raises(ValidationError) as caught:
        Groups.model_validate({"named": {"mine": 5}})
    text = explain(caught.value, "", {"named": {"mine": 5}}, Groups)
    assert text == "named.mine is 5; it must be a group of settings (size)"
