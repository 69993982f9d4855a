"""The divergence of two networks' softened outputs, for methods with a teacher."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def compute_divergences(first: Tensor, second: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(softmax(first / temperature) || softmax(second / temperature)) of each example: float32 [batch].

    Args:
        first: Logits, float32 [batch, classes].
        second: Logits, float32 [batch, classes].
        temperature: Positive. A higher temperature makes both distributions more uniform.
    """
    log_first, log_second = F.log_softmax(first / temperature, dim=1), F.log_softmax(second / temperature, dim=1)
    # Not F.kl_div, which PyTorch cannot compute for several clients at once.
    return (log_first.exp() * (log_first - log_second)).sum(dim=1)
