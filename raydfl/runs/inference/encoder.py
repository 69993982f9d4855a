"""Export of a run's pretrained encoder as a folder for transformers, or of its adapters as a folder for peft.

The folders have no classification head. ``model.safetensors`` in the run's folder contains it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import safetensors.torch

from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.core.pretrained import EncoderFolder, read_encoder_folder, write_encoder
from raydfl.engine.storage import file_name_of
from raydfl.models import Pretrained, adapter_settings, adapter_tensors, merge_adapters
from raydfl.runs.inference.model import RunModel, load_model


def export_encoder(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    form: Literal["adapter", "merged"],
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
) -> Path:
    """Export the encoder of a run's model.

    Args:
        run_dir: Run folder.
        out: Folder to write. Default: ``export/MODEL-FORM`` in the run folder, or ``MODEL-CLIENT-FORM`` for a client's model.
            Existing files of the same names are replaced.
        form: ``adapter``: the adapters, for ``PeftModel.from_pretrained`` on the original encoder. ``merged``: the encoder with its
            adapters and trained layers merged, in the format of the original folder.
        model: Name of the model. Default: the shared model, or with ``client`` the client's private model.
        client: Id of the client whose model is exported. Default: the server's model.
        trust: Approve the code named by the run's configuration.
        best: Export the best round by ``run.best`` instead of the last round.

    Returns:
        The folder.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: Unknown model or client, a model without an encoder, or without adapters for ``adapter``.
        ConfigError: The original folder of the encoder cannot be read.
        ResourcesError: The disk is full, or the folder is not writable.
    """
    loaded = load_model(run_dir, model, client, trust, best)
    network = next((part for part in loaded.network.modules() if isinstance(part, Pretrained)), None)
    if network is None:
        raise InputError(
            f"--{form}: model {loaded.name!r} has the architecture {loaded.spec.architecture}, not pretrained. Omit --{form} "
            f"to export it as ONNX, or choose another model with --model."
        )
    folder = _default_folder(loaded, form) if out is None else Path(out)
    with tempfile.TemporaryDirectory(prefix="raydfl-export-") as temporary:
        options: dict[str, Any] = dict(loaded.spec.options)
        source = read_encoder_folder(Path(options["folder"]))
        if form == "merged":
            write_encoder(source, options.get("after"), merge_adapters(network.encoder), Path(temporary))
        else:
            _write_adapter(network, source, Path(temporary))
        for file in sorted(Path(temporary).iterdir()):
            write_durably(folder / file.name, file.read_bytes(), "make room or name another folder with --out")
    return folder


def _write_adapter(network: Pretrained, source: EncoderFolder, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    place = "" if source.kind == "audio-spectrogram-transformer" else "encoder."
    tensors = {f"{place}{name}": value for name, value in adapter_tensors(network.encoder).items()}
    if not tensors:
        raise InputError(
            "--adapter: the model has no adapters (models.model.lora). Use --merged to export its encoder."
        )
    import peft  # the import takes seconds, and ONNX files do not need it

    targets = sorted({name.rpartition(".lora_")[0] for name in tensors})
    peft.LoraConfig(
        **adapter_settings(network.encoder),
        target_modules=targets,
        base_model_name_or_path=str(source.path),
        inference_mode=True,
    ).save_pretrained(str(folder))
    content = {f"base_model.model.{name}": value for name, value in tensors.items()}
    safetensors.torch.save_file(content, folder / "adapter_model.safetensors", {"format": "pt"})


def _default_folder(model: RunModel, form: str) -> Path:
    parts = (model.name, model.client, "best" if model.chosen else "", form)
    return model.run_dir / "export" / "-".join(file_name_of(part) for part in parts if part)
