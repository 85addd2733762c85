"""LMCache's quantization schedule under LMCache's names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvzip.errors import UsageError

_LAYERS = {
    "mistralai/Mistral-7B-Instruct-v0.2": 32,
    "lmsys/longchat-7b-16k": 32,
    "Qwen/Qwen-7B": 32,
    "meta-llama/Llama-3.1-8B-Instruct": 32,
    "THUDM/glm-4-9b-chat": 40,
}
"""The models that LMCache knows by name."""


class UnknownModelError(UsageError, ValueError):
    """A model whose layer count cannot be told; LMCache raises ``ValueError``."""


class UnknownSerdeError(UsageError, ValueError):
    """A serde type that there is not; LMCache raises ``ValueError``."""


@dataclass
class QuantizationSpec:
    """``bins`` for layers ``start_layer`` up to, not including, ``end_layer``."""

    start_layer: int
    end_layer: int
    bins: int

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass
class CacheGenConfig:
    """Bins per layer for keys and for values."""

    nlayers: int
    kspecs: list[QuantizationSpec]
    vspecs: list[QuantizationSpec]

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    @staticmethod
    def from_model_name(model_name: str) -> CacheGenConfig:
        """The schedule of a model that LMCache knows, or whose folder is here; no network is asked.

        Raises ``UnknownModelError`` (a ``ValueError`` too) for any other.
        """
        if model_name in _LAYERS:
            return CacheGenConfig.from_layer_count(_LAYERS[model_name])
        if (Path(model_name) / "config.json").is_file():
            return CacheGenConfig.from_hf_config(model_name)
        raise UnknownModelError(
            f"the layer count of {model_name!r} is not known here; use CacheGenConfig.from_layer_count, or "
            "from_hf_config with the model's config.json",
            code="unknown-model",
        )

    @staticmethod
    def from_layer_count(nlayers: int) -> CacheGenConfig:
        """LMCache's schedule, which depends on nothing else: 32 bins for the first 10 layers of keys and 2 of values,
        else 16; 32 throughout below 10 layers.
        """
        if nlayers < 1:
            raise UsageError(f"a model has 1 layer or more, not {nlayers}", code="bad-layers")
        if nlayers < 10:
            return CacheGenConfig(nlayers, [QuantizationSpec(0, nlayers, 32)], [QuantizationSpec(0, nlayers, 32)])
        return CacheGenConfig(
            nlayers,
            [QuantizationSpec(0, 10, 32), QuantizationSpec(10, nlayers, 16)],
            [QuantizationSpec(0, 2, 32), QuantizationSpec(2, nlayers, 16)],
        )

    @staticmethod
    def from_hf_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> CacheGenConfig:
        """The schedule of a Hugging Face ``config.json``: its contents, its path, or its folder's.

        Raises ``UnknownModelError`` if it does not tell the number of layers.
        """
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UnknownModelError(f"{path} is no JSON: {error}", code="unknown-model") from error
        for part in (config, config.get("text_config") if isinstance(config, Mapping) else None):
            count = part.get("num_hidden_layers") if isinstance(part, Mapping) else None
            if type(count) is int and count > 0:
                return CacheGenConfig.from_layer_count(count)
        raise UnknownModelError("the config has no num_hidden_layers", code="unknown-model")

    def bins(self) -> tuple[list[int], list[int]]:
        """Bins of each layer, for keys and for values.

        Raises ``UsageError`` if a layer has none, or fewer than 4 or more than 32.
        """
        return _bins(self.kspecs, self.nlayers, "kspecs"), _bins(self.vspecs, self.nlayers, "vspecs")


def _bins(specs: Sequence[QuantizationSpec], nlayers: int, name: str) -> list[int]:
    bins = [0] * nlayers
    for spec in specs:
        for layer in range(spec.start_layer, min(spec.end_layer, nlayers)):
            bins[layer] = spec.bins
    for layer, count in enumerate(bins):
        if not 4 <= count <= 32:
            raise UsageError(f"{name} gives layer {layer} {count} bins, expected 4 to 32", code="bad-bins")
    return bins
