"""The commands of raydfl. Oracles: exit codes, the registries, closed-form counts and direct calls of the engine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from commands import Raydfl, write_config

import raydfl as package
from raydfl.core import registry
from raydfl.data.dataset import dataset_names, find_dataset
from raydfl.engine.config import Config, load_config
from raydfl.runs._replay import replay
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
COMMANDS = [
    ["init"],
    ["run"],
    ["resume"],
    ["replay"],
    ["report"],
    ["predict"],
    ["export"],
    ["sweep"],
    ["methods"],
    ["config"],
    ["data", "list"],
    ["data", "info"],
    ["data", "prepare"],
    ["data", "plot"],
    ["data", "fleet"],
]


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom raydfl.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('loaded:', [name for name in ('torch', 'ray', 'numpy', 'pyarrow', 'mlflow', 'matplotlib') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Usage: raydfl" in shown
    assert all(command[0] in shown for command in COMMANDS)
    assert shown.splitlines()[-1] == "loaded: []"


def test_python_m_raydfl_is_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "raydfl", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"raydfl {package.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(raydfl: Raydfl, command: list[str]) -> None:
    output = raydfl(*command, "--help")
    assert output.code == 0
    assert output.out.startswith(f"Usage: raydfl {' '.join(command)}")
    assert output.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["run"], "Missing argument 'FILE'"),
        (["run", "x.yaml", "--quite"], "No such option: --quite"),
        (["replay", "x"], "Missing option '--round'"),
        (["replay", "x", "--round", "0", "--client", "a"], "--round"),
        (["replay", "x", "--round", "one", "--client", "a"], "--round"),
        (["report"], "Missing argument 'DIR"),
        (["data", "show"], "No such command 'show'"),
    ],
)
def test_wrong_usage_exits_with_code_2(raydfl: Raydfl, arguments: list[str], message: str) -> None:
    output = raydfl(*arguments)
    assert output.code == 2
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["run", "x.yaml", "--train.rounds=3"], "train.rounds=3"),
        (["run", "--train.rounds", "3", "x.yaml"], "train.rounds=VALUE"),
        (["resume", "x", "--ray.actors=1"], "ray.actors=1"),
        (["sweep", "x.yaml", "--data.root=a=b"], "data.root=a=b"),
        (["data", "info", "x.yaml", "--method=fedprox"], "method=fedprox"),
    ],
)
def test_a_setting_written_as_an_option_is_corrected_in_the_message(
    raydfl: Raydfl, arguments: list[str], settings: str
) -> None:
    raydfl(*arguments).refuses(rf"no option --.* as key=value: {settings}\n$")


def test_an_error_cannot_steer_the_terminal(raydfl: Raydfl) -> None:
    output = raydfl("report", "no\x1b[2Jsuch")
    assert output.code == 2
    assert r"no\x1b[2Jsuch" in output.err
    assert "\x1b" not in output.err


def test_a_bug_exits_with_code_1_and_a_traceback(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydfl.runs._run.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # Python prints the traceback and exits with 1
        raydfl("run", write_config(tiny(), tmp_path))


def test_control_c_outside_a_round_exits_with_code_1_without_traceback(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raydfl.runs._run.run", interrupt)
    output = raydfl("run", write_config(tiny(), tmp_path))
    assert (output.code, output.out, output.err) == (1, "", "stopped\n")


# -- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("fedavg", []),
        ("fedmlac", ["method.alpha=1", "method.rule={name: lpa, vl: 0.2}"]),
        ("fedper", ["method.personal=[model/output, model/gru]", "models.model=crnn_tiny"]),
        ("scaffold", ["run.name=1e5", "data.corrupt.noise={snr_db: 10, clients: [s1, s2]}", "train.cohort=0.5"]),
        ("fedavg", ["data.split.test={by: group, fraction: 0.3}", "data.takes=5", "data.segment=null"]),
    ],
)
def test_the_resolved_configuration_is_a_valid_equal_configuration(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, method: str, overrides: list[str]
) -> None:
    file = write_config(tiny(method=method), tmp_path)
    output = raydfl("config", file, *overrides)
    assert (output.code, output.err) == (0, "")
    copy = tmp_path / "again.yaml"
    copy.write_text(output.out)
    assert load_config(copy).digest() == load_config(file, overrides).digest()
    assert raydfl("config", copy).out == output.out


def test_the_resolved_configuration_explains_every_setting(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    lines = raydfl("config", write_config(tiny(method="fedmlac"), tmp_path)).out.splitlines()
    keys = [number for number, line in enumerate(lines) if line.partition("#")[0].strip()]
    mute = [lines[number] for number in keys if not lines[number - 1].lstrip().startswith("#")]
    assert mute == [
        "  local: [{name: crnn_tiny, hidden: 8, filters: [4]}, {name: crnn_tiny, hidden: 4, filters: [4]}]"
    ] or all(
        line.startswith(
            (
                "  plugin:",
                "  local:",
                "  first:",
                "  speakers:",
                "  classes:",
                "  takes:",
                "  test_takes:",
                "  seconds:",
            )
        )
        for line in mute
    )  # all models share one comment; the data set of the tests has no descriptions
    text = "\n".join(lines)
    alpha = "# Fraction of cross-entropy in the local loss. 1: the local model learns from labels only. Range: 0 to 1."
    assert f"{alpha}\n  alpha: 0.5" in text
    assert "# Number of communication rounds. Range: 1 to 1000000.\n  rounds: 3" in text
    assert "# Time between frames in ms. Above 0, to 500.\n    hop_ms: 10.0" in text


def test_an_explicit_default_does_not_change_the_configuration(tiny: Tiny) -> None:
    same_run = ["method.rule=null", "data.speakers=6", "train.optimiser.momentum=0", "evaluate.batch_size=64"]
    assert tiny().digest() == tiny(*same_run).digest()
    assert tiny(method="fedmlac").digest() == tiny("method.alpha=0.5", "method.lpa=true", method="fedmlac").digest()
    for other in (
        "data.speakers=7",
        "train.optimiser.momentum=0.5",
        "models.model.hidden=9",
        "method.rule=uniform_mean",
    ):
        assert tiny().digest() != tiny(other).digest()


def test_methods_are_listed_with_their_options(raydfl: Raydfl) -> None:
    shown = raydfl("methods")
    assert shown.code == 0
    listed = json.loads(raydfl("methods", "--json").out)
    assert list(listed["methods"]) == registry.names("raydfl.methods")
    for name, about in listed["methods"].items():
        assert f"\n{name}: {about['about']}\n" in shown.out
        for option, facts in about["options"].items():
            assert facts["meaning"], f"{name}.{option} is not described"
            assert f"  {option} = {json.dumps(facts['default'])}: " in shown.out
    assert listed["methods"]["fedprox"]["options"]["mu"]["default"] == 0.01
    assert "lpa" in listed["rules"]
    assert listed["models"]["crnn_tiny"]["options"]["hidden"] == 32


def test_methods_by_name(raydfl: Raydfl) -> None:
    everything = json.loads(raydfl("methods", "--json").out)
    some = json.loads(raydfl("methods", "fedprox", "median", "--json").out)
    fedprox, median = everything["methods"]["fedprox"], everything["rules"]["median"]
    kinds = ("attacks", "objectives", "transforms", "models")
    assert some == {"methods": {"fedprox": fedprox}, "rules": {"median": median}, **{kind: {} for kind in kinds}}
    shown = raydfl("methods", "fedprox").out
    assert shown.startswith("Methods (method: {name: ...})\n\nfedprox: ")
    assert "\n  mu = 0.01: Weight of the proximal term" in shown
    assert "1. At least 0. Source: ours.\n" in shown
    assert fedprox["options"]["squared"]["source"] == "paper"
    assert "source" not in median["options"]
    assert "\n    min_w  F_k(w) + (mu / 2) ||w - w_t||^2" in shown
    assert "scaffold" not in shown
    raydfl("methods", "fedprx").refuses("'fedprx' is built in. Did you mean 'fedprox'")


# -- data ------------------------------------------------------------------------------------------------------------


def test_data_sets_are_listed_and_described(raydfl: Raydfl) -> None:
    listed = raydfl("data", "list").out
    for name in dataset_names():
        assert f"\n{name} " in listed
        output = raydfl("data", "info", name)
        assert output.code == 0
        card = find_dataset(name).card
        assert output.out.startswith(f"{name}: {card.title}\n")
        for fact in (card.layout, card.licence, card.url):
            assert " ".join(fact.split()) in " ".join(output.out.split())
    assert "root (required): Folder with the files of the set." in raydfl("data", "info", "fsdd").out
    assert "test_takes = 5: Number of each speaker's first takes" in raydfl("data", "info", "fsdd").out
    raydfl("data", "info", "fsd").refuses("unknown data set 'fsd'. Did you mean 'fsdd'?")
    raydfl("data", "info", "fsdd", "root=x").refuses(
        "'root=x': 'fsdd' is not a configuration file. Settings need a configuration file before them."
    )


def test_the_data_are_described_without_reading_a_clip(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tones: 6 speakers x 3 classes x (2 test takes + 6, 7, 8, 6, 7, 8 training takes)."""
    monkeypatch.setattr("raydfl.data.features.extraction.compute_chunk", None)
    output = raydfl("data", "info", write_config(tiny("data.takes=6", f"data.cache={tmp_path / 'no'}"), tmp_path))
    assert output.code == 0
    rows = [" ".join(line.split()) for line in output.out.splitlines()]
    assert "clips 162" in rows
    assert "classes (3) tone0 (54), tone1 (54), tone2 (54)" in rows
    assert "groups (6) s0 (24), s1 (27), s2 (30), s3 (24), s4 (27), s5 (30)" in rows
    assert "official split train (126), test (36)" in rows
    # A fifth of 18, 21 and 24 clips, rounded: 4, 4 and 5 validation clips per client.
    expected = (
        "clients (6) by group: 18 to 24 clips each, median 21, 126 in all; 26 of them for the clients' own validation"
    )
    assert expected in " ".join(rows)
    assert "test set 36 clips of 3 of the 3 classes" in rows
    assert not (tmp_path / "no").exists()


def test_the_suggested_command_runs_as_printed(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    """This holds even if the file's partition does not fit."""
    file = write_config(tiny("data.takes=6", "data.partition={by: iid, clients: 5000}"), tmp_path)
    output = raydfl("data", "info", file)
    assert output.code == 0
    assert "126 clips cannot give 5000 clients 1 each" in output.out
    assert output.err == ""
    command = shlex.split(output.out.partition("\nnext: ")[2].partition("\n")[2].replace("\\\n", ""))
    assert command[:3] == ["raydfl", "run", str(file)]
    assert raydfl(*command[1:], "train.rounds=1", "run.name=begun").code == 0


def test_clips_without_a_fitting_partition_are_an_error(raydfl: Raydfl, tmp_path: Path) -> None:
    (tmp_path / "yes").mkdir()
    (tmp_path / "yes" / "a.wav").touch()
    file = tmp_path / "one.yaml"
    file.write_text(f"{{method: fedavg, data: {{name: folder, root: {tmp_path}}}}}")
    output = raydfl("data", "info", file)
    output.refuses("no clip has 'test' in column 'split'")
    assert "next:" not in output.out


def test_some_clips_may_belong_to_no_client(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    dropping = ["data.takes=6", "data.partition={by: group, minimum: 20, smaller: drop}", "data.split.validation=0"]
    output = raydfl("data", "info", write_config(tiny(*dropping), tmp_path))
    rows = [" ".join(line.split()) for line in output.out.splitlines()]
    assert "clients (4) by group: 21 to 24 clips each, median 22.5, 90 in all" in rows
    assert "left out 36 clips" in rows


def test_features_are_prepared_once_and_announced(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny(f"data.cache={tmp_path / 'cache'}"), tmp_path)
    events = raydfl("data", "prepare", file, "--json").events
    assert {"event": "steps", "description": "computing features", "done": 108, "total": 108} in events
    ready = "Features are ready: 6 clients, 36 test examples, 3 classes, 0 clips left out"
    assert events[-1] == {"event": "message", "text": ready}
    assert raydfl("data", "prepare", file).out == f"{ready}\n"
    assert raydfl("data", "prepare", file, "--quiet").out == ""


def test_the_partition_is_plotted(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file, out = write_config(tiny(), tmp_path), tmp_path / "who.png"
    output = raydfl("data", "plot", file, "--out", out)
    assert output.out.splitlines()[-1] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    raydfl("data", "plot", file, "--out", tmp_path / "who.doc").refuses(
        r"who.doc: the name must end in .png, .svg or .pdf"
    )
    raydfl("data", "plot", file, "--out", "/dev/null/who.png").refuses(
        "/dev/null/who.png cannot be written: File exists"
    )


def test_the_arrivals_of_a_fleet_are_printed_without_training(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    """Three of six clients train for 5 s each. A round of three arrivals therefore takes 5 s."""
    fleet = ("train.fleet={buffer: 3, concurrency: 3, seconds: {start: 5, example: 0}}", "train.cohort=0.5")
    file, out = write_config(tiny(*fleet, "train.rounds=4"), tmp_path), tmp_path / "fleet.svg"
    lines = raydfl("data", "fleet", file, "--out", out).out.splitlines()
    assert lines[:3] == [
        "4 rounds end after 20 virtual seconds, 5 each",
        "12 updates, 2,160 an hour; dropped: none",
        "busy places: 3",
    ]
    assert lines[4].split() == ["round", "trip", "(s)", "5", "5", "5", "5"]
    assert out.read_text().count("<svg") == 1
    values = json.loads(raydfl("data", "fleet", file, "--json").out)
    assert values["seconds"] == 20
    assert values["staleness"] == {"10 %": 0, "50 %": 0, "90 %": 0, "largest": 0}
    raydfl("data", "fleet", write_config(tiny(), tmp_path)).refuses("train.fleet is not set. Add train.fleet")


# -- runs ------------------------------------------------------------------------------------------------------------


def test_json_output_contains_only_json(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny("train.rounds=2", "run.name=machine"), tmp_path)
    output = raydfl("run", file, "--json")
    assert (output.code, output.err) == (0, "")
    assert [event["event"] for event in output.events if event["event"] in ("start", "round", "finish")] == [
        "start",
        "round",
        "round",
        "finish",
    ]
    assert output.events[-1]["status"] == "finished"
    assert Path(output.events[-1]["run_dir"]).is_dir()
    assert "run" in raydfl("--help").out  # standard output is restored


def test_a_run_prints_its_files_and_next_steps(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    output = raydfl("run", write_config(tiny("train.rounds=2"), tmp_path))
    lines = output.out.splitlines()
    folder = tmp_path / "runs/tiny"
    (place,) = (number for number, line in enumerate(lines) if line == f"run directory: {folder}")
    assert lines[place + 1].startswith("report: ")
    assert lines[place + 1].endswith("runs/tiny/report.html")
    assert lines[place + 2].startswith("verdict: ")
    assert lines[-1].startswith("next: raydfl ")
    assert any(line.startswith("round 2/2  loss ") for line in lines)
    assert output.err == ""


def test_quiet_prints_nothing_but_errors(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny("train.rounds=1"), tmp_path)
    output = raydfl("run", file, "--quiet")
    assert (output.code, output.out, output.err) == (0, "", "")
    raydfl("run", file, "-q", "train.cohort=9").refuses("train.cohort")


def test_resume_adds_rounds(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    long = run(tiny("train.rounds=4", "run.name=long"))
    raydfl("run", write_config(tiny("train.rounds=2", "run.name=short"), tmp_path))
    short = tmp_path / "runs/short"
    done = raydfl("resume", short)
    assert done.code == 0
    assert "all 2 rounds are done. To add rounds: raydfl resume " in done.out
    assert done.out.partition("all 2 rounds")[2].splitlines()[0].endswith("runs/short train.rounds=4")
    output = raydfl("resume", short, "train.rounds=4")
    assert "short: 4 rounds, 2 of them done" in output.out
    assert output.code == 0
    assert_same_bits(read_tensors(long.run_dir), read_tensors(short))


@pytest.mark.parametrize("setting", ["run.dir=elsewhere", "run.name=other", "run.name=null"])
def test_a_resumed_run_stays_in_its_folder(setting: str, raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    raydfl("run", write_config(tiny("train.rounds=1"), tmp_path))
    stored = (tmp_path / "runs/tiny/config.yaml").read_text()
    rejected = raydfl("resume", tmp_path / "runs/tiny", "train.rounds=2", setting)
    rejected.refuses("a resumed run stays in its folder")
    assert (tmp_path / "runs/tiny/config.yaml").read_text() == stored


def test_the_same_command_resumes_a_named_run(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    file = write_config(tiny("train.rounds=1"), tmp_path)
    raydfl("run", file)
    output = raydfl("run", file, "train.rounds=2")
    assert "tiny: 2 rounds, 1 of them done" in output.out
    assert (output.code, output.err) == (0, "")


def test_a_replay_is_printed_and_saved(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    run_dir = run(tiny("train.cohort=1.0", "train.rounds=2", method="fedmlac")).run_dir
    out = tmp_path / "update.safetensors"
    output = raydfl("replay", run_dir, "--round", 2, "--client", "s3", "--save", out)
    assert output.code == 0
    # 18 training clips, 4 of them for validation.
    assert "client 's3': 7 examples, plugin=crnn_tiny, local=crnn_tiny" in output.out
    assert "round 2, phase 'train'" in output.out
    update = replay(run_dir, 2, "s3").update
    assert update is not None
    saved = safetensors.torch.load_file(out)
    assert set(saved) == set(update.tensors)
    assert all(torch.equal(saved[name], tensor) for name, tensor in update.tensors.items())
    for name in saved:
        assert name in output.out
    refused = raydfl("replay", run_dir, "--round", 2, "--client", "s3", "--save", "/dev/null/update")
    refused.refuses("/dev/null/update cannot be written: Not a directory")


def test_a_replay_of_a_failing_method_shows_its_traceback(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    method = f"{Path(__file__).parent.parent / 'extra_methods.py'}:Failing"
    file = write_config(tiny(f"method.name={method}", "method.client=s2", "train.cohort=1.0"), tmp_path)
    failed = raydfl("run", file)
    assert failed.code == 1
    assert "client 's2' failed in round 2, phase 'train': ZeroDivisionError: a method's own mistake" in failed.err
    assert "Traceback" not in failed.err
    line = failed.err.strip().splitlines()[-1]
    assert line.startswith("Inspect it with: raydfl replay ")
    replayed = raydfl(*line.partition("raydfl ")[2].split())
    assert replayed.code == 1
    assert "Traceback" in replayed.err
    assert "extra_methods.py" in replayed.err


def test_a_run_reports_uncompiled_operators(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_config(tiny("train.rounds=1"), tmp_path)
    monkeypatch.setattr("raydfl.core.ops.is_compiled", lambda: False)
    output = raydfl("run", file)
    assert output.code == 0
    assert "operators are not compiled here" in output.out + output.err
