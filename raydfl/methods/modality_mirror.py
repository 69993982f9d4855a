r"""ModalityMirror: clients with audio and video teach an audio model for clients without video.

ModalityMirror: Improving Audio Classification in Modality Heterogeneity Federated Learning with Multimodal Distillation.

The method has two phases (docs/configuration.md#trainphases). Phase ``multimodal`` (algorithm 1) is ``multifl``
(docs/methods.md#multifl). Phase ``distil`` (algorithm 2) continues with the clients with all views. The teacher is the first
phase's last encoders and fusion, frozen and in evaluation mode. The student starts from the first phase's network of its view,
encoder and head, and learns

    CE(student(x_A), y) + w T^2 KL(p_M || p_A),    p = softmax(logits / T), mean over the batch

with the teacher's p_M and the student's p_A. The server averages the students. Clients receive the teacher once. A federation
without a client with all views is rejected.

Readings and deviations:

- The paper prints KL(p_A || p_M), with the student first (``divergence: literal``). The default is KL(p_M || p_A), the usual
  distillation, and the result of library functions of (log student, teacher).
- The paper gives neither T (``temperature``) nor w (``kd_weight``), and no factor T^2. Here T is 2, w is 1, and T^2 keeps the
  gradients' size.
- Algorithm 2 sums over the clients with all views, but divides by the number of audio-only clients. Here the sum is divided by its
  own number of clients.
- Heads and the mean (``uniform_mean``) are those of MultiFL. The fusion reads zeros for a clip's missing view.
- Both phases accept any views. ``student`` names the student's view, and all views teach.

Networks and data are as in all methods of several views (docs/methods.md#methods-of-several-views). docs/modality-mirror.md has
studies and jobs.

    raydfl run jobs/tiny.yaml run.name=mirror train.rounds=2 method=modality_mirror \
      models='{a: crnn_tiny, b: crnn_tiny}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.options import OURS
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Task, Update
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._method import UpdateCounter, sample_clients
from raydfl.methods._views import ALL, GLOBAL, compute_fusion, select_clients, use_teacher
from raydfl.methods.multifl import MultiFL
from raydfl.training import Step, fit

MULTIMODAL, DISTIL = "multimodal", "distil"
TEACHER = "teacher"
"""The entry of the state with the models of the first phase's end."""

_TAUGHT = "have the teacher"


@dataclass(frozen=True, kw_only=True)
class ModalityMirror(MultiFL):
    """MultiFL, then distillation of the frozen fusion network into the student of one view."""

    phases: ClassVar[tuple[str, ...]] = (MULTIMODAL, DISTIL)

    temperature: Annotated[
        float,
        Field(gt=0, description="Softmax temperature of teacher and student in the divergence. 1: no softening."),
        OURS,
    ] = 2.0
    kd_weight: Annotated[
        float,
        Field(ge=0, description="Weight of the divergence from the teacher. 0: the student learns only from labels."),
        OURS,
    ] = 1.0
    divergence: Annotated[
        Literal["standard", "literal"],
        Field(description="Divergence. standard: KL(teacher || student). literal: KL(student || teacher), as printed."),
        OURS,
    ] = "standard"

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return MultiFL's state.

        Raises:
            ConfigError: No client has all views.
        """
        state = super().init(clients, models, rng)
        if not select_clients(state, clients, ALL):
            views = ", ".join(sorted({spec.view for built in clients[:1] for spec in built.models if spec.view}))
            raise ConfigError(
                f"method 'modality_mirror': no client has all views of the models, so the phase {DISTIL!r} has no clients (the "
                f"first client has {views or 'only the first view'}). Lower data.missing, change train.clients, or choose another "
                "method (multifl, unifl, harmony)."
            )
        return state

    def begin_phase(self, state: State) -> State:
        """Freeze a copy of all models as the teacher, and keep the student."""
        whole = state.tensors[GLOBAL]
        student = {name: value for name, value in whole.items() if name.startswith(f"{self._find_student(state)}/")}
        return dataclasses.replace(
            state,
            tensors={GLOBAL: student, TEACHER: {name: value.clone() for name, value in whole.items()}},
            extra={**state.extra, _TAUGHT: []},
        )

    def _find_student(self, state: State) -> str:
        return self.student or next(iter(state.tensors[GLOBAL])).partition("/")[0]

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Sample from all clients. In the second phase, sample clients with all views."""
        if state.phase != DISTIL:
            return super().plan(state, clients, rng, cohort)
        members = select_clients(state, clients, ALL)
        taught = set(cast(Sequence[str], state.extra[_TAUGHT]))
        keys = (GLOBAL, TEACHER) if self.kd_weight else (GLOBAL,)
        return [
            Task(client.id, phase=DISTIL, receive=keys, has=keys[1:] if client.id in taught else ())
            for client in sample_clients(members, rng, min(cohort, len(members)))
        ]

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure the models in ``global``, without the teacher."""
        return super().plan_evaluation(state, clients) or [Task("", phase="evaluate")]

    def local(self, step: Step) -> Update:
        """Train like MultiFL. In the second phase, train only the student."""
        if step.phase != DISTIL:
            return super().local(step)
        student = next(iter(step.models))
        metrics = fit(step, self.distil, models=(student,))
        tensors = {name: value for name, value in step.floating_state(student).items() if self.shared(name)}
        return step.update(metrics, tensors=tensors)

    def distil(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy of the student plus its divergence from the teacher."""
        student = next(iter(step.models))
        if self.kd_weight == 0:
            return self.view_loss(step, student, batch)
        logits = step.forward(student, batch)
        value = batch.cross_entropy(logits)
        with use_teacher(step, step.received[TEACHER]):
            teacher = compute_fusion(step.models, batch)
        t = self.temperature
        first, second = (teacher, logits) if self.divergence == "standard" else (logits, teacher)
        return value + self.kd_weight * t * t * batch.mean(compute_divergences(first, second, t))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average over the senders, and record the clients with the teacher."""
        if state.phase != DISTIL:
            return super().aggregate(state, updates, rng)
        counter = UpdateCounter(updates)
        new, report = super().aggregate(state, counter, rng)
        taught = dict.fromkeys([*cast(Sequence[str], state.extra[_TAUGHT]), *counter.clients])
        return dataclasses.replace(new, extra={**new.extra, _TAUGHT: [*taught]}), report
