"""Which rotation each layer has: given as text, read from a model's configuration, or stored in a header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from kvzip.errors import UsageError
from kvzip.profiles.rope import Rope, Scaling

INTERLEAVED_MODELS = frozenset(
    {"codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj", "helium", "llama4_text"}
)
"""Values of ``model_type`` whose pairs are neighbours; all others split a head in halves."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotations of a model: ``kinds`` of them, None for layers without one, and per layer which it has.

    An empty ``layers`` means that all layers have the first kind.
    """

    kinds: tuple[Rope | None, ...] = (None,)
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds or any(not 0 <= kind < len(self.kinds) for kind in self.layers):
            raise UsageError("RoPE description: a layer names a rotation that is not there", code="rope-description")

    def of(self, layer: int) -> Rope | None:
        """The rotation of a layer. Raises ``UsageError`` if the model has fewer layers."""
        if not self.layers:
            return self.kinds[0]
        if layer >= len(self.layers):
            raise UsageError(
                f"the RoPE description has {len(self.layers)} layers, the cache has a layer {layer}", code="rope-layers"
            )
        return self.kinds[self.layers[layer]]

    def starting_at(self, start: int) -> Self:
        """The same rotations for a chunk whose first token stands at position ``start``."""
        return replace(self, kinds=tuple(kind and replace(kind, start=start) for kind in self.kinds))

    @classmethod
    def per_layer(cls, ropes: Sequence[Rope | None]) -> Self:
        kinds = tuple(dict.fromkeys(ropes))
        return cls(kinds, () if len(kinds) == 1 else tuple(kinds.index(rope) for rope in ropes))

    def to_json(self) -> dict[str, Any]:
        kinds = [kind and kind.to_json() for kind in self.kinds]
        return {"kinds": kinds, "layers": list(self.layers)} if self.layers else {"kinds": kinds}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Raises ``UsageError`` for what :meth:`to_json` does not write."""
        try:
            kinds = tuple(Rope.from_json(kind) if kind is not None else None for kind in values["kinds"])
            return cls(kinds, tuple(int(kind) for kind in values.get("layers", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"RoPE description: {error!r}", code="rope-description") from error

    @classmethod
    def parse(cls, text: str) -> Self:
        """One rotation for all layers: ``none`` or ``theta=1e6,rotary=64,offset=0,start=0,interleaved,scaling=...``.

        The scaling is ``linear:FACTOR``, ``dynamic:FACTOR:ORIGINAL``, ``yarn:FACTOR:ORIGINAL[:FAST:SLOW]`` or
        ``llama3:FACTOR:LOW:HIGH:ORIGINAL``. Raises ``UsageError``.
        """
        if text.strip().lower() in ("none", "off"):
            return cls()
        values: dict[str, Any] = {}
        try:
            for word in text.split(","):
                name, _, value = word.strip().partition("=")
                if name == "interleaved":
                    values[name] = True
                elif name == "theta":
                    values[name] = float(value)
                elif name in ("rotary", "offset", "start"):
                    values[name] = int(value)
                elif name == "scaling":
                    values[name] = _parse_scaling(value)
                else:
                    raise ValueError(f"unknown name {name!r}")
            return cls((Rope(**values),))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"RoPE {text!r}: {error}. Write theta=1e6, and after commas rotary=, offset=, start=, interleaved, "
                "scaling=llama3:8:1:4:8192 as needed; or none",
                code="rope-description",
            ) from error


def _parse_scaling(text: str) -> Scaling:
    kind, *numbers = text.split(":")
    names = {
        "linear": ("factor",),
        "dynamic": ("factor", "original"),
        "yarn": ("factor", "original", "fast", "slow"),
        "llama3": ("factor", "low", "high", "original"),
    }
    if kind not in names or not 1 <= len(numbers) <= len(names[kind]):
        raise ValueError(f"scaling {text!r}")
    values: dict[str, Any] = dict(zip(names[kind], map(float, numbers), strict=False))
    if "original" in values:
        values["original"] = int(values["original"])
    return Scaling(kind, **values)


def read_config(path: str | os.PathLike[str]) -> Ropes:
    """The rotations that a model's ``config.json``, or the folder that holds it, tells. Raises ``UsageError``."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the model configuration {file}: {error}", code="model-config") from error
    try:
        return from_config(config)
    except UsageError as error:
        error.args = (f"{file}: {error}",)
        raise
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise UsageError(
            f"{file}: the model configuration cannot be understood: {error!r}", code="model-config"
        ) from error


def from_config(config: Mapping[str, Any]) -> Ropes:
    """The rotations of a Hugging Face ``config.json``, of transformers 4 or 5.

    Raises ``UsageError`` if it names no theta and no rotation, or one that is not known.
    """
    config = config.get("text_config") or config
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise UsageError("the model configuration has no num_hidden_layers", code="model-config")
    types = config.get("layer_types") or ["full_attention"] * layers
    per_type = {name: _of_type(config, name) for name in dict.fromkeys(types)}
    ropes = [per_type[name] for name in types]
    for layer, turns in enumerate(config.get("no_rope_layers") or ()):
        if not turns and layer < len(ropes):
            ropes[layer] = None
    return Ropes.per_layer(ropes)


def _of_type(config: Mapping[str, Any], layer_type: str) -> Rope | None:
    model = config.get("model_type", "")
    if model == "cohere2" and layer_type == "full_attention":
        return None
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get(layer_type, parameters)
    theta = parameters.get("rope_theta", config.get("rope_theta", config.get("rotary_emb_base")))
    scaling = parameters or config.get("rope_scaling") or {}
    if layer_type == "sliding_attention" and "rope_local_base_freq" in config:
        theta, scaling = config["rope_local_base_freq"], {}
    if theta is None:
        if config.get("position_embedding_type", "rotary") != "rotary" or model in ("gpt2", "opt", "bloom", "mpt"):
            return None
        raise UsageError(
            "the model configuration has no rope_theta: give --rope theta=..., or --rope none", code="model-config"
        )
    return Rope(
        float(theta),
        rotary=_rotary(config, parameters),
        interleaved=model in INTERLEAVED_MODELS,
        scaling=_scaling(scaling, config),
    )


def _rotary(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    if "rotary_dim" in config:
        return int(config["rotary_dim"])
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1)))
    if part == 1:
        return None
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads and "hidden_size" in config else None)
    if head_dim is None:
        raise UsageError("the model configuration tells no head_dim for its partial rotary factor", code="model-config")
    return int(head_dim * part)


def _scaling(values: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind == "default":
        return None
    original = (
        values.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config.get("max_position_embeddings", 8192)
    )
    names = {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "beta_fast": "fast",
        "beta_slow": "slow",
    }
    given: dict[str, Any] = {own: float(values[name]) for name, own in names.items() if values.get(name) is not None}
    for own in ("short", "long"):
        given[own] = tuple(map(float, values.get(f"{own}_factor") or ()))
    return Scaling(kind, original=int(original), truncate=bool(values.get("truncate", True)), **given)
