"""COLA: contrastive pretraining with shards of a folder as clients. A single shard is centralised training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from helpers import final_state, stop_after

from raydfl.core.ops import random_state, uniform
from raydfl.core.seeds import generator
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.networks import build_models
from raydfl.runs.folder import export
from raydfl.training.randomness import derive_step_seed, fit_seed

Tiny = Callable[..., Config]
FRAMES, SIZE, ROUNDS, BATCH = 12, 8, 2, 8
SETTINGS = (
    "data.takes=6",
    f"objective={{name: contrast, frames: {FRAMES}, size: {SIZE}}}",
    "models.model=mlp",
    f"train.rounds={ROUNDS}",
    "train.cohort=1.0",
    "data.split.validation=0.0",
    "evaluate.server=false",
    "evaluate.clients=none",
)


def test_one_shard_equals_a_plain_training_loop(tiny: Tiny) -> None:
    """The weights equal a loop over all clips with PyTorch's Adam, layer norm and cross-entropy."""
    config = tiny(
        *SETTINGS, "data.partition={by: iid, clients: 1}", "train.optimiser={name: adam, lr: 0.01, eps: 0.001}"
    )
    stop_after(config, ROUNDS)
    folder = Path(config.run.dir) / str(config.run.name)
    population = Population.load(folder / "population")
    clips = population.data(0).train
    x = clips.batch(np.arange(len(clips))).x
    network: Any = build_models(config.components.method, Clients(population, config)[0].models, config.run.seed)[
        "model"
    ]

    def project(rows: np.ndarray) -> torch.Tensor:
        starts = (uniform(len(rows), x.device) * (x.shape[1] - FRAMES + 1)).floor().long().tolist()
        crops = torch.stack([x[row, first : first + FRAMES] for row, first in zip(rows, starts, strict=True)])
        norm = network.objective.norm
        return F.layer_norm(network(crops), (SIZE,), norm.weight, norm.bias).tanh()

    for round_index in range(ROUNDS):
        optimiser = torch.optim.Adam(network.parameters(), lr=0.01, eps=0.001)
        rng = generator(config.run.seed, round_index, population.ids[0], "train")
        seed = torch.tensor(fit_seed(SimpleNamespace(rng=rng)))  # type: ignore[arg-type]
        order = rng.permutation(len(clips))
        for number, start in enumerate(range(0, len(clips), BATCH)):
            rows = order[start : start + BATCH]
            with random_state(derive_step_seed(seed, number)):
                first, second = project(rows), project(rows)
            optimiser.zero_grad()
            F.cross_entropy(first @ network.objective.weight @ second.T, torch.arange(len(rows))).backward()
            optimiser.step()
    tensors = final_state(folder).tensors["global"]
    assert len(clips) > 2 * BATCH
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(tensors[f"model/{name}"], tensor, rtol=0, atol=5e-6)


def test_a_federation_starts_from_the_pretrained_encoder(tiny: Tiny) -> None:
    """The new federation loads all tensors except the last layer (of a different width) and the similarity."""
    cola = tiny(*SETTINGS, "run.name=cola")
    stop_after(cola, ROUNDS)
    (file,) = export(Path(cola.run.dir) / "cola", cola)
    start = f"{{file: {file}, keep: ['output.*'], ignore: ['output.*', 'objective.*']}}"
    config = tiny(f"models.model={{name: mlp, init_from: {start}}}", "run.name=begun")
    encoder = final_state(Path(cola.run.dir) / "cola").tensors["global"]["model/hidden.weight"]
    population = Population.load(Path(cola.run.dir) / "cola" / "population")
    network = build_models(config.components.method, Clients(population, config)[0].models, config.run.seed)["model"]
    assert torch.equal(network.state_dict()["hidden.weight"], encoder)
    assert network.state_dict()["output.weight"].shape == (3, 32)
