"""SSAST: its size, its patches, and that the two tokens before these do not count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from raydfl.core.errors import ConfigError
from raydfl.core.types import ModelSpec
from raydfl.models import build_model
from raydfl.models.ssast import SSAST, Block
from raydfl.models.start import start_from_file


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


def released(frames: int, bands: int, patch: tuple[int, int], width: int = 8) -> dict[str, torch.Tensor]:
    """Random weights by the names of the release's code, pre-trained on clips of so many frames and bands.

    Args:
        patch: bands and frames of one.
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
        **{f"v.{head}.{kind}": size for head in ("head", "head_dist") for kind, size in sides_of(1000, width)},
        **{
            f"{p}predlayer.{n}.{kind}": size
            for p in "cg"
            for n, o in ((0, width), (2, 256))
            for kind, size in sides_of(o, width)
        },
    }
    for number in range(12):
        block = f"v.blocks.{number}"
        shapes |= {f"{block}.norm{n}.{kind}": (width,) for n in "12" for kind in ("weight", "bias")}
        parts = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        parts |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        shapes |= {f"{block}.{part}.{kind}": size for part, sides in parts.items() for kind, size in sides_of(*sides)}
    found = {f"module.{name}": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    sizes = {"module.p_input_fdim": torch.tensor(bands), "module.p_input_tdim": torch.tensor(frames)}
    return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in (sizes | found).items()}


def sides_of(outputs: int, inputs: int) -> list[tuple[str, tuple[int, ...]]]:
    return [("weight", (outputs, inputs)), ("bias", (outputs,))]


def expected(weights: dict[str, torch.Tensor], model: SSAST, x: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
    """The network as the paper has it: patches by bands and then by frames, PyTorch's own encoder layers."""
    v = {name.removeprefix("module.v."): value for name, value in weights.items()}
    kernel = v["patch_embed.proj.weight"]
    patches = F.conv2d(x.mT[:, None], kernel, v["patch_embed.proj.bias"], stride)
    rows, columns = patches.shape[2:]
    was = [
        int(weights[f"module.p_input_{side}"]) // kernel.shape[2 + axis] for axis, side in enumerate(("fdim", "tdim"))
    ]
    grid = v["pos_embed"][:, 2:].mT.reshape(1, 8, *was)
    for axis, size in ((3, columns), (2, rows)):
        first = was[axis - 2] // 2 - size // 2
        if size < was[axis - 2]:
            grid = grid[:, :, first : first + size] if axis == 2 else grid[:, :, :, first : first + size]
        else:
            grid = F.interpolate(grid, (size, grid.shape[3]) if axis == 2 else (grid.shape[2], size), mode="bilinear")
    both = torch.cat([v["cls_token"], v["dist_token"]], 1)
    y = torch.cat([both.expand(len(x), -1, -1), patches.flatten(2).mT], 1)
    y = y + torch.cat([v["pos_embed"][:, :2], grid.flatten(2).mT], 1)
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj.", "linear1.": "mlp.fc1."}
    names |= {"linear2.": "mlp.fc2.", "norm1.": "norm1.", "norm2.": "norm2."}
    layer = torch.nn.TransformerEncoderLayer(8, 2, 32, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True).eval()
    for number in range(12):
        own = {f"{a}{k}": v[f"blocks.{number}.{b}{k}"] for a, b in names.items() for k in ("weight", "bias")}
        layer.load_state_dict(own)
        y = layer(y)
    mean = F.layer_norm(y, (8,), v["norm.weight"], v["norm.bias"], 1e-6)[:, 2:].mean(1)
    return model.output(model.head_norm(mean))


@pytest.mark.parametrize(
    ("patches", "bands", "frames", "trained"),
    [("patch", 128, 46, 96), ("patch", 32, 106, 64), ("frame", 32, 20, 64), ("frame", 32, 40, 32)],
)
def test_it_begins_from_a_released_file(tmp_path: Path, patches: str, bands: int, frames: int, trained: int) -> None:
    """Positions are cut in time and stretched in bands, the other way round, and cut and stretched for frames."""
    patch, stride = ((16, 16), (10, 10)) if patches == "patch" else ((bands, 2), (bands, 1))
    weights = released(trained, 128 if patches == "patch" else bands, patch)
    torch.save(weights, tmp_path / "SSAST.pth")
    model = begun(tmp_path / "SSAST.pth", bands, patches=patches, frames=frames)
    x = torch.randn(2, frames, bands)
    torch.testing.assert_close(model(x), expected(weights, model, x, stride), atol=1e-4, rtol=1e-4)


def begun(file: Path, bands: int, **options: object) -> SSAST:
    spec = ModelSpec("model", "ssast_tiny", bands, 3, tuple({"embedding": 8, "heads": 2, **options}.items()))
    model = build_model(dataclasses.replace(spec, init_from=(("file", file),)))
    start_from_file(model, dataclasses.replace(spec, init_from=(("file", file),)))
    assert isinstance(model, SSAST)
    return model.eval()


def test_files_of_another_variant_and_unknown_names_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "SSAST.pth"
    weights = released(32, 32, (16, 16))
    for change, options, message in (
        ({}, {"embedding": 16}, "tokens have 8 numbers .*, the network's 16"),
        (
            {},
            {"patches": "frame", "frames": 20},
            "patches have 16 bands and 16 frames, the network's 32 and 2; set patches=patch",
        ),
        ({"module.p_input_tdim": torch.tensor(64)}, {}, "position embedding is for 4 patches, and .* have 2 x 4"),
        ({"module.v.extra": torch.zeros(1)}, {}, "has 'extra', which the network has not"),
    ):
        torch.save({**weights, **change}, file)
        with pytest.raises(ConfigError, match=message):
            begun(file, 32, **{"frames": 32, **options})
    torch.save({name: value for name, value in weights.items() if "dist_token" not in name}, file)
    with pytest.raises(ConfigError, match="lacks 'v.dist_token'"):
        begun(file, 32, frames=32)
    torch.save({name: value for name, value in weights.items() if "blocks.3.norm1.bias" not in name}, file)
    with pytest.raises(ConfigError, match="lacks 'blocks.3.norm1.bias'"):
        begun(file, 32, frames=32)
