"""Run each block of README.md and docs/*.md as printed, in the order of its page, in a folder created by ``raydfl init``.

The blocks use the importable raydfl: the repository's, or an installed wheel's (``make test-wheel``).

For speed, ``raydfl`` commands and Python run in this process. Slow blocks and shell syntax run in a new process. In the
fast suite, a run has a single round unless its command sets the number, with at most two steps for each client. YAML
is merged into ``jobs/tiny.yaml``, and the result must be a valid configuration.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Raydfl
from generate import find_classes
from pages import (
    PAGES,
    RECORDINGS,
    ROOT,
    Block,
    list_headings,
    list_links,
    make_anchor,
    parse_blocks,
    read,
    remove_blocks,
)

import raydfl as package
from raydfl import Method, Objective, Step, load_config, make_config
from raydfl.core import registry
from raydfl.core.options import options_of
from raydfl.core.types import ModelSpec
from raydfl.core.yaml import parse_yaml
from raydfl.data.dataset import dataset_names
from raydfl.models import architectures, build_model, find_architecture, model_options
from raydfl.rules import RULES

BLOCKS = [block for page in PAGES for block in parse_blocks(page)]
RUNNABLE = [block for block in BLOCKS if block.language in ("bash", "python", "yaml")]


_SHELL = {">", "<", "|", "&&", "||", "&", ";"}


def _list_cases() -> list[Any]:
    return [
        pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.mark == "slow" else [])
        for block in RUNNABLE
    ]


def test_all_pages_exist_and_have_blocks() -> None:
    assert {page.name for page in PAGES} == {
        "README.md",
        "attacks.md",
        "clusters.md",
        "configuration.md",
        "speed.md",
        "data.md",
        "datasets.md",
        "engine.md",
        "fleet.md",
        "index.md",
        "methods.md",
        "fedapta.md",
        "fedmlac.md",
        "fedstar.md",
        "modality-mirror.md",
        "profila.md",
        "objectives.md",
        "own-method.md",
        "pretrained.md",
        "recordings.md",
        "reference.md",
        "report.md",
        "results.md",
        "security.md",
        "start.md",
        "studies.md",
        "using.md",
    }
    assert all(any(block.page == page for block in RUNNABLE) for page in PAGES)
    assert len(PAGES[0].read_text().splitlines()) <= 150, "the README is an overview; move details to the linked pages"
    site = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(site) == sorted(page.name for page in PAGES[1:]), "the site shows each page once"
    languages = {block.language for block in BLOCKS}
    assert languages <= {"bash", "python", "yaml", "text"}, languages
    assert all(block.argument for block in BLOCKS if block.mark == "skip"), "give the reason for skipping a block"
    assert all(block.words for block in BLOCKS if block.exit_code), "give words of the expected error message"


@pytest.fixture
def run_block(
    sandbox: Callable[[Path], Path],
    documentation_cache: Path,
    drawing: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fast: bool,
) -> Callable[[Block], None]:
    """Return a runner of blocks in the folder of their page."""
    monkeypatch.setenv("RAYDFL_CACHE", str(documentation_cache))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    raydfl = Raydfl(capsys)

    def run(block: Block) -> None:
        folder = sandbox(block.page)
        monkeypatch.chdir(folder)
        if block.page.name == "report.md" and not fast:  # tests/runs/test_report.py covers all figures
            monkeypatch.setattr("raydfl.runs.report.page.draw", drawing)
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "yaml":
            make_config(_merge_into_tiny(parse_yaml(block.text, block.name)), block.name)
        elif block.language == "python":
            if "import ray.data" in block.text:
                # Otherwise, the block joins a cluster of a different test, which may stop.
                monkeypatch.setenv("RAY_ADDRESS", "local")
            _run_python(block, folder)
        else:
            commands = _split_commands(block.text)
            if block.mark != "slow" and all(_needs_no_shell(command) for command in commands):
                for command in commands:
                    if command[0] == "python" and fast:
                        with monkeypatch.context() as patch:
                            patch.setattr(sys, "argv", command[1:])
                            runpy.run_path(command[1], run_name="__main__")
                        continue
                    if command[0] != "raydfl":
                        _run(command, block, folder)
                        continue
                    result = raydfl(*(_shorten(command) if fast and not block.exit_code else command)[1:])
                    output = result.out + result.err
                    right = result.code == block.exit_code and block.words in output
                    assert right, f"{block.name}: {shlex.join(command)}\n{output}"
            else:
                _run(["bash", "-euo", "pipefail", "-c", block.text], block, folder)

    return run


def _split_commands(text: str) -> list[list[str]]:
    """Split a text into commands and their words. Quotes may span several lines."""
    commands, pending = [], ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is still open
            continue
        commands += [words] if words else []
        pending = ""
    assert not pending, pending
    return commands


def _needs_no_shell(command: Sequence[str]) -> bool:
    if command[0] in ("python", "mkdir", "cp", "cat"):
        return not any(character in word for word in command for character in "*$<>|&;")
    return command[0] == "raydfl" and not _SHELL & set(command)


def _shorten(command: list[str]) -> list[str]:
    """Limit a run to a single round, unless the command sets the number of rounds."""
    is_unlimited = command[1] == "run" and not any(word.startswith(("train=", "train.rounds=")) for word in command)
    return [*command, "train.rounds=1"] if is_unlimited else command


_NOTEBOOK: dict[str, Any] = {"__name__": "__main__"}
"""Namespace shared by the cells of the notebook reference.md. Blocks of all further pages are independent programs."""


def _run_python(block: Block, folder: Path) -> None:
    if block.mark == "slow":
        _run([sys.executable, "-c", block.text], block, folder)
    else:
        program = compile(block.text, block.name, "exec", dont_inherit=True)
        exec(program, _NOTEBOOK if block.page.name == "reference.md" else {"__name__": "__main__"})


def _run(command: list[str], block: Block, folder: Path) -> None:
    process = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=280)
    output = f"{block.name}\n{process.stdout}\n{process.stderr}"
    assert process.returncode == block.exit_code, output
    assert block.words in process.stdout + process.stderr, output


def _merge_into_tiny(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """Replace groups of the tiny configuration by the fragment's. Data without a name is merged into its data."""
    values = parse_yaml((ROOT / "jobs" / "tiny.yaml").read_text(), "tiny")
    for key, value in fragment.items():
        is_merged = key == "data" and isinstance(value, Mapping) and "name" not in value
        values[key] = {**values[key], **value} if is_merged else value
    return values


_executed: set[Block] = set()


@pytest.mark.parametrize("block", _list_cases())
def test_block(block: Block, run_block: Callable[[Block], None]) -> None:
    if block.mark == "skip":
        pytest.skip(block.argument)
    if block.needs_recordings and not RECORDINGS.is_dir():
        pytest.skip(f"there are no recordings in {RECORDINGS}")
    if importlib.util.find_spec("espeakng_loader") is None and block.language != "yaml":
        pytest.skip("the package espeakng-loader is not installed")
    if importlib.util.find_spec("transformers") is None and block.page.name == "pretrained.md":
        pytest.skip("the package transformers is not installed")
    # Run earlier blocks of the page first if this test runs alone.
    earlier_blocks = [entry for entry in RUNNABLE if entry.page == block.page and entry.line < block.line]
    for earlier in earlier_blocks:
        is_skipped = earlier.mark in ("slow", "skip") or (earlier.needs_recordings and earlier.file is None)
        if earlier not in _executed and not is_skipped:
            _executed.add(earlier)
            run_block(earlier)
    _executed.add(block)
    run_block(block)


# -- tables ------------------------------------------------------------------------------------------------------------


def _find_page(name: str) -> Path:
    return next(page for page in PAGES if page.name == name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_option_has_a_row_under_the_heading_of_its_group(page: Path) -> None:
    sections = re.split(r"^#+ (.*)$", remove_blocks(page), flags=re.MULTILINE)[1:]
    texts = {title.strip().replace("`", ""): text for title, text in zip(sections[::2], sections[1::2], strict=True)}
    for heading, (cls, omitted) in find_classes(page.name).items():
        rows = re.findall(r"^\| \[?`([^`]+)`\]?[^|]*\|", texts.get(heading, ""), re.MULTILINE)
        names = {option.name for option in options_of(cls)} - omitted
        assert names <= set(rows), heading


def test_each_method_rule_and_objective_has_a_section() -> None:
    for page, names in {
        "methods.md": [*registry.names("raydfl.methods"), *registry.names("raydfl.engine.groups"), *RULES],
        "objectives.md": registry.names("raydfl.objectives"),
    }.items():
        assert set(names) <= set(list_headings(_find_page(page))), page


def test_each_override_point_of_an_objective_is_described() -> None:
    text = read(_find_page("objectives.md"))
    points = [name for name in vars(Objective) if not name.startswith("_") and callable(getattr(Objective, name))]
    assert len(points) >= 11
    for name in points:
        assert f"| `{name}(" in text, name


def test_the_table_of_methods_lists_their_objectives() -> None:
    """tests/objectives runs all supported pairs and rejects the rest."""
    table: dict[str, str] = {}
    for line in read(_find_page("objectives.md")).partition("| method | takes |")[2].partition("\n\n")[0].splitlines():
        names, _, takes = line.strip("|").partition("|")
        table |= {name: takes.strip().strip("`") for name in re.findall(r"`(\w+)`", names)}
    accepted = {
        n: registry.find("raydfl.methods", n, Method, "method")().needs.objectives
        for n in registry.names("raydfl.methods")
    }
    assert table == {name: ", ".join(names) or "any" for name, names in accepted.items()}


def test_each_architecture_is_described_with_its_options() -> None:
    text = read(_find_page("methods.md"))
    for name in architectures():
        assert f"`{name}`" in text, name
        for option in model_options(name):
            assert f"`{option}`" in text, (name, option)


def test_the_parameter_counts_of_the_page_are_correct() -> None:
    table = {}
    networks = read(_find_page("methods.md")).partition("\n## Networks\n")[2]
    for line in networks.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[3].replace(",", "").isdigit():
            table |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), int(cells[3].replace(",", "")))
    inputs = {
        name: (1, 28, 28) if getattr(find_architecture(name, "")[0], "images", False) else 64
        for name in architectures()
        if name != "pretrained"  # its parameters depend on a folder
    }
    with torch.device("meta"):
        models = {name: build_model(ModelSpec("model", name, inputs[name], 10)) for name in inputs}
    assert table == {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


def test_each_override_point_and_each_member_of_a_step_is_described() -> None:
    text = _find_page("own-method.md").read_text()
    points = [name for name in vars(Method) if not name.startswith("_") and inspect.isfunction(getattr(Method, name))]
    assert len(points) <= 13
    for name in points:
        assert f"| `{name}(" in text, name
    members = [field for field in Step.__slots__ if field != "shared"]
    members += [name for name, value in vars(Step).items() if callable(value) and not name.startswith("_")]
    assert len(members) >= 17
    for name in members:
        assert f"`step.{name}" in text, name


def test_the_dashboard_queries_exactly_the_metrics_of_the_page() -> None:
    """tests/cluster checks the export of these metrics."""
    documented = set(re.findall(r"`ray_raydfl_(\w+)`", _find_page("report.md").read_text()))
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queried = [re.findall(r"ray_raydfl_(\w+)", query) for query in queries]
    assert all(queried)
    assert {re.sub("_(sum|count|bucket)$", "", name) for names in queried for name in names} == documented


def test_the_readme_names_each_method_and_data_set() -> None:
    text = _find_page("README.md").read_text()
    for name in [*registry.names("raydfl.methods"), *dataset_names()]:
        assert f"`{name}`" in text, name


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_have_existing_targets(page: Path) -> None:
    for target in list_links(page):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        linked_page = (page.parent / path).resolve() if path else page
        assert linked_page.exists(), f"{page.name}: {target}"
        if fragment:
            assert fragment in [make_anchor(heading) for heading in list_headings(linked_page)], (
                f"{page.name}: {target}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_machine_specific_paths(page: Path) -> None:
    match = re.search(r"(?<![\w.])/(?:work|home|root|tmp)/", page.read_text())
    assert match is None, page.read_text()[match.start() : match.start() + 60] if match else ""


_IMPORT = re.compile(r"^\s*(?:from (raydfl[\w.]*) import|import (raydfl[\w.]*))", re.MULTILINE)
_DOTTED = re.compile(r"\braydfl\.(\w+)\b(?!/)")


_COLUMNS = 100
"""Characters in a line of a code block on the site (docs/site.css)."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_the_width_of_the_site(page: Path) -> None:
    """Equations of docstrings may be longer."""
    stored = set(page.read_text().splitlines())
    long = [
        f"{block.name}: {line}"
        for block in parse_blocks(page)
        for line in block.text.splitlines()
        if len(line) > _COLUMNS and (block.language != "text" or line in stored)
    ]
    assert not long, "continue a command on the next line with a backslash"


def test_the_site_has_space_for_the_width_of_code() -> None:
    """Widths of Material for MkDocs in pixels, on a screen of 1280: margins, two columns, and the padding of a block."""
    style = (ROOT / "docs" / "site.css").read_text()
    grid, font = (float(re.findall(rf"{name}: ([\d.]+)", style)[0]) for name in ("max-width", "font-size"))
    width = min(1280, 20 * grid) - 2 * 24 - 2 * 242
    character = 0.6 * 16 * font
    assert _COLUMNS * character + 2 * 1.18 * 16 * font <= width


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_only_public_modules(page: Path) -> None:
    """Users import from ``raydfl`` and ``raydfl.ops`` only. All further modules are private and may move."""
    for block in (block for block in parse_blocks(page) if block.language == "python"):
        modules = {a or b for a, b in _IMPORT.findall(block.text)}
        assert modules <= {"raydfl", "raydfl.ops"}, block.name
    for code in re.findall(r"`([^`]+)`", remove_blocks(page)):
        names = {name for name in _DOTTED.findall(code) if name not in ("yaml", "html")}
        assert names <= set(package.__all__), f"{page.name}: {code}"


def test_jobs_are_valid() -> None:
    """Load all jobs except sweeps (tests/experiments), clusters (tests/cluster) and pretrained encoders (tests/models)."""
    files = [
        file
        for file in sorted((ROOT / "jobs").rglob("*.yaml"))
        if file.parent.name != "clusters" and not re.search("\naxes:|name: pretrained", file.read_text())
    ]
    assert len(files) >= 8
    for file in files:
        load_config(file)
