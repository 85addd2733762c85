"""The measures of model quality mean what their names say, and the sample is a cache that they can be taken on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvzip.errors import UsageError
from kvzip.evaluation import Estimate, compare, load_model

SAMPLE = Path(__file__).parent.parent / "samples" / "smollm2-prose-128.safetensors"


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 2, (200, 30))


def test_identical_predictions_cost_nothing(logits: np.ndarray) -> None:
    p = _log_softmax(logits).astype(np.float32)
    quality = compare(p, p, np.zeros(200, np.int64))
    assert (quality.kl, quality.top1, quality.perplexity_ratio) == (Estimate(0, 0), Estimate(1, 0), Estimate(1, 0))
    assert quality.perplexity_original == quality.perplexity_restored
    assert quality.positions == 200


def test_measures_agree_with_their_definitions(logits: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    p, q = _log_softmax(logits), _log_softmax(logits + rng.normal(0, 1, logits.shape))
    targets = rng.integers(0, 30, 200)
    quality = compare(p, q, targets)
    kl = [sum(np.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)]
    assert quality.kl.value == pytest.approx(np.mean(kl))
    assert quality.kl.stderr == pytest.approx(np.std(kl) / 200**0.5)
    assert quality.top1.value == np.mean([np.argmax(x) == np.argmax(y) for x, y in zip(p, q, strict=True)])
    likelihood = np.prod([float(np.exp(x[t])) ** (1 / 200) for x, t in zip(p, targets, strict=True)])
    assert quality.perplexity_original.value == pytest.approx(1 / likelihood)
    ratio = quality.perplexity_restored.value / quality.perplexity_original.value
    assert quality.perplexity_ratio.value == pytest.approx(ratio)


def test_paired_error_of_a_ratio_is_smaller_than_that_of_its_parts(logits: np.ndarray) -> None:
    p, q = _log_softmax(logits), _log_softmax(logits * 1.01)
    quality = compare(p, q, logits.argmax(axis=1))
    assert 0 < quality.perplexity_ratio.stderr < quality.perplexity_original.stderr / 10


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.gguf"):
        load_model(tmp_path / "nothing.gguf")


def test_evaluation_imports_no_torch() -> None:
    """The command line may import it at no cost."""
    check = "import sys, kvzip.evaluation; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_sample_is_a_small_whole_real_cache() -> None:
    assert SAMPLE.stat().st_size < 3_000_000
    tensors = load_file(SAMPLE)
    ids = tensors.pop("token_ids")
    assert set(tensors) == {f"layers.{i}.{kind}" for i in range(30) for kind in ("key", "value")}
    assert {(t.shape, t.dtype) for t in tensors.values()} == {((3, 128, 64), np.dtype(ml_dtypes.bfloat16))}
    assert len(ids) > 128 + 100
    assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values())
