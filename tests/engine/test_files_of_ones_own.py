"""Files in a configuration: their content affects results, their location does not, and code may import neighbouring modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Raydfl, write_config

from raydfl.core.errors import ConfigError
from raydfl.core.registry import load_object
from raydfl.engine.config import Config, make_config
from raydfl.engine.overrides import apply_overrides
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]

NETWORK = """
from pathlib import Path

from torch import nn


class Scaled(nn.Module):
    def __init__(self, inputs, classes, scale: Path | None = None, width: int = 4):
        super().__init__()
        self.output = nn.Linear(inputs, classes)
        self.scale = float(scale.read_text())

    def forward(self, x, lengths=None):
        return self.output(x.mean(1) * self.scale)
"""
METHOD = """
from pathlib import Path
from typing import Annotated

from pydantic.dataclasses import dataclass
from raydfl.methods.fedavg import FedAvg
from raydfl.rules.weighted_mean import WeightedMean


@dataclass(frozen=True, kw_only=True)
class Rule(WeightedMean):
    table: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    weights: Path | None = None
"""


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    """Forget modules from temporary folders after each test."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "pytest" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def raydfl(capsys: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capsys)


@pytest.fixture
def configure_files(tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Return a function that configures a run with a relative file path in every supported place."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "network.py").write_text(NETWORK)
        (tmp_path / folder / "mine.py").write_text(METHOD)
        for file in ("scale", "weights", "table"):
            (tmp_path / folder / file).write_text("1.0")
    monkeypatch.chdir(tmp_path / "here")

    def configure(*overrides: str) -> Config:
        return tiny(
            "method={name: mine.py:Mine, weights: weights, rule: {name: mine.py:Rule, table: table}}",
            "models={model: {name: network.py:Scaled, scale: scale, width: 5}}",
            "train.rounds=2",
            *overrides,
        )

    return configure


def test_files_in_options_become_absolute(configure_files: Tiny, tmp_path: Path) -> None:
    values = configure_files().model_dump(mode="json")
    assert values["method"]["weights"] == f"{tmp_path}/here/weights"
    assert values["method"]["rule"]["table"] == f"{tmp_path}/here/table"
    assert values["models"]["model"]["scale"] == f"{tmp_path}/here/scale"


@pytest.mark.parametrize("file", ["scale", "weights", "table"])
def test_the_digest_depends_on_file_content_not_location(
    configure_files: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    digest = configure_files().digest()
    monkeypatch.chdir(tmp_path / "there")
    assert configure_files().digest() == digest
    (tmp_path / "there" / file).write_text("2.50")
    assert configure_files().digest() != digest


def test_configurations_without_files_keep_their_digest(tiny: Tiny) -> None:
    """The digests come from the last version that ignored the content of files."""
    values = tiny().model_dump(mode="json")
    values["data"] = {"name": "fsdd", "root": "/somewhere", "features": values["data"]["features"]}
    attacked = apply_overrides(values, ["attack={name: backdoor, share: 0.2, target: '1'}"])
    assert make_config(values).digest() == "eaa56e0aaf56bc6d"
    assert make_config(attacked).digest() == "9ceeb475c52a1185"


@pytest.mark.slow
def test_a_run_with_a_changed_file_is_not_resumed(raydfl: Raydfl, configure_files: Tiny, tmp_path: Path) -> None:
    config = configure_files()
    folder = run(config).run_dir
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "here" / "scale").write_text("2.50")
    message = r"models.model.scale of .*: the content of the file .*here/scale has changed since the run began"
    raydfl("resume", folder, "train.rounds=3").refuses(message)
    raydfl("run", write_config(config, tmp_path), "train.rounds=3").refuses(message)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    (tmp_path / "here" / "scale").write_text("1.0")
    assert raydfl("resume", folder, "train.rounds=3").code == 0


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_resumed(
    raydfl: Raydfl, configure_files: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = run(configure_files("train.rounds=3", "run.name=whole")).run_dir
    folder = run(configure_files()).run_dir
    metadata = json.loads((folder / "run.json").read_text())
    for key in ("config", "files", "code"):
        del metadata[key]
    (folder / "run.json").write_text(json.dumps({**metadata, "digest": "of-old-times-1234"}))
    text = (folder / "config.yaml").read_text()  # earlier versions stored paths unresolved
    (folder / "config.yaml").write_text(text.replace(f"{tmp_path}/here/scale", "scale"))
    assert raydfl("resume", folder, "train.rounds=3").code == 0
    assert_same_bits(read_tensors(reference), read_tensors(folder))


# -- imports of neighbouring modules ---------------------------------------------------------------------------------


def test_a_file_imports_its_neighbours_without_shadowing_libraries(tmp_path: Path) -> None:
    """Library modules take precedence over neighbours of the same name. A plain folder cannot be imported."""
    (tmp_path / "own.py").write_text(
        "import json\nfrom helpers_of_mine import three\nimport packed_of_mine.inner as inner\n\n\nclass Own:\n"
        "    value = three + inner.four\n    loads = json.loads\n\n    def later(self):\n        import later_of_mine\n\n"
        "        return later_of_mine.five\n"
    )
    (tmp_path / "helpers_of_mine.py").write_text("three = 3\n")
    (tmp_path / "later_of_mine.py").write_text("five = 5\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('never')\n")
    (tmp_path / "packed_of_mine").mkdir()
    (tmp_path / "packed_of_mine" / "__init__.py").touch()
    (tmp_path / "packed_of_mine" / "inner.py").write_text("four = 4\n")
    (tmp_path / "only_a_folder").mkdir()
    path = list(sys.path)
    own = load_object(f"{tmp_path}/own.py:Own")
    assert own.value == 7
    assert own().later() == 5
    assert own.loads is json.loads
    assert sys.path == path
    with pytest.raises(ImportError):
        __import__("only_a_folder")


def test_modules_of_the_same_name_in_two_folders_are_rejected(tmp_path: Path) -> None:
    """Otherwise the second file would silently import the first folder's module."""
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text("from shared_name import value\n\n\nclass Own:\n    v = value\n")
        (tmp_path / folder / "shared_name.py").write_text(f"value = {value}\n")
    assert load_object(f"{tmp_path}/a/own.py:Own").v == 1
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/a and {tmp_path}/b both have a module 'shared_name', .*Rename either"
    ):
        load_object(f"{tmp_path}/b/own.py:Own")
    (tmp_path / "b" / "own.py").write_text("from other_name import value\n\n\nclass Own:\n    v = value\n")
    (tmp_path / "b" / "shared_name.py").rename(tmp_path / "b" / "other_name.py")
    assert load_object(f"{tmp_path}/b/own.py:Own").v == 2


def test_a_file_can_be_loaded_after_it_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import absent_one\n\n\nclass Own:\n    pass\n")
    with pytest.raises(ConfigError, match="No module named 'absent_one'"):
        load_object(f"{tmp_path}/own.py:Own")
    (tmp_path / "absent_one.py").touch()
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert load_object(f"{tmp_path}/own.py:Own")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_actors_import_neighbouring_modules(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from raydfl.methods.fedavg import FedAvg\nfrom beside_of_mine import half\n\n\nclass Own(FedAvg):\n"
        "    def loss(self, step, batch):\n        return half(super().loss(step, batch))\n"
    )
    (tmp_path / "beside_of_mine.py").write_text("def half(x):\n    return 0.5 * x\n")
    method = f"{tmp_path}/own.py:Own"
    actor_run = run(tiny("ray.actors=2", "run.name=actors", method=method)).run_dir
    assert_same_bits(read_tensors(run(tiny(method=method)).run_dir), read_tensors(actor_run))
