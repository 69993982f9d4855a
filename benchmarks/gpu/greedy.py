"""A network that asks for more memory than any share of a GPU has."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raydfl.models.dense import MeanLinear


class Greedy(MeanLinear):
    """Logistic regression; in training, once it is armed, it asks for all of the GPU."""

    armed: ClassVar[bool] = False

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the mean frame, if there is the memory for what is not needed."""
        if self.armed and self.training:
            if not x.is_cuda:
                raise torch.OutOfMemoryError("out of memory (dry run: this is a CPU)")
            torch.empty(torch.cuda.get_device_properties(x.device).total_memory, dtype=torch.uint8, device=x.device)
        return super().embed(x, lengths)
