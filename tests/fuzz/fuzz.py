"""Damage small files by seed, and run commands on them. Each command must end with exit code 0 or 2, in limited time and memory.

``python tests/fuzz/fuzz.py --cases 250`` prints a table of formats; ``--seconds 3600`` repeats it with new seeds. The exit code is
1 if a case fails. Each failure has a line with its format and seed; ``--only FORMAT --seed SEED --cases 1`` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import importlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import safetensors.numpy
import scipy.io
import soundfile
import typer.main
from PIL import Image

from raydfl.core import isolation

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "data" / "packed")]
PACKED = TESTS / "data" / "packed"
RATE = 8000
SECONDS, MEGABYTES = 30, 1500
"""Limits of a case: time, and memory in addition to the loaded program."""
DATA = {"features": {"sample_rate": RATE, "bands": 8, "seconds": 0.1}}
PARTITION = {"by": "dirichlet", "clients": 2, "alpha": 100.0, "minimum": 1}
LOADED = {"PIL", "pandas", "raydfl", "safetensors", "scipy", "torch", "torchaudio", "transformers", "typer"}
"""Packages that commands import late."""
NUMBERS = (b"\xff" * 4, b"\x00" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\x00\x00\x00")
"""Replacements for lengths."""

typer.main.get_command = functools.cache(typer.main.get_command)  # Typer builds all commands for each call.


@dataclass(frozen=True)
class Format:
    """A format of files, and a command to read it."""

    write: Callable[[Path], list[str]]
    """Writes valid files into a folder, and returns the arguments of the command."""
    files: str
    """Pattern of the files to damage."""
    compressed: bool = False
    """Damages the content of gzip files in half of the cases."""


@dataclass
class Outcome:
    """Results of a format."""

    ends: Counter[str] = field(default_factory=Counter)
    """Number of cases by their end: ``0``, ``2``, or the description of a failure."""
    failures: list[int] = field(default_factory=list)
    """Seeds of failures."""


def write_wave(path: Path, number: int = 0) -> Path:
    """Write 0.1 s of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = 0.1 * np.random.default_rng(number).standard_normal(RATE // 10)
    soundfile.write(path, wave, RATE)
    return path


def write_job(folder: Path, **data: Any) -> list[str]:
    """Write a configuration of data, and return the command for its features."""
    job = {
        "method": "fedavg",
        "models": {"model": "cnn_small" if data.get("features", {}).get("kind") == "image" else "linear"},
        "data": {**DATA, "cache": str(folder / "cache"), **data},
        "train": {"rounds": 1, "cohort": 1.0},
        "ray": {"actors": 0},
        "track": {"mlflow": False},
    }
    (folder / "job.yaml").write_text(json.dumps(job, indent=1))
    return ["data", "prepare", str(folder / "job.yaml")]


def use_recordings(folder: Path, suffix: str = "wav") -> dict[str, Any]:
    """Write two speakers with two takes of two words in a manifest."""
    lines = ["path,label,group"]
    for speaker in ("anna", "bert"):
        for take in range(4):
            name = f"wav/{speaker}-{take}.{suffix}"
            write_wave(folder / name, take)
            lines.append(f"{name},{'ab'[take % 2]},{speaker}")
    (folder / "clips.csv").write_text("\n".join(lines) + "\n")
    return {"name": "manifest", "file": str(folder / "clips.csv"), "split": {"test": {"by": "clip", "fraction": 0.25}}}


def use_features(write: Callable[[Path, Mapping[str, np.ndarray]], Path]) -> Callable[[Path], list[str]]:
    """Read features from a file."""

    def write_all(folder: Path) -> list[str]:
        data = use_recordings(folder)
        clips = [line.split(",")[0] for line in (folder / "clips.csv").read_text().splitlines()[1:]]
        rng = np.random.default_rng(0)
        path = write(folder, {clip: rng.normal(size=(3, 4)).astype(np.float32) for clip in clips})
        return write_job(folder, **data | {"features": {"kind": "file", "path": str(path)}})

    return write_all


def write_npz(folder: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    np.savez(folder / "features.npz", **matrices)  # type: ignore[arg-type]
    return folder / "features.npz"


def write_npy(folder: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    for clip, matrix in matrices.items():
        path = folder / "features" / f"{clip}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, matrix)
    return folder / "features"


def write_safetensors(folder: Path, matrices: Mapping[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(dict(matrices), folder / "features.safetensors")
    return folder / "features.safetensors"


def use_packed(name: str, source: str, **options: Any) -> Callable[[Path], list[str]]:
    """Copy the small files of a library."""

    def write(folder: Path) -> list[str]:
        root = Path(shutil.copytree(PACKED / source, folder / "root"))
        split = {"test": {"by": "clip", "fraction": 0.3}}
        return write_job(folder, name=name, root=str(root), split=split, partition=PARTITION, **options)

    return write


def use_clips(suffix: str) -> Callable[[Path], list[str]]:
    """Read a list of clips in another format than CSV."""

    def write(folder: Path) -> list[str]:
        data = use_recordings(folder)
        table = pa.table({name: list(values) for name, values in _read_columns(folder / "clips.csv").items()})
        path = folder / f"clips.{suffix}"
        write_table(table, path)
        return write_job(folder, **data | {"file": str(path)})

    return write


def use_clients(suffix: str) -> Callable[[Path], list[str]]:
    """Read a table of clients."""

    def write(folder: Path) -> list[str]:
        data = use_recordings(folder)
        path = folder / f"clients.{suffix}"
        write_table(pa.table({"client": ["a", "b"], "first": [0, 3], "clips": [3, 3], "pace": [1.0, 2.5]}), path)
        partition = {"by": "table", "file": str(path)}
        return write_job(folder, **data, partition=partition, profile={"pace": {"column": "pace"}})

    return write


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table in the format of the suffix."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


def _read_columns(path: Path) -> dict[str, Sequence[str]]:
    header, *rows = (line.split(",") for line in path.read_text().splitlines())
    return dict(zip(header, zip(*rows, strict=True), strict=True))


def write_mnist(folder: Path) -> list[str]:
    """Write images and labels in MNIST's format, compressed."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("t10k", 4)):
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", rng.integers(0, 256, (count, 28, 28))), ("labels-idx1", labels)):
            shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()
            (folder / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return write_images(folder, name="mnist", root=str(folder))


def write_images(folder: Path, **data: Any) -> list[str]:
    """Write a configuration of images."""
    features = {"kind": "image", "size": 8, "resize": True}
    return write_job(folder, **{"features": features, "partition": PARTITION, **data})


def write_cifar(folder: Path) -> list[str]:
    """Write the batches of CIFAR-10."""
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = {
            b"batch_label": b"a batch",
            b"labels": [0, 1, 2, 3],
            b"data": rng.integers(0, 256, (4, 3072)).astype(np.uint8),
            b"filenames": [b"image.png"] * 4,
        }
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return write_images(folder, name="cifar10", root=str(folder))


def write_svhn(folder: Path) -> list[str]:
    """Write the files of SVHN."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        images = rng.integers(0, 256, (32, 32, 3, 10)).astype(np.uint8)
        scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": images, "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
    return write_images(folder, name="svhn", root=str(folder))


def use_pictures(suffix: str) -> Callable[[Path], list[str]]:
    """Read a list of images."""

    def write(folder: Path) -> list[str]:
        lines, rng = ["path,label,group"], np.random.default_rng(0)
        for number in range(8):
            name = f"{number}.{suffix}"
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name)
            lines.append(f"{name},{'ab'[number % 2]},{'xyz'[number % 3]}")
        (folder / "clips.csv").write_text("\n".join(lines) + "\n")
        split = {"test": {"by": "clip", "fraction": 0.25}}
        return write_images(folder, name="manifest", file=str(folder / "clips.csv"), split=split)

    return write


def train_small(folder: Path, *command: str, arguments: Sequence[str] = ()) -> list[str]:
    """Train a round, and return a command for its run."""
    job = write_job(folder, **use_recordings(folder))[-1]
    check_and_load(["run", job, f"run.dir={folder}", "run.name=run", "--quiet"], folder)
    return [*command, str(folder / "run"), *arguments]


def use_run(*command: str, recording: bool = False) -> Callable[[Path], list[str]]:
    """Read the folder of a run."""

    def write(folder: Path) -> list[str]:
        return train_small(folder, *command, arguments=[str(folder / "wav" / "anna-0.wav")] * recording)

    return write


def use_encoder(folder: Path) -> list[str]:
    """Compute features with a pretrained encoder."""
    from encoders import write_encoder

    data = use_recordings(folder)
    encoder = write_encoder(folder / "encoder", "wav2vec2")
    return write_job(folder, **data | {"features": {"kind": "pretrained", "folder": str(encoder), "seconds": 0.1}})


FORMATS: dict[str, Format] = {
    **{
        f"recordings, {kind}": Format(
            lambda folder, kind=kind: write_job(folder, **use_recordings(folder, kind)), "wav/*"
        )  # type: ignore[misc]
        for kind in ("wav", "flac", "ogg", "mp3", "aiff")
    },
    **{f"images, {kind}": Format(use_pictures(kind), f"*.{kind}") for kind in ("png", "jpg", "gif", "tif", "webp")},
    "list of clips, CSV": Format(lambda folder: write_job(folder, **use_recordings(folder)), "clips.csv"),
    "list of clips, Parquet": Format(use_clips("parquet"), "clips.parquet"),
    **{
        f"table of clients, {kind}": Format(use_clients(kind), f"clients.{kind}")
        for kind in ("csv", "parquet", "arrow", "feather")
    },
    "WebDataset": Format(use_packed("webdataset", "webdataset"), "root/*.tar"),
    "Hugging Face, Parquet": Format(use_packed("huggingface", "hub"), "root/data/*"),
    "Hugging Face, Arrow": Format(use_packed("huggingface", "disk"), "root/*/*"),
    "Lhotse": Format(use_packed("lhotse", "lhotse"), "root/*.gz", compressed=True),
    "MNIST": Format(write_mnist, "*.gz", compressed=True),
    "CIFAR-10": Format(write_cifar, "*_batch*"),
    "SVHN": Format(write_svhn, "*.mat"),
    "features, npz": Format(use_features(write_npz), "features.npz"),
    "features, npy": Format(use_features(write_npy), "features/**/*.npy"),
    "features, safetensors": Format(use_features(write_safetensors), "features.safetensors"),
    "configuration": Format(lambda folder: write_job(folder, **use_recordings(folder)), "job.yaml"),
    "encoder": Format(use_encoder, "encoder/*"),
    "run, explain": Format(use_run("explain"), "run/*.json"),
    "run, predict": Format(use_run("predict", recording=True), "run/**/*.*"),
    "run, resume": Format(use_run("resume"), "run/**/*.*"),
}


def damage(content: bytes, rng: random.Random) -> bytes:
    """Cut a file, flip some bits, overwrite a length, repeat or delete a part."""
    data, kind = bytearray(content), rng.random()
    at = rng.randrange(max(1, len(data)))
    if kind < 0.2:
        return bytes(data[:at])
    if kind < 0.7:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(max(1, len(data)))] ^= 1 << rng.randrange(8)
    elif kind < 0.85:
        data[at : at + 4] = rng.choice(NUMBERS)
    else:
        part = data[at : at + rng.randrange(1, 64)]
        data[at : at + len(part)] = rng.choice((part * 2, b""))
    return bytes(data)


class ForkedHelper:
    """A process with the interface of ``Popen`` that forks instead of a new interpreter, whose imports take most of a case."""

    def __init__(self, *_: Any, env: Mapping[str, str], **__: Any) -> None:
        requests, answers = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(requests[0], 0)
            os.dup2(answers[1], 1)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(env)
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                isolation.serve()
            finally:
                os._exit(1)
        os.close(requests[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(answers[0], "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None before the end."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the exit code."""
        return cast(int, self._wait(0))

    def kill(self) -> None:
        """End the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def run_command(arguments: Sequence[str]) -> str:
    """Run a command in a child of this process, and return its exit code, or how it failed."""
    return run_child(lambda: _call_main(arguments))


def _call_main(arguments: Sequence[str]) -> None:
    from raydfl.cli.main import main

    cast(Any, isolation).subprocess = SimpleNamespace(Popen=ForkedHelper, PIPE=subprocess.PIPE)
    main(list(arguments))


def check_and_load(arguments: Sequence[str], folder: Path) -> None:
    """Run a command on valid files, and load its modules into this process, to save its children the time."""
    modules = folder / "modules.json"

    def call() -> None:
        try:
            _call_main(arguments)
        finally:
            modules.write_text(json.dumps([*sys.modules]))

    end = run_child(call, 10)  # The first call imports PyTorch.
    if end != "0":
        raise AssertionError(f"raydfl {' '.join(arguments)} must work before files are damaged: {end}")
    names = json.loads(modules.read_text())
    modules.unlink()
    for name in names:
        if name.partition(".")[0] in LOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    typer.main.get_command(sys.modules["raydfl.cli.main"].app)
    gc.freeze()  # A collection in a child would copy the memory.


def run_child(call: Callable[[], None], limits: int = 1) -> str:
    """Call a function in a child of this process, in ``limits`` times the time limit.

    Returns:
        ``0`` or ``2``, or a description of the failure: ``exit code 1``, an exception, a signal, ``time``, or ``memory``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limits * SECONDS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sink = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(sink, stream)
        end = "no exit"
        try:
            call()
        except SystemExit as code:
            end = str(code.code or 0)
            end = end if end in {"0", "2"} else f"exit code {end}"
        except BaseException as error:
            end = type(error).__name__
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 1024 * MEGABYTES:
            end = "memory"
        os.write(writer, end.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        end = answer.read()
    status = os.waitpid(child, 0)[1]
    if not status:
        return end
    return "time" if os.WTERMSIG(status) == signal.SIGALRM else f"signal {os.WTERMSIG(status)}"


def fuzz(name: str, template: Path, arguments: Sequence[str], seeds: Sequence[int], outcome: Outcome) -> None:
    """Damage a file of a format once for each seed, and count the ends."""
    form = FORMATS[name]
    files = sorted(path for path in template.glob(form.files) if path.is_file() and path.stat().st_size)
    before = {path: path.read_bytes() for path in sorted(template.rglob("*")) if path.is_file()}
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        path = rng.choice(files)
        content = before[path]
        inside = form.compressed and rng.random() < 0.5
        changed = damage(gzip.decompress(content) if inside else content, rng)
        path.write_bytes(gzip.compress(changed) if inside else changed)
        end = run_command(arguments)
        outcome.ends[end] += 1
        if end not in {"0", "2"}:
            outcome.failures.append(seed)
        for extra in template.rglob("*"):
            if extra.is_file() and extra not in before:
                extra.unlink()
        for restored, original in before.items():
            if not restored.exists() or restored.read_bytes() != original:
                restored.parent.mkdir(parents=True, exist_ok=True)
                restored.write_bytes(original)


def fuzz_all(names: Sequence[str], seed: int, cases: int, seconds: float) -> dict[str, Outcome]:
    """Fuzz each format with ``cases`` seeds, and again with new seeds until the time is over."""
    outcomes = {name: Outcome() for name in names}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        prepared: dict[str, list[str]] = {}
        while True:
            for number, name in enumerate(names):
                template = Path(temporary).resolve() / str(number)
                if name not in prepared:
                    template.mkdir()
                    prepared[name] = FORMATS[name].write(template)
                    check_and_load(prepared[name], Path(temporary))
                fuzz(name, template, prepared[name], range(seed, seed + cases), outcomes[name])
            seed += cases
            if time.monotonic() >= end:
                return outcomes


def main() -> None:
    """Fuzz, and print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="cases of each format")
    parser.add_argument("--seconds", type=float, default=0.0, help="repeat with new seeds for this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[*FORMATS], help="only this format; may be repeated")
    options = parser.parse_args()
    names = options.only or [*FORMATS]
    print(f"{'format':24} tried  held  not held", flush=True)
    failed = 0
    for name in names if not options.seconds else [None]:
        for key, outcome in fuzz_all([name] if name else names, options.seed, options.cases, options.seconds).items():
            tried, wrong = outcome.ends.total(), len(outcome.failures)
            failed += wrong
            ends = {end: count for end, count in outcome.ends.items() if end not in {"0", "2"}}
            detail = f"{ends} seeds {outcome.failures[:5]}" if wrong else ""
            print(f"{key:24} {tried:5} {tried - wrong:5} {wrong:5}  {detail}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
