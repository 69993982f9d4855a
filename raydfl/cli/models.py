"""The commands that use a trained model: ``predict``, ``listen`` and ``export``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from raydfl.cli._arguments import Json, RunDir, Trust
from raydfl.core.errors import InputError

ModelName = Annotated[
    str | None,
    typer.Option("--model", help="name of the model; default: the shared model, or the private model of --client"),
]
ClientId = Annotated[
    str | None, typer.Option("--client", help="use the model of this client, including its private layers")
]
BestRound = Annotated[
    bool, typer.Option("--best", help="use the models of the best round (see run.best) instead of the last")
]


def predict_command(
    directory: RunDir,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="recordings or images, their folders, or archives (*.tar, *.parquet, *.arrow)",
            show_default=False,
        ),
    ] = None,
    model: ModelName = None,
    client: ClientId = None,
    top: Annotated[int, typer.Option("--top", min=1, help="number of classes to show per recording")] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    as_json: Json = False,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", help="smallest anomalous score; default: the threshold of the run"),
    ] = None,
    dcase: Annotated[
        Path | None,
        typer.Option(
            "--dcase",
            help="write a DCASE task 2 submission into this folder instead of printing",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="the run's test clips instead of FILEs; write DIR/scores.csv or predictions.csv, and the report",
        ),
    ] = False,
    best: BestRound = False,
    view: Annotated[
        list[str] | None,
        typer.Option(
            "--view",
            metavar="NAME=PATH",
            help="folder with the files of another view, for models of several views (--model fusion). File names must "
            "match those of the recordings.",
            show_default=False,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Predict classes, sets, transcripts, anomaly scores or embeddings with a model of the run in DIR.

    Recordings are wav, flac, ogg, opus, mp3, aiff and more, at any sample rate and number of channels. Models of images read
    images. Videos need the extra "video". Unreadable files are listed at the end, with exit code 2.
    """
    from raydfl.data import start_reader

    start_reader()
    from raydfl.cli.predictions import Form, show
    from raydfl.runs.inference import (
        RunFusion,
        Threshold,
        open_model,
        predict_fused,
        predictions,
        score_tests,
        write_submission,
    )
    from raydfl.runs.report import write_report

    if test != (not files):
        raise InputError("Name recordings (FILE...), or use --test for the test clips of the run, but not both.")
    files = files or []
    if as_csv and as_json:
        raise InputError("--csv and --json exclude each other. Remove one of them.")
    user_threshold = None if threshold is None else Threshold(threshold, "given")
    if test:
        if client is not None or dcase is not None:
            raise InputError("--test scores the clips of each client with its own model. Remove --client and --dcase.")
        scored = score_tests(directory, model, user_threshold, trust, best)
        print(scored)  # noqa: T201
        print(write_report([scored.parent], scored.parent))  # noqa: T201
        return
    if dcase is not None:
        written = write_submission(
            directory, files, dcase, model=model, client=client, threshold=user_threshold, trust=trust, best=best
        )
        for path in written:
            print(path)  # noqa: T201
        return
    form: Form = "csv" if as_csv else "json" if as_json else "table"
    loaded = open_model(directory, model, client, trust, best, bool(view))
    if isinstance(loaded, RunFusion):
        if user_threshold is not None:
            raise InputError(f"--model {model}: this model computes no anomaly scores. Remove --threshold.")
        fused = predict_fused(loaded, files, _parse_views(view or []))
        show(fused, min(top, len(loaded.student.classes)), form, loaded.description, several=True)
        return
    if user_threshold is not None:
        if loaded.objective.answers != "score":
            raise InputError(f"--threshold: model {loaded.name!r} computes no anomaly scores. Remove this option.")
        loaded = dataclasses.replace(loaded, threshold=user_threshold)
    heading = loaded.description
    if loaded.threshold is not None:
        heading += f"\nanomalous at {loaded.threshold.value:.4g} or above ({loaded.threshold.origin})"
    show(
        predictions(loaded, files),
        min(top, len(loaded.classes)),
        form,
        heading,
        None,
        loaded.objective.answers,
    )


def listen_command(
    directory: RunDir,
    source: Annotated[
        Path | None,
        typer.Option("--source", help="recording to read instead of the microphone", show_default=False),
    ] = None,
    step: Annotated[float, typer.Option("--step", min=0.05, help="seconds between predictions")] = 0.5,
    window: Annotated[
        float | None,
        typer.Option("--window", min=0.05, help="seconds per prediction; default: length of the run's clips, or 1"),
    ] = None,
    model: ModelName = None,
    client: ClientId = None,
    as_json: Json = False,
    best: BestRound = False,
    trust: Trust = False,
) -> None:
    """Predict the sound of the microphone, with a model of the run in DIR. Ctrl-C ends it.

    Every line has the seconds since the start and the prediction for the last window, as from raydfl predict. The microphone
    needs the extra "microphone". A quiet room gets a class too, unless the run has a class for it.
    """
    from raydfl.cli.predictions import as_data, format_answer
    from raydfl.runs.inference import RunFusion, listen, open_model

    loaded = open_model(directory, model, client, trust, best, False)
    if isinstance(loaded, RunFusion):
        raise InputError(f"--model {model}: this model needs several views. Choose a model of recordings.")
    try:
        for seconds, prediction in listen(loaded, source, step, window):
            if prediction.error:
                raise InputError(f"{seconds:.2f} s: {prediction.error}")
            if as_json:
                values = {"seconds": round(seconds, 3), **as_data(prediction, 1)}
                line = json.dumps({key: value for key, value in values.items() if key != "file"})
            else:
                line = f"{seconds:8.2f} s  {format_answer(prediction)}"
            print(line, flush=True)  # noqa: T201
    except KeyboardInterrupt:
        return


def _parse_views(arguments: list[str]) -> dict[str, Path]:
    """Convert ``NAME=PATH`` arguments to the folder of each view."""
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not (name and equals and path):
            raise InputError(f"--view {argument}: expected NAME=PATH, such as --view image=pictures.")
        folders[name] = Path(path)
    return folders


def export_command(
    directory: RunDir,
    model: ModelName = None,
    client: ClientId = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="file or folder to write; default: DIR/export/MODEL.onnx", show_default=False),
    ] = None,
    best: BestRound = False,
    trust: Trust = False,
    graph_input: Annotated[
        Literal["features", "wave"],
        typer.Option("--input", help="input of the graph: features, or samples (includes the front end)"),
    ] = "features",
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(
            "--quantize",
            help="int8: 8-bit weights and activations, with the change of the test metric",
            show_default=False,
        ),
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="export a CRNN that reads samples in chunks and carries its state")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="export the adapters of a pretrained encoder as a folder for peft")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="export a pretrained encoder, with its adapters merged, as a folder")
    ] = False,
) -> None:
    """Export a model of the run in DIR as ONNX, with a JSON description of its inputs and outputs.

    The export is first compared with PyTorch, or with raydfl predict if its input is samples.
    """
    from raydfl.runs.inference import export_encoder, export_model

    if adapter or merged:
        if (adapter and merged) or graph_input != "features" or quantize or streaming:
            raise InputError(
                "--adapter, --merged, --input wave, --quantize and --streaming cannot be combined. Set a single option."
            )
        form: Literal["adapter", "merged"] = "adapter" if adapter else "merged"
        print(export_encoder(directory, out, form=form, model=model, client=client, trust=trust, best=best))  # noqa: T201
        return
    exported = export_model(
        directory,
        out,
        model=model,
        client=client,
        trust=trust,
        best=best,
        input=graph_input,
        quantize=quantize,
        streaming=streaming,
    )
    print(exported.path)  # noqa: T201
    print(exported.description_path)  # noqa: T201
    print(f"round {exported.description['round']}{', ' * bool(exported.chosen)}{exported.chosen}")  # noqa: T201
    against = "PyTorch" if graph_input == "features" and not streaming else "raydfl predict"
    print(f"largest difference to {against}: {exported.difference:.1e} ({exported.output})")  # noqa: T201
    if exported.quantised:
        print(exported.quantised)  # noqa: T201
