"""The core schema of YAML: values, limits, and differences from earlier versions."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydfl.core.errors import ConfigError
from raydfl.core.yaml import parse_yaml, read_yaml, to_yaml

_CHAIN = "k0: &k0 [x]\n" + "\n".join(f"k{i}: &k{i} [*k{i - 1}]" for i in range(1, 200))
_BOMB = "- &a0 [x]\n" + "\n".join(f"- &a{i} [{f'*a{i - 1}, ' * 10}]" for i in range(1, 9))


def test_plain_scalars_follow_the_core_schema() -> None:
    """Examples of YAML 1.2.2, section 10.3.2, and words with a special meaning in YAML 1.1 only."""
    text = """[~, null, '', true, False, TRUE, 0, 0o7, 0x3A, -19, 03, 0., -0.0, .5, +12e03, -2E+05, 1e3, yes, no, on, off, y, N,
        =, <<,
        2024-01-01, 0.1.2, 1e, 0o8, '010', !!str 010]"""
    expected = [None, None, "", True, False, True, 0, 7, 58, -19, 3, 0.0, -0.0, 0.5, 12e3, -2e5, 1e3]
    expected += ["yes", "no", "on", "off", "y", "N", "=", "<<", "2024-01-01", "0.1.2", "1e", "0o8", "010", "010"]
    assert [(type(value), value) for value in parse_yaml(text, "here")] == [(type(value), value) for value in expected]
    special = parse_yaml("[.inf, -.Inf, +.INF, .nan]", "here")
    assert special[:3] == [math.inf, -math.inf, math.inf]
    assert math.isnan(special[3])


@pytest.mark.parametrize(
    ("text", "before", "now"),
    [
        ("010", "8", "10"),
        ("-0777", "-511", "-777"),
        ("08", "'08'", "8"),
        ("1:1:1", "3661", "'1:1:1'"),
        ("1:30.5", "90.5", "'1:30.5'"),
        ("1_000", "1000", "'1_000'"),
        ("0b11", "3", "'0b11'"),
        ("-0x1F", "-31", "'-0x1F'"),
        ("-.5", "'-.5'", "-0.5"),
        ("2001-12-14t21:59:43Z", "'2001-12-14 21:59:43+00:00'", "'2001-12-14t21:59:43Z'"),
    ],
)
def test_scalars_with_a_changed_meaning_are_rejected_with_both_readings(text: str, before: str, now: str) -> None:
    readings = rf"{re.escape(text)} in line 2 was {re.escape(before)} in earlier versions and is {re.escape(now)} now, in YAML 1.2"
    for place in (f"\n- {text}", f"\n{text}: key"):
        with pytest.raises(ConfigError, match=f"here: {readings}. Write {re.escape(before)} or {re.escape(now)}"):
            parse_yaml(place, "here")
    assert repr(parse_yaml(before, "")) != repr(parse_yaml(now, ""))  # both proposals must be readable
    assert str(parse_yaml(f"'{text}'", "")) == text


@pytest.mark.parametrize(
    "value", ["08", "0o10", "010", "1_000", "1:1:1", "-.5", "1e5", ".inf", "2024-01-01", "yes", "", 8, 1e-5]
)
def test_text_that_resembles_a_number_survives_a_round_trip(value: Any) -> None:
    for saved in (False, True):
        assert parse_yaml(to_yaml([value]), "", saved) == [value]


def test_files_saved_by_earlier_versions_keep_their_text() -> None:
    assert parse_yaml("{ids: [08, 0o10], lr: 1.0e-05, note: 1e-3}", "", saved=True) == {
        "ids": ["08", "0o10"],
        "lr": 1e-5,
        "note": 1e-3,
    }
    with pytest.raises(ConfigError, match="010 in line 1 was 8 in earlier versions"):
        parse_yaml("seed: 010", "", saved=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 30_000, "here: line 1 is nested more than 100 levels deep"),
        ("{a: " * 30_000, "here: line 1 is nested more than 100 levels deep"),
        ("- " * 30_000, "here: line 1 is nested more than 100 levels deep"),
        (_CHAIN, "line 100 is nested more than 100"),
        (_BOMB, "more than 100000 values up to line"),
        ("[" + "x, " * 100_000 + "]", "here: more than 100000 values up to line 1"),
        ("&a [1, {b: *a}]", r"here: \*a in line 1 is an alias inside its own value &a"),
        ("x" * 10_000_001, "here: a configuration has at most 10 MB"),
        ("9" * 5_000, "here: the number in line 1 has 5000 characters"),
    ],
    ids=["lists", "groups", "dashes", "chain of aliases", "bomb", "long", "circle", "large", "digits"],
)  # fmt: skip
def test_texts_beyond_a_limit_are_rejected_before_construction(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "characters" not in reason:
        monkeypatch.setattr(yaml, "load", None)
    with pytest.raises(ConfigError, match=reason):
        parse_yaml(text, "here")


def test_texts_within_the_limits_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_yaml("{a: &x [1], b: *x}", "here") == {"a": [1], "b": [1]}
    assert parse_yaml("[" * 100 + "x" + "]" * 100, "")
    monkeypatch.setattr(yaml, "load", lambda text, Loader: "built")
    assert parse_yaml("[" + "x, " * 99_999 + "]", "") == "built"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2", "here: the key 'a' appears twice, the second time in line 2"),
        ("{[1]: 2}", "here: the key in line 1 is a list or a group"),
        ("!!int five", "here: 'five' in line 1 has the tag !!int, but it is not a valid int"),
        ("!!timestamp x", "here is not valid YAML in line 1, column 1: could not determine a constructor"),
        ("\ud800", "here is not UTF-8 text"),
        ("\0", "here is not valid YAML"),
    ],
)
def test_unreadable_texts_are_rejected_with_their_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_yaml(text, "here")


def test_an_endless_device_is_rejected() -> None:
    with pytest.raises(OSError, match="a device, not a file"):
        read_yaml(Path("/dev/zero"))
