"""A data set with several views: tones, and two images whose brightness is the label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image
from pydantic.dataclasses import dataclass

from raydfl.core.needs import Needs
from raydfl.core.types import Client, State, Task
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.methods._method import sample_clients

OF_KIND = f"{__file__}:OfKind"
RATE = 8000
CLIENTS, TESTS = 6, 6
FEATURES = "{sample_rate: 8000, bands: 8, seconds: 0.1}"
SMALL = "{name: crnn_tiny, hidden: 4, filters: [4]}"
SEEN = "{kind: image, size: [8, 8]}"
EYE = "eye.py:Eye"
NETWORK = '''
from torch import nn


class Eye(nn.Module):
    """A linear network on pictures."""

    images = True

    def __init__(self, inputs, classes):
        super().__init__()
        self.first = nn.Linear(inputs[1] * inputs[2], 4)
        self.output = nn.Linear(4, classes)

    def embed(self, x, lengths=None):
        return self.first(x.flatten(1)).relu()

    def forward(self, x, lengths=None):
        return self.output(self.embed(x))
'''


def write(folder: Path, takes: int = 4, bare: tuple[int, ...] = ()) -> Path:
    """Write recordings, images and their list.

    Args:
        takes: training clips of each client.
        bare: numbers of training clips without the first image.
    """
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    rows = ["path,label,group,split,video,depth"]
    for number in range(TESTS + CLIENTS * takes):
        label = number % 2
        time = np.arange(RATE // 10) / RATE
        tone = 0.3 * np.sin(2 * np.pi * 400 * (1 + label) * time) + 0.1 * rng.standard_normal(len(time))
        soundfile.write(folder / f"{number}.wav", tone.clip(-1, 1), RATE)
        for kind in ("video", "depth"):
            picture = (100 * label + rng.integers(0, 90, (8, 8))).astype(np.uint8)
            Image.fromarray(picture).save(folder / f"{kind}{number}.png")
        mine = number - TESTS
        group, split = ("g0", "test") if mine < 0 else (f"g{mine % CLIENTS}", "train")
        video = "" if mine in bare else f"video{number}.png"
        rows.append(f"{number}.wav,{'ab'[label]},{group},{split},{video},depth{number}.png")
    (folder / "list.csv").write_text("\n".join(rows))
    (folder / "eye.py").write_text(NETWORK)
    return folder


def federation(
    tiny: Callable[..., Config], folder: Path, method: str, *overrides: str, views: tuple[str, ...] = ("video",)
) -> Config:
    """Configure a federation of :data:`CLIENTS` clients on the files of :func:`write`, with networks for views and fusion."""
    of_views = ", ".join(f"{name}: {{column: {name}, features: {SEEN}}}" for name in views)
    listed = f"name: manifest, file: {folder / 'list.csv'}, features: {FEATURES}"
    data = f"data={{{listed}, views: {{{of_views}}}, partition: {{by: group}}}}"
    eyes = ", ".join(f"{name}: {{name: '{folder}/{EYE}', view: {name}}}" for name in views)
    models = f"models={{audio: {SMALL}, {eyes}, fusion: {{name: fusion, hidden: 4}}}}"
    return tiny(f"method.name={method}", data, models, "train.cohort=1.0", "train.batch_size=4", *overrides)


@dataclass(frozen=True, kw_only=True)
class OfKind(Method):
    """FedAvg over the clients with exactly these views of ``data.views``."""

    needs = Needs(views=("video",))  # by which clients are chosen

    views: tuple[str, ...] = ("video",)
    phase: str = "train"

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Sample from these clients."""
        chosen = [client for client in clients if client.profile["views"] == self.views]
        return [Task(client.id, phase=self.phase) for client in sample_clients(chosen, rng, min(cohort, len(chosen)))]
