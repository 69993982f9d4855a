"""ONNX files. Oracles: the network in PyTorch on random batches of several sizes, and predictions of recordings."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from commands import Raydfl
from torch import nn
from used_runs import FEATURES, TINY, Finished, execute_run, make_run_config

from raydfl import classify, export_model, load_model, read_rows
from raydfl.core.errors import InputError, ResourcesError
from raydfl.core.types import ModelSpec
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.models import architectures, build_model, find_architecture
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.recordings import FrontEnd
from raydfl.testing import train_federation

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="the packages of the extra onnx are not installed",
)


OF_FRAMES = [
    name
    for name in architectures()
    if getattr(find_architecture(name, "")[0], "images", False) is not True
    and name not in ("fusion", "pretrained", "ssast_small", "ssast_base")  # two need special features, two are large
]


@pytest.fixture(scope="session")
def exported_model(mutual: Finished, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return export_model(mutual.folder, tmp_path_factory.mktemp("export") / "plugin.onnx")


@pytest.fixture(scope="session")
def model_with_lengths(segmented: Finished, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return export_model(segmented.folder, tmp_path_factory.mktemp("export") / "plugin.onnx")


def open_session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path)


def make_batch(model: RunModel, items: int, frames: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, frames + 1, (items,), generator=random)
    lengths[-1] = frames
    x = torch.randn(items, frames, model.spec.inputs, generator=random)
    return x * (torch.arange(frames) < lengths[:, None])[:, :, None], lengths


@pytest.mark.parametrize(("items", "frames"), [(1, 8), (1, 26), (2, 9), (7, 133)])
def test_the_graph_agrees_with_the_network(mutual: Finished, exported_model: Any, items: int, frames: int) -> None:
    model = load_model(mutual.folder)
    x, _ = make_batch(model, items, frames, frames)
    logits, probabilities = open_session(exported_model.path).run(["logits", "probabilities"], {"x": x.numpy()})
    expected = model.logits(x, None)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(probabilities, expected.softmax(1), atol=1e-6)


@pytest.mark.parametrize(("items", "frames"), [(1, 8), (1, 30), (3, 31), (6, 90)])
def test_lengths_exclude_padding(segmented: Finished, model_with_lengths: Any, items: int, frames: int) -> None:
    model = load_model(segmented.folder)
    x, lengths = make_batch(model, items, frames, frames)
    run = open_session(model_with_lengths.path)
    (logits,) = run.run(["logits"], {"x": x.numpy(), "lengths": lengths.numpy()})
    np.testing.assert_allclose(logits, model.logits(x, lengths), atol=1e-5)
    more = np.concatenate([x.numpy(), np.zeros((items, 11, x.shape[2]), np.float32)], axis=1)
    (padded,) = run.run(["logits"], {"x": more, "lengths": lengths.numpy()})
    np.testing.assert_allclose(padded, logits, atol=1e-5)


def test_a_gru_is_one_node(exported_model: Any, model_with_lengths: Any) -> None:
    import onnx

    for path in (exported_model.path, model_with_lengths.path):
        proto = onnx.load(path)
        onnx.checker.check_model(proto, full_check=True)
        kinds = Counter(node.op_type for node in proto.graph.node)
        assert kinds["GRU"] == kinds["Conv"] == 1
        assert {node.domain for node in proto.graph.node} == {""}


def test_the_description_is_complete(mutual: Finished, exported_model: Any, model_with_lengths: Any) -> None:
    import onnx

    output = json.loads(exported_model.description_path.read_text())
    assert output == exported_model.description
    properties = {entry.key: entry.value for entry in onnx.load(exported_model.path).metadata_props}
    assert json.loads(properties["raydfl"]) == output
    assert (output["model"], output["client"], output["round"], output["run"]) == ("plugin", None, 2, "run")
    assert output["classes"] == ["high", "low", "middle"]
    assert output["parameters"] == sum(p.numel() for p in load_model(mutual.folder).network.parameters())
    assert output["onnx"]["inputs"]["x"]["shape"] == ["batch", "any", 16]
    assert "lengths" not in output["onnx"]["inputs"]
    assert model_with_lengths.description["onnx"]["inputs"]["lengths"]["dtype"] == "int64"
    assert model_with_lengths.description["front_end"]["segments"]["stride"] == 7
    assert 0 <= output["onnx"]["largest_difference_to_pytorch"] == exported_model.difference < 1e-5
    front_end = output["front_end"]
    assert front_end["spectrogram"]["window_samples"] == 200
    assert front_end["spectrogram"]["fft"] == mutual.config.data.features.points
    assert front_end["pad"]["frames"] == 26
    assert front_end["cut"]["samples"] == 2000


def test_recordings_through_the_exported_model(segmented: Finished, model_with_lengths: Any) -> None:
    """Execute the steps of the description by hand."""
    segment = model_with_lengths.description["front_end"]["segments"]
    run, extractor = open_session(model_with_lengths.path), FeatureExtractor(segmented.config.data.features)
    for prediction in classify(segmented.folder, segmented.test_files[:6]):
        matrix = extractor(*soundfile.read(prediction.file, dtype="float32", always_2d=True))
        starts = range(0, max(1, len(matrix) - segment["frames"] + 1), segment["stride"])
        actual = []
        for start in starts:
            x = matrix[start : start + segment["frames"]]
            (part,) = run.run(["probabilities"], {"x": x[None], "lengths": np.array([len(x)])})
            actual.append(part[0])
        np.testing.assert_allclose(np.mean(actual, axis=0), prediction.probabilities, atol=1e-5)


@pytest.fixture
def cached_graph(exported_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reuse the exported graph of the network, because an export takes seconds."""
    from raydfl.runs.inference.network import Graph

    graph = Graph(exported_model.path.read_bytes(), None, False, exported_model.difference)
    monkeypatch.setattr("raydfl.runs.inference.network.to_onnx", lambda model, with_lengths=None: graph)
    return graph


def test_the_exported_file_classifies_samples(raydfl: Raydfl, mutual: Finished, cached_graph: Any) -> None:
    """The file alone classifies the run's test recordings."""
    import onnx

    output = raydfl("export", mutual.folder, "--input", "wave")
    assert output.code == 0, output.err
    assert "largest difference to raydfl predict: " in output.out
    path = mutual.folder / "export" / "plugin-wave.onnx"
    properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert properties["sample_rate"] == "8000"
    assert json.loads(properties["classes"]) == ["high", "low", "middle"]
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["onnx"]["inputs"]["samples"]["sample_rate"] == about["sample_rate"] == 8000
    assert json.loads(properties["raydfl"]) == about
    for prediction in classify(mutual.folder, mutual.test_files):
        samples = soundfile.read(prediction.file, dtype="float32")[0]
        (actual,) = open_session(path).run(["probabilities"], {"samples": samples[None]})
        np.testing.assert_allclose(actual[0], prediction.probabilities, atol=1e-5)


@pytest.mark.slow
def test_int8_export_reports_its_accuracy(raydfl: Raydfl, mutual: Finished, cached_graph: Any) -> None:
    """Oracle: the accuracies of predict and of the int8 file on the test recordings."""
    import onnx

    output = raydfl("export", mutual.folder, "--input", "wave", "--quantize", "int8")
    assert output.code == 0, output.err
    path = mutual.folder / "export" / "plugin-wave-int8.onnx"
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert kinds["QuantizeLinear"] >= 2
    about = json.loads(path.with_suffix(".json").read_text())
    classes, right = about["classes"], {"float32": 0, "int8": 0}
    for prediction, label in zip(classify(mutual.folder, mutual.test_files), mutual.labels, strict=True):
        samples = soundfile.read(prediction.file, dtype="float32")[0]
        (actual,) = open_session(path).run(["probabilities"], {"samples": samples[None]})
        assert 0 < np.abs(actual[0] - prediction.probabilities).max() < 0.1
        right["float32"] += prediction.label == label
        right["int8"] += classes[int(actual.argmax())] == label
    count, measured = len(mutual.labels), about["quantised"]["measured"]
    assert (measured["metric"], measured["split"], measured["clips"]) == ("accuracy", "test", count)
    for kind, number in right.items():
        assert measured[kind] == pytest.approx(number / count)
        assert f"{kind} {number / count:.4f}" in output.out


def test_a_clients_model_is_exported(raydfl: Raydfl, mutual: Finished) -> None:
    client = mutual.list_trained()[0]
    output = raydfl("export", mutual.folder, "--client", client)
    assert output.code == 0, output.err
    path = mutual.folder / "export" / f"local-{client}.onnx"
    first, second, which, third = output.out.splitlines()
    assert [Path(first), Path(second)] == [path, path.with_suffix(".json")]
    assert which == f"round {json.loads(Path(second).read_text())['round']}"
    assert third.startswith("largest difference to PyTorch: ")
    x, _ = make_batch(load_model(mutual.folder), 3, 26, 0)
    expected = mutual.make_step(client).models["local"].eval()(x, None).detach()
    np.testing.assert_allclose(open_session(path).run(["logits"], {"x": x.numpy()})[0], expected, atol=1e-5)
    assert json.loads(path.with_suffix(".json").read_text())["client"] == client


@pytest.mark.slow
def test_a_detector_gives_scores(raydfl: Raydfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raydfl.runs.inference.network import Graph

    data = {
        "name": f"{Path(__file__).parents[2] / 'objectives' / 'machines.py'}:Machines",
        "features": {**FEATURES, "seconds": 0.25, "normalise": "group"},
        "partition": {"by": "group"},
        "split": {"validation": 0.2},
        "cache": str(tmp_path / "cache"),
    }
    objective = {"name": "reconstruct", "size": 4, "bins": 4, "hidden": 16, "normal": ["normal"]}
    parts: dict[str, Any] = {"method": {"name": "fedavg"}, "models": {"model": TINY}, "objective": objective}
    config = make_run_config(tmp_path, tmp_path, whole_data=data, **parts)
    train_federation(config)
    folder = Path(config.run.dir) / "run"
    output = raydfl("export", folder)
    assert output.code == 0, output.err
    path = Path(output.out.splitlines()[0])
    about = json.loads(path.with_suffix(".json").read_text())
    assert set(about["onnx"]["outputs"]) == {"score"}
    rows = read_rows(folder).to_pylist()
    thresholds = [row["value"] for row in rows if row["metric"] == "model/threshold" and not row["client"]]
    assert about["threshold"]["value"] == pytest.approx(thresholds[-1])
    model = load_model(folder)
    x, _ = make_batch(model, 3, model.length or 9, 0)
    actual = open_session(path).run(["score"], {"x": x.numpy()})[0]
    np.testing.assert_allclose(actual, model.logits(x, None).numpy(), rtol=1e-4)
    graph = Graph(path.read_bytes(), None, False, 0.0)
    monkeypatch.setattr("raydfl.runs.inference.network.to_onnx", lambda *_: graph)  # takes seconds
    heard = export_model(folder, input="wave")
    assert heard.description["threshold"] == about["threshold"]
    samples = np.random.default_rng(0).standard_normal(1500).astype(np.float32)
    (score,) = open_session(heard.path).run(["score"], {"samples": samples[None]})
    assert score[0] == pytest.approx(FrontEnd(model).answer_to(samples, 8000), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("resnet18", "shufflenet_v2") else [])
        for name in OF_FRAMES
    ],
)
def test_every_architecture_is_exported(mutual: Finished, architecture: str, lengths: bool) -> None:
    """Oracle: the check of the export, which rejects differences."""
    from raydfl.runs.inference.network import to_onnx

    graph = to_onnx(
        make_model(mutual, build_model(ModelSpec("m", architecture, 16, 3)), architecture, None if lengths else 26)
    )
    assert (graph.frames, graph.lengths) == (None, lengths)
    assert graph.difference < 1e-5


def make_model(run: Finished, network: nn.Module, architecture: str, length: int | None) -> RunModel:
    """Return an untrained model."""

    spec, data = ModelSpec("m", architecture, 16, 3), run.config.data
    return RunModel(run.folder, "m", "", 2, network.eval(), spec, ("a", "b", "c"), data, data.first_view, length)


class Pooled(nn.Module):
    """A network that the exporter can trace only for a fixed number of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(16, 4, 3)
        self.output = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        maps = nn.functional.max_pool1d(self.convolution(x.transpose(1, 2)), 2)
        return self.output(maps.mean(dim=2))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.output(x.mean(1) if x.sum() > 0 else x.amax(1))


class TorchGru(nn.Module):
    """PyTorch's GRU without biases, and its final state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 5, batch_first=True, bidirectional=True, bias=False)
        self.output = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        outputs, last = self.gru(x)
        return self.output(torch.cat([outputs.mean(1), *last], dim=1))


class Uncopied(Branching):
    """A network with a tensor computed from its weights, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled = 2 * self.output.weight

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x.mean(1), self.doubled)


@pytest.mark.slow
def test_user_networks_are_exported(mutual: Finished, capfd: pytest.CaptureFixture[str]) -> None:
    from raydfl.runs.inference.network import to_onnx

    graph = to_onnx(make_model(mutual, TorchGru(), "mine.py:Torchs", 26))
    assert graph.frames is None
    assert to_onnx(make_model(mutual, Pooled(), "mine.py:Pooled", 26)).frames == 26
    capfd.readouterr()
    for network, length in ((Pooled(), None), (Branching(), 26), (Uncopied(), 26)):
        name = f"mine.py:{type(network).__name__}"
        with pytest.raises(
            InputError, match=rf"model 'm' \({name}\) cannot be exported to ONNX: .*traceable by torch.export"
        ):
            to_onnx(make_model(mutual, network, name, length))
        assert capfd.readouterr() == ("", "")  # without pages of the exporter's code


def test_a_wrong_graph_is_not_written(mutual: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.runs.inference.network._reorder_gates", lambda gates: gates)  # the injected error
    with pytest.raises(
        InputError,
        match=r"the ONNX graph of model 'plugin' \(crnn_tiny\) differs from raydfl predict by .*nothing was written",
    ):
        export_model(mutual.folder, tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_unsupported_exports_are_rejected(
    raydfl: Raydfl, mutual: Finished, exported_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydfl.runs.inference.network import Graph

    raydfl("export", mutual.folder, "--out", tmp_path / "x.pt").refuses(r"x\.pt: the name must end in \.onnx")
    raydfl("export", mutual.folder, "--quantize", "int8", "--streaming").refuses("streams support float32 only")
    raydfl("export", mutual.folder, "--streaming").refuses("over the whole clip .data.features.normalise: clip")
    with pytest.raises(InputError, match="--input samples: choose features or wave"):
        export_model(mutual.folder, input="samples")  # type: ignore[arg-type]
    raydfl("export", mutual.folder, "--model", "local").refuses("model 'local' of this run is not shared as a whole")
    (tmp_path / "file").write_text("")
    graph = Graph(exported_model.path.read_bytes(), None, False, 0.0)
    monkeypatch.setattr("raydfl.runs.inference.network.to_onnx", lambda *_: graph)  # takes seconds
    with pytest.raises(ResourcesError, match=r"x\.onnx cannot be written.*--out"):
        export_model(mutual.folder, tmp_path / "file" / "x.onnx")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxruntime" else find(name))
    raydfl("export", mutual.folder).refuses(r"cannot find onnxruntime. Install them with pip install 'raydfl\[onnx\]'")


@pytest.mark.slow
def test_a_fixed_number_of_frames_is_reported(tmp_path: Path) -> None:
    network = tmp_path / "mine.py"
    network.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Pooled(nn.Module):\n"
        "    def __init__(self, inputs, classes):\n        super().__init__()\n        self.output = nn.Linear(inputs, classes)\n\n"
        "    def forward(self, x, lengths=None):\n"
        "        return self.output(nn.functional.max_pool1d(x.transpose(1, 2), 2).mean(dim=2))\n"
    )
    run = execute_run(tmp_path, method={"name": "fedavg"}, models={"model": {"name": f"{network}:Pooled"}})
    output = export_model(run.folder)
    assert output.path == run.folder / "export" / "model.onnx"
    assert output.description["onnx"]["inputs"]["x"]["shape"] == ["batch", 26, 16]
    assert output.description["architecture"]["name"] == f"{network}:Pooled"
