"""A network that requests more memory than any share of a GPU."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raydfl.models.dense import MeanLinear


class Greedy(MeanLinear):
    """Logistic regression. In training, once it is armed, it requests the whole GPU."""

    armed: ClassVar[bool] = False

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the mean frame, if there is memory for an unused tensor."""
        if self.armed and self.training:
            if not x.is_cuda:
                raise torch.OutOfMemoryError("out of memory (dry run: this is a CPU)")
            torch.empty(torch.cuda.get_device_properties(x.device).total_memory, dtype=torch.uint8, device=x.device)
        return super().embed(x, lengths)
