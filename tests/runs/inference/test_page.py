"""What the run's page says about its models, and the public names."""

from __future__ import annotations

import re
import shlex
from html import unescape
from pathlib import Path

from commands import Raydfl
from used_runs import Finished, configure, finished

import raydfl as package
from raydfl.runs.folder import create, export
from raydfl.runs.progress import Progress
from raydfl.runs.report import write_report
from raydfl.runs.words import format_size


def models_section(folder: Path, out: Path) -> str:
    """The section's text, tags taken out."""
    page = write_report([folder], out / "page.html").read_text(encoding="utf-8")
    section = re.search(r"<h2>Models</h2>(.*?)</section>", page, re.DOTALL)
    assert section is not None
    return unescape(re.sub(r"<[^>]+>", " ", section[1]))


def test_shared_and_private_models_are_told_apart(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    text = models_section(mutual.folder, tmp_path)
    assert "plugin is shared: all clients train it" in text
    assert "until the end of the run writes model.safetensors" in text
    count = len(mutual.trained())
    assert (
        "local is private: each client keeps its own model, so no single model is the run's result. "
        f"{count} of 3 clients have taken part." in text
    )
    assert text.count("Measured on test data.") == 2  # the plug-in by the server, the others by their clients
    commands = [line.strip() for line in text.splitlines() if line.strip().startswith("raydfl ")]
    folder = shlex.quote(str(mutual.folder))
    assert commands == [
        f"raydfl predict {folder} FILE...",
        f"raydfl export {folder}",
        f"raydfl predict {folder} FILE... --client ID",
        f"raydfl export {folder} --client ID",
    ]
    for command in commands:
        if " predict " in command:
            words = shlex.split(
                command.replace("ID", mutual.trained()[0]).replace("FILE...", str(mutual.test_files[0]))
            )
            assert raydfl(*words[1:]).code == 0


def test_the_file_of_the_shared_model_is_named_with_its_size(tmp_path: Path) -> None:
    run = finished(tmp_path, method={"name": "fedavg"}, models={"model": {"name": "linear"}})
    (path,) = export(run.folder, run.config)
    text = models_section(run.folder, tmp_path)
    assert f"It is the run's result: model.safetensors, {format_size(path.stat().st_size)}." in text
    assert "--client" not in text


def test_partly_shared_models(tmp_path: Path) -> None:
    run = finished(tmp_path, method={"name": "fedper"}, models={"model": {"name": "mlp"}})
    export(run.folder, run.config)
    text = models_section(run.folder, tmp_path)
    assert "model is partly private: each client keeps some layers" in text
    assert "The other layers are shared: model.safetensors, " in text
    assert f"raydfl predict {shlex.quote(str(run.folder))} FILE... --client ID" in text
    assert f"raydfl export {shlex.quote(str(run.folder))}\n" not in text


def test_before_the_first_round_there_is_nothing_to_use(mutual: Finished, tmp_path: Path) -> None:
    run_dir = create(configure(tmp_path, mutual.recordings), Progress("quiet"))
    text = models_section(run_dir, tmp_path)
    assert "crnn_tiny" in text
    assert "raydfl predict" not in text


def test_public_names() -> None:
    assert {"classify", "export_model", "load_model"} <= set(package.__all__)
    assert all(callable(getattr(package, name)) for name in ("classify", "export_model", "load_model"))
    # ``raydfl.predict`` stays what a method's code calls.
    assert package.predict.__module__ == "raydfl.training._fit"
