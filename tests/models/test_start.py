"""Initial weights from a file: names and shapes are checked, and no code of the file is executed."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import differ, known, stop_after
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.types import ModelSpec
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.store import RunStore
from raydfl.models import build_model
from raydfl.models.start import InitFrom, start_from_file
from raydfl.runs._run import resume, run
from raydfl.testing import read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
NETWORKS = Path(__file__).parent.parent / "networks.py"


def make_spec(**init_from: Any) -> ModelSpec:
    return ModelSpec("model", "mlp", 5, 3, init_from=tuple(sorted(init_from.items())))


def build_other() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build_model(ModelSpec("model", "mlp", 5, 3))


def load_from_file(**init_from: Any) -> dict[str, Tensor]:
    network = build_model(ModelSpec("model", "mlp", 5, 3))
    start_from_file(network, make_spec(**init_from))
    return network.state_dict()


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_safetensors_and_several_forms_of_checkpoints_are_read(tmp_path: Path) -> None:
    expected = build_other().state_dict()
    forms: dict[str, Any] = {
        "plain.pt": expected,
        "nested.pt": {"state_dict": expected, "epoch": 3, "optimiser": {"state": {0: {"mean": torch.ones(2)}}}},
        "half.pt": {name: value.bfloat16() for name, value in expected.items()},
    }
    for name, content in forms.items():
        torch.save(content, tmp_path / name)
    torch.save(expected, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(expected, tmp_path / "plain.safetensors")
    prefixed = {f"{group}/{name}": value for group in ("model", "local") for name, value in expected.items()}
    safetensors.torch.save_file({name: value.clone() for name, value in prefixed.items()}, tmp_path / "run.safetensors")
    assert_equal(load_from_file(file=str(tmp_path / "plain.pt")), expected)
    assert_equal(load_from_file(file=str(tmp_path / "old.pt")), expected)
    assert_equal(load_from_file(file=str(tmp_path / "nested.pt"), model="state_dict"), expected)
    assert_equal(load_from_file(file=str(tmp_path / "plain.safetensors")), expected)
    assert_equal(load_from_file(file=str(tmp_path / "run.safetensors")), expected)  # the group with the model's name
    assert_equal(load_from_file(file=str(tmp_path / "run.safetensors"), model="local"), expected)
    assert_equal(load_from_file(file=str(tmp_path / "half.pt")), {n: v.bfloat16().float() for n, v in expected.items()})


def test_names_are_renamed_kept_and_ignored(tmp_path: Path) -> None:
    expected = build_other().state_dict()
    file = tmp_path / "w.pt"
    torch.save({**{f"module.{n}": v for n, v in expected.items()}, "extra.bias": torch.ones(2)}, file)
    assert_equal(load_from_file(file=str(file), rename=(("module.", ""),), ignore=("extra.*",)), expected)
    torch.manual_seed(3)
    network = build_model(ModelSpec("model", "mlp", 5, 3))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    wide = {"module.output.weight": torch.ones(9, 32)}  # a head with another number of classes keeps its initial values
    torch.save({**{f"module.{n}": v for n, v in expected.items()}, **wide}, file)
    start_from_file(network, make_spec(file=str(file), rename=(("module.", ""),), keep=("output.*",)))
    after = network.state_dict()
    assert torch.equal(after["output.weight"], before["output.weight"])
    assert torch.equal(after["hidden.weight"], expected["hidden.weight"])


def test_integer_counters_may_be_missing(tmp_path: Path) -> None:
    network = nn.Sequential(nn.BatchNorm1d(3))
    expected = {name: value + 1 for name, value in network.state_dict().items() if "num" not in name}
    torch.save(expected, tmp_path / "w.pt")
    start_from_file(network, make_spec(file=str(tmp_path / "w.pt")))
    assert torch.equal(network[0].running_var, expected["0.running_var"])
    torch.save({**expected, "0.num_batches_tracked": torch.tensor(7)}, tmp_path / "w.pt")
    start_from_file(network, make_spec(file=str(tmp_path / "w.pt")))
    assert int(network[0].num_batches_tracked) == 7


def test_tied_tensors_need_a_single_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.two = self.one

    torch.save({"one.weight": torch.ones(3, 3), "one.bias": torch.ones(3)}, tmp_path / "w.pt")
    network = Tied()
    start_from_file(network, make_spec(file=str(tmp_path / "w.pt")))
    assert torch.equal(network.two.weight, torch.ones(3, 3))


class WriteOnLoad:
    """An object with a side effect: unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_bad_files_are_rejected_without_changing_the_network(tmp_path: Path) -> None:
    good = build_other().state_dict()
    whole, safe = tmp_path / "whole.pt", tmp_path / "whole.safetensors"
    torch.save(good, whole)
    safetensors.torch.save_file(good, safe)
    files: dict[str, bytes] = {
        "half.pt": whole.read_bytes()[: whole.stat().st_size // 2],
        "half.safetensors": safe.read_bytes()[: safe.stat().st_size // 2],
        "mislabelled.safetensors": whole.read_bytes(),
        "mislabelled.pt": safe.read_bytes(),
        "text.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "empty.pt": b"",
        "code.pt": pickle.dumps(WriteOnLoad(str(tmp_path / "ran")), protocol=2),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"hidden.weight": good["hidden.weight"], "outptu.weight": good["output.weight"]}, tmp_path / "names.pt")
    torch.save({**good, "output.bias": torch.zeros(4)}, tmp_path / "shape.pt")
    torch.save({**good, "output.bias": torch.full((3,), torch.nan)}, tmp_path / "nan.pt")
    torch.save({**good, "output.bias": torch.zeros(3, dtype=torch.int64)}, tmp_path / "type.pt")
    torch.save({"a": good, "b": good}, tmp_path / "groups.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    messages = {
        "missing.pt": "there is no file .*missing.pt",
        "half.pt": "damaged checkpoint",
        "half.safetensors": "damaged safetensors file",
        "mislabelled.safetensors": r"is a checkpoint file with a wrong suffix. Rename it to .pt",
        "mislabelled.pt": r"is a safetensors file with a wrong suffix. Rename it to .safetensors",
        "text.pt": "neither safetensors nor a PyTorch checkpoint: it starts with b'version '",
        "empty.pt": "empty.pt is empty. Download it again",
        "code.pt": r"would load \S*open and could execute code. Save only the tensors",
        "module.pt": r"would load torch.nn.modules.linear.Linear and could execute code",
        "names.pt": r"lacks 'hidden.bias', 'output.weight', 'output.bias' of the network \(nearest: 'hidden.weight'\) and has "
        r"'outptu.weight', unknown to the network \(nearest: 'output.weight'\). Map",
        "shape.pt": r"'output.bias' has the shape \[4\], but \[3\] in the network. Use the options",
        "nan.pt": "'output.bias' has values that are not finite",
        "type.pt": "'output.bias' is torch.int64, but torch.float32 in the network",
        "groups.pt": r"several groups of tensors \('a', 'b'\). Choose a group with model",
        "none.pt": "contains no tensors",
    }
    network = build_model(ModelSpec("model", "mlp", 5, 3))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=r"^models\.model\.init_from.*" + message):
            start_from_file(network, make_spec(file=str(tmp_path / name)))
    assert_equal(network.state_dict(), before)
    assert not (tmp_path / "ran").exists()
    for settings, message in (
        ({"model": "c"}, r"has no 'c'"),
        (
            {"model": "a", "keep": ("outptu.*",)},
            r"keep: 'outptu.\*' matches no tensor of the network \(nearest: 'output",
        ),
        ({"model": "a", "ignore": ("x*",)}, r"ignore: 'x\*' matches no tensor of the file"),
        ({"model": "a", "rename": (("module.", ""),)}, r"rename: no name in .* starts with 'module.'"),
        (
            {"model": "a", "rename": (("output.weight", "output.bias"),)},
            r"two tensors would have the name 'output.bias'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            start_from_file(network, make_spec(file=str(tmp_path / "groups.pt"), **settings))


def test_a_run_starts_from_the_export_of_another_run(tiny: Tiny) -> None:
    first = run(tiny("run.name=first", "train.rounds=1")).run_dir
    file = first / "model.safetensors"
    settings = [f"models.model.init_from={file}", "run.name=second"]
    config = tiny(*settings)
    assert config.digest() != tiny("run.name=second").digest()
    start_server(config).close()
    store = RunStore(Path(config.run.dir) / "second")
    initial = store.load(store.commits()[0]).state.tensors["global"]
    final = final_state(first).tensors["global"]
    assert_equal(dict(initial), dict(final))


def test_the_digest_depends_on_the_content_and_a_changed_file_prevents_resuming(tiny: Tiny, tmp_path: Path) -> None:
    network = f"models.model={{name: {NETWORKS}:FrozenStem, init_from: {tmp_path / 'a.pt'}}}"
    moved = f"models.model={{name: {NETWORKS}:FrozenStem, init_from: {tmp_path / 'b.pt'}}}"
    plain = tiny(f"models.model={NETWORKS}:FrozenStem", "train.rounds=1")
    train_federation(plain)
    population = Population.load(Path(plain.run.dir) / "tiny" / "population")
    weights = build_models(plain.components.method, Clients(population, plain).variants()[0], 99)["model"].state_dict()
    torch.save(weights, tmp_path / "a.pt")
    shutil.copyfile(tmp_path / "a.pt", tmp_path / "b.pt")
    config = tiny(network, "run.name=started", "train.rounds=3")
    assert config.digest() == tiny(moved, "train.rounds=3").digest()
    reference = known(tiny(network, "train.rounds=3"))
    assert differ(
        reference, train_federation(tiny(f"models.model={NETWORKS}:FrozenStem", "run.name=seed", "train.rounds=3"))
    )
    stop_after(config, 1)
    run_dir = Path(config.run.dir) / "started"
    # Checkpoints do not contain the frozen stem, so a resumed run reads it from the file again.
    original = (tmp_path / "a.pt").read_bytes()
    weights["stem.0.weight"] += 1
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(
        RunDirectoryError, match=r"models.model.init_from.file of .*the content of the file .* has changed"
    ):
        resume(run_dir)
    (tmp_path / "a.pt").write_bytes(original)
    assert not differ(reference, read_tensors(resume(run_dir).run_dir))


def test_bad_settings_are_rejected_before_the_first_round(tiny: Tiny, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "w.pt")
    for text, message in (
        ("nowhere.pt", r"models.model.init_from.file: there is no file .*/nowhere.pt"),
        (f"{{file: {tmp_path / 'w.pt'}, modle: x}}", r"models.model.init_from: unknown key 'modle'"),
        ("{model: x}", r"models.model.init_from.file"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny(f"models.model.init_from={text}")
    with pytest.raises(ConfigError, match=r"lacks .* of the network.* and has 'x', unknown to the network"):
        run(tiny(f"models.model.init_from={tmp_path / 'w.pt'}"))


def test_settings_have_descriptions() -> None:
    assert all(field.description for field in InitFrom.model_fields.values())
