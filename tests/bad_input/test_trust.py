"""Run folders from strangers: raydfl executes only code that the user has run or approved on this machine."""

from __future__ import annotations

import importlib.util
import json
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from commands import Raydfl, write_config

from raydfl.core import registry
from raydfl.core.errors import DataError
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.data.features.cache import FORMAT, open_store
from raydfl.data.features.kinds import make_features
from raydfl.engine.config import Config
from raydfl.engine.storage.trust import code_digest
from raydfl.methods import Method
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]

METHOD = "from raydfl.methods.fedavg import FedAvg\nimport {neighbour}\n\n\nclass Own(FedAvg):\n    pass\n"
HARM = "\nfrom pathlib import Path\n\nPath({path!r}).touch()\n"

COMMANDS = [
    ("resume", ["train.rounds=2"]),
    ("replay", ["--round", "1", "--client", "s2"]),
    ("predict", ["sound.wav"]),
    ("export", []),
]


@pytest.fixture
def commands(tmp_path: Path) -> list[tuple[str, list[str]]]:
    soundfile.write(tmp_path / "sound.wav", [0.1] * 4000, 8000)
    return [(name, [str(tmp_path / "sound.wav") if a == "sound.wav" else a for a in more]) for name, more in COMMANDS]


@pytest.fixture
def user_method(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write a user's method that imports a neighbour. Names differ between tests, because modules stay loaded."""
    folder = tmp_path / "mine"
    folder.mkdir()
    neighbour = f"beside_{abs(hash(request.node.nodeid))}"
    (folder / "own.py").write_text(METHOD.format(neighbour=neighbour))
    (folder / f"{neighbour}.py").write_text("x = 1\n")
    return folder


def rename_method(folder: Path, value: str) -> None:
    """Change the method in a run's configuration."""
    config = parse_yaml((folder / "config.yaml").read_text(), "config")
    config["method"]["name"] = value
    (folder / "config.yaml").write_text(to_yaml(config, flow=False))


def list_code(folder: Path, digests: dict[str, str] | None) -> None:
    """Write digests of code to run.json; ``None`` removes them, as in a run of an earlier version."""
    about = json.loads((folder / "run.json").read_text()) | {"code": digests}
    (folder / "run.json").write_text(json.dumps({key: about[key] for key in about if about[key] is not None}))


def test_a_compiled_file_next_to_a_users_file_is_not_executed(tmp_path: Path) -> None:
    """Python would execute an unchecked cache file instead of the visible source."""
    source, marker = tmp_path / "read_and_approved.py", tmp_path / "harm"
    source.write_text("from raydfl.methods.fedavg import FedAvg\n\n\nclass Own(FedAvg):\n    pass\n")
    evil = tmp_path / "evil.py"
    evil.write_text(source.read_text() + HARM.format(path=str(marker)))
    cache = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(evil), cache, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert registry.find("raydfl.methods", f"{source}:Own", Method, "method").__name__ == "Own"  # type: ignore[type-abstract]
    assert not marker.exists()


ATTACKS: list[tuple[str, str]] = [
    ("lib/evil_file.py", "{folder}/lib/evil_file.py:Own"),
    ("lib/evil_link.py", "{folder}/link/evil_link.py:Own"),
    ("lib/evil_current.py", "/proc/self/cwd/lib/evil_current.py:Own"),
    ("lib/evil_relative.py", "lib/evil_relative.py:Own"),
    ("lib/evil_name.py", "{folder}/lib/evil_name.py:no identifier"),
    ("evil_module.py", "evil_module:Own"),
    ("evil_parent.py", "evil_parent.nothing:Own"),
    ("evil_package/__init__.py", "evil_package.nothing:Own"),
]
"""A file of a stranger's folder, and the reference in config.yaml that loads it."""


def test_a_strangers_code_is_not_executed_whatever_the_folder_lists(
    raydfl: Raydfl,
    tiny: Tiny,
    tmp_path: Path,
    commands: list[tuple[str, list[str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, harm = run(tiny("train.rounds=1")).run_dir, tmp_path / "harm"
    (folder / "link").symlink_to(folder / "lib")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name, reference in ATTACKS:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(METHOD.format(neighbour="json") + HARM.format(path=str(harm)))
        rename_method(folder, reference.format(folder=folder))
        for digests in ({code_digest(file): str(file)}, None):
            list_code(folder, digests)
            for command, more in commands if name == ATTACKS[0][0] else commands[::2]:
                raydfl(command, folder, *more).refuses("evil_.* (has changed|neither run nor approved).*--trust")
                assert not harm.exists(), (name, digests, command)
    raydfl("report", folder)  # draws numbers without building a network
    assert not harm.exists()


def test_an_approval_covers_one_unchanged_file_at_one_path(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, tmp_path: Path
) -> None:
    folder = run(tiny("train.rounds=1")).run_dir
    list_code(folder, None)
    rename_method(folder, f"{user_method}/own.py:Own")
    raydfl("resume", folder).refuses("neither run nor approved on this machine")
    # The command loads the approved code before it rejects the changed method.
    raydfl("resume", folder, "--trust").refuses("config.yaml was changed since the run began")
    raydfl("resume", folder).refuses("config.yaml was changed since the run began")
    copy = shutil.copytree(user_method, tmp_path / "copy")
    rename_method(folder, f"{copy}/own.py:Own")
    raydfl("resume", folder).refuses("neither run nor approved on this machine")
    rename_method(folder, f"{user_method}/own.py:Own")
    (neighbour,) = user_method.glob("beside_*.py")
    neighbour.write_text("x = 2\n")
    raydfl("resume", folder).refuses("neither run nor approved on this machine")


def test_a_module_already_run_by_the_user_needs_no_approval(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(user_method))
    (user_method / "own_package").mkdir()
    (user_method / "own_package" / "__init__.py").touch()
    (user_method / "own_package" / "method.py").write_text(METHOD.format(neighbour="json"))
    folder = run(tiny("train.rounds=1", method="own_package.method:Own")).run_dir
    assert raydfl("resume", folder, "train.rounds=2").code == 0
    (user_method / "own_package" / "__init__.py").write_text("x = 1\n")
    raydfl("resume", folder, "train.rounds=3").refuses("neither run nor approved on this machine")
    assert raydfl("resume", folder, "train.rounds=3", "--trust").code == 0


def test_other_users_and_machines_need_one_approval(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(tiny("train.rounds=1", method=f"{user_method}/own.py:Own")).run_dir
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    raydfl("resume", folder, "train.rounds=2").refuses("neither run nor approved on this machine.*--trust")
    assert raydfl("resume", folder, "train.rounds=2", "--trust").code == 0
    assert raydfl("resume", folder, "train.rounds=3").code == 0
    (store,) = (tmp_path / "elsewhere" / "raydfl").iterdir()
    assert (store.stat().st_mode | store.parent.stat().st_mode) & 0o077 == 0, "nobody else may read or write it"


def test_relative_and_unwritable_configuration_folders_approve_nothing(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.chdir(tmp_path)
    for given in ("config", "/dev/null"):  # a stranger's folder could contain config/raydfl
        monkeypatch.setenv("XDG_CONFIG_HOME", given)
        folder = run(tiny("train.rounds=1", f"run.name={len(given)}", method=f"{user_method}/own.py:Own")).run_dir
        raydfl("resume", folder, "train.rounds=2").refuses("neither run nor approved on this machine")
        assert raydfl("resume", folder, "train.rounds=2", "--trust").code == 0
    assert not (tmp_path / "config").exists()


def test_changed_code_needs_approval(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, tmp_path: Path, commands: list[tuple[str, list[str]]]
) -> None:
    config = tiny("train.rounds=1", method=f"{user_method}/own.py:Own")
    folder = run(config).run_dir
    assert raydfl("replay", folder, "--round", 1, "--client", "s2").code == 0, "unchanged code is not asked about"
    (neighbour,) = user_method.glob("beside_*.py")
    for file in (user_method / "own.py", neighbour):
        content = file.read_text()
        file.write_text(content + "# changed\n")
        for command, more in commands:
            raydfl(command, folder, *more).refuses(
                "own.py:Own.* or one of its imports in the same folder has changed since the run began.*--trust"
            )
        file.write_text(content)
    (user_method / "own.py").write_text((user_method / "own.py").read_text() + "# changed\n")
    assert raydfl("resume", folder, "train.rounds=2", "--trust").code == 0
    assert raydfl("resume", folder, "train.rounds=3").code == 0, "it is approved now"
    whole_run = run(tiny("train.rounds=3", "run.name=whole", method=f"{user_method}/own.py:Own")).run_dir
    assert_same_bits(read_tensors(whole_run), read_tensors(folder))


def test_code_in_the_users_configuration_needs_no_approval(
    raydfl: Raydfl, tiny: Tiny, user_method: Path, tmp_path: Path
) -> None:
    config = tiny("train.rounds=1", method=f"{user_method}/own.py:Own")
    folder = run(config).run_dir
    (user_method / "own.py").write_text((user_method / "own.py").read_text() + "# changed\n")
    output = raydfl("run", write_config(config, tmp_path), "train.rounds=2")
    assert output.code == 0
    assert "your own code has changed since the run began" in output.out
    assert code_digest(user_method / "own.py") in json.loads((folder / "run.json").read_text())["code"]


def test_built_in_methods_need_no_approval(raydfl: Raydfl, tiny: Tiny) -> None:
    built_in = run(tiny("train.rounds=1", "run.name=builtin")).run_dir
    moved = Path(shutil.move(built_in, built_in.with_name("moved")))
    assert raydfl("resume", moved).code == 0


def test_the_digest_of_code_covers_imported_neighbours(tmp_path: Path) -> None:
    files = {
        "own.py": "import a\nfrom b.c import d\nimport json\n",
        "a.py": "from b import e\n",
        "b/__init__.py": "",
        "b/c.py": "from . import f\nfrom .. import own\n",
        "b/e.py": "",
        "b/f.py": "",
    }
    for name, text in {**files, "unused.py": "", "b/unused.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    first = code_digest(tmp_path / "own.py")
    moved = shutil.copytree(tmp_path, tmp_path.with_name(tmp_path.name + "-moved"))
    assert code_digest(moved / "own.py") == first
    for name, text in files.items():
        (moved / name).write_text(text + "# another\n")
        assert code_digest(moved / "own.py") != first, name
        (moved / name).write_text(text)
    for name in ("unused.py", "b/unused.py"):
        (moved / name).write_text("# another\n")
    assert code_digest(moved / "own.py") == first


class _Harm:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_features_are_never_unpickled(tmp_path: Path) -> None:
    harmful = np.array([_Harm(tmp_path / "harm")], dtype=object)
    folder = tmp_path / "key"
    folder.mkdir()
    for name in ("frames", "offsets", "lengths"):
        np.save(folder / f"{name}.npy", harmful, allow_pickle=True)
    facts = {"format": FORMAT, "key": "key", "files": {}, "failures": {}, "length": None}
    (folder / "store.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="cannot be used"):
        open_store(folder)
    np.save(tmp_path / "clip.npy", harmful, allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        make_features({"kind": "file", "path": str(tmp_path)})
    assert not (tmp_path / "harm").exists()
    np.load(tmp_path / "clip.npy", allow_pickle=True)
    assert (tmp_path / "harm").exists(), "the file would have done it"
