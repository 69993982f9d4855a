"""Options in words: ranges, wrong values within lists and alternatives, and classes with options that JSON does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.options import Option, describe_field, options_of, path_options, plain


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
