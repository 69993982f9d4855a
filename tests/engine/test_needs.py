"""Declared needs: every field rejects unsuitable configurations with the same wording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import raydfl
from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config

Tiny = Callable[..., Config]
UNMET: dict[str, tuple[str, tuple[str, ...], str]] = {
    "pools": ("('far',)", (), "data.pools: {} needs the pool 'far', but data has none. Hide labels"),
    "views": ("('video',)", (), "data.views: {} needs the view 'video', but it is not defined. Add it"),
    "columns": ("('age',)", (), "data.profile: {} needs the column 'age', but the clients' profiles do not have it"),
    "objectives": (
        "('compact',)",
        (),
        "objective: {} needs objective=compact, but the objective is 'classify'. Choose a",
    ),
    "labels": ("'sets'", (), "objective: {} needs an objective that learns sets of classes, but the objective is"),
    "optimiser": (
        "'sgd'",
        ("train.optimiser.name=adam",),
        "train.optimiser.name: {} needs train.optimiser.name=sgd, but it is 'adam'. Set it",
    ),
    "plain_steps": (
        "True",
        ("train.optimiser.momentum=0.5",),
        "train.optimiser: {} needs plain steps, but it has momentum or clipping. Remove train.optimiser.momentum and",
    ),
    "batch_size": (
        "9",
        (),
        "train.batch_size: {} needs batches of at least 9 clips, but it is 8. Set it to at least 9.",
    ),
    "one_class_list": (
        "True",
        ("data.parts={a: {}, b: {}}",),
        "data.parts: {} needs one list of classes for all clients, but each part has its own. Remove one of the two.",
    ),
    "own_outputs": (
        "True",
        ("data.parts={a: {}, b: {}}", "data.heads=common"),
        "data.heads: {} needs one output for each class of a part, but all parts share the outputs. Set it to part",
    ),
    "recordings": (
        "True",
        ("data.features={kind: file, path: x.npz, bands: 16}",),
        "data.features.kind: {} needs recordings, but features of the kind file have none. Set it to logmel",
    ),
    "own_clips": (
        "True",
        ("data.sites={north: {folder: /x, partition: {by: table, file: /x.csv}}}", "data.split.validation=0"),
        "data.partition.by: {} needs clips with a single owner, but clients of a table may share clips. Choose",
    ),
    "one_round": (
        "True",
        ("train.fleet={buffer: 2, seconds: {start: 1}}",),
        "train.fleet: {} needs tensors of one round, but a fleet combines updates of several rounds. Remove it",
    ),
    "new_values": ("True", (), "method.rule: {} needs updates near the server's tensors, but method '"),
}


def test_every_field_has_a_case() -> None:
    assert UNMET.keys() == {field.name for field in fields(raydfl.Needs)}


@pytest.mark.parametrize("field", UNMET)
def test_unmet_needs_are_rejected(tiny: Tiny, tmp_path: Path, field: str) -> None:
    value, settings, message = UNMET[field]
    file = tmp_path / "mine.py"
    file.write_text(
        "import raydfl\nclass Mine(raydfl.Method):\n    changes = ('control/',)\n"
        f"    needs = raydfl.Needs({field}={value})\n"
    )
    with pytest.raises(ConfigError) as error:
        tiny(*settings, method=f"{file}:Mine")
    assert message.format(f"method '{file}:Mine'") in str(error.value)


@pytest.mark.parametrize(
    "code",
    [
        "class Mine(raydfl.Method):\n    {}",
        "class Mixin:\n    {}\nclass Mine(Mixin, raydfl.Method): ...",
    ],
)
@pytest.mark.parametrize(
    ("member", "replacement"),
    [
        ("across_parts = False", r"needs = raydfl.Needs\(one_class_list=True\)"),
        ("def check(self, train): ...", r"raydfl.Needs\(optimiser=..., batch_size=...\)"),
        ("def build(self, client): ...", r"def build\(self, models\), with models in place of client.models"),
        ("def may_send(self, key, name): ...", "the class variable additions"),
        ("def fixed(self, name, trains): ...", r"fixed = \('model/output',\)"),
        ("def default_rule(self): ...", r"default_rule = UniformMean\(\)"),
    ],
)
def test_removed_members_are_rejected_with_their_replacement(
    tiny: Tiny, tmp_path: Path, code: str, member: str, replacement: str
) -> None:
    (tmp_path / "mine.py").write_text(f"import raydfl\n{code.format(member)}\n")
    with pytest.raises(
        ConfigError, match=rf"Mi\w+\.\w+ is not called in this version of raydfl. Write .*{replacement}"
    ):
        tiny(method=f"{tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize(
    ("base", "setting", "body", "message"),
    [
        (
            "Method",
            "method",
            "def needs(self): ...",
            r"needs must be a raydfl.Needs. Write needs = raydfl.Needs\(...\)",
        ),
        (
            "Objective",
            "objective",
            "def needs(self): ...",
            r"needs must be a raydfl.Needs. Write needs = raydfl.Needs\(...\)",
        ),
        ("Method", "method", "needs = property(lambda self: super().needs())", "Mine': needs failed: TypeError: "),
    ],
)
def test_malformed_needs_are_rejected(
    tiny: Tiny, tmp_path: Path, base: str, setting: str, body: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(
        f"import raydfl\nclass Mine(raydfl.{base}):\n    {body}\n    loss = metrics = None\n"
    )
    with pytest.raises(ConfigError, match=message):
        tiny(f"{setting}={tmp_path / 'mine.py'}:Mine")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("additions = 'mask/'", r"Mine.additions is 'mask/'. It must be a tuple of strings, such as \('model/',\)"),
        ("fixed = 'model/'", r"Mine.fixed is 'model/'. It must be a tuple of strings, such as \('model/',\)"),
        (
            "default_rule = 'median'",
            "Mine.default_rule is 'median'. It must be a rule, such as default_rule = UniformMean",
        ),
        ("default_rule = raydfl.rules.UniformMean", "Mine.default_rule is <class .*It must be a rule, such as"),
        ("on_features = ('head',)", "Mine.on_features: unknown model 'head' in Mine.models. "),
    ],
)
def test_class_variables_of_the_wrong_type_are_rejected(tiny: Tiny, tmp_path: Path, members: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"import raydfl, raydfl.rules\nclass Mine(raydfl.Method):\n    {members}\n")
    with pytest.raises(ConfigError, match=message):
        tiny(method=f"{tmp_path / 'mine.py'}:Mine")


def test_additions_may_be_a_list(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import raydfl\nclass Mine(raydfl.Method):\n    additions = ['mask/']\n")
    assert tiny(method=f"{tmp_path / 'mine.py'}:Mine").components.method.additions == ("mask/",)


def test_a_method_may_have_one_encoder_and_a_model_on_its_features(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import raydfl\nclass Mine(raydfl.Method):\n"
        "    models, on_features, partial = {'audio': 'crnn_lite', 'head': 'fusion'}, ('head',), ('head',)\n"
    )
    values = tiny().model_dump(mode="json") | {"method": f"{tmp_path / 'mine.py'}:Mine", "models": {}}
    assert list(raydfl.make_config(values).components.models) == ["audio", "head"]
