"""LoRA adapters on the layers of a pretrained encoder, by the package peft.

E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. An adapter adds a product of two small matrices to a
frozen linear layer: W x + alpha / rank B A x. A float32 [rank, inputs] is drawn at random. B float32 [outputs, rank] starts at 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.settings import Settings
from raydfl.models._width import Channels, scale_channels

_NAME = "default"
"""The only adapter of a layer, by peft's default name."""


class Lora(Settings):
    """LoRA adapters on linear layers."""

    rank: int = Field(8, ge=1, description="Rank of the adapters, at most the smaller side of each target layer.")
    alpha: float = Field(16.0, gt=0, description="Scale: the product of the adapter is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("q_proj", "v_proj"),
        min_length=1,
        description="Linear layers with an adapter, by the end of their names in a layer of the encoder.",
    )
    fixed_a: bool = Field(False, description="Keep A at its initial values, and train and send only B (FFA-LoRA).")

    @model_validator(mode="before")
    @classmethod
    def _read_pairs(cls, values: Any) -> Any:
        """Convert a tuple of pairs, the hashable form of a mapping in a specification, to a mapping."""
        return dict(values) if isinstance(values, tuple) else values


def add_adapters(layers: nn.ModuleDict, lora: Lora, width: float) -> None:
    """Add adapters to the linear layers of an encoder. All other parameters are frozen.

    Args:
        layers: layers of the encoder by number.
        lora: settings of the adapters.
        width: fraction of the rank. The scale remains alpha / rank of the whole rank, so that slices of A and B have one meaning
            at all clients.

    Raises:
        ConfigError: peft is missing, a target has no layer, or the rank exceeds a side of a layer.
    """
    linear = {name: layer for name, layer in layers.named_modules() if isinstance(layer, nn.Linear)}
    names = [name for name in linear if f".{name}".endswith(tuple(f".{target}" for target in lora.targets))]
    for target in lora.targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = {name.partition(".")[2].rpartition(".")[2] for name in linear}
            raise ConfigError(f"lora.targets: no linear layer has the name {target!r}. {nearest(target, known)}")
    for name in names:
        side = min(linear[name].in_features, linear[name].out_features)
        if lora.rank > side:
            raise ConfigError(
                f"lora.rank: {lora.rank} exceeds the smaller side of {name}, {side}. Set lora.rank to at most {side}."
            )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora needs the package peft. Install it with: pip install 'raydfl[huggingface]'")
    import peft  # the import takes seconds, and other networks do not need it

    settings = peft.LoraConfig(r=scale_channels(lora.rank, width), target_modules=names)
    peft.inject_adapter_in_model(settings, layers, _NAME)
    del layers.peft_config  # an object of its own at each network, so that clients could not train batched
    for _, layer in _list_adapted(layers):
        layer.scaling[_NAME] = lora.alpha / lora.rank  # peft would divide by the narrower rank
        layer.lora_A.requires_grad_(not lora.fixed_a)


def adapter_channels(encoder: nn.Module, prefix: str) -> Channels:
    """Return a group of channels for each adapter: the rows of A and the columns of B.

    Args:
        encoder: network with adapters.
        prefix: prefix of its tensors' names.
    """
    groups: dict[str, tuple[tuple[str, ...], ...]] = {}
    for path, _ in _list_adapted(encoder):
        groups[f"{prefix}{path}.lora_A.{_NAME}.weight"] = ((path,), ())
        groups[f"{prefix}{path}.lora_B.{_NAME}.weight"] = ((), (path,))
    return groups


def merge_adapters(encoder: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the encoder without adapters, with their products added to the weights."""
    state: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): value.detach().clone()
        for name, value in encoder.state_dict().items()
        if ".lora_" not in name
    }
    for path, layer in _list_adapted(encoder):
        state[f"{path}.weight"] += layer.get_delta_weight(_NAME).detach()
    return state


def adapter_tensors(encoder: nn.Module) -> Mapping[str, Tensor]:
    """Return the adapters' tensors with peft's names in files, such as ``layers.0.attention.q_proj.lora_A.weight``."""
    return {
        name.replace(f".{_NAME}.", "."): value.detach().contiguous()
        for name, value in encoder.state_dict().items()
        if ".lora_" in name
    }


def adapter_settings(encoder: nn.Module) -> dict[str, Any]:
    """Return the rank and the scale alpha of the adapters for ``peft.LoraConfig``."""
    layer = next(layer for _, layer in _list_adapted(encoder))
    return {"r": layer.r[_NAME], "lora_alpha": layer.scaling[_NAME] * layer.r[_NAME]}


def _list_adapted(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with an adapter and their names."""
    return ((name, layer) for name, layer in network.named_modules() if hasattr(layer, "lora_A"))
