"""Wrong configurations give exit code 2 and one message with the problem, the place and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Raydfl, write_config

from raydfl.core.errors import ConfigError
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.engine.config import Config, load_config

Tiny = Callable[..., Config]
ROOT = Path(__file__).resolve().parents[2]
_BOMB = ("- &a0 [x]\n" + "\n".join(f"- &a{i} [{f'*a{i - 1}, ' * 10}]" for i in range(1, 9))).encode()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.ronds=3", "train: unknown key 'ronds'. Did you mean 'rounds'?"),
        ("ronuds=3", "unknown key 'ronuds'. Did you mean train.rounds?"),
        ("train.optimiser.lrr=1", "train.optimiser: unknown key 'lrr'. Did you mean 'lr'?"),
        ("ray.actor=2", "ray: unknown key 'actor'. Did you mean 'actors'?"),
        ("track.experimnt=x", "track: unknown key 'experimnt'. Did you mean 'experiment'?"),
        ("data.features.bnads=3", "data.features: unknown key 'bnads'. Did you mean 'bands'?"),
        ("data.split.test.fractoin=3", "data.split.test: unknown key 'fractoin'. Did you mean 'fraction'?"),
        ("data.corrupt.noise={snr: 3}", "data.corrupt.noise: unknown key 'snr'. Did you mean 'snr_db'?"),
        ("data.speaker=3", "data: unknown key 'speaker' for data set '"),
        ("data.speaker=3", "Did you mean 'speakers'?"),
        ("method.alhpa=1", "method: unknown key 'alhpa' for FedMLAC. Did you mean 'alpha'?"),
        ("method.rule={name: lpa, vll: 1}", "method.rule: unknown key 'vll' for LayerwisePruning. Did you mean 'vl'?"),
        ("models.plugn=crnn_tiny", "models: fedmlac has no model 'plugn'. Did you mean 'plugin'?"),
        (
            "models.plugin={name: crnn_lite, kernal: 5}",
            "models.plugin: crnn_lite: unknown option 'kernal'. Did you mean 'kernel'?",
        ),
        (
            "models.local=[crnn_lite, {name: mlp, hiden: 5}]",
            "models.local: mlp: unknown option 'hiden'. Did you mean 'hidden'?",
        ),
        (
            "models.plugin=linear models.plugin.width=5",
            "models.plugin: linear: unknown option 'width'. It has no options",
        ),
        (
            "train.optimiser.models={locl: 1}",
            "train.optimiser.models: fedmlac has no model 'locl'. Did you mean 'local'?",
        ),
        ("modles.plugin=linear", "unknown key 'modles'. Did you mean 'models'?"),
        # Keys of other groups: without their group, or in the wrong group.
        ("rounds=5", "unknown key 'rounds'. Did you mean train.rounds?"),
        ("train.lr=0.1", "train: unknown key 'lr'. Did you mean train.optimiser.lr?"),
        ("data.sample_rate=8000", "Did you mean data.features.sample_rate?"),
        ("data.features.stride=3", "data.features: unknown key 'stride'. Did you mean data.segment.stride?"),
        # Unknown names.
        ("method.name=fedavgg", "unknown method 'fedavgg'. Did you mean 'fedavg'? Your own class: my_file.py:Class"),
        ("method.rule=lpaa", "unknown rule 'lpaa'. Did you mean 'lpa'? Your own class: my_file.py:Class"),
        ("data={name: fsddd}", "unknown data set 'fsddd'. Did you mean 'fsdd'? Your own class: my_file.py:Class"),
        ("models.plugin=crnn_lit", "models.plugin: unknown architecture 'crnn_lit'. Did you mean 'crnn_lite'?"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, override: str, message: str
) -> None:
    file = write_config(tiny(method="fedmlac"), tmp_path)
    overrides = override.split(" ") if override.count("=") > 1 else [override]
    raydfl("run", file, *overrides).refuses(re.escape(message))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.rounds=many",
            'train.rounds: Input should be a valid integer (got "many")\n  train.rounds: Number of communication rounds.',
        ),
        ("train.rounds=2.5", "train.rounds: Input should be a valid integer"),
        ("train.rounds=[3]", "train.rounds: Input should be a valid integer"),
        (
            "train.cohort=abc",
            'train.cohort: Input should be a valid integer or a valid number (got "abc")\n  train.cohort: Clients in each round: ',
        ),
        ("train.optimiser.lr=fast", "train.optimiser.lr: Input should be a valid number"),
        ("train.optimiser.models={model: fast}", "train.optimiser.models.model: Input should be a valid number"),
        ("train.optimiser=adam", "train.optimiser: Input should be a valid dictionary or instance of "),
        ("train.optimiser.betas=[0.9]", "train.optimiser.betas.1: Field required"),
        ("train=5", "train: Input should be a valid dictionary or instance of "),
        ("data=5", "data: Input should be a valid dictionary or instance of "),
        ("data.name=5", "data.name: Input should be a valid string"),
        ("data.takes=x", "data.takes: Input should be a valid integer"),
        ("data.split.test=all", "data.split.test: Input should be a valid dictionary or instance of "),
        (
            "data.corrupt.noise={clients: 2}",
            "data.corrupt.noise.snr_db: Field required\n  data.corrupt.noise.snr_db: Signal-to-noise ratio",
        ),
        (
            "data.corrupt.labels={rate: 0.1, clients: x}",
            "data.corrupt.labels.clients: Input should be a valid integer or a valid number or a valid tuple",
        ),
        (
            "data.corrupt.labels={rate: 0.1, clients: [1]}",
            "data.corrupt.labels.clients.0: Input should be a valid string",
        ),
        ("method=5", "method: Input should be a valid dictionary"),
        ("method={}", "method: a name is missing. Choose one of "),
        ("method.rule=5", "method.rule: Input should be a valid string or a valid dictionary"),
        ("models.model=5", "models.model: Input should be a valid string or a valid dictionary or a valid list"),
        ("models.model=[linear, 5]", "models.model.1: Input should be a valid string or a valid dictionary"),
        ("models.model={kernel: 5}", "models.model: an architecture's name is missing in"),
        ("models.model.hidden=big", "models.model: crnn_tiny.hidden: Input should be a valid integer"),
        ("ray.actors=two", "ray.actors: Input should be a valid integer or 'per_client'"),
        ("track.mlflow=perhaps", "track.mlflow: Input should be a valid boolean"),
        ("run.name=[a]", "run.name: Input should be a valid string"),
        ("run.seed=true", "run.seed: Input should be a valid integer"),
        (
            "run.seed=010",
            "override 'run.seed=010': 010 in line 1 was 8 in earlier versions and is 10 now, in YAML 1.2. Write 8 or 10",
        ),
        ("run.seed=1:1:1", "1:1:1 in line 1 was 3661 in earlier versions and is '1:1:1' now"),
        ("data.transforms=5", "data.transforms: write a list of transforms, like [{name: spec_augment}] (got 5)"),
        ("train.phases.one=5", "train.phases.one: Input should be a valid dictionary or instance of "),
    ],
)
def test_a_wrong_type_reports_the_expected_type(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, override: str, message: str
) -> None:
    raydfl("run", write_config(tiny(), tmp_path), override).refuses(re.escape(message))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.rounds=0", "train.rounds: Input should be greater than or equal to 1"),
        ("train.rounds=99999999999999999999", "train.rounds: Input should be less than or equal to 1000000"),
        ("ray.threads=9999", "ray.threads: Input should be less than or equal to 1024"),
        ("method={name: fedmlac, alpha: .inf}", "method.alpha: Input should be a finite number"),
        (
            "data.transforms=[{name: gain, db: [0, .inf]}]",
            "data.transforms.0: gain.db.1: Input should be a finite number",
        ),
        ("train.cohort=0", "train.cohort: Input should be greater than 0"),
        (
            "train.cohort=1.5",
            "train.cohort: a fraction of the clients must be at most 1.0; for a number of clients, write an integer (got 1.5)",
        ),
        ("train.optimiser.momentum=1", "train.optimiser.momentum: Input should be less than 1"),
        ("train.optimiser.lr=.nan", "train.optimiser.lr: Input should be a finite number"),
        ("train.optimiser.name=sgdd", "train.optimiser.name: Input should be 'sgd', 'adam' or 'adamw' (got \"sgdd\")"),
        ("evaluate.clients=everybody", "evaluate.clients: Input should be 'none', 'cohort' or 'all'"),
        ("ray.actors=-1", "ray.actors: the number of actors must be at least 0 (got -1)"),
        ("data.features.window_ms=900", "data.features.window_ms: Input should be less than or equal to 500"),
        ("data.features.fft=128", "data.features: fft 128 is shorter than the window of 200 samples (25.0 ms)"),
        ("data.partition={by: dirichlet}", "data.partition: by: dirichlet needs alpha and clients"),
        (
            "data.partition.by=speaker",
            "data.partition.by: Input should be 'group', 'dirichlet', 'quantity', 'classes', 'iid'",
        ),
        ("data.split.validation=1", "data.split.validation: Input should be less than 1"),
        ("data.split.test={by: clip, values: []}", "data.split.test.values: Tuple should have at least 1 item"),
        (
            "method={name: fedmlac, alpha: 2}",
            "method.alpha: Input should be less than or equal to 1 (got 2)\n  method.alpha: Fraction of cross-entropy",
        ),
        ("method.rule={name: lpa, vl: 1}", "method.rule.vl: Input should be less than 1"),
        ("models.model.kernel=4", "models.model: kernel is 4, but kernels must be odd. Use 5"),
        ("models.model.dropout=1.0", "models.model: crnn_tiny.dropout: Input should be less than 1"),
        ("models.model=[]", "models.model: the list of architectures is empty"),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0"),
        (
            "track.uri=mlruns",
            "track.uri: MLflow no longer stores runs in plain folders. Set it to a server (http://host:5000)",
        ),
    ],
)
def test_a_value_out_of_range_reports_the_range(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, override: str, message: str
) -> None:
    raydfl("run", write_config(tiny(), tmp_path), override).refuses(re.escape(message))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.rounds", "override 'train.rounds' is not of the form key=value, such as train.rounds=50"),
        ("=5", "override '=5' is not of the form key=value"),
        ("train..rounds=5", "override 'train..rounds=5': a name is missing in 'train..rounds'"),
        ("train.rounds.x=5", "override 'train.rounds.x=5': train.rounds is 3, not a group of settings"),
        (
            "train.rounds=[",
            "override 'train.rounds=[' is not valid YAML in line 2, column 1: while parsing a flow node",
        ),
        ("train={rounds: 1, rounds: 2}", "the key 'rounds' appears twice, the second time in line 1"),
    ],
)
def test_malformed_overrides_are_rejected(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path, override: str, message: str
) -> None:
    raydfl("run", write_config(tiny(), tmp_path), override).refuses(re.escape(message))


def test_a_rejected_configuration_leaves_no_files(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    raydfl("run", write_config(tiny(), tmp_path), "train.rounds=0").refuses("train.rounds")
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "file.yaml is empty. Write the groups method, models, objective, data, attack, train"),
        (b"fedavg", "file.yaml is 'fedavg'. Write the groups"),
        (b"- method\n- data", r"file.yaml is .*. Write the groups"),
        (b"method: fedavg\ndata: [", "file.yaml is not valid YAML in line 3, column 1: while parsing a flow node"),
        (b"method: fedavg\n\tdata: x", "file.yaml is not valid YAML in line 2, column 1"),
        (
            b"method: fedavg\ntrain: {rounds: 1}\ntrain: {}",
            "file.yaml: the key 'train' appears twice, the second time in line 3",
        ),
        (b"method: &a {name: fedavg, again: *a}", r"file.yaml: \*a in line 1 is an alias inside its own value &a"),
        (
            b"method: fedavg\ndata: &d\n  name: [{deep: *d}]",
            r"file.yaml: \*d in line 3 is an alias inside its own value &d",
        ),
        (b"method: " + b"[" * 30_000, "file.yaml: line 1 is nested more than 100 levels deep"),
        (_BOMB, "file.yaml: more than 100000 values up to line 6, including aliases"),
        (b"method: \xff\xfe", "cannot read the configuration .*file.yaml: it is not UTF-8 text"),
        (b"method: fedavg", "data: Field required"),
        (b"data: {name: spoken_words}", "method: Field required"),
    ],
)
def test_files_without_a_configuration_are_rejected(
    raydfl: Raydfl, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "file.yaml"
    file.write_bytes(content)
    raydfl("run", file).refuses(message)
    raydfl("config", file).refuses(message)
    raydfl("data", "prepare", file).refuses(message)


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_a_file_of_many_runs_has_the_same_limits(raydfl: Raydfl, tmp_path: Path, command: str) -> None:
    (tmp_path / "file.yaml").write_bytes(_BOMB)
    raydfl(command, tmp_path / "file.yaml").refuses("file.yaml: more than 100000 values")


@pytest.mark.parametrize(
    "override",
    [
        "data.unlabelled.keep=true",
        "train.cohort=true",
        "train.optimiser.lr='0.1'",
        "train.optimiser.betas=[true, 0.5]",
        "train.deadline=true",
        "train.optimiser.models={model: true}",
        "train.clients={min_examples: true}",
        "train.together=true",
        "ray.actors=true",
        "ray.cpus='1'",
        "evaluate.every=5.0",
        "attack={name: sign_flip, clients: true}",
        "attack={name: gaussian_noise, std: true}",
        "data.corrupt.labels={rate: true}",
        "data.corrupt.noise={snr_db: '5'}",
        "data.partition={by: iid, clients: true}",
        "data.split.validation=true",
        "data.features.bands=true",
        "data.segment={frames: true}",
        "data.takes=true",
        "data.missing={v: true}",
        "data.transforms=[{name: gain, db: [false, true]}]",
        "data.transforms=[{name: spec_augment, frame_masks: true}]",
        "method={name: fedprox, mu: '0.1'}",
        "method={name: fedprox, squared: 1}",
        "method.rule={name: trimmed_mean, trim: true}",
        "method={name: fedavg, tasks: {name: hdbscan, layers: true}}",
        "models.model={name: crnn_tiny, hidden: true}",
        "objective={name: classify, top_k: true}",
        "run.stop={patience: true}",
    ],
)
def test_no_setting_converts_a_value_of_another_type(tiny: Tiny, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="Input should be a valid "):
        load_config(write_config(tiny(), tmp_path), [override])


def test_an_alias_next_to_its_anchor_is_not_a_cycle() -> None:
    assert parse_yaml("a: &x {lr: 1}\nb: [*x, *x]\nc: &y [1, *x]\nd: *y", "here") == {
        "a": {"lr": 1},
        "b": [{"lr": 1}, {"lr": 1}],
        "c": [1, {"lr": 1}],
        "d": [1, {"lr": 1}],
    }


def test_an_unreadable_file_is_reported(raydfl: Raydfl, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").touch()
    missing = raydfl("run", tmp_path / "experimnt.yaml")
    missing.refuses("cannot read the configuration .*experimnt.yaml: No such file", "Did you mean 'experiment.yaml'?")
    raydfl("run", tmp_path / "no/x.yaml").refuses(
        r"No such file or directory. Give a YAML file, such as jobs/quickstart.yaml \(raydfl init writes it\)"
    )
    raydfl("run", "train.rounds=3").refuses("Give the file as the first argument, and settings after it")
    raydfl("run", tmp_path).refuses("cannot read the configuration .*: Is a directory")
    (tmp_path / "config.yaml").touch()
    raydfl("run", tmp_path).refuses("It is a run directory. Resume it with: raydfl resume")


def test_words_with_a_meaning_in_yaml_stay_words() -> None:
    """Speech Commands has the labels yes, no, on, off ... and speakers with names such as 1e5."""
    assert parse_yaml("[yes, no, on, off, true, false, 1e-3, 1.5E+2]", "") == [
        "yes",
        "no",
        "on",
        "off",
        True,
        False,
        1e-3,
        150.0,
    ]
    for value in (
        "1e5",
        "yes",
        "true",
        "null",
        "2024-01-01",
        "a: b",
        "x\ny",
        "",
        "s\u00e9",
        None,
        1e-8,
        7,
        [1, [2.5, "1e5"]],
        {"a": {}},
    ):
        assert parse_yaml(f"k: {to_yaml(value)}", "") == {"k": value}
        assert parse_yaml(to_yaml({"k": value}, flow=False), "") == {"k": value}


def test_an_existing_file_is_not_suggested_for_itself(raydfl: Raydfl, tmp_path: Path) -> None:
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    output = raydfl("run", tmp_path / "bin.yaml")
    output.refuses("bin.yaml: it is not UTF-8 text. Give a readable text file")
    assert "Did you mean" not in output.err
    raydfl("run", tmp_path / "bim.yaml").refuses("No such file or directory. Did you mean 'bin.yaml'")
    (tmp_path / "circle").symlink_to("circle")
    raydfl("run", ROOT / "jobs/fsdd.yaml", f"data.root={tmp_path}/circle").refuses(
        "circle' cannot be found: Symlink loop"
    )


def test_plain_names_may_gain_options(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text("method: fedprox\ndata: spoken_words\nmodels: {model: crnn_tiny}\n")
    config = load_config(
        file, ["method.mu=0.5", "data.speakers=3", "models.model.hidden=9", "method.rule=lpa", "method.rule.vl=0"]
    )
    assert config.method == {"name": "fedprox", "mu": 0.5, "rule": {"name": "lpa", "vl": 0}}
    assert config.data.source.options == {"speakers": 3}
    assert config.models == {"model": {"name": "crnn_tiny", "hidden": 9}}


def test_paths_do_not_depend_on_the_working_directory_of_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from raydfl import Method, Rule\nfrom torch import nn\n\n\nclass Mine(Method):\n    pass\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, inputs, classes):\n        super().__init__()\n\n\n"
        "class Sum(Rule):\n    def __call__(self, updates, current):\n        raise NotImplementedError\n"
    )
    file = tmp_path / "x.yaml"
    file.write_text(
        "method: {name: 'own.py:Mine', rule: 'own.py:Sum'}\nmodels: {model: [linear, {name: 'own.py:Net'}]}\n"
        "data: {name: manifest, file: clips.csv, root: ~/x}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config(file)
    monkeypatch.chdir("/")
    assert config.method == {"name": f"{tmp_path}/own.py:Mine", "rule": f"{tmp_path}/own.py:Sum"}
    assert config.models == {"model": ["linear", {"name": f"{tmp_path}/own.py:Net"}]}
    assert config.data.source.options == {"file": str(tmp_path / "clips.csv"), "root": str(Path("~/x").expanduser())}
    assert config.run.dir == str(tmp_path / "runs")
