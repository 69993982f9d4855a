"""Options in words: ranges, wrong values within lists and alternatives, and classes with options that JSON does not know."""

from __future__ import annotations

import dataclasses
import math
import re
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
    assert describe_field({"description": "Rate in Hz.", "minimum": 1}) == "Rate in Hz. At least 1."
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
        ({}, "mine.size: Field required\n  mine.size: how large (at least 1)"),
        (
            {"size": 0},
            "mine.size: Input should be greater than or equal to 1 (got 0)\n  mine.size: how large (at least 1)",
        ),
        ({"size": 1, "names": "abc"}, 'mine.names: Input should be a valid tuple (got "abc")'),
        ({"size": 1, "names": ["a", 2]}, "mine.names.1: Input should be a valid string (got 2)"),
        (
            {"size": 1, "either": "al"},
            "mine.either: Input should be a valid integer, unable to parse string as an integer or 'all' (got \"al\")\n"
            "  mine.either: a number, or all",
        ),
        ({"size": 1, "pair": [1]}, "mine.pair.1: Field required"),
        (
            {"size": 1, "pair": [1, 2, 3]},
            "mine.pair: Tuple should have at most 2 items after validation, not 3 (got [1, 2, 3])",
        ),
        ({"size": 1, "folder": 5}, "mine.folder: Input is not a valid path for <class 'pathlib.Path'> (got 5)"),
        (
            {"size": "x" * 200},
            "mine.size: Input should be a valid integer, unable to parse string as an integer "
            f'(got "{"x" * 79} ...)\n  mine.size: how large (at least 1)',
        ),
        (
            {"size": 0, "either": 0.5},
            "mine.size: Input should be greater than or equal to 1 (got 0)\n  mine.size: how large (at least 1)\n"
            "mine.either: Input should be a valid integer, got a number with a fractional part or 'all' (got 0.5)\n"
            "  mine.either: a number, or all",
        ),
        ({"sise": 1}, "mine: unknown key 'sise' for Mine. Did you mean 'size'?"),
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


def test_a_message_shows_the_value_that_a_setting_does_not_take() -> None:
    for field, value, words in [
        ("whole", True, "a valid integer (got true)"),
        ("whole", "9" * 5000, f'a valid integer (got "{"9" * 79} ...)'),
        ("number", math.inf, "a finite number (got Infinity)"),
        ("share", True, "a valid integer or a valid number (got true)"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(f"kinds.{field}: Input should be {words}")):
            registry.build(Kinds, {field: value}, "kinds")


class Optimiser(Settings):
    """A group."""

    lr: float = 0.1


class Tree(Settings):
    """Settings with groups, named groups and equal names in several places."""

    rounds: int = 1
    optimiser: Optimiser | None = None
    named: dict[str, Optimiser] = Field(default_factory=dict)


def test_each_wrong_setting_of_a_tree_has_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "tree", Tree)
    values = {
        "ronuds": 3,
        "lr": 1,
        "zzz": 1,
        "optimiser": {"rounsd": 1, "l": 1},
        "named": {"mine": {"rl": 1}, "other": 5},
    }
    with pytest.raises(ValidationError) as caught:
        Tree.model_validate(values)
    assert explain(caught.value, "", values, Tree).splitlines() == [
        "optimiser: unknown key 'rounsd'. Did you mean rounds?",
        "optimiser: unknown key 'l'. Did you mean 'lr'?",
        "named.mine: unknown key 'rl'. Did you mean 'lr'?",
        "named.other: Input should be a valid dictionary or instance of Optimiser (got 5)",
        "  named.other: A group.",
        "unknown key 'ronuds'. Did you mean 'rounds'?",
        "unknown key 'lr'. Did you mean optimiser.lr?",
        "unknown key 'zzz'. Choose one of named, optimiser, rounds.",
    ]
