"""ModalityMirror: clients that see and hear teach an audio model that clients without video can use.

ModalityMirror: Improving Audio Classification in Modality Heterogeneity Federated Learning with Multimodal Distillation.

Phase ``multimodal`` (algorithm 1) is :mod:`raydfl.methods.multifl`. Phase ``distil`` (algorithm 2) goes on with the clients that
have all views. The teacher is what the first phase ended with (encoders and fusion), frozen and in evaluation mode. The student
begins with the first phase's network of its view, encoder and head, and learns

    CE(student(x_A), y) + w T^2 KL(p_M || p_A),    p = softmax(logits / T), mean over the batch

where p_M is the teacher's and p_A the student's. The server averages the students. Clients receive the teacher once.

Readings and deviations:

- The paper prints KL(p_A || p_M), with the student first; ``divergence: literal`` is that. What distillation is, and what a
  library's function of (log student, teacher) computes, is KL(p_M || p_A), the default.
- The paper gives no temperature T and no weight w, and does not mention T^2, which keeps the gradients' size: 2, 1, and T^2 is
  there.
- Algorithm 2 divides by the number of audio-only clients, while it sums over the others: they are divided by their own number.
- Heads, and the uniform mean: see MultiFL. A fusion sees zeros in place of a view that a clip lacks.
- The phases are general: any views, of which ``student`` says which learns; all of them teach.
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
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Task, Update
from raydfl.methods._distillation import compute_divergences
from raydfl.methods._method import UpdateCounter, sample_clients
from raydfl.methods._views import ALL, GLOBAL, compute_fusion, select_clients, use_teacher
from raydfl.methods.multifl import MultiFL
from raydfl.training import Step, fit

MULTIMODAL, DISTIL = "multimodal", "distil"
TEACHER = "teacher"
"""The entry of the state with what the first phase ended with."""

_TAUGHT = "have the teacher"


@dataclass(frozen=True, kw_only=True)
class ModalityMirror(MultiFL):
    """MultiFL, then a student of one view learns from the frozen network of all views."""

    phases: ClassVar[tuple[str, ...]] = (MULTIMODAL, DISTIL)

    temperature: Annotated[
        float, Field(gt=0, description="softening of the teacher's and the student's output; 1: none")
    ] = 2.0
    kd_weight: Annotated[
        float,
        Field(ge=0, description="weight of the divergence from the teacher; 0: the student learns from labels alone"),
    ] = 1.0
    divergence: Annotated[
        Literal["standard", "literal"],
        Field(description="standard: KL(teacher || student); literal: KL(student || teacher), as the paper prints it"),
    ] = "standard"

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return MultiFL's state.

        Raises:
            ConfigError: no client has all views, so that nobody could be taught.
        """
        state = super().init(clients, models, rng)
        if not select_clients(state, clients, ALL):
            views = ", ".join(sorted({spec.view for built in clients[:1] for spec in built.models if spec.view}))
            raise ConfigError(
                "method 'modality_mirror': no client has all views that its models read, so nobody can take part in the phase "
                f"{DISTIL!r} (the first client has {views or 'the first view alone'}); lower data.missing, look at train.clients, "
                "or take a method that needs no such client (multifl, unifl, harmony)"
            )
        return state

    def begin_phase(self, state: State) -> State:
        """Freeze what there is as the teacher; the student goes on from it."""
        whole = state.tensors[GLOBAL]
        student = {name: value for name, value in whole.items() if name.startswith(f"{self._student(state)}/")}
        return dataclasses.replace(
            state,
            tensors={GLOBAL: student, TEACHER: {name: value.clone() for name, value in whole.items()}},
            extra={**state.extra, _TAUGHT: []},
        )

    def _student(self, state: State) -> str:
        return self.student or next(iter(state.tensors[GLOBAL])).partition("/")[0]

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Draw from all clients; in the second phase from those that have all views."""
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
        """Measure what is in ``global``, and not the teacher."""
        return super().plan_evaluation(state, clients) or [Task("", phase="evaluate")]

    def local(self, step: Step) -> Update:
        """Do MultiFL's work, or train the student."""
        if step.phase != DISTIL:
            return super().local(step)
        student = next(iter(step.models))
        metrics = fit(step, self.distil, models=(student,))
        sent = {name: value for name, value in step.floating_state(student).items() if self.shared(name)}
        return step.update(metrics, tensors=sent)

    def distil(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy of the student plus its divergence from the teacher."""
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
        """Average over those who sent; note who has the teacher now."""
        if state.phase != DISTIL:
            return super().aggregate(state, updates, rng)
        arriving = UpdateCounter(updates)
        new, report = super().aggregate(state, arriving, rng)
        taught = dict.fromkeys([*cast(Sequence[str], state.extra[_TAUGHT]), *arriving.clients])
        return dataclasses.replace(new, extra={**new.extra, _TAUGHT: [*taught]}), report
