"""SSAST: its size, its patches, its embedding, and released files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from raydfl.core.errors import ConfigError
from raydfl.core.types import ModelSpec
from raydfl.models import build_model
from raydfl.models.ssast import SSAST, TransformerBlock
from raydfl.models.start import start_from_file


def build(name: str, **options: object) -> SSAST:
    with torch.device("meta"):
        model = build_model(ModelSpec("model", name, 128, 51, tuple(options.items())))
    assert isinstance(model, SSAST)
    return model


@pytest.mark.parametrize(
    ("name", "width", "millions"), [("ssast_tiny", 192, 5.6), ("ssast_small", 384, 21.7), ("ssast_base", 768, 86.1)]
)
@pytest.mark.parametrize(("patches", "count"), [("patch", 12 * 50), ("frame", 511)])
def test_networks_have_the_parameter_counts_of_the_paper(
    name: str, width: int, millions: float, patches: str, count: int
) -> None:
    """The oracle is the closed form of backbone and embeddings, and DeiT's published 5, 22 and 86 million."""
    model = build(name, patches=patches)
    assert model.pos_embed.shape == (1, count + 2, width)
    block = 12 * width**2 + 13 * width
    rest = 256 * width + width + 2 * width + (count + 2) * width + 2 * width + 2 * width + 51 * width + 51
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == 12 * block + rest
    assert total / 1e6 == pytest.approx(millions, abs=0.7)


def test_a_block_equals_a_transformer_encoder_layer() -> None:
    """The oracle is PyTorch's encoder layer with the same weights."""
    torch.manual_seed(0)
    block, reference = (
        TransformerBlock(8, 2),
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
    weights = block.state_dict()
    reference.load_state_dict(
        {
            f"{reference_name}{kind}": weights[f"{block_name}{kind}"]
            for reference_name, block_name in names.items()
            for kind in ("weight", "bias")
        }
    )
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(block(x), reference(x))


def test_clips_of_any_length_are_accepted_and_bad_sizes_rejected() -> None:
    torch.manual_seed(0)
    model = SSAST(24, 3, embedding=8, heads=2, frames=32).eval()
    x = torch.randn(2, 20, 24)
    padded = torch.cat([x, torch.zeros(2, 40, 24)], dim=1)
    torch.testing.assert_close(model(x), model(padded))
    assert model.embed(x).shape == (2, 8)
    with torch.no_grad():  # the mean excludes the tokens before the patches
        sequence = model.blocks(
            torch.cat([model.tokens.expand(2, -1, -1), model.patch_embed(padded[:, None, :32]).flatten(2).mT], 1)
            + model.pos_embed
        )
        mean = model.norm(sequence)[:, 2:].mean(1)
        torch.testing.assert_close(model.embed(x), model.head_norm(mean))
    with pytest.raises(ConfigError, match="too small for a patch"):
        SSAST(8, 3)
    with pytest.raises(ConfigError, match="does not divide"):
        SSAST(24, 3, embedding=8, heads=3)


def make_released_weights(frames: int, bands: int, patch: tuple[int, int], width: int = 8) -> dict[str, torch.Tensor]:
    """Draw weights with the names of the release, for pre-training clips of this size.

    Args:
        frames: frames of the clips.
        bands: bands of the clips.
        patch: bands and frames of a patch.
        width: dimension of a token.
    """
    torch.manual_seed(3)
    count = (bands // patch[0]) * (frames // patch[1])
    shapes: dict[str, tuple[int, ...]] = {
        "mask_embed": (1, 1, width),
        "v.cls_token": (1, 1, width),
        "v.dist_token": (1, 1, width),
        "v.pos_embed": (1, count + 2, width),
        "v.patch_embed.proj.weight": (width, 1, *patch),
        "v.patch_embed.proj.bias": (width,),
        "v.norm.weight": (width,),
        "v.norm.bias": (width,),
        **{
            f"v.{head}.{kind}": size for head in ("head", "head_dist") for kind, size in list_linear_shapes(1000, width)
        },
        **{
            f"{p}predlayer.{n}.{kind}": size
            for p in "cg"
            for n, o in ((0, width), (2, 256))
            for kind, size in list_linear_shapes(o, width)
        },
    }
    for number in range(12):
        block = f"v.blocks.{number}"
        shapes |= {f"{block}.norm{n}.{kind}": (width,) for n in "12" for kind in ("weight", "bias")}
        parts = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        parts |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        shapes |= {
            f"{block}.{part}.{kind}": size for part, sides in parts.items() for kind, size in list_linear_shapes(*sides)
        }
    tensors = {f"module.{name}": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    sizes = {"module.p_input_fdim": torch.tensor(bands), "module.p_input_tdim": torch.tensor(frames)}
    return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in (sizes | tensors).items()}


def list_linear_shapes(outputs: int, inputs: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("weight", (outputs, inputs)), ("bias", (outputs,))]


def compute_logits(
    weights: dict[str, torch.Tensor], model: SSAST, x: torch.Tensor, stride: tuple[int, int]
) -> torch.Tensor:
    """Compute the paper's network with PyTorch's encoder layers, with patches by bands and then by frames."""
    v = {name.removeprefix("module.v."): value for name, value in weights.items()}
    kernel = v["patch_embed.proj.weight"]
    patches = F.conv2d(x.mT[:, None], kernel, v["patch_embed.proj.bias"], stride)
    rows, columns = patches.shape[2:]
    trained_grid = [
        int(weights[f"module.p_input_{side}"]) // kernel.shape[2 + axis] for axis, side in enumerate(("fdim", "tdim"))
    ]
    grid = v["pos_embed"][:, 2:].mT.reshape(1, 8, *trained_grid)
    for axis, size in ((3, columns), (2, rows)):
        first = trained_grid[axis - 2] // 2 - size // 2
        if size < trained_grid[axis - 2]:
            grid = grid[:, :, first : first + size] if axis == 2 else grid[:, :, :, first : first + size]
        else:
            grid = F.interpolate(grid, (size, grid.shape[3]) if axis == 2 else (grid.shape[2], size), mode="bilinear")
    special_tokens = torch.cat([v["cls_token"], v["dist_token"]], 1)
    y = torch.cat([special_tokens.expand(len(x), -1, -1), patches.flatten(2).mT], 1)
    y = y + torch.cat([v["pos_embed"][:, :2], grid.flatten(2).mT], 1)
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj.", "linear1.": "mlp.fc1."}
    names |= {"linear2.": "mlp.fc2.", "norm1.": "norm1.", "norm2.": "norm2."}
    layer = torch.nn.TransformerEncoderLayer(8, 2, 32, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True).eval()
    for number in range(12):
        state = {f"{a}{k}": v[f"blocks.{number}.{b}{k}"] for a, b in names.items() for k in ("weight", "bias")}
        layer.load_state_dict(state)
        y = layer(y)
    mean = F.layer_norm(y, (8,), v["norm.weight"], v["norm.bias"], 1e-6)[:, 2:].mean(1)
    return model.output(model.head_norm(mean))


@pytest.mark.parametrize(
    ("patches", "bands", "frames", "trained"),
    [("patch", 128, 46, 96), ("patch", 32, 106, 64), ("frame", 32, 20, 64), ("frame", 32, 40, 32)],
)
def test_a_network_starts_from_a_released_file(
    tmp_path: Path, patches: str, bands: int, frames: int, trained: int
) -> None:
    """Position embeddings are cropped in time and interpolated in bands, or vice versa, for patches and frames."""
    patch, stride = ((16, 16), (10, 10)) if patches == "patch" else ((bands, 2), (bands, 1))
    weights = make_released_weights(trained, 128 if patches == "patch" else bands, patch)
    torch.save(weights, tmp_path / "SSAST.pth")
    model = start_model(tmp_path / "SSAST.pth", bands, patches=patches, frames=frames)
    x = torch.randn(2, frames, bands)
    torch.testing.assert_close(model(x), compute_logits(weights, model, x, stride), atol=1e-4, rtol=1e-4)


def start_model(file: Path, bands: int, **options: object) -> SSAST:
    spec = ModelSpec("model", "ssast_tiny", bands, 3, tuple({"embedding": 8, "heads": 2, **options}.items()))
    model = build_model(dataclasses.replace(spec, init_from=(("file", file),)))
    start_from_file(model, dataclasses.replace(spec, init_from=(("file", file),)))
    assert isinstance(model, SSAST)
    return model.eval()


def test_files_of_another_variant_and_unknown_names_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "SSAST.pth"
    weights = make_released_weights(32, 32, (16, 16))
    for change, options, message in (
        ({}, {"embedding": 16}, "tokens have 8 dimensions in the file .*, but 16 in the network"),
        (
            {},
            {"patches": "frame", "frames": 20},
            "patches have 16 bands and 16 frames in the file, but 32 and 2 in the network. Set patches=patch",
        ),
        ({"module.p_input_tdim": torch.tensor(64)}, {}, "position embedding has 4 patches, but .* have 2 x 4"),
        ({"module.v.extra": torch.zeros(1)}, {}, "has 'extra', unknown to the network"),
    ):
        torch.save({**weights, **change}, file)
        with pytest.raises(ConfigError, match=message):
            start_model(file, 32, **{"frames": 32, **options})
    torch.save({name: value for name, value in weights.items() if "dist_token" not in name}, file)
    with pytest.raises(ConfigError, match="lacks 'v.dist_token'"):
        start_model(file, 32, frames=32)
    torch.save({name: value for name, value in weights.items() if "blocks.3.norm1.bias" not in name}, file)
    with pytest.raises(ConfigError, match="lacks 'blocks.3.norm1.bias'"):
        start_model(file, 32, frames=32)
