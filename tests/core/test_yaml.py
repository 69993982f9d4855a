"""Reading YAML by libyaml, which is fast, and by PyYAML, whose messages are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raydfl.core import yaml as raydfl_yaml
from raydfl.core.errors import ConfigError
from raydfl.core.yaml import parse_yaml

JOBS = Path(__file__).resolve().parents[2] / "jobs"
TEXTS = [
    *(file.read_text() for file in sorted(JOBS.glob("*.yaml"))),
    "{a: 1e-3, b: yes, c: .5, d: true, e: 08, f: [x, 1_0]}",
]


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_both_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [yaml.load(text, Loader=raydfl_yaml._Loader) for text in TEXTS]
    monkeypatch.setattr(raydfl_yaml, "_Loader", None)
    assert [parse_yaml(text, "here") for text in TEXTS] == expected


def test_aliases_and_mistakes() -> None:
    assert parse_yaml("{a: &x [1], b: *x}", "here") == {"a": [1], "b": [1]}
    with pytest.raises(ConfigError, match=r"here: \*x in line 1 stands within what &x names"):
        parse_yaml("a: &x [*x]", "here")
    with pytest.raises(ConfigError, match="here: the key 'a' stands twice, the second time in line 2"):
        parse_yaml("a: 1\na: 2", "here")
