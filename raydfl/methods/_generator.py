"""FedGen's generator: from a label and noise to what a network's last layer could see of an example of that class.

    G(y, e) = W_2 relu(N(W_1 [e, onehot(y)] + b_1)) + b_2,     N batch normalisation

It is one vector of float32, so that it can be an entry of the server's state and, with several ``data.parts``, each part's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from raydfl.core.part_names import beside
from raydfl.core.types import State, Tensors

MODULE, MOMENTS = "generator", "generator/moments"
"""Keys of the server's state."""
VECTOR, FIRST, SECOND = "generator/vector", "moments/first", "moments/second"
"""Names of the vector and of Adam's moments under these keys: float32 [elements]. The vector's end is not trained."""
STEPS = "generator_steps"
"""Name of the number of steps in the state's extra facts."""

MOMENTUM, EPSILON = 0.1, 1e-5
"""Of batch normalisation, PyTorch's defaults."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generator:
    """The sizes of a generator, and what can be done with the vectors of such generators."""

    noise: int
    hidden: int
    width: int
    """Outputs: the features that a network's last layer sees."""
    classes: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by name, in the order in which they lie in the vector; the last two are statistics."""
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
        """Elements that are trained; behind them stand the running statistics of batch normalisation."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values()) - 2 * self.hidden

    def initial(self, rng: np.random.Generator) -> Tensor:
        """Draw a new one, as PyTorch draws its linear layers: float32 [elements]."""
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
        """Return the tensors of a vector by name, views of it."""
        parts = torch.split(vector, [int(np.prod(shape)) for shape in self.shapes().values()])
        return {name: part.view(shape) for part, (name, shape) in zip(parts, self.shapes().items(), strict=True)}

    def features(self, vector: Tensor, labels: Tensor, noise: Tensor, training: bool = False) -> tuple[Tensor, Tensor]:
        """Return generated features, float32 [batch, width], and the running statistics after them, float32 [2 * hidden].

        Args:
            vector: of a generator.
            labels: int64 [batch], in training of two examples or more.
            noise: float32 [batch, noise].
            training: normalise by the batch's statistics, and not by the running ones.
        """
        own = self.tensors(vector)
        hidden = noise @ own["of_noise"].T + own["of_label"][labels] + own["bias"]
        mean, variance = own["mean"], own["variance"]
        running = torch.cat([mean, variance]).detach()
        if training:
            variance, mean = torch.var_mean(hidden, dim=0, correction=0)
            seen = torch.cat([mean, variance * len(labels) / (len(labels) - 1)]).detach()
            running = running + MOMENTUM * (seen - running)
        normalised = (hidden - mean) * (variance + EPSILON).rsqrt() * own["scale"] + own["shift"]
        return normalised.relu() @ own["output"].T + own["output_bias"], running


def similarity(noise: Tensor, features: Tensor) -> Tensor:
    """Return how alike is what different noise gives: exp(-mean over pairs of ||e_i - e_j||^2 / n * ||z_i - z_j||_1 / d), a scalar.

    Args:
        noise: float32 [batch, n].
        features: float32 [batch, d].
    """
    of_noise = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    of_features = torch.cdist(features, features, p=1) / features.shape[1]
    return (-(of_noise * of_features).mean()).exp()


class ServerGenerator:
    """The generator of one part in the server's state, and its optimiser."""

    def __init__(self, state: State, name: str) -> None:
        self.vector = state.tensors[MODULE][name]
        first, second = (state.tensors[MOMENTS][beside(moment, name)] for moment in (FIRST, SECOND))
        self.moments = first, second
        self.steps = int(state.extra[beside(STEPS, name)])
        self._name = name

    def train(self, loss: Callable[[Tensor], tuple[Tensor, Tensor]], lr: float, weight_decay: float) -> None:
        """Take one step.

        Args:
            loss: returns the loss of a vector, and the new end of the vector.
            lr: learning rate.
            weight_decay: added to the gradient, times the vector.
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
        """Put the generator into the tensors and the extra facts of a new state."""
        tensors[MODULE][self._name] = self.vector
        for moment, value in zip((FIRST, SECOND), self.moments, strict=True):
            tensors[MOMENTS][beside(moment, self._name)] = value
        extra[beside(STEPS, self._name)] = self.steps
