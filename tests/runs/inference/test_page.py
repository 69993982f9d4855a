"""The report's section on models, and the public names."""

from __future__ import annotations

import re
import shlex
from html import unescape
from pathlib import Path

from commands import Raydfl
from used_runs import Finished, execute_run, make_run_config

import raydfl as package
from raydfl.core.words import format_size
from raydfl.runs.folder import create, export
from raydfl.runs.progress import Progress
from raydfl.runs.report import write_report


def read_models_section(folder: Path, out: Path) -> str:
    """Return the section's text without tags."""
    page = write_report([folder], out / "page.html").read_text(encoding="utf-8")
    section = re.search(r"<h2>Models</h2>(.*?)</section>", page, re.DOTALL)
    assert section is not None
    return unescape(re.sub(r"<[^>]+>", " ", section[1]))


def test_the_report_distinguishes_shared_and_private_models(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    text = read_models_section(mutual.folder, tmp_path)
    assert "plugin is shared: all clients train it" in text
    assert "until the end of the run writes model.safetensors" in text
    count = len(mutual.list_trained())
    assert (
        "local is private: each client keeps its own model, so no single model is the run's result. "
        f"{count} of 3 clients have taken part." in text
    )
    assert text.count("Measured on test data.") == 2  # the server has the plug-in, clients have their local models
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
                command.replace("ID", mutual.list_trained()[0]).replace("FILE...", str(mutual.test_files[0]))
            )
            assert raydfl(*words[1:]).code == 0


def test_the_report_names_the_file_of_the_shared_model_and_its_size(tmp_path: Path) -> None:
    run = execute_run(tmp_path, method={"name": "fedavg"}, models={"model": {"name": "linear"}})
    (path,) = export(run.folder, run.config)
    text = read_models_section(run.folder, tmp_path)
    assert f"It is the run's result: model.safetensors, {format_size(path.stat().st_size)}." in text
    assert "--client" not in text


def test_the_report_describes_partly_shared_models(tmp_path: Path) -> None:
    run = execute_run(tmp_path, method={"name": "fedper"}, models={"model": {"name": "mlp"}})
    export(run.folder, run.config)
    text = read_models_section(run.folder, tmp_path)
    assert "model is partly private: each client keeps some layers" in text
    assert "The other layers are shared: model.safetensors, " in text
    assert f"raydfl predict {shlex.quote(str(run.folder))} FILE... --client ID" in text
    assert f"raydfl export {shlex.quote(str(run.folder))}\n" not in text


def test_the_report_before_the_first_round_offers_no_model(mutual: Finished, tmp_path: Path) -> None:
    run_dir = create(make_run_config(tmp_path, mutual.recordings), Progress("quiet"))
    text = read_models_section(run_dir, tmp_path)
    assert "crnn_tiny" in text
    assert "raydfl predict" not in text


def test_public_names_are_exported() -> None:
    assert {"classify", "export_model", "load_model"} <= set(package.__all__)
    assert all(callable(getattr(package, name)) for name in ("classify", "export_model", "load_model"))
    # ``raydfl.predict`` remains the function for code of methods.
    assert package.predict.__module__ == "raydfl.training._fit"
