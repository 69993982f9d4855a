"""FedGen's generator: maps a label and noise to input features of a network's last layer.

    G(y, e) = W_2 relu(N(W_1 [e, onehot(y)] + b_1)) + b_2,     N batch normalisation

A generator is one float32 vector, so that it fits into an entry of the server's state. Each of several ``data.parts`` has its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from raydfl.core.part_names import mark_like
from raydfl.core.types import State, Tensors

MODULE, MOMENTS = "generator", "generator/moments"
"""Keys of the server's state."""
VECTOR, FIRST, SECOND = "generator/vector", "moments/first", "moments/second"
"""Names of the vector and of Adam's moments under these keys, float32 [elements]. The vector ends with running statistics."""
STEPS = "generator_steps"
"""Key of ``State.extra`` for the number of Adam steps."""

MOMENTUM, EPSILON = 0.1, 1e-5
"""PyTorch's defaults for batch normalisation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generator:
    """The sizes of a generator, and operations on its parameter vector."""

    noise: int
    hidden: int
    width: int
    """Number of outputs, equal to the inputs of the network's last layer."""
    classes: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the generator's tensors by name, in the vector's order. The last two are running statistics."""
        return {
            "of_noise": (self.hidden, self.noise),
            "of_label": (self.classes, self.hidden),
            "bias": (self.hidden,),
            "scale": (self.hidden,),
            "shift": (self.hidden,),
            "output": (self.width, self.hidden),
            "output_bias": (self.width,),
            "mean": (self.hidden,),
            "variance": (self.hidden,),
        }

    @property
    def trained(self) -> int:
        """Number of trained elements. The running statistics of batch normalisation follow them in the vector."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values()) - 2 * self.hidden

    def initial(self, rng: np.random.Generator) -> Tensor:
        """Draw the vector of a new generator with PyTorch's initialisation of linear layers: float32 [elements]."""
        first, second = 1 / np.sqrt(self.noise + self.classes), 1 / np.sqrt(self.hidden)
        ranges = {"of_noise": first, "of_label": first, "bias": first, "output": second, "output_bias": second}
        parts = []
        for name, shape in self.shapes().items():
            if name in ranges:
                parts.append(rng.uniform(-ranges[name], ranges[name], shape).ravel())
            else:
                parts.append(np.full(shape, float(name in ("scale", "variance"))))
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    def entries(self, rng: np.random.Generator) -> dict[str, Tensors]:
        """Return the entries of the server's state with a new generator and its moments."""
        first, second = torch.zeros(self.trained), torch.zeros(self.trained)
        return {MODULE: {VECTOR: self.initial(rng)}, MOMENTS: {FIRST: first, SECOND: second}}

    def tensors(self, vector: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a vector by name, as views of the vector."""
        parts = torch.split(vector, [int(np.prod(shape)) for shape in self.shapes().values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes().items(), strict=True)}

    def features(self, vector: Tensor, labels: Tensor, noise: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Generate features of some classes.

        Args:
            vector: The generator's vector, float32 [elements].
            labels: int64 [batch]. Training needs at least two.
            noise: float32 [batch, noise].
            training: Normalise by the batch's statistics instead of the running ones.

        Returns:
            Features, float32 [batch, width], and the new running statistics, float32 [2 * hidden].
        """
        tensors = self.tensors(vector)
        hidden = noise @ tensors["of_noise"].T + tensors["of_label"][labels] + tensors["bias"]
        mean, variance = tensors["mean"], tensors["variance"]
        running = torch.cat([mean, variance]).detach()
        if training:
            variance, mean = torch.var_mean(hidden, dim=0, correction=0)
            # Like PyTorch, normalise by the biased variance but track the unbiased one.
            batch = torch.cat([mean, variance * len(labels) / (len(labels) - 1)]).detach()
            running = running + MOMENTUM * (batch - running)
        normalised = (hidden - mean) * (variance + EPSILON).rsqrt() * tensors["scale"] + tensors["shift"]
        return normalised.relu() @ tensors["output"].T + tensors["output_bias"], running


def similarity(noise: Tensor, features: Tensor) -> Tensor:
    """Return the similarity of features from different noise (the term D of FedGen), a scalar in [0, 1].

    D = exp(-mean over pairs of ||e_i - e_j||^2 / n * ||z_i - z_j||_1 / d)

    Args:
        noise: float32 [batch, n].
        features: float32 [batch, d].
    """
    noise_distances = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    feature_distances = torch.cdist(features, features, p=1) / features.shape[1]
    return (-(noise_distances * feature_distances).mean()).exp()


class ServerGenerator:
    """A generator in the server's state, with its Adam optimiser."""

    def __init__(self, state: State, name: str) -> None:
        self.vector = state.tensors[MODULE][name]
        first, second = (state.tensors[MOMENTS][mark_like(moment, name)] for moment in (FIRST, SECOND))
        self.moments = first, second
        self.steps = int(state.extra[mark_like(STEPS, name)])
        self._name = name

    def train(self, loss: Callable[[Tensor], tuple[Tensor, Tensor]], lr: float, weight_decay: float) -> None:
        """Take one step of Adam.

        Args:
            loss: Maps a vector to its loss and the new running statistics.
            lr: Learning rate.
            weight_decay: Factor of the vector in the gradient.
        """
        first, second = self.moments
        trained = self.vector[: len(first)]
        leaf = trained.clone().requires_grad_()
        value, end = loss(torch.cat([leaf, self.vector[len(first) :]]))
        (gradient,) = torch.autograd.grad(value, leaf)
        gradient = gradient + weight_decay * trained
        self.steps += 1
        # PyTorch's Adam with its default betas and eps.
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient.square()
        deviation = (second / (1 - 0.999**self.steps)).sqrt() + 1e-8
        self.moments = first, second
        self.vector = torch.cat([trained - lr / (1 - 0.9**self.steps) * first / deviation, end])

    def store(self, tensors: dict[str, dict[str, Tensor]], extra: dict[str, object]) -> None:
        """Put the generator into the tensors and the ``extra`` of a new state."""
        tensors[MODULE][self._name] = self.vector
        for moment, value in zip((FIRST, SECOND), self.moments, strict=True):
            tensors[MOMENTS][mark_like(moment, self._name)] = value
        extra[mark_like(STEPS, self._name)] = self.steps
