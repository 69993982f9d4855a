"""Exporting a model of a run: ``MODEL.onnx``, and ``MODEL.json`` beside it, which says how to feed it and what comes out."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.core.version import __version__
from raydfl.engine.storage import file_name_of
from raydfl.runs.inference.front_end import describe_front_end
from raydfl.runs.inference.model import RunModel, load_model
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
    """Largest difference of an output between ONNX Runtime and PyTorch: of logits or scores; of answers where samples come in."""
    output: str = "logits"
    """Name of the first output, of which that is told."""

    @property
    def chosen(self) -> str:
        """By what its round was chosen, where it is the best one; empty: it is the last."""
        return str(self.description.get("chosen", ""))

    @property
    def quantised(self) -> str:
        """One line on what int8 costs; empty: the network is in floats."""
        said = self.description.get("quantised")
        if said is None:
            return ""
        measured = said["measured"]
        made = f"int8: {said['operators']} operators, ranges of {said['calibration_examples']} training examples"
        if measured is None:
            return f"{made}; not measured, for the run holds nothing out here"
        return (
            f"{made}; {measured['metric']} on {measured['split']} ({measured['clips']} clips): float32 {measured['float32']:.4f}, "
            f"int8 {measured['int8']:.4f}"
        )


def export_model(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
    input: Literal["features", "wave"] = "features",  # noqa: A002 - the option's name on the command line
    quantize: Literal["int8"] | None = None,
    streaming: bool = False,
) -> Exported:
    """Write a model of a run as ONNX, with a JSON file beside it that says how to feed it.

    Args:
        run_dir: the run's folder.
        out: the ONNX file; by default ``export/MODEL.onnx`` in the run's folder (``MODEL-CLIENT.onnx`` of a client's, and then
            ``-best``, ``-wave`` or ``-streaming``, and ``-int8`` where these are asked for).
        model: by default the shared one, or with ``client`` the one that the client does not share.
        client: whose model; by default the server's.
        trust: approves the code that the run's configuration names.
        best: whether it is the best round's, by ``run.best``; by default the last round's.
        input: what the graph takes: features, or samples at the run's rate, with the front end inside and the answer coming out.
        quantize: the type of weights and activations; ``None``: float32. It needs the run's training clips.
        streaming: whether the graph takes samples piece by piece and carries a state; CRNNs in one direction alone.

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
    _check_form(input, quantize, streaming)
    form = "streaming" if streaming else input
    loaded = load_model(run_dir, model, client, trust, best)
    path = _default_path(loaded, form, quantize) if out is None else Path(out)
    if path.suffix != ".onnx":
        raise InputError(f"--out {path}: the name must end in .onnx")
    content, difference, more = _make(loaded, form, quantize is not None)
    described = _describe(loaded, content, path.name, difference, more)
    text, beside = json.dumps(described, indent=1), path.with_suffix(".json")
    properties = {"raydfl": text}
    if "sample_rate" in described:
        properties |= {"sample_rate": str(described["sample_rate"]), "classes": json.dumps(list(loaded.classes))}
    write_durably(path, _with_properties(content, properties), "make room or name another file with --out")
    write_durably(beside, text.encode(), "make room or name another file with --out")
    return Exported(path, beside, json.loads(text), difference, next(iter(described["onnx"]["outputs"])))


def _check_form(given: str, quantize: str | None, streaming: bool) -> None:
    """Refuse what cannot be asked for, or not together."""
    if given not in ("features", "wave"):
        raise InputError(f"--input {given}: choose features or wave")
    if quantize not in (None, "int8"):
        raise InputError(f"--quantize {quantize}: choose int8, or leave it out for float32")
    if streaming and quantize:
        raise InputError("--streaming: a stream is computed in float32; leave --quantize out")


def _make(model: RunModel, form: str, int8: bool) -> tuple[bytes, float, dict[str, Any]]:
    """Return the ONNX model in one of its forms (features, wave or streaming), its difference, and what else describes it."""
    # These need the extra onnx, which predict and the report can do without.
    from raydfl.runs.inference import network, streaming, wave

    if form == "features":
        graph, more = _make_network(model, int8, None)
        return graph.content, graph.difference, more
    rate = {"sample_rate": wave.read_settings(model).sample_rate}
    if form == "streaming":
        content = streaming.stream_graph(model)
        stream = streaming.Stream(network.open_session(content), 2)
        return content, streaming.largest_difference(stream.hear, model), rate
    wave.Answer(model, model.logits)  # refuses early what cannot be exported
    graph, more = _make_network(model, int8, wave.takes_lengths(model))
    content = wave.answer_graph(model, graph)
    session = network.open_session(content)
    difference = wave.largest_difference(lambda given: session.run(None, {"samples": given})[0], model, tolerant=int8)
    return content, difference, {**rate, **more}


def _make_network(model: RunModel, int8: bool, with_lengths: bool | None) -> tuple[Any, dict[str, Any]]:
    """Return the network's graph, and what it costs to have it in int8."""
    from raydfl.runs.inference import int8 as quantiser  # needs the extra onnx, as above
    from raydfl.runs.inference import network

    graph = network.to_onnx(model, with_lengths)
    if not int8:
        return graph, {}
    graph, quantised = quantiser.quantise(model, graph)
    return graph, {"quantised": quantised}


def _default_path(model: RunModel, form: str, quantize: str | None) -> Path:
    name = model.name if not model.client else f"{model.name}-{model.client}"
    endings = ("best" if model.chosen else "", "" if form == "features" else form, quantize or "")
    return model.run_dir / "export" / f"{'-'.join([file_name_of(name), *filter(None, endings)])}.onnx"


def _describe_values(model: RunModel, content: bytes, rate: int | None) -> dict[str, dict[str, Any]]:
    """Return types, shapes and meanings of the graph's inputs and outputs.

    Args:
        model: of the run.
        content: the ONNX model.
        rate: of samples in Hz; ``None``: the graph takes features.
    """
    import onnx

    graph = onnx.load_from_string(content).graph
    names = [value.name for value in graph.input]
    facts: dict[str, dict[str, Any]] = {
        "samples": {
            "sample_rate": rate,
            "what": "one channel, -1..1, at that rate; the front end from there on is in the graph",
        },
        "x": {"what": "images" if isinstance(model.spec.inputs, tuple) else "features"},
        "lengths": {"what": "frames that count, at least 1"},
    }
    if "lengths" in names:
        padded = "features, each followed by frames of zeros up to the longest of the batch and to least_frames"
        facts["x"] = {"what": padded, "least_frames": LEAST_FRAMES}
    for name in names:
        if name not in facts:
            facts |= {name: {"begins": 0}, f"next_{name}": {"what": f"{name} of the next call"}}
    for name in model.output_names:
        facts[name] = dict(_MEANINGS[model.objective.answers, name])

    def describe(value: Any) -> dict[str, Any]:
        kind = value.type.tensor_type
        sizes = [size.dim_param or size.dim_value for size in kind.shape.dim]
        return {
            "dtype": "int64" if kind.elem_type == onnx.TensorProto.INT64 else "float32",
            "shape": ["any" if size == "frames" else size for size in sizes],
            **facts[value.name],
        }

    values = {"inputs": graph.input, "outputs": graph.output}
    return {kind: {value.name: describe(value) for value in found} for kind, found in values.items()}


def _describe(model: RunModel, content: bytes, file: str, difference: float, more: Mapping[str, Any]) -> dict[str, Any]:
    of_set = getattr(model.objective, "threshold", None) if model.objective.answers == "set" else None
    against = "predict" if "sample_rate" in more else "pytorch"
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
            **_describe_values(model, content, more.get("sample_rate")),
            f"largest_difference_to_{against}": difference,
        },
        **more,
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
        **({"has_class_from": of_set} if of_set is not None else {}),
        "front_end": describe_front_end(
            model.view,
            model.statistics,
            model.output_names[0 if model.objective.averages_logits() else -1],
        ),
    }


def _with_properties(content: bytes, properties: dict[str, str]) -> bytes:
    """Return the ONNX file with properties in its metadata; the description is ``raydfl``, so the file alone is enough."""
    import onnx

    proto = onnx.load_from_string(content)
    onnx.helper.set_model_props(proto, properties)
    whole: bytes = proto.SerializeToString()
    return whole
