"""Options: descriptions of ranges, messages about wrong values, and classes with options outside JSON."""

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
from raydfl.core.options import PAPER, Option, describe_field, explain, options_of, path_options, plain
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
def test_ranges_are_described_in_words(limits: dict[str, Any], words: str) -> None:
    assert describe_field({"description": "share", **limits}) == words


def test_a_range_in_the_description_is_not_repeated() -> None:
    assert describe_field({"description": "Hz. 1 to 512.", "minimum": 1, "maximum": 512}) == "Hz. 1 to 512."
    assert describe_field({"description": "Rate in Hz.", "minimum": 1}) == "Rate in Hz. At least 1."
    assert (
        describe_field({"description": "Gain in dB.", "minimum": -60, "maximum": 0}) == "Gain in dB. Range: -60 to 0."
    )
    assert describe_field({"description": "first or mean", "enum": ["first", "mean"]}) == "first or mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine:
    """A user class with options of many kinds."""

    size: Annotated[int, Field(ge=1, description="how large")]
    activation: Callable[[float], float] = abs
    names: tuple[str, ...] = ("a",)
    either: Annotated[int | Literal["all"], Field(description="a number, or all")] = 3
    folder: Path | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    rate: Annotated[float, Field(gt=0, description="how fast"), PAPER] = 0.1


def test_options_of_any_class_are_listed() -> None:
    options = {option.name: option for option in options_of(Mine)}
    assert options["size"] == Option("size", None, True, "how large (at least 1)")
    assert options["rate"] == Option("rate", 0.1, False, "how fast (above 0)", "paper")
    assert options["names"].default == ["a"]
    assert not options["activation"].required
    assert path_options(Mine) == ["folder"]


def test_callables_become_text_without_memory_addresses() -> None:
    """The digest of a configuration uses this text, so it must be equal in all processes."""
    values = plain(Mine(size=2, folder=Path("/x"), activation=lambda x: x))
    assert values["folder"] == "/x"
    assert values["names"] == ["a"]
    assert "0x" not in values["activation"]


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
def test_messages_describe_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(Mine, options, "mine")
    assert str(caught.value) == message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kinds(StrictTypes):
    """A class with an option of each kind."""

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
def test_options_accept_only_values_of_their_type(field: str) -> None:
    def is_accepted(value: Any) -> bool:
        try:
            result = getattr(registry.build(Kinds, {field: value}, "kinds"), field)
        except ConfigError:
            with pytest.raises(ValidationError):
                GroupOfKinds.model_validate({field: value})
            return False
        assert repr(result) == repr(getattr(GroupOfKinds.model_validate({field: value}), field))
        assert plain(result) == value or value != value  # the type must be preserved, also for shares
        return True

    accepted = [value for value in _VALUES if is_accepted(value)]
    assert [(type(value), repr(value)) for value in accepted] == [
        (type(value), repr(value)) for value in _ACCEPTED[field]
    ]


def test_messages_show_rejected_values() -> None:
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
    """Settings with groups, named groups and repeated names."""

    rounds: int = 1
    optimiser: Optimiser | None = None
    named: dict[str, Optimiser] = Field(default_factory=dict)


def test_each_wrong_nested_setting_has_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
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
