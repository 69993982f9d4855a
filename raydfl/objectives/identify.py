"""Identify: classification of the machine, scored by the nearest training clip of the same machine.

    z_i    output of the network for clip i, scaled to length 1
    c(i)   the machine of clip i, its value in ``column``
    w_c    row c of a matrix with a row for each machine, scaled to length 1
    loss   mean over the batch of -log p_i, with p_i = softmax over c of (scale w_c . z_i), at c = c(i)
    score  of clip i at a client: min over j of ||z_i - z_j||^2 = 2 - 2 max z_i . z_j

j are the client's normal training clips of the machine c(i), without clip i itself. Normal clips of other machines stand in for
anomalous clips: R. Giri et al., Self-supervised classification for detecting anomalous sounds, DCASE workshop 2020.

Deviations: Giri et al. score a clip by -log p_i. The distance to the nearest training clip is the score of later work (K.
Wilkinghoff, Design choices for learning embeddings from auxiliary tasks for domain generalization in anomalous sound detection,
ICASSP 2023, whose neighbours include means of clips). Unit vectors and a fixed ``scale`` replace a linear layer, because the score
compares angles. Both papers train a network of their own on all machines in one place. Here the network is a setting, and clients
train it.

Privacy: outputs of training clips never leave a client. Each client scores clips of its own machines at each evaluation, with the
current network. Rows w_c are sent and averaged like the network (``model/objective.weight``), so a client's update names its
machines. The server has no training clips and measures no scores.

A client with a single machine sees a single label. Its loss falls if all its clips move to w_c(i), and nothing in its data keeps
clips of other machines away: the hard case of FedAvg (F. X. Yu et al., Federated learning with only positive labels, ICML 2020).
Give clients several machines with ``data.partition``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Metrics, ModelSpec
from raydfl.data import Examples, Population
from raydfl.objectives._anomaly import AnomalyObjective
from raydfl.objectives._reference import compare_with_training
from raydfl.training import Step

_Codes = TypeVar("_Codes")


@dataclass(frozen=True, kw_only=True)
class Identify(AnomalyObjective):
    """Classification of the machine: a recording's score is its distance to the nearest training clip of its machine."""

    answers: ClassVar[Literal["class", "set", "score", "none"]] = "none"

    size: Annotated[int, Field(ge=2, description="Outputs of the network for a clip.")] = 32
    column: Annotated[
        str, Field(min_length=1, description="Column with the machine of each clip. It must be listed in data.columns.")
    ] = "group"
    machines: Annotated[
        int, Field(ge=2, description="Rows of the classifier: at least the number of machines of all clients.")
    ] = 32
    scale: Annotated[
        float, Field(gt=0, description="Factor of the cosines in the softmax. Large values separate machines less.")
    ] = 16.0

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Build the classifier."""
        return nn.Linear(self.size, self.machines, bias=False)

    def remarks(self, population: Population) -> Sequence[str]:
        """Return the warnings about anomalous clips and tests.

        Raises:
            ConfigError: The column is not in the batches, or has more values than ``machines``.
        """
        present = len(self._find_codes(population.columns))
        if present > self.machines:
            raise ConfigError(
                f"objective.machines is {self.machines}, but column {self.column!r} has {present} values. Set objective.machines "
                f"to at least {present}."
            )
        return super().remarks(population)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy of the machines."""
        z = F.normalize(step.forward(name, batch), dim=1)
        rows = F.normalize(cast(Any, step.models[name]).objective.weight, dim=1)
        machines = replace(batch, y=self._find_codes(batch.columns))
        return machines.cross_entropy(self.scale * z @ rows.T)

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Evaluate a model at a client. Return no metrics without training clips."""
        if not len(self.normal_examples(step.data.train)):
            return {}
        return super().evaluate(step, name, examples, batch_size)

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Compute the scores of examples: float [examples, 1], on the CPU. 4 for machines without a normal training clip."""
        normal = self.normal_examples(step.data.train).cut_for_test()
        machines, own = (torch.from_numpy(self._find_codes(clips.columns)) for clips in (examples, normal))
        other = machines[:, None] != own[None, :]
        return compare_with_training("nearest", step, name, examples, normal, batch_size, other)

    def _find_codes(self, columns: Mapping[str, _Codes]) -> _Codes:
        """Return the codes of the machines, or the values of the population's column."""
        if self.column not in columns:
            raise ConfigError(
                f"objective: identify reads the machine of each clip from column {self.column!r}, but data.columns has only "
                f"{', '.join(columns) or 'no columns'}. Add {self.column!r} to data.columns."
            )
        return columns[self.column]
