r"""FedMLAC: a private local model and a shared plug-in model learn from each other, with layer-wise pruning aggregation.

FedMLAC: Mutual Learning Driven Heterogeneous Federated Audio Classification, equations:

    (6)     CE of the local model
    (7, 8)  L_local = alpha CE(F_k(x), y) + (1 - alpha) KL(p_g || p_k)
    (9)     L_plug  = KL(p_k || p_g)
    (10-14) layer-wise pruning aggregation (LPA): the rule lpa

p_k and p_g are the softmax outputs of the client's local model and of its plug-in. KL(a || b) = sum_c a_c (log a_c - log b_c),
averaged over the batch. In each loss the teacher's output is a constant. The local model never leaves the client and may have any
architecture. At each participation the server's plug-in replaces the client's.

Readings and deviations:

- Equation 4 has the learner first in the divergence, equations 7 and 9 the teacher. The code uses 7 and 9.
- The paper does not give alpha, vl, vh and the temperature. They are 0.5, 0.1, 0.1 and 1 here. A temperature T softens both outputs
  and multiplies the divergence by T^2, so that gradients keep their size.
- ``form: literal`` is equation 9 as printed: the plug-in learns only from the local model, which takes many rounds
  (docs/fedmlac.md). ``form: supervised`` adds cross-entropy to the plug-in's loss with weight 1. A number sets the weight.
- The paper does not define the initial local models. At a client's first participation, ``warm_epochs`` epochs train its local
  model alone with cross-entropy. Without them the plug-in first learns from untrained teachers. They cost computation, but no
  communication.
- One forward pass updates both models. ``sequential`` updates the local model first, and the plug-in learns from the updated
  model, another reading of algorithm 1.
- A layer is a module: weight and bias together, and a GRU is one layer. ``layer: tensor`` treats each tensor separately. Pruned
  clients are rounded down: with vl = vh = 0.1 a cohort of fewer than 10 clients loses none.
- Ablations: ``lpa: false`` uses the mean weighted by examples. ``mutual: false`` trains both models with cross-entropy alone and
  keeps LPA. The paper does not define it, but a plug-in without a loss would not learn.
- The paper does not name the model of its tables. Recorded are ``test plugin/...`` (the plug-in on the server's test data,
  comparable with the global models of other methods), ``test local/...`` (local models on sampled test clips) and
  ``validation local/...`` (on their clients' held-out clips).

The objective must be ``classify``. ``train.optimiser.models: {plugin: 0.3, local: 0.1}`` sets each model's learning rate.

    raydfl run jobs/tiny.yaml run.name=fedmlac train.rounds=1 method=fedmlac \
      'models.local=[crnn_tiny, crnn_lite]'
    raydfl run jobs/tiny.yaml run.name=no_lpa train.rounds=1 \
      method='{name: fedmlac, lpa: false, form: supervised}'
    raydfl run jobs/tiny.yaml run.name=warm train.rounds=1 method='{name: fedmlac, warm_epochs: 2}'

The paper's settings. alpha, the temperature, vl, vh, and SGD without momentum and weight decay are assumptions:

    method: {name: fedmlac, form: literal, alpha: 0.5, temperature: 1.0, vl: 0.1, vh: 0.1}
    models: {plugin: crnn_lite, local: crnn_base}
    train:
      rounds: 5000
      cohort: 0.2
      local_epochs: 1
      batch_size: 16
      optimiser: {name: sgd, lr: 0.01}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.options import OURS, PAPER
from raydfl.core.types import Batch, Update
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._method import Method
from raydfl.rules import LayerwisePruning, Rule, find_rule
from raydfl.training import Step, fit

FORMS: Mapping[str, float] = {"literal": 0.0, "supervised": 1.0}
"""Weight of the cross-entropy in the plug-in's loss, by form."""

_WARM = "warm"


@dataclass(frozen=True, kw_only=True)
class FedMLAC(Method):
    """Mutual learning of a private local model and a shared plug-in model."""

    needs = Needs(objectives=("classify",))

    models: ClassVar[Mapping[str, str]] = {"plugin": "crnn_lite", "local": "crnn_base"}

    alpha: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Fraction of cross-entropy in the local loss. 1: the local model learns from labels only.",
        ),
        OURS,
    ] = 0.5
    temperature: Annotated[
        float, Field(gt=0, description="Softmax temperature of both outputs in the divergences. 1: no softening."), OURS
    ] = 1.0
    vl: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="Fraction of clients pruned in each layer for the smallest deviation. 0: no pruning.",
        ),
        OURS,
    ] = 0.1
    vh: Annotated[
        float,
        Field(
            ge=0, lt=1, description="Fraction of clients pruned in each layer for the largest deviation. 0: no pruning."
        ),
        OURS,
    ] = 0.1
    layer: Annotated[
        Literal["module", "tensor"],
        Field(
            description="Unit of pruning. module: weight and bias together, a GRU is one layer. tensor: each tensor."
        ),
        OURS,
    ] = "module"
    form: Annotated[
        Literal["literal", "supervised"] | Annotated[float, Field(ge=0)],
        Field(
            description="Loss of the plug-in. literal: equation 9 as printed. supervised: plus cross-entropy with weight 1. "
            "A number: plus cross-entropy with this weight."
        ),
        PAPER,
    ] = "literal"
    warm_epochs: Annotated[
        int,
        Field(ge=0, description="Epochs of the local model alone before a client's first participation. 0: none."),
        PAPER,
    ] = 0
    sequential: Annotated[bool, Field(description="Train the plug-in on the updated local model's output."), OURS] = (
        False
    )
    lpa: Annotated[
        bool, Field(description="Prune layers in the aggregation. false: the mean weighted by examples."), PAPER
    ] = True
    mutual: Annotated[
        bool, Field(description="Train with mutual learning. false: both models learn only from labels."), PAPER
    ] = True

    def shared(self, name: str) -> bool:
        """Share only the plug-in."""
        return name.startswith("plugin/")

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the sum of equations 8 and 9. Their gradients concern disjoint parameters."""
        local, plugin = step.forward("local", batch), step.forward("plugin", batch)
        return self._compute_local_loss(local, plugin, batch) + self._compute_plugin_loss(local, plugin, batch)

    def local(self, step: Step) -> Update:
        """Train both models, after the warm-up of a new client's local model, and send the plug-in."""
        if self.warm_epochs and _WARM not in step.state:
            fit(step, self._compute_supervised_loss, models=("local",), epochs=self.warm_epochs)
            step.state[_WARM] = torch.ones(())
            step.clock.steps = 0  # If train.deadline ends the training here, the plug-in was not trained.
        if not self.sequential:
            return step.update(fit(step, self.loss))

        def local_loss(step: Step, batch: Batch) -> Tensor:
            return self._compute_local_loss(step.forward("local", batch), step.forward("plugin", batch), batch)

        def plugin_loss(step: Step, batch: Batch) -> Tensor:
            return self._compute_plugin_loss(step.forward("local", batch), step.forward("plugin", batch), batch)

        return step.update(fit(step, local_loss, plugin_loss))

    @functools.cached_property
    def built_rule(self) -> Rule:
        """The configured rule. By default LPA, or the mean weighted by examples without ``lpa``."""
        lpa = LayerwisePruning(vl=self.vl, vh=self.vh, by=self.layer)
        return find_rule(self.rule, lpa if self.lpa else self.default_rule, "method.rule")

    def _compute_supervised_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy of the local model (equation 6)."""
        return batch.cross_entropy(step.forward("local", batch))

    def _compute_local_loss(self, local: Tensor, plugin: Tensor, batch: Batch) -> Tensor:
        """Return equation 8 from both models' logits [batch, classes]."""
        cross_entropy = batch.cross_entropy(local)
        if not self.mutual or self.alpha == 1:
            return cross_entropy
        return self.alpha * cross_entropy + (1 - self.alpha) * self._compute_divergence(plugin, local, batch)

    def _compute_plugin_loss(self, local: Tensor, plugin: Tensor, batch: Batch) -> Tensor:
        """Return equation 9 from both models' logits, with the optional cross-entropy term."""
        cross_entropy = batch.cross_entropy(plugin)
        if not self.mutual:
            return cross_entropy
        divergence = self._compute_divergence(local, plugin, batch)
        weight = FORMS[self.form] if isinstance(self.form, str) else self.form
        return divergence if weight == 0 else divergence + weight * cross_entropy

    def _compute_divergence(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return T^2 KL(softmax(teacher / T) || softmax(student / T)), with a constant teacher, averaged over the batch."""
        t = self.temperature
        return t * t * batch.mean(compute_divergences(teacher.detach(), student, t))
