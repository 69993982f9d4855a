"""Former names of public functions stay importable."""

import pytest

import raydfl.rules


def test_a_former_name_returns_the_renamed_function_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="raydfl.rules.filled is now named fill_cuts"):
        from raydfl.rules import filled
    assert filled is raydfl.rules.fill_cuts


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'raydfl.rules' has no attribute 'unknown'"):
        raydfl.rules.unknown  # type: ignore[attr-defined]  # noqa: B018
