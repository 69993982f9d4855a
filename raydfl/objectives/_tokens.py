"""Base class of objectives with outputs at each token of a clip."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.types import same_view
from raydfl.data import Examples
from raydfl.objectives._objective import Objective
from raydfl.training import Step, predict


@dataclass(frozen=True, kw_only=True)
class TokenObjective(Objective):
    """Base class of objectives whose predictor returns float32 [batch, tokens, answers]. Tokens differ between batches."""

    needs_frames: ClassVar[bool] = True

    def activate(self, logits: Tensor) -> Tensor:
        """Convert the network's outputs at each token to the predictor's, float32 [..., answers]."""
        raise NotImplementedError

    def fill(self, zeros: Tensor) -> Tensor:
        """Return the predictor's outputs after the end of an example, of the shape of ``zeros``, float [..., answers]."""
        raise NotImplementedError

    def answers_to(self, step: Step, name: str, examples: Examples, batch_size: int) -> Tensor:
        """Compute the predictor's outputs for examples: float32 [examples, tokens, answers], on the CPU."""
        network = step.models[name]
        step = dataclasses.replace(step, models={**step.models, name: same_view(self.predictor(network), network)})
        order = [*examples.order(batch_size, None)]
        if not order:
            return torch.zeros(0, 1, len(self.names(examples.classes)))
        joined = self.join([predict(step, name, examples.take(rows), batch_size) for rows in order])
        outputs = torch.empty_like(joined)
        for rows, part in zip(order, torch.split(joined, [len(rows) for rows in order]), strict=True):
            outputs[rows] = part
        return outputs

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the predictor's outputs for batches of examples, with :meth:`fill` after the end of shorter batches."""
        tokens = max(part.shape[1] for part in parts)
        return torch.cat(
            [torch.cat([p, self.fill(p.new_zeros(len(p), tokens - p.shape[1], p.shape[2]))], 1) for p in parts]
        )


def count_frames_per_token(network: nn.Module) -> int:
    """Return the number of frames from a token of a network to the next, 1 if the network does not define it."""
    return int(getattr(network, "frames_per_token", 1))
