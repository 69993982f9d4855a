"""SSAST: its size, its patches, and that the two tokens before these do not count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raydfl.core.errors import ConfigError
from raydfl.core.types import ModelSpec
from raydfl.models import build_model
from raydfl.models.ssast import SSAST, Block


def of(name: str, **options: object) -> SSAST:
    with torch.device("meta"):
        model = build_model(ModelSpec("model", name, 128, 51, tuple(options.items())))
    assert isinstance(model, SSAST)
    return model


@pytest.mark.parametrize(
    ("name", "width", "millions"), [("ssast_tiny", 192, 5.6), ("ssast_small", 384, 21.7), ("ssast_base", 768, 86.1)]
)
@pytest.mark.parametrize(("patches", "count"), [("patch", 12 * 50), ("frame", 511)])
def test_the_parameters_are_those_of_the_papers_sizes(
    name: str, width: int, millions: float, patches: str, count: int
) -> None:
    """Oracle: the closed form of the trunk and the embeddings; DeiT's published 5, 22 and 86 million."""
    model = of(name, patches=patches)
    assert model.pos_embed.shape == (1, count + 2, width)
    block = 12 * width**2 + 13 * width
    rest = 256 * width + width + 2 * width + (count + 2) * width + 2 * width + 2 * width + 51 * width + 51
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == 12 * block + rest
    assert found / 1e6 == pytest.approx(millions, abs=0.7)


def test_a_block_is_a_transformers() -> None:
    """Oracle: PyTorch's own encoder layer with the same weights."""
    torch.manual_seed(0)
    block, reference = (
        Block(8, 2),
        torch.nn.TransformerEncoderLayer(
            8, 2, 32, dropout=0.0, activation=F.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=True
        ),
    )
    names = {
        "self_attn.in_proj_": "qkv.",
        "self_attn.out_proj.": "proj.",
        "linear1.": "fc1.",
        "linear2.": "fc2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    own = block.state_dict()
    reference.load_state_dict(
        {f"{theirs}{kind}": own[f"{mine}{kind}"] for theirs, mine in names.items() for kind in ("weight", "bias")}
    )
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(block(x), reference(x))


def test_clips_of_any_length_and_what_is_refused() -> None:
    torch.manual_seed(0)
    model = SSAST(24, 3, embedding=8, heads=2, frames=32).eval()
    x = torch.randn(2, 20, 24)
    padded = torch.cat([x, torch.zeros(2, 40, 24)], dim=1)
    torch.testing.assert_close(model(x), model(padded))
    assert model.embed(x).shape == (2, 8)
    with torch.no_grad():  # the mean leaves out what stands before the patches
        sequence = model.blocks(
            torch.cat([model.tokens.expand(2, -1, -1), model.patch_embed(padded[:, None, :32]).flatten(2).mT], 1)
            + model.pos_embed
        )
        mean = model.norm(sequence)[:, 2:].mean(1)
        torch.testing.assert_close(model.embed(x), model.head_norm(mean))
    with pytest.raises(ConfigError, match="hold no patch"):
        SSAST(8, 3)
    with pytest.raises(ConfigError, match="do not divide"):
        SSAST(24, 3, embedding=8, heads=3)
