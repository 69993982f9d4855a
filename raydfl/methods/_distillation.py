"""The divergence of two networks' softened answers, which methods with a teacher learn from."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def softened_divergences(first: Tensor, second: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(softmax(first / temperature) || softmax(second / temperature)) of each example: float32 [batch].

    Args:
        first: logits [batch, classes].
        second: logits [batch, classes].
        temperature: above 0. A higher temperature makes both distributions more uniform.
    """
    log_first, log_second = F.log_softmax(first / temperature, dim=1), F.log_softmax(second / temperature, dim=1)
    # Not F.kl_div, which PyTorch cannot compute for several clients at once.
    return (log_first.exp() * (log_first - log_second)).sum(dim=1)
