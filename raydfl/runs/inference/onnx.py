"""Export of a run's model to ``MODEL.onnx``, with a description of inputs and outputs in ``MODEL.json``."""

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
from raydfl.objectives import Events, TokenObjective
from raydfl.runs.inference.front_end import describe_front_end
from raydfl.runs.inference.model import RunModel, load_model
from raydfl.runs.inference.recordings import LEAST_FRAMES, find_separator, find_token_seconds

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


_MEANINGS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("class", "logits"): {},
    ("class", "probabilities"): {"what": "softmax of the logits"},
    ("set", "logits"): {},
    ("set", "probabilities"): {"what": "sigmoid of the logits, each class by itself"},
    ("score", "score"): {"what": "anomaly score (higher is more anomalous); the mean over the segments of a recording"},
    ("text", "log_probabilities"): {
        "what": "logarithm of the probability of each output at each token; output 0 is the blank, which is certain after the end "
        "of an example; transcript: the most probable output of each token, without repeats, then without blanks"
    },
    ("intervals", "probabilities"): {
        "what": "probability of each class at each token before the median filter, -1 after the end of an example"
    },
    ("embedding", "embedding"): {
        "what": "vector of length 1; for several segments, scale the mean of their vectors to length 1; the cosine of two "
        "recordings is the sum of the products of their values"
    },
    ("none", "outputs"): {"what": "outputs of the network for a recording, without individual meanings"},
}
"""Description of each output, by the kind of the objective's answer and the output's name."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The files of an export."""

    path: Path
    """The ONNX file."""
    description_path: Path
    """The JSON file with the description."""
    description: dict[str, Any]
    """Content of the JSON file."""
    difference: float
    """Largest absolute difference between ONNX Runtime and PyTorch, of logits or scores. For samples as input: of answers."""
    output: str = "logits"
    """Name of the first output, the subject of :attr:`difference`."""

    @property
    def chosen(self) -> str:
        """Description of the best round's choice. Empty: the model is of the last round."""
        return str(self.description.get("chosen", ""))

    @property
    def quantised(self) -> str:
        """One-line summary of the int8 quantisation, with the scores before and after. Empty for a float32 network."""
        facts = self.description.get("quantised")
        if facts is None:
            return ""
        measured = facts["measured"]
        summary = f"int8: {facts['operators']} operators, ranges of {facts['calibration_examples']} training examples"
        if measured is None:
            return f"{summary}; not measured, because this machine has no held-out clips of the run"
        return (
            f"{summary}; {measured['metric']} on {measured['split']} ({measured['clips']} clips): "
            f"float32 {measured['float32']:.4f}, int8 {measured['int8']:.4f}"
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
    """Export a model of a run to ONNX, with a description of its inputs and outputs as JSON.

    Args:
        run_dir: Run folder.
        out: ONNX file. Default: ``export/MODEL.onnx`` in the run folder, or ``MODEL-CLIENT.onnx`` for a client's model.
            ``-best``, ``-wave`` or ``-streaming``, and ``-int8`` are appended to the stem for these options.
        model: Name of the model. Default: the shared model, or with ``client`` the client's private model.
        client: Id of the client whose model is exported. Default: the server's model.
        trust: Approve the code named by the run's configuration.
        best: Export the best round by ``run.best`` instead of the last round.
        input: Input of the graph. ``"wave"``: samples at the run's sample rate; the graph then includes the front end.
        quantize: Type of weights and activations. ``None``: float32. int8 needs the run's training clips.
        streaming: Accept samples in pieces and carry a state between calls. Supports unidirectional CRNNs only.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: Unknown model or client, a missing package, a network that cannot be exported, or a graph with different
            results. Nothing is written.
        ResourcesError: The disk is full, or the folder is not writable.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"raydfl export needs the packages {', '.join(_PACKAGES)}, but cannot find {', '.join(missing)}. Install them with "
            f"pip install 'raydfl[onnx]', or in the repository with pip install -c constraints.txt -e '.[onnx]'."
        )
    _check_form(input, quantize, streaming)
    form = "streaming" if streaming else input
    loaded = load_model(run_dir, model, client, trust, best)
    path = _make_default_path(loaded, form, quantize) if out is None else Path(out)
    if path.suffix != ".onnx":
        raise InputError(f"--out {path}: the name must end in .onnx")
    content, difference, more = _make(loaded, form, quantize is not None)
    description = _describe(loaded, content, path.name, difference, more)
    text, description_path = json.dumps(description, indent=1), path.with_suffix(".json")
    properties = {"raydfl": text}
    if "sample_rate" in description:
        properties |= {"sample_rate": str(description["sample_rate"]), "classes": json.dumps(list(loaded.classes))}
    write_durably(path, _set_properties(content, properties), "make room or name another file with --out")
    write_durably(description_path, text.encode(), "make room or name another file with --out")
    return Exported(path, description_path, json.loads(text), difference, next(iter(description["onnx"]["outputs"])))


def _check_form(input_form: str, quantize: str | None, streaming: bool) -> None:
    """Reject unknown options and unsupported combinations."""
    if input_form not in ("features", "wave"):
        raise InputError(f"--input {input_form}: choose features or wave")
    if quantize not in (None, "int8"):
        raise InputError(f"--quantize {quantize}: choose int8, or omit the option for float32")
    if streaming and quantize:
        raise InputError("--streaming: streams support float32 only. Omit --quantize.")


def _make(model: RunModel, form: str, int8: bool) -> tuple[bytes, float, dict[str, Any]]:
    """Build the ONNX model in a form (features, wave or streaming), and return it with its difference and further facts."""
    # These need the extra onnx. predict and the report work without it.
    from raydfl.runs.inference import network, streaming, wave

    if form == "features":
        graph, more = _make_network(model, int8, None)
        return graph.content, graph.difference, more
    rate = {"sample_rate": wave.read_settings(model).sample_rate}
    if form == "streaming":
        content = streaming.build_stream_graph(model)
        stream = streaming.Stream(network.open_session(content), 2)
        return content, streaming.measure_difference(stream.process, model), rate
    wave.Answer(model, model.logits)  # rejects unsupported models before the slow export of the network
    graph, more = _make_network(model, int8, wave.takes_lengths(model))
    content = wave.build_answer_graph(model, graph)
    session = network.open_session(content)
    difference = wave.measure_difference(lambda waves: session.run(None, {"samples": waves})[0], model, tolerant=int8)
    return content, difference, {**rate, **more}


def _make_network(model: RunModel, int8: bool, with_lengths: bool | None) -> tuple[Any, dict[str, Any]]:
    """Export the network, and return it with the facts about its quantisation."""
    from raydfl.runs.inference import int8 as quantiser  # needs the extra onnx, as above
    from raydfl.runs.inference import network

    graph = network.to_onnx(model, with_lengths)
    if not int8:
        return graph, {}
    graph, quantised = quantiser.quantise(model, graph)
    return graph, {"quantised": quantised}


def _make_default_path(model: RunModel, form: str, quantize: str | None) -> Path:
    name = model.name if not model.client else f"{model.name}-{model.client}"
    endings = ("best" if model.chosen else "", "" if form == "features" else form, quantize or "")
    return model.run_dir / "export" / f"{'-'.join([file_name_of(name), *filter(None, endings)])}.onnx"


def _describe_values(model: RunModel, content: bytes, rate: int | None) -> dict[str, dict[str, Any]]:
    """Describe types, shapes and meanings of the graph's inputs and outputs.

    Args:
        model: Model of a run.
        content: ONNX model.
        rate: Sample rate in Hz. ``None``: the graph takes features.
    """
    import onnx

    graph = onnx.load_from_string(content).graph
    names = [value.name for value in graph.input]
    facts: dict[str, dict[str, Any]] = {
        "samples": {
            "sample_rate": rate,
            "what": "one channel, -1..1, at this sample rate; the graph includes the rest of the front end",
        },
        "x": {"what": "images" if isinstance(model.spec.inputs, tuple) else "features"},
        "lengths": {"what": "number of frames without padding, at least 1"},
    }
    if "lengths" in names:
        padded = "features, zero-padded to the longest example of the batch and to at least least_frames"
        facts["x"] = {"what": padded, "least_frames": LEAST_FRAMES}
    for name in names:
        if name not in facts:
            facts |= {name: {"begins": 0}, f"next_{name}": {"what": f"{name} for the next call"}}
    for name in model.output_names:
        facts[name] = dict(_MEANINGS[model.objective.answers, name])
    if isinstance(model.objective, TokenObjective):
        facts[model.output_names[0]]["seconds_per_token"] = find_token_seconds(model)
    facts["final"] = {
        "what": "number of the first tokens that later samples cannot change; the next call returns the tokens after them"
    }

    def describe(value: Any) -> dict[str, Any]:
        tensor = value.type.tensor_type
        sizes = [size.dim_param or size.dim_value for size in tensor.shape.dim]
        return {
            "dtype": "int64" if tensor.elem_type == onnx.TensorProto.INT64 else "float32",
            "shape": [size if size in (*names, "batch") or isinstance(size, int) else "any" for size in sizes],
            **facts[value.name],
        }

    values = {"inputs": graph.input, "outputs": graph.output}
    return {side: {value.name: describe(value) for value in infos} for side, infos in values.items()}


def _describe(model: RunModel, content: bytes, file: str, difference: float, more: Mapping[str, Any]) -> dict[str, Any]:
    set_threshold = (
        getattr(model.objective, "threshold", None) if model.objective.answers in ("set", "intervals") else None
    )
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
        **({"has_class_from": set_threshold} if set_threshold is not None else {}),
        **({"separator": find_separator(model)} if model.objective.answers == "text" else {}),
        **(
            {"median_filter_tokens": model.objective.count_filter_tokens(find_token_seconds(model))}
            if isinstance(model.objective, Events)
            else {}
        ),
        "front_end": describe_front_end(
            model.view,
            model.statistics,
            model.output_names[0 if model.objective.averages_logits() else -1],
        ),
    }


def _set_properties(content: bytes, properties: dict[str, str]) -> bytes:
    """Add properties to the metadata of an ONNX file. ``raydfl`` has the description, so the file is self-contained."""
    import onnx

    proto = onnx.load_from_string(content)
    onnx.helper.set_model_props(proto, properties)
    whole: bytes = proto.SerializeToString()
    return whole
