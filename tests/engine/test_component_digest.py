"""Digests of a configuration's code: each change of code or options that a run would execute changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydfl.engine.storage import component_digest, digest_components

METHOD = "import tools_of_mine\nfrom package.inner import f\n\n\nclass Mine:\n    pass\n"
Digest = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a method with a helper, a helper of the helper, a package and an unrelated file."""
    folder = tmp_path / "first"
    (folder / "package").mkdir(parents=True)
    (folder / "mine.py").write_text(METHOD)
    (folder / "tools_of_mine.py").write_text("import deeper\n")
    (folder / "deeper.py").write_text("x = 1\n")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "inner.py").write_text("from .sibling import f\n")
    (folder / "package" / "sibling.py").write_text("f = 1\n")
    (folder / "unrelated.py").write_text("y = 1\n")
    return folder


def make_values(folder: Path, **options: Any) -> dict[str, Any]:
    return {"method": {"name": f"{folder}/mine.py:Mine", **options}, "data": {"name": "folder"}}


def digest(values: dict[str, Any], kind: str = "method") -> str:
    (component,) = [component for component in digest_components(values) if component.kind == kind]
    return component.digest


@pytest.mark.parametrize(
    "changed",
    ["mine.py", "tools_of_mine.py", "deeper.py", "package/__init__.py", "package/inner.py", "package/sibling.py"],
)
def test_a_changed_helper_module_changes_the_digest(folder: Path, changed: str) -> None:
    before = digest(make_values(folder))
    with (folder / changed).open("a") as file:
        file.write("z = 2\n")
    assert digest(make_values(folder)) != before


def test_unrelated_files_and_the_folder_do_not_change_the_digest(folder: Path) -> None:
    before = digest(make_values(folder))
    (folder / "unrelated.py").write_text("y = 2\n")
    assert digest(make_values(folder)) == before
    assert digest(make_values(folder.rename(folder.with_name("second")))) == before


def test_swapped_helpers_change_the_digest(folder: Path) -> None:
    (folder / "mine.py").write_text("import a, b\n\n\nclass Mine:\n    pass\n")
    (folder / "a.py").write_text("x = 1\n")
    (folder / "b.py").write_text("x = 2\n")
    before = digest(make_values(folder))
    (folder / "a.py").write_text("x = 2\n")
    (folder / "b.py").write_text("x = 1\n")
    assert digest(make_values(folder)) != before


def test_helpers_on_pythons_path_are_covered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper outside the folder of the method, as with PYTHONPATH."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "far_helper.py").write_text("x = 1\n")
    (folder / "mine.py").write_text(f"import far_helper\n{METHOD}")
    before = digest(make_values(folder))
    (tmp_path / "far_helper.py").write_text("x = 2\n")
    assert digest(make_values(folder)) != before


def test_a_module_of_the_same_name_on_pythons_path_is_covered_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deeper.py").write_text("x = 1\n")
    before = digest(make_values(folder))
    for changed in (tmp_path / "deeper.py", folder / "deeper.py"):
        changed.write_text("x = 2\n")
        assert digest(make_values(folder)) != before
        before = digest(make_values(folder))


def test_the_version_of_an_imported_package_changes_the_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tools_of_mine.py").write_text("import numpy as np\n")
    (component,) = digest_components(make_values(folder))
    assert component.packages["numpy"].startswith("2.")
    monkeypatch.setattr(component_digest, "_describe_package", lambda _: "another version")
    assert digest(make_values(folder)) != component.digest


def test_raydfls_source_changes_every_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"method": {"name": "fedavg", "rule": "krum"}}
    before = [component.digest for component in digest_components(values)]
    monkeypatch.setattr(component_digest, "describe_source", lambda: "0.1.0 (another)")
    after = [component.digest for component in digest_components(values)]
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)


def test_options_belong_to_their_component() -> None:
    first: dict[str, Any] = {"method": {"name": "fedprox", "mu": 0.1, "rule": {"name": "krum", "attackers": 1}}}
    mu, rule = copy.deepcopy(first), copy.deepcopy(first)
    mu["method"]["mu"] = 0.2
    rule["method"]["rule"]["attackers"] = 2
    assert digest(mu) != digest(first)
    assert digest(mu, "rule") == digest(first, "rule")
    assert digest(rule) == digest(first)
    assert digest(rule, "rule") != digest(first, "rule")


def test_users_classes_in_other_settings_are_components(folder: Path) -> None:
    values = {"method": {"name": "fedavg"}, "data": {"name": f"{folder}/mine.py:Mine", "uri": "s3://bucket/runs"}}
    assert [(component.kind, component.name) for component in digest_components(values)] == [
        ("method", "fedavg"),
        ("code", "mine.py:Mine"),
    ]


def test_nothing_is_loaded(folder: Path) -> None:
    marker = folder / "loaded"
    for name in ("mine.py", "tools_of_mine.py"):
        with (folder / name).open("a") as file:
            file.write(f"open({str(marker)!r}, 'w')\n")
    digest_components(make_values(folder))
    assert not marker.exists()


def test_imports_by_a_computed_name_are_reported(folder: Path) -> None:
    (folder / "deeper.py").write_text("import importlib\nimportlib.import_module('hid' + 'den')\n")
    (component,) = digest_components(make_values(folder))
    assert component.unresolved == ("deeper.py:2",)
