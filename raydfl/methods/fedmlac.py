"""FedMLAC: a private local model and a shared plug-in model learn from each other; layers are pruned in the aggregation.

FedMLAC: Mutual Learning Driven Heterogeneous Federated Audio Classification, equations:

    (6)     CE of the local model
    (7, 8)  L_local = alpha CE(F_k(x), y) + (1 - alpha) KL(p_g || p_k)
    (9)     L_plug  = KL(p_k || p_g)
    (10-14) layer-wise pruning aggregation (LPA): raydfl.rules.LayerwisePruning

p_k and p_g are the softmax outputs of the client's local model and of its plug-in copy; KL(a || b) = sum_c a_c (log a_c - log b_c),
mean over the batch; in each loss the other model's output is a constant. The local model never leaves the client and may have any
architecture; the plug-in is overwritten by the server's at each participation.

Readings of what the paper leaves open, and deviations:

- Equation 4 puts the learner first in the divergence, 7 and 9 the teacher; 7 and 9 are used.
- alpha, vl, vh and the temperature are not given: 0.5, 0.1, 0.1 and 1. A temperature T other than 1 softens both outputs and
  multiplies the divergence by T^2, so that gradients keep their size.
- ``form: literal`` is equation 9 as printed: the plug-in learns from the local model alone. ``form: supervised`` adds
  cross-entropy to the plug-in's loss, with weight 1; a number is another weight.
- The paper does not say what the local models are at the start. ``warm_epochs`` passes over a client's data train its local
  model alone, with cross-entropy, when it takes part for the first time: without it the plug-in first learns from untrained
  teachers. It costs no communication.
- Both models are updated from one forward pass each; ``sequential`` updates the local model first and lets the plug-in learn from
  the updated one, as the order of algorithm 1 could also be read.
- "Layer" means a module (weight and bias together, a GRU is one layer); ``layer: tensor`` takes each tensor alone.
- Ablations: ``lpa: false`` uses the mean weighted by examples; ``mutual: false`` trains both models with cross-entropy alone and
  keeps LPA (the paper does not define it; a plug-in without any loss would not learn).
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
        Field(ge=0, le=1, description="share of cross-entropy in the local loss; 1: the local model learns alone"),
    ] = 0.5
    temperature: Annotated[float, Field(gt=0, description="softening of both outputs in the divergences; 1: none")] = (
        1.0
    )
    vl: Annotated[
        float, Field(ge=0, lt=1, description="share of clients with the smallest deviation pruned in a layer")
    ] = 0.1
    vh: Annotated[
        float, Field(ge=0, lt=1, description="share of clients with the largest deviation pruned in a layer")
    ] = 0.1
    layer: Annotated[
        Literal["module", "tensor"], Field(description="what a layer is: a module with its bias, or each tensor")
    ] = "module"
    form: Annotated[
        Literal["literal", "supervised"] | Annotated[float, Field(ge=0)],
        Field(
            description="the plug-in's loss. literal: equation 9 as printed; supervised: plus cross-entropy with weight 1; "
            "a number: with that weight"
        ),
    ] = "literal"
    warm_epochs: Annotated[
        int, Field(ge=0, description="passes that train a client's local model alone before its first participation")
    ] = 0
    sequential: Annotated[bool, Field(description="the plug-in learns from the already updated local model")] = False
    lpa: Annotated[bool, Field(description="false: without layer-wise pruning")] = True
    mutual: Annotated[
        bool, Field(description="false: without mutual learning, both models learn from labels alone")
    ] = True

    def shared(self, name: str) -> bool:
        """Share only the plug-in."""
        return name.startswith("plugin/")

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Equations 8 and 9 together: their gradients meet disjoint parameters."""
        local, plugin = step.forward("local", batch), step.forward("plugin", batch)
        return self._local_loss(local, plugin, batch) + self._plugin_loss(local, plugin, batch)

    def local(self, step: Step) -> Update:
        """Train both models, a new client's local one alone before; the plug-in goes back."""
        if self.warm_epochs and _WARM not in step.state:
            fit(step, self._labels_only, models=("local",), epochs=self.warm_epochs)
            step.state[_WARM] = torch.ones(())
            step.clock.steps = 0  # where train.deadline ends the training here, the plug-in has none that counts
        if not self.sequential:
            return step.update(fit(step, self.loss))

        def first(step: Step, batch: Batch) -> Tensor:
            return self._local_loss(step.forward("local", batch), step.forward("plugin", batch), batch)

        def second(step: Step, batch: Batch) -> Tensor:
            return self._plugin_loss(step.forward("local", batch), step.forward("plugin", batch), batch)

        return step.update(fit(step, first, second))

    @functools.cached_property
    def built_rule(self) -> Rule:
        """The configured rule; else LPA, or the mean weighted by examples in the ablation."""
        lpa = LayerwisePruning(vl=self.vl, vh=self.vh, by=self.layer)
        return find_rule(self.rule, lpa if self.lpa else self.default_rule, "method.rule")

    def _labels_only(self, step: Step, batch: Batch) -> Tensor:
        """Equation 6: cross-entropy of the local model."""
        return batch.cross_entropy(step.forward("local", batch))

    def _local_loss(self, local: Tensor, plugin: Tensor, batch: Batch) -> Tensor:
        """Equation 8 from both models' logits [batch, classes]."""
        cross_entropy = batch.cross_entropy(local)
        if not self.mutual or self.alpha == 1:
            return cross_entropy
        return self.alpha * cross_entropy + (1 - self.alpha) * self._divergence(plugin, local, batch)

    def _plugin_loss(self, local: Tensor, plugin: Tensor, batch: Batch) -> Tensor:
        """Equation 9 from both models' logits, with the optional cross-entropy term."""
        cross_entropy = batch.cross_entropy(plugin)
        if not self.mutual:
            return cross_entropy
        divergence = self._divergence(local, plugin, batch)
        weight = FORMS[self.form] if isinstance(self.form, str) else self.form
        return divergence if weight == 0 else divergence + weight * cross_entropy

    def _divergence(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over the batch; no gradient reaches the teacher."""
        t = self.temperature
        return t * t * batch.mean(compute_divergences(teacher.detach(), student, t))
