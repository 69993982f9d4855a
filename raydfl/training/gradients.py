"""A training step's loss and its gradients: by the loss's code, or from a tape of the operations that it came to before.

A small network's step is short, and most of what is not arithmetic in it is Python and autograd finding out, again, which
operations to do. So the operations of a loss and of its backward pass are recorded (tape.py) once the same computation has
been done a few times, and done again from there by every client for whom it is the same computation. The bits do not change.

Whether it is the same is never guessed from a single look:

- The loss's code, all that it captured and all that it names in the user's modules and classes (``users_code.outside``), the task's
  options, the phase, the architectures with their layers' attributes, the types and shapes of all tensors, and an autocast around
  it must be equal, and nothing captured or named may be something that can change unseen (``alike.constants``).
- While it is recorded the loss sees no ``step.client``, ``data``, ``rng``, ``training`` or ``round_index``, may not write into the
  step, nor look at a tensor's value, and may use no other tensors than its models', its step's and its batch's.
- What the tape computes must have the bits of what the loss's own code computed for the same batch: loss, gradients, buffers, and
  the state of PyTorch's generators after it.
- It is recorded again in a later round: both tapes must be equal, operation by operation and number by number.

Where one of these fails the loss's code runs in every step, as it does for all others.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from raydfl.core.types import Batch
from raydfl.training.precision import GradientScale, computing_in
from raydfl.training.randomness import generator_states, seed_of_step, set_generator_states, step_randomness
from raydfl.training.step import Loss, Step
from raydfl.training.tape import Tape, TapeError, form, record
from raydfl.training.together import signature as alike
from raydfl.training.together.handles import Unavailable
from raydfl.training.users_code import is_users, outside

logger = logging.getLogger(__name__)


FIRST = 16
"""Times that a computation is done by the loss's code before it is recorded, which takes as long as some eight steps.

The nth of a kind waits (n - 1)² times longer: clips of many lengths make many computations, each of which comes seldom.
"""

LARGEST = 1 << 22
"""Elements of the models and of the state of a client up to which its steps are recorded: in larger networks' steps there is little
to gain, and a recording holds several copies of them, and all of a step's intermediate results."""

_KINDS = 64
"""Kinds of fits that are remembered in a process."""

_SHAPES = 500
"""Shapes of batches that are counted, for each kind. (What is counted takes 0.7 KB, a tape of CRNN-Base 20 KB.)"""


class _Origin(NamedTuple):
    """Where a step holds a tensor."""

    holder: str
    """``"model"``, ``"received"``, ``"state"``, ``"batch"`` or ``"seed"``."""
    key: str = ""
    name: str = ""


class _Known:
    """What is known of one computation: a loss of a fit on batches of one shape."""

    __slots__ = ("done", "first", "recorded", "refused", "round", "tape")

    def __init__(self, round_index: int) -> None:
        self.done = 0
        """Times that the loss's code computed it."""
        self.first: Tape | None = None
        """As it was recorded the first time."""
        self.round = round_index
        """When that was, before that when it was computed the first time: what comes in one round only is not worth a tape."""
        self.recorded = False
        """Whether that was tried at least."""
        self.tape: Tape | None = None
        """To compute it with, after the second time."""
        self.refused = False


_known: dict[Hashable, dict[Hashable, _Known]] = {}
"""By kind of fit, and in it by place of the loss and shapes of the batch."""


def forget() -> None:
    """Forget all recordings of this process."""
    _known.clear()


class Gradients:
    """Computes the losses of one client's fit, and puts their gradients into its parameters."""

    def __init__(
        self, step: Step, losses: Sequence[Loss], models: tuple[str, ...], parameters: Sequence[Tensor], seed: Tensor
    ) -> None:
        """Look up what is known of such fits.

        Args:
            step: the client's.
            losses: of the fit.
            models: names of those that are trained; none: all.
            parameters: theirs.
            seed: of the fit's dropout.
        """
        self._step = step
        self._losses = losses
        self._trained = models
        self._parameters = parameters
        self._seed = seed
        self._kind: Hashable = None
        self._known: dict[Hashable, _Known] | None = None
        self._tensors: dict[_Origin, Tensor] = {}
        """The models', once they are needed."""
        self._inputs: dict[int, list[Tensor | _Origin] | None] = {}
        """Of each tape that was used, by ``id``: see _find."""
        self._code_ran = False
        """Whether, since that was found out, a loss's code ran that may have changed it."""
        if step.training.tape and step.training.precision != "float16" and self._size() <= LARGEST:
            self._kind = self._look()
        if self._kind is not None:
            if self._kind not in _known and len(_known) >= _KINDS:
                _known.clear()
            self._known = _known.setdefault(self._kind, {})

    def compute(self, number: int, batch: Batch, scale: GradientScale | None = None) -> Tensor:
        """The value of a loss, detached; the ``grad`` of every parameter that it depends on is set, all were ``None`` before.

        Args:
            number: of the fit's step, from 0: the losses take turns.
            batch: its batch.
            scale: what the gradients are multiplied by (float16).
        """
        if self._known is None:
            return self._by_code(number, batch, scale)
        computation = (number % len(self._losses), *[_shape(getattr(batch, name)) for name in _FIELDS])
        known = self._known.get(computation)
        if known is None:
            if len(self._known) >= _SHAPES:
                return self._by_code(number, batch, scale)
            known = self._known[computation] = _Known(self._step.round_index)
        if known.tape is not None:
            return self._from_tape(known.tape, number, batch) if self._unchanged() else self._by_code(number, batch)
        known.done += 1
        if known.refused or known.done <= FIRST or known.round == self._step.round_index or self._seldom(known):
            return self._by_code(number, batch)
        return self._recording(known, number, batch)

    def _unchanged(self) -> bool:
        """Whether this is still the kind of fit that it was; where a step's tensors are is then looked up again."""
        if self._code_ran:
            self._tensors.clear()
            self._inputs.clear()
            self._code_ran = self._look() != self._kind
        return not self._code_ran

    def _seldom(self, known: _Known) -> bool:
        """Whether a computation that has not been recorded yet has to wait for it, because others have been."""
        recorded = sum(other.recorded for other in cast("dict[Hashable, _Known]", self._known).values())
        return not known.recorded and known.done <= FIRST + recorded**2

    def _by_code(self, number: int, batch: Batch, scale: GradientScale | None = None) -> Tensor:
        self._code_ran = True
        value = self._loss(self._step, number, batch, seed_of_step(self._seed, number))
        (value if scale is None else value * scale.scale).backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _loss(self, step: Step, number: int, batch: Batch, seed: Tensor) -> Tensor:
        with step_randomness(seed), computing_in(self._step.training.precision, step.device):
            return self._losses[number % len(self._losses)](step, batch)

    def _from_tape(self, tape: Tape, number: int, batch: Batch) -> Tensor:
        if id(tape) not in self._inputs:
            self._inputs[id(tape)] = self._find(tape)
        inputs = self._inputs[id(tape)]
        if inputs is None:
            return self._by_code(number, batch)
        value, *gradients = self._play(tape, inputs, number, batch)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return cast(Tensor, value)

    def _find(self, tape: Tape) -> list[Tensor | _Origin] | None:
        """This client's inputs of a tape, and which come with each step; ``None`` if one is missing or of another form."""
        found: list[Tensor | _Origin] = []
        for origin, its_form in cast("Mapping[_Origin, Hashable]", tape.inputs).items():
            if origin.holder in ("batch", "seed"):
                found.append(origin)
                continue
            tensor = self._at(origin)
            if tensor is None or form(tensor) != its_form:
                return None
            found.append(tensor)
        return found

    def _play(
        self, tape: Tape, inputs: Sequence[Tensor | _Origin], number: int, batch: Batch
    ) -> tuple[Tensor | None, ...]:
        given = []
        for place in inputs:
            if isinstance(place, Tensor):
                given.append(place)
            else:
                given.append(getattr(batch, place.name) if place.name else seed_of_step(self._seed, number))
        with torch.no_grad():
            return tape.run(*given)

    def _at(self, origin: _Origin) -> Tensor | None:
        """The step's tensor there."""
        if origin.holder == "state":
            return self._step.state.get(origin.name)
        if origin.holder == "received":
            return self._step.received.get(origin.key, {}).get(origin.name)
        return self._models().get(origin)

    def _models(self) -> Mapping[_Origin, Tensor]:
        """All tensors of the models by their numbers in them; one that stands in several places has several."""
        if not self._tensors:
            for model, module in self._step.models.items():
                for number, tensor in enumerate(_tensors_of(module)):
                    self._tensors[_Origin("model", model, str(number))] = tensor
        return self._tensors

    def _size(self) -> int:
        return sum(tensor.numel() for tensor in (*self._models().values(), *self._step.state.values()))

    def _look(self) -> Hashable:
        """All that has to be equal for two fits to be the same computations; ``None`` where it cannot be told."""
        step = self._step
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self._parameters):
            return None
        first: dict[int, int] = {}
        tied = tuple(first.setdefault(id(tensor), number) for number, tensor in enumerate(self._models().values()))
        try:
            return (
                tied,
                alike.constants((self._losses, self._trained, dict(step.options), step.phase, step.shared)),
                alike.architecture(step.models, alike.constants),
                tuple((key, tuple(tensors)) for key, tensors in step.received.items()),
                tuple(step.state),
                step.client.models,
                step.device,
                step.training.precision,
                _surroundings(step),
                alike.constants(outside((*self._losses, *_own_layers(step)))),
            )
        except alike.VaryingError:
            return None

    def _recording(self, known: _Known, number: int, batch: Batch) -> Tensor:
        """Compute it by the loss's code, and record it besides; whatever comes of that, the client does not notice."""
        known.recorded = True
        before = _Kept(self._step)
        value = self._by_code(number, batch)
        after = _Kept(self._step)
        gradients = [parameter.grad for parameter in self._parameters]
        try:
            if self._look() != self._kind:  # before it is called once more: it may count its calls
                raise TapeError("it changes what it captured or names")
            if before.objects != after.objects:
                raise TapeError("it changes its step or its models' attributes")
            before.put_back()
            tape = self._record(number, batch)
            before.put_back()
            inputs = self._find(tape)
            if inputs is None:
                raise TapeError("it changes the tensors of its step for others")
            if not _equal((*self._play(tape, inputs, number, batch), *after.now()), (value, *gradients, *after.values)):
                raise TapeError("it does not give the same bits again")
            if known.first is None:
                known.first, known.round = tape, self._step.round_index
            elif (tape.code, list(tape.inputs)) != (known.first.code, list(known.first.inputs)):
                raise TapeError("it is not the same operations as in an earlier round")
            else:
                known.first, known.tape = None, tape
        except Exception as error:  # noqa: BLE001 - the loss goes on as it is, without a tape
            known.refused = True
            logger.info("train.tape: the loss's code runs in every step: %s: %s", type(error).__name__, error)
        finally:
            after.put_back()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        return value

    def _record(self, number: int, batch: Batch) -> Tape:
        step, seed = self._step, seed_of_step(self._seed, number)
        origins: dict[int, Hashable] = {id(tensor): origin for origin, tensor in self._models().items()}
        origins.update((id(getattr(batch, name)), _Origin("batch", "", name)) for name in _FIELDS)
        origins[id(seed)] = _Origin("seed")
        received = {key: _Watched("received", key, tensors, origins) for key, tensors in step.received.items()}
        hidden = {name: cast(Any, Unavailable(name, "all steps")) for name in _HIDDEN}
        state = cast(Any, _Watched("state", "", step.state, origins))
        shown = dataclasses.replace(step, models=dict(step.models), received=received, state=state, **hidden)
        shown.__class__ = _Sealed

        def computation() -> list[Tensor | None]:
            value = self._loss(shown, number, batch, seed)
            return [value.detach(), *torch.autograd.grad(value, list(self._parameters), allow_unused=True)]

        return record(computation, origins)


class _Sealed(Step):
    """A step whose fields cannot be set."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise TapeError(f"it sets step.{name}")


class _Watched(Mapping[str, Tensor]):
    """``step.state`` or an entry of ``step.received``, read only; where what was read came from is noted."""

    def __init__(self, holder: str, key: str, tensors: Mapping[str, Tensor], origins: dict[int, Hashable]) -> None:
        self._holder = holder
        self._key = key
        self._tensors = tensors
        self._origins = origins
        self._read: list[Tensor] = []  # what has an id has to stay

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self._read.append(tensor)
        self._origins[id(tensor)] = _Origin(self._holder, self._key, name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Kept:
    """Everything of a step that a loss can reach, and PyTorch's generators, as they are now."""

    def __init__(self, step: Step) -> None:
        layers = [layer for module in step.models.values() for layer in module.modules()]
        held = [*(vars(layer) for layer in layers), {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}]
        self.objects = [
            {name: id(value) for name, value in holder.items()} for holder in (*held, step.state, step.models)
        ]
        """Which objects are the layers' attributes, the step's fields, its state and its models."""
        self._alive = [dict(holder) for holder in held]
        self._live = [
            *(tensor for module in step.models.values() for tensor in _tensors_of(module)),
            *step.state.values(),
            *(tensor for tensors in step.received.values() for tensor in tensors.values()),
        ]
        self.values = [*(tensor.detach().clone() for tensor in self._live), *generator_states()]

    def now(self) -> list[Tensor]:
        """The same, as it is by now."""
        return [*(tensor.detach() for tensor in self._live), *generator_states()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make everything what it was."""
        for tensor, value in zip(self._live, self.values, strict=False):
            tensor.copy_(value)
        set_generator_states(self.values[len(self._live) :])


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, layer by layer; ``parameters()`` takes several times as long."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for child in module._modules.values():
        if child is not None:
            yield from _tensors_of(child)


def _own_layers(step: Step) -> list[Any]:
    """The classes of the user's layers, and what these compute."""
    classes = dict.fromkeys(type(layer) for module in step.models.values() for layer in module.modules())
    return [part for layer in classes if is_users(layer.__module__) for part in (layer, layer.forward)]


def _surroundings(step: Step) -> Hashable:
    """Which layers are training, and what PyTorch itself computes in at the moment."""
    kind = step.device.type
    return (
        tuple(layer.training for module in step.models.values() for layer in module.modules()),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
    )


_HIDDEN = ("client", "data", "rng", "round_index", "training", "clock")
_FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


def _shape(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride())


def _equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether all values are equal, NaN to NaN."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))

    return len(one) == len(other) and all(map(same, one, other))
