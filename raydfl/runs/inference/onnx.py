"""Exporting a model of a run: ``MODEL.onnx``, and ``MODEL.json`` beside it, which says how to feed it and what comes out."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.core.version import __version__
from raydfl.engine.storage import file_name_of
from raydfl.runs.inference.front_end import describe_front_end
from raydfl.runs.inference.model import RunModel, load_model
from raydfl.runs.inference.network import Graph
from raydfl.runs.inference.recordings import LEAST_FRAMES

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


_MEANINGS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("class", "logits"): {},
    ("class", "probabilities"): {"what": "softmax of the logits"},
    ("set", "logits"): {},
    ("set", "probabilities"): {"what": "sigmoid of the logits, each class by itself"},
    ("score", "score"): {"what": "the higher the stranger; of a recording in segments the mean over them"},
    ("none", "outputs"): {"what": "what the network gives for a recording; they have no meaning one by one"},
}
"""What the outputs of a graph are, by what the objective answers."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that an export has written."""

    path: Path
    """The ONNX file."""
    description_path: Path
    """The JSON file beside it."""
    description: dict[str, Any]
    """Its content."""
    difference: float
    """Largest difference of an output between ONNX Runtime and PyTorch."""
    output: str = "logits"
    """Name of the first output, of which that is told."""

    @property
    def chosen(self) -> str:
        """By what its round was chosen, where it is the best one; empty: it is the last."""
        return str(self.description.get("chosen", ""))


def export_model(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
) -> Exported:
    """Write a model of a run as ONNX, with its front end described in a JSON file beside it.

    Args:
        run_dir: the run's folder.
        out: the ONNX file; by default ``export/MODEL.onnx`` in the run's folder (``MODEL-CLIENT.onnx`` of a client's, and with
            ``-best`` at the end where ``best``).
        model: by default the shared one, or with ``client`` the one that the client does not share.
        client: whose model; by default the server's.
        trust: whether code may be run that came with the folder or has changed since the run began.
        best: whether it is the best round's, by ``run.best``; by default the last round's.

    Raises:
        RunDirectoryError: no run directory, or no round is completed yet.
        InputError: no such model or client, a package is missing, the network cannot be exported, or the ONNX graph computes
            something else; nothing is written then.
        ResourcesError: the disk is full or the folder cannot be written.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"raydfl export needs the packages {', '.join(_PACKAGES)}, of which {', '.join(missing)} cannot be found: "
            f"pip install 'raydfl[onnx]', or in the repository pip install -c constraints.txt -e '.[onnx]'"
        )
    from raydfl.runs.inference.network import to_onnx

    loaded = load_model(run_dir, model, client, trust, best)
    path = _default_path(loaded) if out is None else Path(out)
    if path.suffix != ".onnx":
        raise InputError(f"--out {path}: the name must end in .onnx")
    graph = to_onnx(loaded)
    text = json.dumps(_describe(loaded, graph, path.name), indent=1)
    beside = path.with_suffix(".json")
    write_durably(path, _with_description(graph.content, text), "make room or name another file with --out")
    write_durably(beside, text.encode(), "make room or name another file with --out")
    output = next(iter(json.loads(text)["onnx"]["outputs"]))
    return Exported(path, beside, json.loads(text), graph.difference, output)


def _default_path(model: RunModel) -> Path:
    name = model.name if not model.client else f"{model.name}-{model.client}"
    return model.run_dir / "export" / f"{file_name_of(name)}{'-best' if model.chosen else ''}.onnx"


def _describe(model: RunModel, graph: Graph, file: str) -> dict[str, Any]:
    from raydfl.runs.inference.network import output_names

    size, classes = model.spec.inputs, len(model.classes)
    shape = [*size] if isinstance(size, tuple) else ["any" if graph.frames is None else graph.frames, size]
    what = "images" if isinstance(size, tuple) else "features"
    inputs: dict[str, Any] = {"x": {"dtype": "float32", "shape": ["batch", *shape], "what": what}}
    if graph.lengths:
        inputs["x"]["what"] = (
            "features, each followed by frames of zeros up to the longest of the batch and to least_frames"
        )
        inputs["x"]["least_frames"] = LEAST_FRAMES
        inputs["lengths"] = {"dtype": "int64", "shape": ["batch"], "what": "frames that count, at least 1"}
    return {
        "format": 1,
        "raydfl": __version__,
        "run": model.run_dir.resolve().name,
        "round": model.round,
        **({"chosen": model.chosen} if model.chosen else {}),
        "model": model.name,
        "client": model.client or None,
        **({"view": model.spec.view} if model.spec.view else {}),
        "architecture": {"name": model.spec.architecture, **dict(model.spec.options)},
        "parameters": sum(parameter.numel() for parameter in model.network.parameters()),
        "classes": list(model.classes),
        "onnx": {
            "file": file,
            "inputs": inputs,
            "outputs": {
                name: {"dtype": "float32", "shape": ["batch", classes], **_MEANINGS[model.objective.answers, name]}
                for name in output_names(model.objective)
            },
            "largest_difference_to_pytorch": graph.difference,
        },
        **(
            {}
            if model.threshold is None
            else {
                "threshold": {
                    "value": model.threshold.value,
                    "origin": model.threshold.origin,
                    "meaning": "a score of at least this is anomalous",
                }
            }
        ),
        "front_end": describe_front_end(
            model.view,
            model.statistics,
            output_names(model.objective)[0 if model.objective.averages_logits() else -1],
        ),
    }


def _with_description(content: bytes, description: str) -> bytes:
    """Return the ONNX file with the description in its metadata too, under the key ``raydfl``: the file alone is enough."""
    import onnx

    proto = onnx.load_from_string(content)
    onnx.helper.set_model_props(proto, {"raydfl": description})
    whole: bytes = proto.SerializeToString()
    return whole
